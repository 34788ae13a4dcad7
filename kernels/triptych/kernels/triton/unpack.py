# pyright: basic, reportPrivateImportUsage=false, reportArgumentType=false, reportAttributeAccessIssue=false, reportAssignmentType=false, reportOperatorIssue=false
# ruff: noqa: SIM108
# Triton's language is not Python: the checker takes tiles for integers.
"""Unpacking of codes to fp16, two numbers at a time.

A byte c becomes the fp16 number 1024 + c by putting 0x64 above it, which ``prmt`` does for two
bytes at once. Codes of 4 or 2 bits are masked where they are, so they are 1024 + 2**k c; one fused
multiply-add on two numbers removes factor and offset, exactly. Source of the idea: Kim et al., "Who
Says Elephants Can't Run" (2022).
"""

from collections.abc import Sequence
from struct import unpack

import triton
import triton.language as tl

from triptych.kernels.codec import quantizer

ASM = """{{
.reg .b32 codes, factor, offset;
and.b32 codes, $2, {mask:#010x};
mov.b32 factor, {factor:#06x}{factor:04x};
mov.b32 offset, {offset:#06x}{offset:04x};
prmt.b32 $0, codes, 0x64646464, 0x4140;
prmt.b32 $1, codes, 0x64646464, 0x4342;
fma.rn.f16x2 $0, $0, factor, offset;
fma.rn.f16x2 $1, $1, factor, offset;
}}"""
"""Unpack a part of four bytes: the factor is 2**-k, the offset -1024 * 2**-k, both in fp16."""


def _asm(bits: int, part: int) -> str:
    shift = bits * part
    return ASM.format(
        mask=0x01010101 * ((1 << bits) - 1 << shift),
        factor=(15 - shift) << 10,
        offset=0x8000 | ((25 - shift) << 10),
    )


PARTS = tuple((bits, part) for bits in (8, 4, 2, 1) for part in range(8 // bits))
PART_ASM = tl.constexpr(tuple(_asm(*place) for place in PARTS))


def _words(numbers: Sequence[float]) -> tuple[int, int]:
    """Eight numbers in steps of 1/256 as the bytes of two words, int32."""
    codes = bytes(int(256 * number) for number in numbers)
    return unpack("<2i", codes)


COSINES = tl.constexpr(_words(quantizer.COSINES))
SINES = tl.constexpr(_words(quantizer.COSINES[::-1]))


@triton.jit
def half_of(code):
    """Convert codes 0 to 255 to fp16 exactly, as (1024 + code) - 1024 without an I2F conversion."""
    return tl.cast(code.to(tl.uint16) | 0x6400, tl.float16, bitcast=True) - 1024.0


@triton.jit
def float8_of(byte):
    """Convert float8 numbers (e4m3) to fp16 exactly; NaN becomes 480.

    With exponent and mantissa in the place of those of fp16, which has a bias of 15 instead of 7, a
    number is 2**-8 times itself.
    """
    wide = byte.to(tl.uint16)
    bits = ((wide & 0x80) << 8) | ((wide & 0x7F) << 7)
    return tl.cast(bits.to(tl.uint16), tl.float16, bitcast=True) * 256.0


@triton.jit
def numbers_of_codes(codes, IS_FLOAT: tl.constexpr):
    """fp16 numbers of codes that are unpacked."""
    if IS_FLOAT:
        numbers = float8_of(codes)
    else:
        numbers = half_of(codes)
    return numbers


@triton.jit
def pair_numbers(pairs, first, second, shift):
    """fp16 numbers of a channel of each pair of a key, as ``quantizer.polar_numbers``.

    ``first``, ``second``: words with the cosines of the first and the last four eighths for channel
    c, or with the sines for channel c + d/2; ``shift``: from the sign's bit to the highest of 16.
    """
    pairs = pairs.to(tl.int32)
    word = tl.where((pairs & 32) != 0, second, first)
    cosine = half_of((word >> (pairs & 24)) & 0xFF) * 0.00390625  # 1/256
    number = tl.cast(half_of(pairs & 7) * cosine.to(tl.float16), tl.uint16, bitcast=True)
    sign = ((pairs << shift) & 0x8000).to(tl.uint16)
    return tl.cast(number | sign, tl.float16, bitcast=True)


@triton.jit
def pair_part(pairs, part: tl.constexpr):
    """``pair_numbers`` of channels c (part 0) or c + d/2 (part 1)."""
    if part == 0:
        numbers = pair_numbers(pairs, COSINES[0], COSINES[1], 9)
    else:
        numbers = pair_numbers(pairs, SINES[0], SINES[1], 8)
    return numbers


@triton.jit
def pair_channels(pairs, is_second):
    """``pair_numbers`` of channels c, or c + d/2 where ``is_second``."""
    first = tl.where(is_second, SINES[0], COSINES[0])
    second = tl.where(is_second, SINES[1], COSINES[1])
    return pair_numbers(pairs, first, second, tl.where(is_second, 8, 9))


@triton.jit
def key_part(units, FORM: tl.constexpr, part: tl.constexpr):
    """fp16 numbers of one part of packed bytes of keys."""
    if FORM.is_polar:
        numbers = pair_part(units, part)
    else:
        numbers = unpacked(units, FORM.key_bits, part, FORM.is_float, FORM.has_asm)
    return numbers


@triton.jit
def part_codes(units, bits: tl.constexpr, part: tl.constexpr, IS_FLOAT: tl.constexpr):
    """fp16 codes of one part of packed bytes, without assembly."""
    if bits == 8:
        codes = numbers_of_codes(units, IS_FLOAT)
    else:
        codes = half_of((units >> (bits * part)) & ((1 << bits) - 1))
    return codes


@triton.jit
def unpacked(
    units, bits: tl.constexpr, part: tl.constexpr, IS_FLOAT: tl.constexpr, HAS_ASM: tl.constexpr
):  # fmt: skip
    """fp16 codes of one part of packed bytes, which hold ``8 / bits`` parts."""
    if HAS_ASM and not IS_FLOAT:
        PLACE: tl.constexpr = 8 // bits - 1 + part
        asm: tl.constexpr = PART_ASM[PLACE]
        codes = tl.inline_asm_elementwise(
            asm, "=r,=r,r", [units], dtype=tl.float16, is_pure=True, pack=4
        )
    else:
        codes = part_codes(units, bits, part, IS_FLOAT)
    return codes
