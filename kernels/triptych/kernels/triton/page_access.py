# pyright: basic, reportPrivateImportUsage=false, reportArgumentType=false, reportAttributeAccessIssue=false, reportGeneralTypeIssues=false
# ruff: noqa: SIM108, RUF005
# Triton's language is not Python: the checker takes tiles for integers.
"""Functions of Triton kernels that read pages: token slots, codes, metadata and logits.

Codes are loaded without a mask, since any byte is a finite code and the weight of an unused token
is 0. Metadata is loaded with a mask, since an unused scale may be NaN. Scale and zero are one
32-bit word. Page ids are converted to 64-bit offsets. A page id out of range is not read; it makes
the result of the row NaN, since an error would make the host wait.
"""

import triton
import triton.language as tl

from triptych.kernels.triton.unpack import numbers_of_codes, pair_channels, pair_part, part_codes


@triton.jit
def metadata_of(page, row, live, FORM: tl.constexpr, KEYS: tl.constexpr):
    """Scale and zero of each key or value, in one load; 0 where not live."""
    if KEYS:
        start = page + FORM.key_metadata
    else:
        start = page + FORM.value_metadata
    return words_of(start + 4 * row, live)


@triton.jit
def words_of(at, live):
    """Scale and zero at byte pointers, in one load; 0 where not live."""
    word = tl.load(at.to(tl.pointer_type(tl.int32)), mask=live, other=0)
    scale = tl.cast((word & 0xFFFF).to(tl.uint16), tl.float16, bitcast=True)
    zero = tl.cast(((word >> 16) & 0xFFFF).to(tl.uint16), tl.float16, bitcast=True)
    return scale.to(tl.float32), zero.to(tl.float32)


@triton.jit
def halves_at(at, live):
    """float16 numbers at byte pointers, as float32; 0 where not live."""
    return tl.load(at.to(tl.pointer_type(tl.float16)), mask=live, other=0.0).to(tl.float32)


@triton.jit
def odd_codes(start, channel, FORM: tl.constexpr):
    """Numbers ``2 * code - top`` of channels of keys with segments, fp16 [keys, channels].

    start: pointers [keys, 1] to the first byte of each key. Channels that keys do not have are 0.
    """
    byte = tl.zeros_like(channel)
    shift = tl.zeros_like(channel)
    top = tl.zeros_like(channel)
    SEGMENTS: tl.constexpr = FORM.key_segments
    for at in tl.static_range(len(SEGMENTS)):
        byte, shift, top = placed_in(channel, byte, shift, top, at, FORM)
    mask = (channel < FORM.dim)[None, :]
    packed = tl.load(start + byte[None, :] * FORM.key_unit_stride, mask=mask, other=0).to(tl.int32)
    codes = (packed >> shift[None, :]) & top[None, :]
    return (2 * codes - top[None, :]).to(tl.float16)


@triton.jit
def placed_in(channel, byte, shift, top, at: tl.constexpr, FORM: tl.constexpr):
    """Byte, shift and largest code of channels, with those of one segment filled in."""
    SEGMENTS: tl.constexpr = FORM.key_segments
    BITS: tl.constexpr = SEGMENTS[at][0]
    FIRST: tl.constexpr = SEGMENTS[at][1]
    UNITS: tl.constexpr = SEGMENTS[at][2]
    START: tl.constexpr = SEGMENTS[at][3]
    inside = in_segment(channel, at, FORM)
    place = tl.where(inside, channel - FIRST, 0)
    byte = tl.where(inside, START + place % UNITS, byte)
    shift = tl.where(inside, place // UNITS * BITS, shift)
    return byte, shift, tl.where(inside, 2**BITS - 1, top)


@triton.jit
def in_segment(channel, at: tl.constexpr, FORM: tl.constexpr):
    """Mask of the channels in a segment of keys."""
    SEGMENTS: tl.constexpr = FORM.key_segments
    FIRST: tl.constexpr = SEGMENTS[at][1]
    END: tl.constexpr = SEGMENTS[at][1] + SEGMENTS[at][2] * (8 // SEGMENTS[at][0])
    return (channel >= FIRST) & (channel < END)


@triton.jit
def segment_scales(page, row, live, at: tl.constexpr, FORM: tl.constexpr):
    """Scales of a segment of keys; 0 where not live."""
    return halves_at(page + FORM.key_metadata + 2 * (at * FORM.tokens + row), live)


@triton.jit
def token_scales(page, row, live, FORM: tl.constexpr):
    """Scales of the keys of tokens of balanced pages; 0 where not live."""
    return halves_at(page + FORM.token_scales + 2 * row, live)


@triton.jit
def row_of(
    table, tokens, slots, slot_count, width, by_slot, by_head, count_slot, count_head, request,
    head,
):  # fmt: skip
    """Page table, width and tokens of a head row.

    A slot out of range has one token and width 0, which is then reported as a wrong page.
    """
    slot = tl.load(slots + request)
    is_known = (slot >= 0) & (slot < slot_count)
    at = tokens + slot.to(tl.int64) * count_slot + head * count_head
    count = tl.load(at, mask=is_known, other=1)
    table += slot.to(tl.int64) * by_slot + head.to(tl.int64) * by_head
    return table, tl.where(is_known, width, 0), count


@triton.jit
def held_of(tokens, slot, head, slot_count, count_slot, count_head, width, room):
    """Tokens and pages of a head row in a section; 0 if the slot is out of range."""
    is_known = (slot >= 0) & (slot < slot_count)
    at = tokens + slot.to(tl.int64) * count_slot + head * count_head
    count = tl.load(at, mask=is_known, other=0)
    return count, tl.minimum((count + room - 1) // room, width)


@triton.jit
def listed_of(page_lists, request, head, base, count, pages, room, CHUNK: tl.constexpr):
    """The entries of a page list that belong to one section, and the number of their tokens.

    Lists are ascending and a page that is not full is the last one of its section. So the entries
    of a section are contiguous, and only the last one may have fewer tokens than a page.

    base: pages of the sections before; count, pages: tokens and pages of this section.
    Returns entries (a pointer to the first one), whether there is a list, and tokens.
    """
    ordinals, counts, rows, row_count, most, by_row, by_head, count_row, count_head = page_lists
    place = tl.load(rows + request)
    has_list = (place >= 0) & (place < row_count)
    row = tl.where(has_list, place, 0).to(tl.int64)
    entries = ordinals + row * by_row + head * by_head
    length = tl.load(counts + row * count_row + head * count_head, mask=has_list, other=0)
    length = tl.minimum(length, most)
    start, end = 0, 0
    for first in range(0, length, CHUNK):
        entry = first + tl.arange(0, CHUNK)
        named = tl.load(entries + entry, mask=entry < length, other=2**31 - 1)
        start += tl.sum((named < base).to(tl.int32), 0)
        end += tl.sum((named < base + pages).to(tl.int32), 0)
    last = tl.load(entries + end - 1, mask=end > start, other=-1)
    held = (end - start) * room
    held -= tl.where(last == base + pages - 1, pages * room - count, 0)
    return entries + start, has_list, tl.where(has_list, held, count)


@triton.jit
def slots_of(
    arena, page_count, table, width, stride, first, tokens,
    FORM: tl.constexpr, BACKWARD: tl.constexpr, TILE: tl.constexpr, listed=None, base=0,
):  # fmt: skip
    """Token slots of the tokens ``first`` to ``first + TILE`` of a head row.

    ``listed``: entries and has_list of ``listed_of``, numbered from ``base`` on; None: all pages
    are read.

    Returns page (pointers to bytes), row, live, and wrong: the token exists, but its page id is out
    of range. The page of tokens that are not live is page 0.
    """
    token = first + tl.arange(0, TILE)
    index = (token.to(tl.uint32) // FORM.tokens).to(tl.int32)
    row = token - index * FORM.tokens
    live = token < tokens
    if listed is not None:
        entries, has_list = listed
        entry = tl.load(entries + index, mask=live & has_list, other=0)
        index = tl.where(has_list, entry - base, index)
    column = index
    if BACKWARD:
        column = width - 1 - index
    named = live & (index >= 0) & (index < width)
    page = tl.load(table + column.to(tl.int64) * stride, mask=named, other=-1)
    known = named & (page >= 0) & (page < page_count * FORM.parts)
    offset = tl.where(known, page, 0).to(tl.int64) * FORM.page_bytes
    return arena + offset, row, known, live & (known == 0)


@triton.jit
def key_units(page, row, live, FORM: tl.constexpr):
    """Packed keys [TILE, key_tile]: bytes, or fp16 numbers."""
    unit = tl.arange(0, FORM.key_tile)
    offset = row[:, None] * FORM.key_stride + unit[None, :] * FORM.key_unit_stride
    if FORM.key_bits == 16:
        at = page.to(tl.pointer_type(tl.float16))[:, None] + offset
        # Triton does not always find this out, and copies to shared memory only where it is known.
        ALIGNMENT: tl.constexpr = FORM.key_alignment
        HALVES: tl.constexpr = FORM.key_alignment // 2
        at = tl.max_contiguous(tl.multiple_of(at, (ALIGNMENT, ALIGNMENT)), (1, HALVES))
    else:
        at = page[:, None] + offset
    if FORM.key_units == FORM.key_tile:
        packed = tl.load(at)
    else:
        packed = tl.load(at, mask=(unit < FORM.key_units)[None, :], other=0)
    return packed


@triton.jit
def value_units(page, row, live, FORM: tl.constexpr):
    """Packed values [TILE, value_tile]; fp16 numbers that are not live are 0, as 0 * NaN is NaN."""
    unit = tl.arange(0, FORM.value_tile)
    offset = row[:, None] * FORM.value_units + unit[None, :]
    if FORM.value_bits == 16:
        at = (page + FORM.values).to(tl.pointer_type(tl.float16))[:, None] + offset
        packed = tl.load(at, mask=live[:, None] & (unit < FORM.value_units)[None, :], other=0.0)
    else:
        at = (page + FORM.values)[:, None] + offset
        if FORM.value_units == FORM.value_tile:
            packed = tl.load(at)
        else:
            packed = tl.load(at, mask=(unit < FORM.value_units)[None, :], other=0)
    return packed


@triton.jit
def query_part(
    query, heads, share: tl.constexpr, G: tl.constexpr, FORM: tl.constexpr
):  # fmt: skip
    """Channels of one part of a key, for all query heads of a group: float32 [heads, key_tile]."""
    unit = tl.arange(0, FORM.key_tile)
    PARTS: tl.constexpr = FORM.key_parts
    FIRST: tl.constexpr = PARTS[share][0]
    UNITS: tl.constexpr = PARTS[share][1]
    at = query + heads[:, None] * FORM.dim + FIRST + unit[None, :]
    mask = (heads < G)[:, None] & (unit < UNITS)[None, :]
    return tl.load(at, mask=mask, other=0.0).to(tl.float32)


@triton.jit
def unit_of(largest):
    """A power of two near each non-negative number, and its inverse.

    Numbers up to ``largest`` fit in fp16 after division by it.
    """
    exponent = tl.cast(largest, tl.int32, bitcast=True) & 0x7F800000
    exponent = tl.minimum(tl.maximum(exponent, 27 << 23), 227 << 23)
    unit = tl.cast(exponent, tl.float32, bitcast=True)
    return unit, tl.cast((254 << 23) - exponent, tl.float32, bitcast=True)


@triton.jit
def halves(numbers):
    """Split a float32 tile into fp16 numbers and the fp16 rounding errors."""
    high = numbers.to(tl.float16)
    return high, (numbers - high.to(tl.float32)).to(tl.float16)


@triton.jit
def split_query(query, G: tl.constexpr, HEADS: tl.constexpr, FORM: tl.constexpr):
    """A group's query as fp16 tiles, one for each part of a packed key.

    Numbers are divided by a power of two near the largest of their row, so that they fit in fp16.
    Returns (high, low) of each part, where ``low`` is the rounding error of ``high``; the sum of
    the row; and the divisor.
    """
    heads = tl.arange(0, HEADS)
    PARTS: tl.constexpr = FORM.parts_of_key
    parts = ()
    for share in tl.static_range(PARTS):
        parts = parts + (query_part(query, heads, share, G, FORM),)
    return split_parts(parts)


@triton.jit
def split_parts(parts):
    """``split_query`` of float32 tiles [heads, key_tile], one for each part."""
    largest = tl.max(tl.abs(parts[0]), 1)
    total = tl.sum(parts[0], 1)
    for share in tl.static_range(1, len(parts)):
        largest = tl.maximum(largest, tl.max(tl.abs(parts[share]), 1))
        total += tl.sum(parts[share], 1)
    unit, inverse = unit_of(largest)
    split = ()
    for share in tl.static_range(len(parts)):
        split = split + (halves(parts[share] * inverse[:, None]),)
    return split, total * inverse, unit


@triton.jit
def sliced_dot(rows, columns, SLICES: tl.constexpr, out_dtype: tl.constexpr = tl.float32):
    """``rows @ columns`` as a sum over slices of the channels, one in each warp.

    Source: sliced-K of CUTLASS ("Efficient GEMM in CUDA")
    """
    COUNT: tl.constexpr = rows.shape[1] // SLICES
    rows = tl.permute(tl.reshape(rows, [rows.shape[0], SLICES, COUNT]), (1, 0, 2))
    columns = tl.reshape(columns, [SLICES, COUNT, columns.shape[1]])
    return tl.sum(tl.dot(rows, columns, input_precision="ieee", out_dtype=out_dtype), 0)


@triton.jit
def products(high, low, codes, EXACT: tl.constexpr, SLICES: tl.constexpr = 1):
    """``(high + low) @ codes`` in float32; without ``EXACT`` only ``high``."""
    if SLICES > 1:
        out = sliced_dot(high, codes, SLICES)
        if EXACT:
            out += sliced_dot(low, codes, SLICES)
    else:
        out = tl.dot(high, codes)
        if EXACT:
            out += tl.dot(low, codes)
    return out


@triton.jit
def key_codes(units, FORM: tl.constexpr, part: tl.constexpr):
    """fp16 numbers of one part of packed bytes of keys, without assembly."""
    if FORM.is_polar:
        codes = pair_part(units, part)
    else:
        codes = part_codes(units, FORM.key_bits, part, FORM.is_float)
    return codes


@triton.jit
def tile_logits(
    split, total, page, row, live, FORM: tl.constexpr, EXACT: tl.constexpr,
):  # fmt: skip
    """Products of a group's query with the keys of a tile, [HEADS, TILE], in the query's unit.

    The tensor cores multiply the query by *codes*; scale and zero are applied to the result:
    q * (s c + z) = s (q * c) + z sum(q).
    """
    if FORM.key_bits == 16:
        units = key_units(page, row, live, FORM)
        out = products(split[0][0], split[0][1], tl.trans(units), EXACT, FORM.slices)
    elif FORM.key_widths > 0:
        out = tl.zeros([split[0][0].shape[0], row.shape[0]], tl.float32)
        SEGMENTS: tl.constexpr = FORM.key_segments
        for at in tl.static_range(len(SEGMENTS)):
            out = plus_segment(out, split, page, row, live, at, FORM, EXACT)
    else:
        units = key_units(page, row, live, FORM)
        codes = key_codes(units, FORM, 0)
        out = products(split[0][0], split[0][1], tl.trans(codes), EXACT, FORM.slices)
        PARTS: tl.constexpr = FORM.parts_of_key
        for share in tl.static_range(1, PARTS):
            codes = key_codes(units, FORM, share)
            out += products(split[share][0], split[share][1], tl.trans(codes), EXACT, FORM.slices)
        scale, zero = metadata_of(page, row, live, FORM, True)
        out = out * scale[None, :] + total[:, None] * zero[None, :]
    return out


@triton.jit
def plus_segment(
    out, split, page, row, live, at: tl.constexpr, FORM: tl.constexpr, EXACT: tl.constexpr
):  # fmt: skip
    """``out`` plus the products of a query with one segment of the keys of a tile."""
    SEGMENTS: tl.constexpr = FORM.key_segments
    BITS: tl.constexpr = SEGMENTS[at][0]
    UNITS: tl.constexpr = SEGMENTS[at][2]
    START: tl.constexpr = SEGMENTS[at][3]
    PART: tl.constexpr = SEGMENTS[at][4]
    TOP: tl.constexpr = 2**BITS - 1
    unit = tl.arange(0, FORM.key_tile)
    near = row[:, None] * FORM.key_stride + (START + unit)[None, :] * FORM.key_unit_stride
    units = tl.load(page[:, None] + near, mask=(unit < UNITS)[None, :], other=0)
    some = tl.zeros_like(out)
    total = tl.sum(some, 1)
    for share in tl.static_range(8 // BITS):
        codes = tl.trans(part_codes(units, BITS, share, False))
        some += products(split[PART + share][0], split[PART + share][1], codes, EXACT)
        total += part_total(split[PART + share][0], split[PART + share][1], 1, EXACT)
    scale = segment_scales(page, row, live, at, FORM)
    return out + (2.0 * some - TOP * total[:, None]) * scale[None, :]


@triton.jit
def part_total(high, low, AXIS: tl.constexpr, EXACT: tl.constexpr):
    """The sum of the numbers of a query's part that products take."""
    total = tl.sum(high.to(tl.float32), AXIS)
    if EXACT:
        total += tl.sum(low.to(tl.float32), AXIS)
    return total


@triton.jit
def capped(logits, cap, CAPPED: tl.constexpr):
    """``cap * tanh(logits)`` if ``CAPPED``, without overflow of the exponential."""
    if CAPPED:
        small = tl.exp2(tl.abs(logits) * -2.8853900817779268)  # exp(-2 |x|), by 2 log2(e)
        size = cap * (1.0 - small) / (1.0 + small)
        logits = tl.where(logits < 0, -size, size)
    return logits


@triton.jit
def online_softmax(logits, peak, mass):
    """One step of an online softmax in powers of two over the columns of a tile.

    Returns the weights, the factor of earlier sums, and the new peak and mass of each row.
    """
    before = peak
    peak = tl.maximum(peak, tl.max(logits, 1))
    base = tl.where(peak == float("-inf"), 0.0, peak)
    weights = tl.exp2(logits - base[:, None])
    rescale = tl.exp2(before - base)
    return weights, rescale, peak, mass * rescale + tl.sum(weights, 1)


@triton.jit
def biased(logits, page, row, live, FORM: tl.constexpr):
    """Logits [tokens, heads] in powers of two, plus the biases of the tokens if there are any."""
    if FORM.has_bias:
        at = (page + FORM.scores).to(tl.pointer_type(tl.float32)) + row
        bias = tl.load(at, mask=live, other=0.0)
        logits = logits + (bias * 1.4426950408889634)[:, None]  # log2(e)
    return logits


@triton.jit
def positions_of(page, row, live, FORM: tl.constexpr):
    """Positions of a tile's tokens, -1 for those that are not live, 0 if they are not tracked."""
    if FORM.is_tracked:
        at = (page + FORM.positions).to(tl.pointer_type(tl.int32)) + row
        position = tl.load(at, mask=live, other=-1)
    else:
        position = tl.where(live, 0, -1)
    return position


@triton.jit
def units_at(page, row, unit, FORM: tl.constexpr, KEYS: tl.constexpr):
    """Pointers to units of keys or values: bytes, or fp16 numbers."""
    if KEYS:
        start = page
        offset = row[:, None] * FORM.key_stride + unit[None, :] * FORM.key_unit_stride
        bits: tl.constexpr = FORM.key_bits
    else:
        start = page + FORM.values
        offset = row[:, None] * FORM.value_units + unit[None, :]
        bits: tl.constexpr = FORM.value_bits
    if bits == 16:
        at = start.to(tl.pointer_type(tl.float16))[:, None] + offset
    else:
        at = start[:, None] + offset
    return at


@triton.jit
def codes_of(page, row, live, channel, FORM: tl.constexpr, KEYS: tl.constexpr):
    """Unpacked codes of channels as int32."""
    bits: tl.constexpr = FORM.key_bits if KEYS else FORM.value_bits
    count: tl.constexpr = FORM.key_units if KEYS else FORM.value_units
    at = units_at(page, row, channel % count, FORM, KEYS)
    byte = tl.load(at, mask=live[:, None] & (channel < FORM.dim)[None, :], other=0).to(tl.int32)
    return (byte >> ((channel // count) * bits)[None, :]) & (2**bits - 1)


@triton.jit
def numbers_of(page, row, live, channel, FORM: tl.constexpr, KEYS: tl.constexpr):
    """Decoded channels of keys or values, float32."""
    bits: tl.constexpr = FORM.key_bits if KEYS else FORM.value_bits
    if bits == 16:
        at = units_at(page, row, channel, FORM, KEYS)
        mask = live[:, None] & (channel < FORM.dim)[None, :]
        numbers = tl.load(at, mask=mask, other=0.0).to(tl.float32)
    elif KEYS and FORM.key_widths > 0:
        start = page[:, None] + row[:, None] * FORM.key_stride
        numbers = odd_codes(start, channel, FORM).to(tl.float32)
        scales = tl.zeros_like(numbers)
        SEGMENTS: tl.constexpr = FORM.key_segments
        for at in tl.static_range(len(SEGMENTS)):
            scale = segment_scales(page, row, live, at, FORM)[:, None]
            scales = tl.where(in_segment(channel, at, FORM)[None, :], scale, scales)
        numbers = numbers * scales
    else:
        if KEYS and FORM.is_polar:
            at = units_at(page, row, channel % FORM.key_units, FORM, KEYS)
            mask = live[:, None] & (channel < FORM.dim)[None, :]
            pairs = tl.load(at, mask=mask, other=0)
            numbers = pair_channels(pairs, (channel >= FORM.key_units)[None, :]).to(tl.float32)
        else:
            codes = codes_of(page, row, live, channel, FORM, KEYS)
            numbers = numbers_of_codes(codes, FORM.is_float).to(tl.float32)
        mask = live[:, None] & (channel < FORM.dim)[None, :]
        if KEYS and FORM.by_channel:
            scale, zero = words_of((page + FORM.key_metadata)[:, None] + 4 * channel[None, :], mask)
            numbers = numbers * scale + zero
            if FORM.is_balanced:
                numbers = numbers * token_scales(page, row, live, FORM)[:, None]
        else:
            scale, zero = metadata_of(page, row, live, FORM, KEYS)
            numbers = numbers * scale[:, None] + zero[:, None]
            if FORM.is_balanced:
                numbers = numbers * halves_at(
                    (page + FORM.channel_scales)[:, None] + 2 * channel[None, :], mask
                )
    return numbers
