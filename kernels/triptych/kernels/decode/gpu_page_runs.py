# pyright: basic, reportPrivateImportUsage=false, reportArgumentType=false, reportAttributeAccessIssue=false, reportGeneralTypeIssues=false
# ruff: noqa: RUF005
# Triton's language is not Python: the checker takes tiles for integers.
"""Decode attention over quantized pages, one page at a time: its id is one number of a program."""

import triton
import triton.language as tl

from triptych.kernels.decode.gpu_bytes import byte_logits, byte_query
from triptych.kernels.triton.page_access import (
    biased,
    capped,
    halves,
    halves_at,
    metadata_of,
    part_total,
    positions_of,
    query_part,
    segment_scales,
    sliced_dot,
    split_parts,
    token_scales,
    words_of,
)
from triptych.kernels.triton.unpack import key_part, unpacked

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
def added(total, codes, high, low, EXACT: tl.constexpr, SLICES: tl.constexpr = 1):
    """``total + codes @ (high + low)`` in float32; without ``EXACT`` only ``high``."""
    if SLICES > 1:
        total += sliced_dot(codes, high, SLICES)
        if EXACT:
            total += sliced_dot(codes, low, SLICES)
    else:
        total = tl.dot(codes, high, total)
        if EXACT:
            total = tl.dot(codes, low, total)
    return total


@triton.jit
def page_query(query, page, G: tl.constexpr, HEADS: tl.constexpr, FORM: tl.constexpr):
    """A group's query for a page whose keys have a scale and a zero for each channel.

    A channel's scale multiplies the query instead of the codes. Returns (high, low) of each part as
    ``split_query`` does, the product of the query with the zeros, and the divisor of the parts.
    """
    heads = tl.arange(0, HEADS)
    unit = tl.arange(0, FORM.key_tile)
    offset = tl.zeros([HEADS], tl.float32)
    PARTS: tl.constexpr = FORM.parts_of_key
    parts = ()
    for share in tl.static_range(PARTS):
        part = query_part(query, heads, share, G, FORM)
        at = page + FORM.key_metadata + 4 * (share * FORM.key_units + unit)
        scale, zero = words_of(at, unit < FORM.key_units)
        offset += tl.sum(part * zero[None, :], 1)
        parts = parts + (part * scale[None, :],)
    split, _total, divisor = split_parts(parts)
    return split, offset, divisor


@triton.jit
def transposed(split):
    """(high, low) of each part as [channels, heads]."""
    turned = ()
    for share in tl.static_range(len(split)):
        turned = turned + ((tl.trans(split[share][0]), tl.trans(split[share][1])),)
    return turned


@triton.jit
def attend_pages(
    query, split, total, unit, factor, cap, oldest,
    is_windowed: tl.constexpr, arena, page_count, table, width, stride, count, first, last, listed,
    base, FORM: tl.constexpr, BACKWARD: tl.constexpr, G: tl.constexpr, HEADS: tl.constexpr,
    EXACT: tl.constexpr, CAPPED: tl.constexpr,
):  # fmt: skip
    """Softmax over the pages ``first`` to ``last`` (exclusive) of a head row.

    Tiles are [tokens, heads] and [channels, heads], since the tensor cores take as few as 8
    columns, but 16 rows. The weight of a token times the scale of its value is one power of two, so
    that no weight is lost in fp16 whatever the scales are: with l' = l + log2(scale), the sums are
    those of 2**(l' - peak), and of the same divided by the scale.

    Returns peak and sum of weights [heads], and the unnormalised output of each part.
    """
    READ: tl.constexpr = FORM.read_tile
    READS: tl.constexpr = (FORM.tokens + READ - 1) // READ
    PARTS: tl.constexpr = FORM.parts_of_value
    split = transposed(split)
    totals = segment_totals(split, FORM, EXACT)
    digits = ()
    if FORM.has_byte_keys:
        digits, total = byte_query(split, EXACT)
    # Without EXACT the offset of codes stays in the products; it is removed from the sums.
    peak = tl.full([HEADS], float("-inf"), tl.float32)
    mass = tl.zeros([HEADS], tl.float32)
    shift = tl.zeros([HEADS], tl.float32)
    outs = ()
    for _share in tl.static_range(PARTS):
        outs = outs + (tl.full([FORM.value_tile, HEADS], 0.0, tl.float32),)
    for read in range(first * READS, last * READS):
        tile = read // READS
        token = read % READS * READ + tl.arange(0, READ)
        inside = tl.minimum(token, FORM.tokens - 1)  # rows beyond a page are not read
        key_unit = tl.arange(0, FORM.key_tile)
        key_at = key_unit[:, None] * FORM.key_unit_stride + inside[None, :] * FORM.key_stride
        value_at = inside[:, None] * FORM.value_units + tl.arange(0, FORM.value_tile)[None, :]
        page, is_known = page_at(
            arena, page_count, table, width, stride, tile, FORM, BACKWARD, listed, base
        )
        live = token < tl.minimum(count - tile * FORM.tokens, FORM.tokens)
        key = None  # with widths each segment is loaded for itself
        if FORM.key_widths == 0:
            key = tl.load(page + key_at)
        value = units_of(page + FORM.values, value_at, FORM.value_units, FORM.value_tile)
        scale, zero = metadata_of(page, token, live, FORM, False)
        logits = logits_of_page(
            query, split, total, unit, factor, digits, totals, page, key, inside, token, live,
            READ, G, HEADS, FORM, EXACT,
        )  # fmt: skip
        logits = biased(capped(logits, cap, CAPPED), page, token, live, FORM)
        shown = live
        if is_windowed:
            shown = shown & (positions_of(page, token, live, FORM) >= oldest)
        hidden = tl.where(is_known, float("-inf"), float("nan"))
        power, inverse = power_of(scale)
        logits = tl.where(shown[:, None], logits + power[:, None], hidden)
        weights, peak, rescale = weights_of(logits, peak)
        mass = mass * rescale + tl.sum(weights * inverse[:, None], 0)
        zero_part = tl.sum(weights * (zero * inverse)[:, None], 0)
        if not FORM.is_balanced:
            shift = shift * rescale + zero_part
        weights *= (scale * inverse)[:, None]
        high, low = halves(weights)
        more_outs = ()
        for share in tl.static_range(PARTS):
            out = more(outs[share], rescale, high, low, zero_part, page, value, share, FORM, EXACT)
            more_outs = more_outs + (out,)
        outs = more_outs
    shifted = ()
    for share in tl.static_range(PARTS):
        shifted = shifted + (outs[share] + shift[None, :],)
    return peak, mass, shifted


@triton.jit
def logits_of_page(
    query, split, total, unit, factor, digits, totals, page, key, row, token, live,
    READ: tl.constexpr, G: tl.constexpr, HEADS: tl.constexpr, FORM: tl.constexpr,
    EXACT: tl.constexpr,
):  # fmt: skip
    """Logits [tokens, heads] of a page's tokens, before cap and biases.

    The query is as ``attend_pages`` has it: itself, its parts, the sum of its numbers and their
    unit, its digits for products of bytes, and its sums by segments of keys. ``key``: the codes.
    """
    if FORM.by_channel:
        own, offset, divisor = page_query(query, page, G, HEADS, FORM)
        logits = page_logits(transposed(own), key, READ, HEADS, FORM, EXACT)
        logits = logits * divisor[None, :] + offset[None, :]
        if FORM.is_balanced:
            logits = logits * token_scales(page, token, live, FORM)[:, None]
        logits = logits * factor
    elif FORM.key_widths > 0:
        logits = tl.zeros([READ, HEADS], tl.float32)
        SEGMENTS: tl.constexpr = FORM.key_segments
        for at in tl.static_range(len(SEGMENTS)):
            logits = plus_segment_of_page(
                logits, split, totals, page, row, token, live, at, FORM, EXACT
            )
        logits = logits * (unit * factor)[None, :]
    else:
        key_scale, key_zero = metadata_of(page, token, live, FORM, True)
        if FORM.has_byte_keys:
            logits = byte_logits(digits, key, READ, HEADS, FORM)
            if FORM.key_bits == 8:
                key_zero += 128.0 * key_scale
        else:
            logits = page_logits(split, key, READ, HEADS, FORM, EXACT)
        logits = logits * key_scale[:, None] + total[None, :] * key_zero[:, None]
        logits = logits * (unit * factor)[None, :]
    return logits


@triton.jit
def weights_of(logits, before):
    """Weights of tokens after a peak of ``before`` [heads], the new peak, and what sums up to now
    are multiplied with."""
    peak = tl.maximum(before, tl.max(logits, 0))
    start = tl.where(peak == float("-inf"), 0.0, peak)
    return tl.exp2(logits - start[None, :]), peak, tl.exp2(before - start)


@triton.jit
def page_logits(
    split, key, READ: tl.constexpr, HEADS: tl.constexpr, FORM: tl.constexpr, EXACT: tl.constexpr
):  # fmt: skip
    """Products of a query with the codes of a page's keys, float32 [tokens, heads]."""
    PARTS: tl.constexpr = FORM.parts_of_key
    logits = tl.zeros([READ, HEADS], tl.float32)
    for share in tl.static_range(PARTS):
        codes = key_part(key, FORM, share)
        high, low = split[share]
        logits = added(logits, tl.trans(codes), high, low, EXACT, FORM.slices)
    return logits


@triton.jit
def segment_totals(split, FORM: tl.constexpr, EXACT: tl.constexpr):
    """The sum of a query's numbers in each segment of keys, [heads] each; none without segments."""
    totals = ()
    SEGMENTS: tl.constexpr = FORM.key_segments
    for at in tl.static_range(len(SEGMENTS)):
        totals = totals + (segment_total(split, at, FORM, EXACT),)
    return totals


@triton.jit
def segment_total(split, at: tl.constexpr, FORM: tl.constexpr, EXACT: tl.constexpr):
    """The sum of a query's numbers in one segment of keys, [heads]."""
    SEGMENTS: tl.constexpr = FORM.key_segments
    BITS: tl.constexpr = SEGMENTS[at][0]
    PART: tl.constexpr = SEGMENTS[at][4]
    total = part_total(split[PART][0], split[PART][1], 0, EXACT)
    for share in tl.static_range(1, 8 // BITS):
        total += part_total(split[PART + share][0], split[PART + share][1], 0, EXACT)
    return total


@triton.jit
def plus_segment_of_page(
    logits, split, totals, page, row, token, live, at: tl.constexpr, FORM: tl.constexpr,
    EXACT: tl.constexpr,
):  # fmt: skip
    """``logits`` [tokens, heads] plus the products of a query with one segment of a page's keys."""
    SEGMENTS: tl.constexpr = FORM.key_segments
    BITS: tl.constexpr = SEGMENTS[at][0]
    UNITS: tl.constexpr = SEGMENTS[at][2]
    START: tl.constexpr = SEGMENTS[at][3]
    PART: tl.constexpr = SEGMENTS[at][4]
    TOP: tl.constexpr = 2**BITS - 1
    unit = tl.arange(0, FORM.key_tile)
    near = (START + unit)[:, None] * FORM.key_unit_stride + row[None, :] * FORM.key_stride
    units = tl.load(page + near, mask=(unit < UNITS)[:, None], other=0)
    some = tl.zeros_like(logits)
    for share in tl.static_range(8 // BITS):
        codes = tl.trans(unpacked(units, BITS, share, False, FORM.has_asm))
        some = added(some, codes, split[PART + share][0], split[PART + share][1], EXACT)
    scale = segment_scales(page, token, live, at, FORM)
    return logits + (2.0 * some - TOP * totals[at][None, :]) * scale[:, None]


@triton.jit
def more(
    out, rescale, high, low, zero_part, start, value, part: tl.constexpr, FORM: tl.constexpr,
    EXACT: tl.constexpr,
):  # fmt: skip
    """The output of a part after one more page, which begins at ``start``.

    A page starts a sum of its own, since the sums of tensor cores are rounded towards zero: over
    the pages of a run that adds up to more than the rounding of weights.
    """
    codes = tl.trans(unpacked(value, FORM.value_bits, part, FORM.is_float, FORM.has_asm))
    page = added(tl.zeros_like(out), codes, high, low, EXACT)
    if FORM.is_balanced:
        unit = tl.arange(0, FORM.value_tile)
        at = start + FORM.channel_scales + 2 * (part * FORM.value_units + unit)
        scale = halves_at(at, unit < FORM.value_units)
        page = (page + zero_part[None, :]) * scale[:, None]
    return tl.fma(out, rescale[None, :], page)
