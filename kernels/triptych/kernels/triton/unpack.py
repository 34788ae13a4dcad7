# pyright: basic, reportPrivateImportUsage=false, reportArgumentType=false, reportAttributeAccessIssue=false, reportAssignmentType=false, reportOperatorIssue=false
# ruff: noqa: SIM108
# Triton's language is not Python: the checker takes tiles for integers.
"""Unpacking of codes to fp16, two numbers at a time.

A byte c becomes the fp16 number 1024 + c by putting 0x64 above it, which ``prmt`` does for two
bytes at once. Codes of 4 or 2 bits are masked where they are, so they are 1024 + 2**k c; one fused
multiply-add on two numbers removes factor and offset, exactly. Source of the idea: Kim et al., "Who
Says Elephants Can't Run" (2022).
"""

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


COSINES = tl.constexpr(quantizer.COSINES)


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
def cosine_of(eighth):
    """The cosine of the middle of an eighth (0 to 7) of a quarter turn, float32.

    Three levels of choices: an eighth is 4, 2 and 1 times a bit.
    """
    first = (eighth & 1) != 0
    second = (eighth & 2) != 0
    low = tl.where(
        second, tl.where(first, COSINES[3], COSINES[2]), tl.where(first, COSINES[1], COSINES[0])
    )
    high = tl.where(
        second, tl.where(first, COSINES[7], COSINES[6]), tl.where(first, COSINES[5], COSINES[4])
    )
    return tl.where((eighth & 4) != 0, high, low)


@triton.jit
def pair_numbers(pairs, is_second):
    """A channel of each pair of a key, as ``quantizer.polar_numbers``, float32.

    ``is_second``: the channel c + d/2 instead of c.
    """
    pairs = pairs.to(tl.int32)
    radius = (pairs & 7).to(tl.float32)
    eighth = (pairs >> 3) & 7
    number = radius * cosine_of(tl.where(is_second, 7 - eighth, eighth))
    sign = (pairs >> tl.where(is_second, 7, 6)) & 1
    return tl.where(sign != 0, -number, number)


@triton.jit
def key_part(units, FORM: tl.constexpr, part: tl.constexpr):
    """fp16 numbers of one part of packed bytes of keys."""
    if FORM.is_polar:
        numbers = pair_numbers(units, part == 1).to(tl.float16)
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
