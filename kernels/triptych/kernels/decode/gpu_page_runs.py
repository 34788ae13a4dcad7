# pyright: basic, reportPrivateImportUsage=false, reportArgumentType=false, reportAttributeAccessIssue=false, reportGeneralTypeIssues=false
# Triton's language is not Python: the checker takes tiles for integers.
"""Decode attention over quantized pages, one page at a time: its id is one number of a program."""

import triton
import triton.language as tl

from triptych.kernels.triton.page_access import biased, capped, halves, metadata_of, positions_of
from triptych.kernels.triton.unpack import unpacked

LEAST = tl.constexpr(2.0**-24)


@triton.jit
def power_of(scale):
    """The exponent of each scale as a float, and two to its negative power; at least -24."""
    bits = tl.cast(tl.maximum(scale, LEAST), tl.int32, bitcast=True) & 0x7F800000
    inverse = tl.cast((254 << 23) - bits, tl.float32, bitcast=True)
    power = tl.cast((bits >> 23) | 0x4B000000, tl.float32, bitcast=True) - (8388608.0 + 127.0)
    return power, inverse


@triton.jit
def page_at(
    arena, page_count, table, width, stride, tile, FORM: tl.constexpr, BACKWARD: tl.constexpr,
    listed, base,
):  # fmt: skip
    """Page number ``tile`` of a head row: a pointer, and whether its id is in range."""
    index = tile
    if listed is not None:
        entries, has_list = listed
        entry = tl.load(entries + tile, mask=has_list, other=0)
        index = tl.where(has_list, entry - base, tile)
    column = index
    if BACKWARD:
        column = width - 1 - index
    is_named = (index >= 0) & (index < width)
    page = tl.load(table + column.to(tl.int64) * stride, mask=is_named, other=-1)
    is_known = is_named & (page >= 0) & (page < page_count * FORM.parts)
    return arena + tl.where(is_known, page, 0).to(tl.int64) * FORM.page_bytes, is_known


@triton.jit
def units_of(start, offset, units: tl.constexpr, tile: tl.constexpr):
    """Packed bytes [tokens, tile] at ``offset``, of which ``units`` are channels."""
    if units == tile:
        packed = tl.load(start + offset)
    else:
        packed = tl.load(start + offset, mask=(tl.arange(0, tile) < units)[None, :], other=0)
    return packed


@triton.jit
def added(total, codes, high, low, EXACT: tl.constexpr):
    """``total + codes @ (high + low)`` in float32; without ``EXACT`` only ``high``."""
    total = tl.dot(codes, high, total)
    if EXACT:
        total = tl.dot(codes, low, total)
    return total


@triton.jit
def attend_pages(
    first_high, first_low, second_high, second_low, total, factor, cap, oldest,
    is_windowed: tl.constexpr, arena, page_count, table, width, stride, count, first, last, listed,
    base, FORM: tl.constexpr, BACKWARD: tl.constexpr, HEADS: tl.constexpr,
    EXACT: tl.constexpr, CAPPED: tl.constexpr,
):  # fmt: skip
    """Softmax over the pages ``first`` to ``last`` (exclusive) of a head row.

    Tiles are [tokens, heads] and [channels, heads], since the tensor cores take as few as 8
    columns, but 16 rows. The weight of a token times the scale of its value is one power of two, so
    that no weight is lost in fp16 whatever the scales are: with l' = l + log2(scale), the sums are
    those of 2**(l' - peak), and of the same divided by the scale.

    Returns peak and sum of weights [heads], and the unnormalised output of each part.
    """
    PAGE: tl.constexpr = FORM.page_tile
    token = tl.arange(0, PAGE)
    inside = tl.minimum(token, FORM.tokens - 1)  # rows beyond a page are not read
    key_unit = tl.arange(0, FORM.key_tile)
    key_at = key_unit[:, None] * FORM.key_unit_stride + inside[None, :] * FORM.key_stride
    value_at = inside[:, None] * FORM.value_units + tl.arange(0, FORM.value_tile)[None, :]
    first_high = tl.trans(first_high)
    first_low = tl.trans(first_low)
    second_high = tl.trans(second_high)
    second_low = tl.trans(second_low)
    # Without EXACT the offset of codes stays in the products; it is removed from the sums.
    peak = tl.full([HEADS], float("-inf"), tl.float32)
    mass = tl.zeros([HEADS], tl.float32)
    shift = tl.zeros([HEADS], tl.float32)
    out_0 = tl.full([FORM.value_tile, HEADS], 0.0, tl.float32)
    out_1 = out_0
    out_2 = out_0
    out_3 = out_0
    for tile in range(first, last):
        page, is_known = page_at(
            arena, page_count, table, width, stride, tile, FORM, BACKWARD, listed, base
        )
        live = token < tl.minimum(count - tile * FORM.tokens, FORM.tokens)
        key = tl.load(page + key_at)
        value = units_of(page + FORM.values, value_at, FORM.value_units, FORM.value_tile)
        key_scale, key_zero = metadata_of(page, token, live, FORM, True)
        scale, zero = metadata_of(page, token, live, FORM, False)
        logits = tl.zeros([PAGE, HEADS], tl.float32)
        codes = unpacked(key, FORM.key_bits, 0, FORM.has_asm)
        logits = added(logits, tl.trans(codes), first_high, first_low, EXACT)
        if FORM.key_bits == 4:
            codes = unpacked(key, 4, 1, FORM.has_asm)
            logits = added(logits, tl.trans(codes), second_high, second_low, EXACT)
        logits = logits * key_scale[:, None] + total[None, :] * key_zero[:, None]
        logits = biased(capped(logits * factor[None, :], cap, CAPPED), page, token, live, FORM)
        shown = live
        if is_windowed:
            shown = shown & (positions_of(page, token, live, FORM) >= oldest)
        hidden = tl.where(is_known, float("-inf"), float("nan"))
        power, inverse = power_of(scale)
        logits = tl.where(shown[:, None], logits + power[:, None], hidden)
        before = peak
        peak = tl.maximum(peak, tl.max(logits, 0))
        start = tl.where(peak == float("-inf"), 0.0, peak)
        weights = tl.exp2(logits - start[None, :])
        rescale = tl.exp2(before - start)
        mass = mass * rescale + tl.sum(weights * inverse[:, None], 0)
        shift = shift * rescale + tl.sum(weights * (zero * inverse)[:, None], 0)
        weights *= (scale * inverse)[:, None]
        high, low = halves(weights)
        out_0 = more(out_0, rescale, high, low, value, 0, FORM, EXACT)
        if FORM.value_bits < 8:
            out_1 = more(out_1, rescale, high, low, value, 1, FORM, EXACT)
        if FORM.value_bits < 4:
            out_2 = more(out_2, rescale, high, low, value, 2, FORM, EXACT)
            out_3 = more(out_3, rescale, high, low, value, 3, FORM, EXACT)
    return (
        peak,
        mass,
        out_0 + shift[None, :],
        out_1 + shift[None, :],
        out_2 + shift[None, :],
        out_3 + shift[None, :],
    )


@triton.jit
def more(
    out, rescale, high, low, value, part: tl.constexpr, FORM: tl.constexpr, EXACT: tl.constexpr
):
    """The output of a part after one more page.

    A page starts a sum of its own, since the sums of tensor cores are rounded towards zero: over
    the pages of a run that adds up to more than the rounding of weights.
    """
    codes = tl.trans(unpacked(value, FORM.value_bits, part, FORM.has_asm))
    page = tl.zeros_like(out)
    return tl.fma(out, rescale[None, :], added(page, codes, high, low, EXACT))
