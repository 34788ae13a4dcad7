"""The quantizers of the page formats, in torch."""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from triptych.core.layout import Codec

FP16_MAX = 65504.0
FLOAT8_MAX = 448.0
LEAST_SCALE = 2.0**-24
"""The smallest number of float16."""
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


def encode_as(codec: Codec, vectors: Tensor, bits: int, groups: int, limited: int = 0) -> Encoded:
    """Quantize vectors by a codec; ``limited``: how many numbers a range limits before."""
    if codec == "float":
        return encode_floats(vectors)
    if codec == "polar":
        return encode_polar(vectors)
    return encode(limit(vectors, limited), bits, groups)


def decode(encoded: Encoded) -> Tensor:
    """Decoded vectors, float32 [n, d]: number of the code * scale + zero."""
    groups = encoded.metadata.shape[1]
    if groups == 0:
        return encoded.codes.float()
    scale, zero = encoded.metadata.float().unbind(-1)
    count, dim = encoded.codes.shape
    codes = numbers_of(encoded).view(count, groups, dim // groups)
    return (codes * scale[..., None] + zero[..., None]).flatten(1)


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


def unpack(packed: Tensor, bits: int) -> Tensor:
    """Unpack bytes [n, d * bits / 8] to codes [n, d]; the inverse of ``pack``."""
    if bits >= 8:
        return packed
    mask = 2**bits - 1
    return torch.cat([(packed >> shift) & mask for shift in range(0, 8, bits)], dim=1)
