# pyright: basic, reportPrivateImportUsage=false, reportArgumentType=false, reportAttributeAccessIssue=false, reportGeneralTypeIssues=false, reportOperatorIssue=false
# ruff: noqa: RUF005
# Triton's language is not Python: the checker takes tiles for integers.
"""Products of queries and codes of keys in bytes, which tensor cores add up without rounding.

Codes stay integers, so four of them need one instruction instead of four to six, and a product of
bytes covers twice as many channels as one of fp16. A query is a sum of digits to the base 254, each
an integer from -127 to 127: two digits keep 15 bits of the largest number of a query, three keep
float32. Codes of 8 bits are multiplied as integers from -128 to 127. The sum of a query, by which
zeros are multiplied, is that of its digits: so logits are those of one query, which is rounded.

Source: integer attention as in SageAttention (Zhang et al., 2025), with exact queries
"""

import triton
import triton.language as tl

from triptych.kernels.triton.page_access import sliced_dot

ASM = "{{ .reg .b32 moved; shr.u32 moved, $1, {shift}; and.b32 $0, moved, {mask:#010x}; }}"
"""Take a part of four packed bytes."""


def _asm(bits: int, part: int) -> str:
    return ASM.format(shift=bits * part, mask=0x01010101 * ((1 << bits) - 1))


PART_ASM = tl.constexpr(
    tuple(_asm(bits, part) for bits in (8, 4, 2, 1) for part in range(8 // bits))
)
LARGEST = tl.constexpr(63.0)
"""Factor of a query whose numbers are less than 2, so that its first digit fits."""
BASE = tl.constexpr(254.0)
ROUND = tl.constexpr(12582912.0)
"""Added to a number and taken away again, this rounds it to an integer."""


@triton.jit
def byte_query(split, EXACT: tl.constexpr):
    """The digits of a query that is split into fp16 numbers (``split_query``), [channels, heads].

    Returns the int8 digits of each part, and the sum of the query, [heads].
    """
    parts = ()
    total = tl.zeros_like(tl.sum(split[0][0].to(tl.float32), 0))
    for share in tl.static_range(len(split)):
        rest = (split[share][0].to(tl.float32) + split[share][1].to(tl.float32)) * LARGEST
        digits = ()
        factor = 1.0 / LARGEST
        for _digit in tl.static_range(3 if EXACT else 2):
            whole = (rest + ROUND) - ROUND
            digits = digits + (whole.to(tl.int8),)
            total += tl.sum(whole, 0) * factor
            rest = (rest - whole) * BASE
            factor = factor / BASE
        parts = parts + (digits,)
    return parts, total


@triton.jit
def byte_codes(units, bits: tl.constexpr, part: tl.constexpr, HAS_ASM: tl.constexpr):
    """int8 codes of one part of packed bytes; those of 8 bits minus 128."""
    if bits == 8:
        codes = units ^ 0x80
    elif HAS_ASM:
        PLACE: tl.constexpr = 8 // bits - 1 + part
        asm: tl.constexpr = PART_ASM[PLACE]
        codes = tl.inline_asm_elementwise(
            asm, "=r,r", [units], dtype=tl.uint8, is_pure=True, pack=4
        )
    else:
        codes = (units >> (bits * part)) & ((1 << bits) - 1)
    return tl.cast(codes, tl.int8, bitcast=True)


@triton.jit
def byte_logits(parts, key, READ: tl.constexpr, HEADS: tl.constexpr, FORM: tl.constexpr):
    """Products of a query with the codes of a page's keys, float32 [tokens, heads].

    Codes of 8 bits are less by 128. ``parts``: of ``byte_query``; ``key``: packed [units, tokens].
    """
    logits = tl.zeros([READ, HEADS], tl.float32)
    factor = 1.0 / LARGEST
    for digit in tl.static_range(len(parts[0])):
        total = tl.zeros([READ, HEADS], tl.int32)
        for share in tl.static_range(len(parts)):
            codes = tl.trans(byte_codes(key, FORM.key_bits, share, FORM.has_asm))
            if FORM.slices > 1:
                total += sliced_dot(codes, parts[share][digit], FORM.slices, tl.int32)
            else:
                total = tl.dot(codes, parts[share][digit], total, out_dtype=tl.int32)
        logits += total.to(tl.float32) * factor
        factor = factor / BASE
    return logits
