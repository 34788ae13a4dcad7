"""The asymmetric quantizer of the page formats, in torch."""

from dataclasses import dataclass

import torch
from torch import Tensor

FP16_MAX = 65504.0
FLOAT8_MAX = 448.0
LEAST_SCALE = 2.0**-24
"""The smallest number of float16."""


@dataclass(frozen=True, slots=True)
class Encoded:
    """Quantized vectors before packing: codes and metadata."""

    codes: Tensor
    """uint8 [n, d]; for 16-bit formats the float16 vectors themselves."""
    metadata: Tensor
    """float16 [n, groups, 2]: scale and zero; no groups for 16-bit formats."""
    is_float: bool = False
    """Whether codes are float8 numbers, e4m3."""


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
    return Encoded(codes, torch.stack((scale, torch.zeros_like(scale)), -1), is_float=True)


def decode(encoded: Encoded) -> Tensor:
    """Decoded vectors, float32 [n, d]: code * scale + zero."""
    groups = encoded.metadata.shape[1]
    if groups == 0:
        return encoded.codes.float()
    scale, zero = encoded.metadata.float().unbind(-1)
    count, dim = encoded.codes.shape
    numbers = encoded.codes.view(torch.float8_e4m3fn) if encoded.is_float else encoded.codes
    codes = numbers.float().view(count, groups, dim // groups)
    return (codes * scale[..., None] + zero[..., None]).flatten(1)


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
