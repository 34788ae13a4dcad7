import math

import pytest
import torch

from triptych.core.layout import FORMATS
from triptych.kernels.codec.quantizer import (
    FP16_MAX,
    decode,
    encode,
    encode_by_norm,
    encode_polar,
    encode_segments,
    encode_values_by_norm,
    narrow,
    pack,
    pack_segments,
    unpack,
    unpack_segments,
)

HEAD_DIMS = [16, 64, 80, 96, 128, 256]


@pytest.mark.parametrize("bits", [1, 2, 4, 8])
@pytest.mark.parametrize("head_dim", HEAD_DIMS)
def test_unpack_inverts_pack(bits: int, head_dim: int) -> None:
    codes = torch.randint(0, 2**bits, (50, head_dim), dtype=torch.uint8)
    packed = pack(codes, bits)
    assert packed.shape == (50, head_dim * bits // 8)
    assert torch.equal(unpack(packed, bits), codes)


def test_the_low_nibbles_of_a_row_hold_its_first_half() -> None:
    packed = pack(torch.arange(16, dtype=torch.uint8)[None], 4)
    assert packed[0].tolist() == [low | (low + 8) << 4 for low in range(8)]


@pytest.mark.parametrize("bits", [2, 4, 8])
@pytest.mark.parametrize("groups", [1, 2, 4])
@pytest.mark.parametrize("spread", [1e-3, 1.0, 300.0])
def test_the_error_is_at_most_half_a_step_and_rounding(
    bits: int, groups: int, spread: float
) -> None:
    vectors = torch.randn(500, 64) * spread + torch.randn(500, 1) * spread
    encoded = encode(vectors, bits, groups)
    grouped = vectors.unflatten(1, (groups, -1))
    error = (decode(encoded) - vectors).abs().unflatten(1, (groups, -1)).amax(-1)
    bound = encoded.metadata[..., 0].float() / 2 + 2**-10 * grouped.abs().amax(-1)
    # Below the smallest normal float16 number, scales are as coarse as 2**-24.
    assert (error <= bound + 256 * 2**-24).all()


@pytest.mark.parametrize("bits", [2, 4, 8])
@pytest.mark.parametrize("constant", [0.0, 1.25, -7.0])
def test_a_constant_vector_has_no_range_and_no_nan(bits: int, constant: float) -> None:
    encoded = encode(torch.full((3, 64), constant), bits, 1)
    assert (encoded.codes == 0).all()
    assert torch.equal(decode(encoded), torch.full((3, 64), constant))


@pytest.mark.parametrize("bits", [2, 4, 8, 16])
def test_huge_values_saturate_and_stay_finite(bits: int) -> None:
    vectors = torch.randn(20, 64) * 1e9
    decoded = decode(encode(vectors, bits, 1))
    assert decoded.isfinite().all()
    assert decoded.abs().max() <= FP16_MAX * 1.01


@pytest.mark.parametrize(("bits", "to_bits"), [(8, 4), (4, 2), (8, 2)])
def test_dropping_bits_gives_the_codes_of_a_direct_quantization(bits: int, to_bits: int) -> None:
    # Exact for a zero of 0 and a scale that float16 represents, for every ratio.
    fine = torch.randint(0, 2**bits, (2000, 64))
    fine[:, 0], fine[:, 1] = 0, 2**bits - 1
    vectors = fine.float() * 2**-6
    direct = encode(vectors, to_bits, 1)
    dropped = narrow(encode(vectors, bits, 1), bits, to_bits)
    assert torch.equal(dropped.codes, direct.codes)
    assert torch.equal(dropped.metadata, direct.metadata)


def test_codes_by_norm_by_hand() -> None:
    """2 bits: the norm is sqrt(20), a step 0.9957 of half of it, so codes are 3, 2, 1, 0 and odd
    numbers 3, 1, -1, -3, of the same norm. 1 bit: signs, times sqrt(20 / 4)."""
    vector = torch.tensor([[3.0, 1.0, -1.0, -3.0]])
    codes, scale = encode_by_norm(vector, 2)
    assert (codes.tolist(), scale.tolist()) == ([[3, 2, 1, 0]], [1.0])
    assert torch.equal(decode(encode_values_by_norm(vector, 2)), vector)
    codes, scale = encode_by_norm(vector, 1)
    assert codes.tolist() == [[1, 1, 0, 0]]
    assert scale.tolist() == pytest.approx([math.sqrt(5)], rel=2**-11)


def test_segments_of_keys_by_hand() -> None:
    """4 bits: a step is 0.3352 of half of sqrt(452), 3.563, so 15 is the fifth step above 0 and 1
    the first: odd numbers 9 and 1, times sqrt(452 / 164)."""
    segments = FORMATS["block_gtq"].key_segments(16)
    key = torch.tensor([[15.0, 1, -1, -15, 3, 1, -1, -3, 2, -2, 2, 2, -2, -2, 2, -2]])
    coded = encode_segments(key, segments)
    assert coded.codes.tolist() == [[12, 8, 7, 3, 3, 2, 1, 0, 1, 0, 1, 1, 0, 0, 1, 0]]
    ratio = math.sqrt(452 / 164)
    assert coded.metadata[0].tolist() == pytest.approx([ratio, 1.0, 2.0], rel=2**-11)
    first = torch.tensor([9.0, 1.0, -1.0, -9.0]) * ratio
    assert torch.allclose(decode(coded)[0], torch.cat((first, key[0, 4:])), rtol=2**-11)
    packed = pack_segments(coded.codes, segments)
    assert packed.tolist() == [[12 | 7 << 4, 8 | 3 << 4, 3 | 2 << 2 | 1 << 4, 0b01001101]]
    assert torch.equal(unpack_segments(packed, segments), coded.codes)


@pytest.mark.parametrize("head_dim", [16, 64, 80])
@pytest.mark.parametrize("spread", [1e-3, 1.0, 300.0, 1e9])
def test_segments_keep_their_length(head_dim: int, spread: float) -> None:
    segments = FORMATS["block_gtq"].key_segments(head_dim)
    vectors = torch.randn(200, head_dim) * spread
    found, given = decode(encode_segments(vectors, segments)), vectors.clamp(-FP16_MAX, FP16_MAX)
    assert found.isfinite().all()
    for each in segments:
        inside = slice(each.channel, each.channel + each.channels)
        norms = (part[:, inside].norm(dim=1) for part in (found, given))
        assert torch.allclose(*norms, rtol=2**-10 if spread > 0.1 else 2e-2)


def test_a_vector_of_zeros_stays_zero() -> None:
    codes, scale = encode_by_norm(torch.zeros(2, 8), 2)
    assert scale.tolist() == [0.0, 0.0]
    assert (codes == 2).all()


def test_polar_codes_by_hand() -> None:
    """Pairs (0, 3) and (-7, 0) in steps of 1: radius 3 in the last eighth of the first quarter, and
    radius 7 in the first eighth behind the second axis. Cosines are 255/256 and 25/256."""
    encoded = encode_polar(torch.tensor([[0.0, -7.0, 3.0, 0.0]]))
    assert encoded.metadata.tolist() == [[[1.0, 0.0]]]
    first, second = 3 | 7 << 3, 7 | 1 << 6
    assert pack(encoded.codes, 4).tolist() == [[first, second]]
    want = [3 * 25 / 256, -7 * 255 / 256, 3 * 255 / 256, 7 * 25 / 256]
    assert decode(encoded).tolist() == [want]


@pytest.mark.parametrize("head_dim", HEAD_DIMS)
@pytest.mark.parametrize("spread", [1e-2, 1.0, 300.0])
def test_radius_and_angle_are_off_by_half_a_step(head_dim: int, spread: float) -> None:
    vectors = torch.randn(500, head_dim) * spread
    encoded = encode_polar(vectors)
    (left, right), (near, beside) = (part.chunk(2, -1) for part in (vectors, decode(encoded)))
    radius, found = torch.hypot(left, right), torch.hypot(near, beside)
    step = encoded.metadata[:, 0, :1].float()
    assert ((found - radius).abs() <= step * 0.5 + radius * 0.01).all()
    away = (torch.atan2(beside, near) - torch.atan2(right, left)).remainder(2 * math.pi)
    turned = torch.minimum(away, 2 * math.pi - away)[found > 0]
    assert float(turned.max()) <= math.radians(5.625 + 0.2)


def test_polar_codes_of_extreme_vectors_are_finite() -> None:
    for vectors in (torch.zeros(3, 16), torch.randn(3, 16) * 1e9, torch.randn(3, 16) * 1e-8):
        decoded = decode(encode_polar(vectors))
        assert decoded.isfinite().all()
        assert decoded.abs().max() <= FP16_MAX * math.sqrt(2) * 1.01
