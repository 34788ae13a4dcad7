"""Codecs of papers beside those of pages: their formulas on cases by hand."""

import math

import pytest
import torch

from triptych.evals.codecs.layer_predictors import fit_predictors
from triptych.evals.codecs.pair_bits import (
    bits_by_energy,
    lloyd_max,
    mixed_bits,
    normed_codes,
    pair_energy,
    segment_bytes,
)
from triptych.evals.codecs.polar_keys import encode_polar
from triptych.evals.codecs.unbiased_values import encode_unbiased
from triptych.kernels.codec.quantizer import decode, encode


def test_the_next_bit_goes_to_the_pair_with_the_largest_error() -> None:
    """64, 16 and 1 at a bit each: errors 16, 4, 1/4, then 4, 4, 1/4, then 1, 4, 1/4."""
    assert bits_by_energy(torch.tensor([64.0, 16.0, 1.0]), 2).tolist() == [3, 2, 1]
    assert bits_by_energy(torch.ones(2, 4), 3).tolist() == [[3] * 4] * 2
    assert bits_by_energy(torch.tensor([1e9, 1.0]), 5).tolist() == [8, 2]


def test_energy_of_pairs_is_that_of_channels_half_a_vector_apart() -> None:
    vectors = torch.tensor([[1.0, 0.0, 3.0, 0.0], [0.0, 2.0, 0.0, 0.0]])
    assert pair_energy(vectors).tolist() == [5.0, 2.0]


def test_levels_are_those_of_lloyd_and_max() -> None:
    """Max's table: 0.7979 for one bit, 0.4528 and 1.510 for two."""
    assert lloyd_max(1).tolist() == pytest.approx([-math.sqrt(2 / math.pi), math.sqrt(2 / math.pi)])
    assert lloyd_max(2).tolist() == pytest.approx([-1.5104, -0.4528, 0.4528, 1.5104], abs=1e-4)


@pytest.mark.parametrize(("bits", "error"), [(1, 0.3634), (2, 0.1175), (3, 0.03454), (4, 0.0095)])
def test_errors_of_normal_vectors_are_those_of_the_table(bits: int, error: float) -> None:
    """Max's table of squared errors; a norm that is kept makes them a little larger or smaller."""
    vectors = torch.randn(4000, 64)
    found = (normed_codes(vectors, bits) - vectors).square().mean()
    assert float(found) == pytest.approx(error, rel=0.25)


def test_segments_keep_their_length_and_bits_their_pairs() -> None:
    vectors = torch.randn(50, 16)
    vectors[:, [0, 8]] *= 10
    bits = bits_by_energy(pair_energy(vectors), 3)
    found = mixed_bits(vectors, bits)
    for width in bits.unique().tolist():
        pairs = (bits == width).nonzero()[:, 0]
        channels = torch.cat((pairs, pairs + 8))
        assert torch.allclose(
            found[:, channels].norm(dim=1), vectors[:, channels].norm(dim=1), rtol=2e-3
        )
    even = normed_codes(vectors, 3)
    assert (found - vectors).square().sum() < (even - vectors).square().sum()
    assert segment_bytes(torch.tensor([3, 2, 1, 2])) == 2 + 3 * 2


def test_polar_codes_by_hand() -> None:
    """Radius 3 of 3 at a right angle, and radius 1 of 3 at half a turn."""
    coded = encode_polar(torch.tensor([[0.0, -1.0, 3.0, 0.0]]), radius_bits=2, angle_bits=2)
    assert (coded.radius.tolist(), coded.angle.tolist()) == ([[3.0, 1.0]], [[1, 2]])
    assert torch.allclose(coded.decode(), torch.tensor([[0.0, -1.0, 3.0, 0.0]]), atol=1e-6)


def test_logits_of_codes_are_those_of_decoded_keys() -> None:
    keys, query = torch.randn(40, 32) * 3, torch.randn(32)
    coded = encode_polar(keys, radius_bits=4, angle_bits=6)
    assert torch.allclose(coded.logits(query), coded.decode() @ query, atol=1e-4)


def test_predictions_of_linear_layers_leave_nothing_to_quantize() -> None:
    first = torch.randn(2, 300, 4)
    rows = first.transpose(0, 1).flatten(1)
    second = (rows @ torch.randn(8, 8) + 1).view(300, 2, 4).transpose(0, 1)
    keys = torch.stack((first, second))
    found = fit_predictors(keys, keys, ridge=1e-9)
    zero = [0.0]

    def rounded(layer: int, rest: torch.Tensor) -> torch.Tensor:
        zero.append(float(rest.abs().max()) * layer)
        return rest if layer == 0 else torch.zeros_like(rest)

    again, values = found.replace(keys, keys, rounded, rounded)
    assert max(zero) < 1e-3
    assert torch.allclose(again, keys, atol=1e-3)
    assert torch.allclose(values, keys, atol=1e-3)


def test_unbiased_codes_by_hand() -> None:
    """Of a range of 6 decoded codes span 4.78, 1.594 apart. Numbers are rounded at 0 and at 1.494
    beside it."""
    vector = torch.tensor([[-3.0, -1.5, -1.49, -0.1, 0.1, 1.49, 1.5, 3.0]])
    made = encode_unbiased(vector, 2)
    assert made.codes.tolist() == [[0, 0, 1, 1, 2, 2, 3, 3]]
    scale, zero = made.metadata[0, 0].tolist()
    assert (scale, zero) == (pytest.approx(1.594, abs=1e-3), pytest.approx(-2.391, abs=1e-3))
    constant = torch.full((1, 8), 1.25)
    assert torch.equal(decode(encode_unbiased(constant, 2)), constant)


def test_unbiased_codes_keep_lengths_with_smaller_errors() -> None:
    """Of normally distributed vectors, which rotated values are."""
    vectors = torch.randn(2000, 64)
    energy = vectors.square().sum()
    plain, found = decode(encode(vectors, 2, 1)), decode(encode_unbiased(vectors, 2))
    assert abs(float((found * vectors).sum() / energy) - 1) < 0.01
    assert (found - vectors).square().sum() < 0.7 * (plain - vectors).square().sum()
