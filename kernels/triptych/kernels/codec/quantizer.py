"""The quantizers of the page formats, in torch."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from triptych.core.layout import Codec, KeySegment, PageFormat

FP16_MAX = 65504.0
FLOAT8_MAX = 448.0
LEAST_SCALE = 2.0**-24
"""The smallest number of float16."""
LEAST_NUMBER = 2.0**-126
"""The smallest normal number of float32."""
NORMAL_STEPS = {1: 1.596, 2: 0.9957, 4: 0.3352}
"""Distances of equally spaced levels with the least squared error for a normal variable of
deviation 1, by bits. Source: Max, Quantizing for minimum distortion (1960), table II"""

COPY, NARROW, REQUANTIZE = range(3)
"""Conversions of a vector from one format to another."""
TOP_RADIUS = 7
"""Largest code of a radius."""
COSINES = tuple(round(256 * math.cos((part + 0.5) * math.pi / 16)) / 256 for part in range(8))
"""Of the middle of each eighth of a quarter turn, in steps of 1/256: a product with the code of a
radius has 11 bits, so float16 holds it. The sines are the same in reverse order."""
TANGENTS = tuple(math.tan(part * math.pi / 16) for part in range(1, 8))
"""Of the borders between the eighths of a quarter turn."""


@dataclass(frozen=True, slots=True)
class Encoded:
    """Quantized vectors before packing: codes and metadata."""

    codes: Tensor
    """uint8 [n, d]; for 16-bit formats the float16 vectors themselves."""
    metadata: Tensor
    """float16 [n, groups, 2]: scale and zero; no groups for 16-bit formats."""
    codec: Codec = "range"
    """What codes are: ``float``: float8 numbers, e4m3; ``polar``: halves of bytes of pairs."""
    segments: tuple[KeySegment, ...] = ()
    """Segments of the vectors; then metadata is [n, segments], a scale of each."""


def encode(vectors: Tensor, bits: int, groups: int) -> Encoded:
    """Quantize each group of each vector asymmetrically, over its own range.

    Codes are computed with the scale and zero as rounded to float16, the numbers that are stored.
    A constant group has codes 0 and scale 1. Values saturate at the float16 range, so metadata is
    finite for finite input.

    Shapes:  vectors [n, d] -> codes [n, d], metadata [n, groups, 2]
    Promise: |decode(encode(x)) - x| <= scale / 2 + 2**-10 * max|x|, group by group
    Source:  KIVI (asymmetric quantization); per token, head and group as in DiffKV
    """
    x = vectors.float().clamp(-FP16_MAX, FP16_MAX)
    if bits == 16:
        return Encoded(x.half(), x.new_empty(len(x), 0, 2, dtype=torch.float16))
    top = 2**bits - 1
    grouped = x.view(len(x), groups, x.shape[1] // groups)
    low, high = grouped.amin(-1), grouped.amax(-1)
    scale, zero = ((high - low) / top).half(), low.half()
    usable = (scale > 0) & scale.isfinite()
    scale = torch.where(usable, scale, 1.0)
    steps = (grouped - zero.float()[..., None]) / scale.float()[..., None]
    codes = torch.where(usable[..., None], steps.round().clamp(0, top), 0.0)
    return Encoded(codes.flatten(1).to(torch.uint8), torch.stack((scale, zero), -1))


def limit(vectors: Tensor, count: int) -> Tensor:
    """Vectors whose ``count`` largest magnitudes become the next one; 0: as they are.

    Shapes:  [n, d] -> [n, d]
    Source:  OSCAR (clipping at a quantile of each vector, 0.96 for keys and 0.92 for values)
    """
    if count == 0:
        return vectors
    most = vectors.abs().sort(-1).values[..., -1 - count, None]
    return torch.where(vectors.abs() > most, most.copysign(vectors), vectors)


def encode_floats(vectors: Tensor) -> Encoded:
    """Quantize each vector to float8 (e4m3), by the least power of two that brings it below 448.

    Powers of two change no mantissa, so encoding decoded numbers again gives the same numbers. A
    vector of zeros has codes 0 and scale 1. The zero of the metadata is 0.

    Shapes:  vectors [n, d] -> codes [n, d], metadata [n, 1, 2]
    Promise: |decode(encode(x)) - x| <= |x| / 16 + scale * 2**-10
    Source:  FP8 formats for deep learning (Micikevicius et al., 2022), e4m3 without infinities;
             powers of two as in OCP's microscaling formats
    """
    x = vectors.float().clamp(-FP16_MAX, FP16_MAX)
    largest = x.abs().amax(-1, keepdim=True)
    mantissa, exponent = torch.frexp(largest / FLOAT8_MAX)
    power = torch.ldexp(torch.ones_like(largest), exponent - (mantissa == 0.5).int())
    usable = largest > 0
    scale = torch.where(usable, power.clamp(min=LEAST_SCALE), 1.0).half()
    steps = (x / scale.float()).clamp(-FLOAT8_MAX, FLOAT8_MAX)
    codes = torch.where(usable, steps, 0.0).to(torch.float8_e4m3fn).view(torch.uint8)
    return Encoded(codes, torch.stack((scale, torch.zeros_like(scale)), -1), "float")


def encode_polar(vectors: Tensor) -> Encoded:
    """Quantize the pair of channels c and c + d/2 of each vector to a radius and an angle.

    The byte of a pair has 3 bits of the radius, in steps of a seventh of the largest of the vector;
    3 bits of the angle to the nearer axis of the first channel, in eighths of a quarter turn; and
    the signs of both channels, which are the quarter. Its lower half is the code of channel c, its
    upper half that of channel c + d/2. The scale of the metadata is the step, the zero is 0.
    Numbers are rounded to float16 first, so that their squares are exact and all backends find the
    same codes. A vector of zeros has codes 0 and scale 1.

    Shapes:  vectors [n, d] -> codes [n, d], metadata [n, 1, 2]
    Promise: a radius is off by at most half a step, an angle by 5.625 degrees (and 0.3 %, as
             cosines are rounded)
    Source:  Spherical KV (radius and angle codes of keys); 3 and 5 bits, and angles in the middle
             of equal parts of a turn, are ours
    """
    x = vectors.float().clamp(-FP16_MAX, FP16_MAX).half().float()
    left, right = x.chunk(2, -1)
    # Through float64, since torch does not round square roots of float32 correctly.
    radius = (left * left + right * right).double().sqrt().float()
    step = (radius.amax(-1, keepdim=True) / TOP_RADIUS).half()
    usable = step > 0
    step = torch.where(usable, step, 1.0)
    steps = (radius / step.float()).round().clamp(0, TOP_RADIUS)
    eighth = torch.zeros_like(radius)
    for tangent in TANGENTS:
        eighth += right.abs() > left.abs() * tangent
    signs = (left < 0).int() << 6 | (right < 0).int() << 7
    pairs = torch.where(usable, steps.int() | eighth.int() << 3 | signs, 0)
    codes = torch.cat((pairs & 15, pairs >> 4), -1).to(torch.uint8)
    return Encoded(codes, torch.stack((step, torch.zeros_like(step)), -1), "polar")


def polar_numbers(codes: Tensor) -> Tensor:
    """The channels that codes of ``encode_polar`` stand for, in steps of the radius.

    Shapes:  [n, d] -> [n, d]
    Dtypes:  uint8 -> float32
    """
    low, high = codes.chunk(2, -1)
    pairs = low.int() | high.int() << 4
    cosines = torch.tensor(COSINES, device=codes.device)
    radius, eighth = (pairs & 7).float(), pairs >> 3 & 7
    left, right = radius * cosines[eighth], radius * cosines[7 - eighth]
    return torch.cat(
        (torch.where(pairs & 64 > 0, -left, left), torch.where(pairs & 128 > 0, -right, right)), -1
    )


def step_share(bits: int, channels: int) -> float:
    """The distance of two levels of ``encode_by_norm``, as a share of the norm of a vector."""
    return NORMAL_STEPS[bits] / channels**0.5


def encode_by_norm(vectors: Tensor, bits: int) -> tuple[Tensor, Tensor]:
    """Quantize vectors in equal steps around 0, of a length that suits a normal variable.

    A number becomes ``scale * (2 * code - top)``, where top is the largest code. The scale is not
    the step: it makes the decoded vector as long as the given one. Vectors should be rotated, so
    that their numbers are nearly normal.

    Shapes:  vectors [n, d] -> codes uint8 [n, d], scales float16 [n]
    Promise: the decoded vector is as long as the given one, but for the rounding of the scale
    Source:  TurboQuant (one norm, fixed levels); Block-GTQ (the norm corrected). Levels are equally
             spaced instead of those of Lloyd and Max: 1 % more error at 2 bits, 21 % at 4
    """
    x, top = vectors.float().clamp(-FP16_MAX, FP16_MAX), 2**bits - 1
    norm = x.double().square().sum(-1).sqrt().float()
    step = (norm * step_share(bits, x.shape[1])).clamp_min(LEAST_NUMBER)
    codes = ((x / step[:, None]).floor() + 2 ** (bits - 1)).clamp(0, top)
    odd = 2 * codes - top
    return codes.to(torch.uint8), (norm / odd.square().sum(-1).sqrt()).half()


def encode_values_by_norm(vectors: Tensor, bits: int) -> Encoded:
    """``encode_by_norm`` with a scale and a zero, as ``encode`` has them."""
    codes, scale = encode_by_norm(vectors, bits)
    zero = ((1 - 2**bits) * scale.float()).clamp_min(-FP16_MAX).half()
    return Encoded(codes, torch.stack((2 * scale, zero), -1)[:, None])


def encode_segments(vectors: Tensor, segments: Sequence[KeySegment]) -> Encoded:
    """``encode_by_norm`` of each segment of keys.

    Shapes:  vectors [n, d] -> codes [n, d], metadata [n, segments]
    Source:  Block-GTQ (segments of channels with equal bits, each with a norm)
    """
    parts = [
        encode_by_norm(vectors[:, each.channel : each.channel + each.channels], each.bits)
        for each in segments
    ]
    codes, scales = zip(*parts, strict=True)
    return Encoded(torch.cat(codes, 1), torch.stack(scales, 1), segments=tuple(segments))


def encode_as(form: PageFormat, vectors: Tensor, *, of_keys: bool) -> Encoded:
    """Quantize keys or values [n, d] by the codec of a format."""
    bits = form.key_bits if of_keys else form.value_bits
    groups = form.key_groups if of_keys else form.value_groups
    dim = vectors.shape[1]
    match form.key_codec if of_keys else form.value_codec:
        case "float":
            return encode_floats(vectors)
        case "polar":
            return encode_polar(vectors)
        case "by_norm" if of_keys:
            return encode_segments(vectors, form.key_segments(dim))
        case "by_norm":
            return encode_values_by_norm(vectors, bits)
        case _:
            limited = form.limited_numbers(dim)[0 if of_keys else 1]
            return encode(limit(vectors, limited), bits, groups)


def _decode_segments(encoded: Encoded) -> Tensor:
    counts = torch.tensor([each.channels for each in encoded.segments])
    tops = torch.tensor([2**each.bits - 1 for each in encoded.segments])
    device = encoded.codes.device
    top = tops.repeat_interleave(counts).to(device)
    scale = encoded.metadata.float().repeat_interleave(counts.to(device), 1)
    return (2 * encoded.codes.float() - top) * scale


def decode(encoded: Encoded) -> Tensor:
    """Decoded vectors, float32 [n, d]: number of the code * scale + zero."""
    if encoded.segments:
        return _decode_segments(encoded)
    groups = encoded.metadata.shape[1]
    if groups == 0:
        return encoded.codes.float()
    scale, zero = encoded.metadata.float().unbind(-1)
    count, dim = encoded.codes.shape
    codes = numbers_of(encoded).view(count, groups, dim // groups)
    return (codes * scale[..., None] + zero[..., None]).flatten(1)


def conversion(old: PageFormat, new: PageFormat, *, of_keys: bool) -> int:
    """How keys or values of pages of ``old`` become those of ``new``."""
    (bits, *kind), (to_bits, *to_kind) = (
        (form.key_bits, form.key_groups, form.key_codec)
        if of_keys
        else (form.value_bits, form.value_groups, form.value_codec)
        for form in (old, new)
    )
    if bits == to_bits == 16:
        return COPY
    if kind != to_kind:
        return REQUANTIZE
    if bits == to_bits:
        return COPY
    is_narrower = to_bits < bits < 16 and "range" in kind and not new.is_clipped
    return NARROW if is_narrower else REQUANTIZE


def numbers_of(encoded: Encoded) -> Tensor:
    """The numbers of codes, in steps of the scale, float32 [n, d]."""
    if encoded.codec == "float":
        return encoded.codes.view(torch.float8_e4m3fn).float()
    return polar_numbers(encoded.codes) if encoded.codec == "polar" else encoded.codes.float()


def narrow(encoded: Encoded, bits: int, to_bits: int) -> Encoded:
    """Reduce codes to ``to_bits``, as if the original values had been quantized to ``to_bits``.

    255 = 17 * 15 and 15 = 5 * 3, so the coarse grid is a subset of the fine grid, and the nearest
    coarse code follows from the fine code alone.

    Source:  DiffKV (downgrade of tokens); rounding at the midpoint is ours: its strict
             comparison differs in up to 4.8 % of the codes
    """
    ratio = (2**bits - 1) // (2**to_bits - 1)
    codes = (encoded.codes.to(torch.int16) + ratio // 2) // ratio
    scale, zero = encoded.metadata.unbind(-1)
    coarse = (scale.float() * ratio).half()
    return Encoded(codes.to(torch.uint8), torch.stack((coarse, zero), -1))


def pack(codes: Tensor, bits: int) -> Tensor:
    """Pack codes [n, d] to bytes [n, d * bits / 8]: byte j holds channels j, j + q, j + 2q, ...

    ``q = d * bits / 8``, lowest bits first. Unpacking yields contiguous blocks of channels, without
    a shuffle.
    """
    if bits >= 8:
        return codes
    share = 8 // bits
    parts = codes.view(len(codes), share, codes.shape[1] // share).unbind(1)
    packed = torch.zeros_like(parts[0])
    for index, part in enumerate(parts):
        packed |= part << (bits * index)
    return packed


def pack_segments(codes: Tensor, segments: Sequence[KeySegment]) -> Tensor:
    """Pack the codes [n, d] of each segment alone, one behind the other: [n, bytes]."""
    parts = (codes[:, each.channel : each.channel + each.channels] for each in segments)
    return torch.cat([pack(part, each.bits) for part, each in zip(parts, segments, strict=True)], 1)


def unpack_segments(packed: Tensor, segments: Sequence[KeySegment]) -> Tensor:
    """Unpack bytes [n, bytes] to codes [n, d]; the inverse of ``pack_segments``."""
    parts = (
        unpack(packed[:, each.byte : each.byte + each.channels * each.bits // 8], each.bits)
        for each in segments
    )
    return torch.cat(list(parts), 1)


def unpack(packed: Tensor, bits: int) -> Tensor:
    """Unpack bytes [n, d * bits / 8] to codes [n, d]; the inverse of ``pack``."""
    if bits >= 8:
        return packed
    mask = 2**bits - 1
    return torch.cat([(packed >> shift) & mask for shift in range(0, 8, bits)], dim=1)
