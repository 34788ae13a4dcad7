"""Attention in rotated, centred coordinates is the attention of the model."""

import math

import pytest
import torch
from torch import Tensor

from triptych.core.layout import Geometry
from triptych.core.policy import KVRotation
from triptych.kernels.hadamard import hadamard
from triptych.workers.models.attention_interface import LayerTraits
from triptych.workers.models.kv_rotation import (
    BasisCoordinates,
    Coordinates,
    PairCoordinates,
    hartley,
    pack_bases,
)


def dense(
    _layer: int,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    traits: LayerTraits,
    sinks: Tensor | None = None,
) -> Tensor:
    """Every query sees every key. Shapes: (T, H, D); (T, KH, D) twice"""
    assert (traits.window, traits.softcap, sinks) == (0, 0.0, None)
    group = query.shape[1] // key.shape[1]
    key, value = key.repeat_interleave(group, 1), value.repeat_interleave(group, 1)
    weights = torch.einsum("qhd,khd->hqk", query, key).mul(traits.scale).softmax(-1)
    return torch.einsum("hqk,khd->qhd", weights, value)


@pytest.mark.parametrize("dim", [1, 32, 64, 80, 96, 128, 256])
def test_the_rotation_is_its_own_inverse(dim: int) -> None:
    rotation = hadamard(dim)
    assert torch.equal(rotation, rotation.T)
    assert torch.allclose(rotation @ rotation, torch.eye(dim), atol=1e-6)


def test_an_outlier_is_spread_over_all_channels() -> None:
    outlier = torch.zeros(64)
    outlier[17] = 8.0
    assert (outlier @ hadamard(64)).abs().max() == 1.0


@pytest.mark.parametrize("dim", [64, 80])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("rotates_keys", [True, False])
def test_attention_is_that_of_the_model(dim: int, dtype: torch.dtype, rotates_keys: bool) -> None:
    geometry = Geometry(layers=3, kv_heads=2, head_dim=dim)
    packed = torch.randn(3, 2, dim).mul(4).half().numpy().tobytes()
    rotation = KVRotation(rotated=True, key_centre=packed, rotates_keys=rotates_keys)
    coordinates = Coordinates.of(rotation, geometry)
    assert coordinates is not None
    query, key, value = torch.randn(11, 6, dim), torch.randn(11, 2, dim), torch.randn(11, 2, dim)
    for layer in range(3):
        mixed = coordinates.around(dense)(
            layer, query.to(dtype), key.to(dtype), value.to(dtype), LayerTraits(scale=0.2)
        )
        exact = [part.to(dtype).float() for part in (query, key, value)]
        want = dense(layer, *exact, LayerTraits(scale=0.2))
        assert mixed.dtype == dtype
        assert torch.allclose(mixed.float(), want, atol=1e-5 if dtype == torch.float32 else 2e-2)


def test_latents_are_rotated_and_centred_as_keys_and_as_values_alike() -> None:
    geometry = Geometry(layers=2, kv_heads=1, head_dim=48, has_latents=True)
    packed = torch.randn(2, 1, 48).mul(4).half().numpy().tobytes()
    coordinates = Coordinates.of(KVRotation(rotated=True, key_centre=packed), geometry)
    assert coordinates is not None
    query, latent = torch.randn(11, 6, 48), torch.randn(11, 1, 48)

    def same(layer: int, query: Tensor, key: Tensor, value: Tensor, *rest: object) -> Tensor:
        assert key is value
        return dense(layer, query, key, value, *rest)

    for layer in range(2):
        traits = LayerTraits(scale=0.2)
        mixed = coordinates.around(same)(layer, query, latent, latent, traits)
        want = dense(layer, query, latent, latent, traits)
        assert torch.allclose(mixed, want, atol=1e-5)


def test_the_centre_is_what_pages_do_not_hold() -> None:
    seen = list[Tensor]()

    def note(layer: int, query: Tensor, key: Tensor, value: Tensor, *_: object) -> Tensor:
        seen.append(key)
        return query

    geometry = Geometry(layers=1, kv_heads=1, head_dim=32)
    centre = torch.randn(1, 1, 32).half()
    rotation = KVRotation(rotated=True, key_centre=centre.numpy().tobytes())
    coordinates = Coordinates.of(rotation, geometry)
    assert coordinates is not None
    key = centre.float().expand(5, 1, 32)
    coordinates.around(note)(0, key, key, key, LayerTraits(scale=1.0))
    assert torch.allclose(seen[0], torch.zeros(5, 1, 32), atol=1e-6)


def test_plain_coordinates_cost_nothing() -> None:
    assert Coordinates.of(KVRotation(), Geometry(layers=1, kv_heads=1, head_dim=64)) is None


def random_bases(layers: int, kv_heads: int, dim: int) -> Tensor:
    return torch.linalg.qr(torch.randn(2, layers, kv_heads, dim, dim))[0]


@pytest.mark.parametrize("dim", [64, 80])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_attention_in_bases_of_heads_is_that_of_the_model(dim: int, dtype: torch.dtype) -> None:
    geometry = Geometry(layers=3, kv_heads=2, head_dim=dim)
    packed = torch.randn(3, 2, dim).mul(4).half().numpy().tobytes()
    bases = pack_bases(random_bases(3, 2, dim))
    rotation = KVRotation(rotated=True, key_centre=packed, bases=bases)
    coordinates = Coordinates.of(rotation, geometry)
    assert coordinates is not None
    query, key, value = torch.randn(11, 6, dim), torch.randn(11, 2, dim), torch.randn(11, 2, dim)
    for layer in range(3):
        exact = [part.to(dtype) for part in (query, key, value)]
        mixed = coordinates.around(dense)(layer, *exact, LayerTraits(scale=0.2))
        want = dense(layer, *(part.float() for part in exact), LayerTraits(scale=0.2))
        assert mixed.dtype == dtype
        assert torch.allclose(mixed.float(), want, atol=2e-5 if dtype == torch.float32 else 2e-2)


def test_packed_bases_are_near_those_that_were_fitted_and_orthogonal() -> None:
    geometry, bases = Geometry(layers=2, kv_heads=3, head_dim=32), random_bases(2, 3, 32)
    centre = torch.zeros(2, 3, 32)
    found = BasisCoordinates.of_bases(pack_bases(bases), centre, geometry, None)
    assert (found.bases - bases).abs().max() < 0.02
    unit = found.bases @ found.bases.mT
    assert torch.allclose(unit, torch.eye(32).expand_as(unit), atol=1e-5)


def test_pages_hold_vectors_in_the_basis_of_their_head() -> None:
    """Heads swap two channels in one basis and change a sign in the other, then are rotated."""
    swap, sign = torch.eye(4)[[1, 0, 2, 3]], torch.diag(torch.tensor([1.0, 1.0, -1.0, 1.0]))
    bases = torch.stack((torch.stack((swap, sign)), torch.stack((sign, swap))))[:, None]
    geometry, seen = Geometry(layers=1, kv_heads=2, head_dim=4), list[Tensor]()

    def watch(_layer: int, query: Tensor, key: Tensor, value: Tensor, *_: object) -> Tensor:
        seen.extend((query, key, value))
        return query

    coordinates = Coordinates.of(KVRotation(rotated=True, bases=pack_bases(bases)), geometry)
    assert coordinates is not None
    vectors = torch.arange(8.0).view(1, 2, 4)
    coordinates.around(watch)(0, vectors, vectors, vectors, LayerTraits(scale=1.0))
    turned = torch.tensor([[[1.0, 0.0, 2.0, 3.0], [4.0, 5.0, -6.0, 7.0]]]) @ hadamard(4)
    other = torch.tensor([[[0.0, 1.0, -2.0, 3.0], [5.0, 4.0, 6.0, 7.0]]]) @ hadamard(4)
    for part, want in zip(seen, (turned, turned, other), strict=True):
        assert torch.allclose(part, want, atol=1e-5)


def random_orders(rows: int, pairs: int) -> Tensor:
    return torch.stack([torch.randperm(pairs) for _ in range(rows)])


@pytest.mark.parametrize("dim", [16, 64, 80])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_attention_in_the_order_of_pairs_is_that_of_the_model(dim: int, dtype: torch.dtype) -> None:
    geometry = Geometry(layers=3, kv_heads=2, head_dim=dim)
    packed = torch.randn(3, 2, dim).mul(4).half().numpy().tobytes()
    order = random_orders(6, dim // 2).to(torch.uint8).numpy().tobytes()
    coordinates = Coordinates.of(
        KVRotation(rotated=True, key_centre=packed, pair_order=order), geometry
    )
    assert isinstance(coordinates, PairCoordinates)
    query, key, value = torch.randn(11, 6, dim), torch.randn(11, 2, dim), torch.randn(11, 2, dim)
    for layer in range(3):
        exact = [part.to(dtype) for part in (query, key, value)]
        mixed = coordinates.around(dense)(layer, *exact, LayerTraits(scale=0.2))
        want = dense(layer, *(part.float() for part in exact), LayerTraits(scale=0.2))
        assert mixed.dtype == dtype
        assert torch.allclose(mixed.float(), want, atol=2e-5 if dtype == torch.float32 else 2e-2)


def test_a_segment_of_a_page_holds_the_pairs_that_the_order_gives_it() -> None:
    """Keys of 16 channels, of which one segment has pairs (3, 11) and (0, 8), and so on; the mean
    key is subtracted before, and values are rotated alone."""
    order, seen = torch.tensor([[3, 0, 7, 1, 2, 4, 5, 6]]), list[Tensor]()
    geometry = Geometry(layers=1, kv_heads=1, head_dim=16)

    def watch(_layer: int, query: Tensor, key: Tensor, value: Tensor, *_: object) -> Tensor:
        seen.extend((query, key, value))
        return query

    centre = torch.randn(1, 1, 16).half()
    rotation = KVRotation(
        rotated=True,
        key_centre=centre.numpy().tobytes(),
        pair_order=order.to(torch.uint8).numpy().tobytes(),
    )
    coordinates = Coordinates.of(rotation, geometry)
    assert coordinates is not None
    vectors = torch.randn(5, 1, 16)
    coordinates.around(watch)(0, vectors, vectors, vectors, LayerTraits(scale=1.0))
    query, key, value = (part[:, 0] for part in seen)
    assert torch.allclose(value, vectors[:, 0] @ hadamard(16), atol=1e-6)
    given = vectors[:, 0], vectors[:, 0] - centre[0, 0].float()
    for turned, before in zip((query, key), given, strict=True):
        for first, pairs in ((0, [3, 0]), (4, [7, 1]), (8, [2, 4, 5, 6])):
            channels = [*pairs, *(pair + 8 for pair in pairs)]
            want = before[:, channels] @ hartley(len(channels)).float()
            assert torch.allclose(turned[:, first : first + len(channels)], want, atol=1e-5)


@pytest.mark.parametrize("count", [4, 8, 10, 24])
def test_hartleys_matrix_is_its_own_inverse(count: int) -> None:
    matrix = hartley(count)
    assert torch.allclose(matrix @ matrix, torch.eye(count, dtype=torch.float64), atol=1e-12)
    assert float(matrix.abs().max()) <= math.sqrt(2 / count) + 1e-12
