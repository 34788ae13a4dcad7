# pyright: basic, reportPrivateImportUsage=false, reportArgumentType=false, reportAttributeAccessIssue=false, reportGeneralTypeIssues=false
# Triton's language is not Python: the checker takes tiles for integers.
"""Triton kernels of the codec ops: a program handles a block of token slots."""

import triton
import triton.language as tl

from triptych.kernels.codec import quantizer
from triptych.kernels.triton.page_access import (
    codes_of,
    metadata_of,
    numbers_of,
    positions_of,
    segment_scales,
    slots_of,
    units_at,
)

TANGENTS = tl.constexpr(quantizer.TANGENTS)
TOP_RADIUS = tl.constexpr(float(quantizer.TOP_RADIUS))


@triton.jit
def store_slots(
    arena, page_count, key, value, pages, rows, positions, scores, items,
    key_token, key_head, value_token, value_head,
    FORM: tl.constexpr, BLOCK: tl.constexpr, KV_HEADS: tl.constexpr,
):  # fmt: skip
    """Encode a block of tokens into given slots; item ``token * KV_HEADS + head``."""
    item = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    page, row, live = named_slots(arena, page_count, pages, rows, item, items, FORM)
    token, head = item // KV_HEADS, item % KV_HEADS
    score = tl.full([BLOCK], 0.0, tl.float32)
    if scores is not None:
        score = tl.load(scores + item, mask=live, other=0.0)
    write_tokens(
        page, row, live, key, value, token, head, positions, score,
        key_token, key_head, value_token, value_head, FORM,
    )  # fmt: skip


@triton.jit
def append_slots(
    arena, mirror, page_count, key, value, slots, places, positions, items, table,
    key_token, key_head, value_token, value_head,
    FORM: tl.constexpr, BACKWARD: tl.constexpr, BLOCK: tl.constexpr, KV_HEADS: tl.constexpr,
):  # fmt: skip
    """Encode a block of tokens at places of head rows; item ``request * KV_HEADS + head``.

    Grid: blocks, and arenas: the second one is ``mirror``, if it is given.
    """
    if mirror is not None:
        arena = tl.where(tl.program_id(1) == 0, arena, mirror)
    item = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    token, head = item // KV_HEADS, item % KV_HEADS
    slot = tl.load(slots + token, mask=item < items, other=-1)
    place = tl.load(places + token, mask=item < items, other=-1)
    page, row, live = placed_slots(arena, page_count, table, slot, head, place, FORM, BACKWARD)
    write_tokens(
        page, row, live, key, value, token, head, positions, tl.full([BLOCK], 0.0, tl.float32),
        key_token, key_head, value_token, value_head, FORM,
    )  # fmt: skip


@triton.jit
def write_tokens(
    page, row, live, key, value, token, head, positions, score,
    key_token, key_head, value_token, value_head, FORM: tl.constexpr,
):  # fmt: skip
    """Write keys, values, positions and scores of a block of slots."""
    at = key + token.to(tl.int64) * key_token + head.to(tl.int64) * key_head
    quantize(at, row, page, row, live, None, FORM, True)
    at = value + token.to(tl.int64) * value_token + head.to(tl.int64) * value_head
    quantize(at, row, page, row, live, None, FORM, False)
    if FORM.is_tracked:
        position = tl.load(positions + token, mask=live, other=0)
        tl.store((page + FORM.positions).to(tl.pointer_type(tl.int32)) + row, position, mask=live)
        tl.store((page + FORM.scores).to(tl.pointer_type(tl.float32)) + row, score, mask=live)


@triton.jit
def transcode_slots(
    arena, page_count, source_pages, source_rows, target_pages, target_rows, items,
    SOURCE: tl.constexpr, TARGET: tl.constexpr,
    KEY_CONVERSION: tl.constexpr, VALUE_CONVERSION: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Re-encode a block of slots into slots of another format."""
    item = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    old, old_row, is_old = named_slots(
        arena, page_count, source_pages, source_rows, item, items, SOURCE
    )
    new, new_row, is_new = named_slots(
        arena, page_count, target_pages, target_rows, item, items, TARGET
    )
    rewrite(
        old,
        old_row,
        new,
        new_row,
        is_old & is_new,
        SOURCE,
        TARGET,
        KEY_CONVERSION,
        VALUE_CONVERSION,
    )


@triton.jit
def move_slots(
    arena, page_count, slots, places, by_row, by_head, to, to_by_row, to_by_head, most, heads,
    items, table, to_table,
    SOURCE: tl.constexpr, SOURCE_BACKWARD: tl.constexpr,
    TARGET: tl.constexpr, TARGET_BACKWARD: tl.constexpr,
    KEY_CONVERSION: tl.constexpr, VALUE_CONVERSION: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Re-encode a block of tokens; item ``(request * heads + head) * most + token``."""
    item = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    token, row = item % most, item // most
    head, row = row % heads, (row // heads).to(tl.int64)
    in_range = item < items
    slot = tl.load(slots + row, mask=in_range, other=-1)
    place = tl.load(places + row * by_row + head * by_head + token, mask=in_range, other=-1)
    to_place = tl.load(to + row * to_by_row + head * to_by_head + token, mask=in_range, other=-1)
    old, old_row, is_old = placed_slots(
        arena, page_count, table, slot, head, place, SOURCE, SOURCE_BACKWARD
    )
    new, new_row, is_new = placed_slots(
        arena, page_count, to_table, slot, head, to_place, TARGET, TARGET_BACKWARD
    )
    rewrite(
        old,
        old_row,
        new,
        new_row,
        is_old & is_new,
        SOURCE,
        TARGET,
        KEY_CONVERSION,
        VALUE_CONVERSION,
    )


@triton.jit
def rewrite(
    old, old_row, new, new_row, live,
    SOURCE: tl.constexpr, TARGET: tl.constexpr,
    KEY_CONVERSION: tl.constexpr, VALUE_CONVERSION: tl.constexpr,
):  # fmt: skip
    """Copy keys, values, scores and positions of a block of slots into another format."""
    recode(old, old_row, new, new_row, live, SOURCE, TARGET, KEY_CONVERSION, True)
    recode(old, old_row, new, new_row, live, SOURCE, TARGET, VALUE_CONVERSION, False)
    if TARGET.is_tracked:
        copy_tracked(old, old_row, new, new_row, live, SOURCE, TARGET)


@triton.jit
def copy_tracked(
    old, old_row, new, new_row, live, SOURCE: tl.constexpr, TARGET: tl.constexpr
):  # fmt: skip
    """Copy scores and positions; 0 from pages whose tokens are not tracked."""
    if SOURCE.is_tracked:
        word = tl.load((old + SOURCE.scores).to(tl.pointer_type(tl.int32)) + old_row, mask=live)
    else:
        word = tl.zeros_like(new_row).to(tl.int32)
    tl.store((new + TARGET.scores).to(tl.pointer_type(tl.int32)) + new_row, word, mask=live)
    word = positions_of(old, old_row, live, SOURCE)
    tl.store((new + TARGET.positions).to(tl.pointer_type(tl.int32)) + new_row, word, mask=live)


@triton.jit
def load_slots(
    arena, page_count, table, width, by_row, by_page, tokens, longest, key, value, positions,
    FORM: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Decode a block of tokens of one head row. Grid: rows, of which there may be many, blocks."""
    first, line = tl.program_id(1) * BLOCK, tl.program_id(0).to(tl.int64)
    count = tl.load(tokens + line)
    page, row, live, wrong = slots_of(
        arena, page_count, table + line * by_row, width, by_page, first, count, FORM, False, BLOCK
    )
    token = first + tl.arange(0, BLOCK)
    in_range = token < longest
    at = line * longest + token
    tl.store(positions + at, positions_of(page, row, live, FORM), mask=in_range)
    unknown = tl.where(wrong, float("nan"), 0.0)[:, None]
    channel = tl.arange(0, triton.next_power_of_2(FORM.dim))
    to = at[:, None] * FORM.dim + channel[None, :]
    mask = in_range[:, None] & (channel < FORM.dim)[None, :]
    vector = numbers_of(page, row, live, channel, FORM, True)
    tl.store(key + to, tl.where(live[:, None], vector, unknown), mask=mask)
    vector = numbers_of(page, row, live, channel, FORM, False)
    tl.store(value + to, tl.where(live[:, None], vector, unknown), mask=mask)


@triton.jit
def named_slots(arena, page_count, pages, rows, item, items, FORM: tl.constexpr):
    """Page pointers and rows of given slots, and a mask of those in range."""
    in_range = item < items
    page = tl.load(pages + item, mask=in_range, other=-1)
    row = tl.load(rows + item, mask=in_range, other=0)
    live = (page >= 0) & (page < page_count * FORM.parts) & (row >= 0) & (row < FORM.tokens)
    page = tl.where(live, page, 0)
    return arena + page.to(tl.int64) * FORM.page_bytes, tl.where(live, row, 0), live


@triton.jit
def placed_slots(
    arena, page_count, table, slot, head, place, FORM: tl.constexpr, BACKWARD: tl.constexpr
):
    """Page pointers and rows of tokens at places of head rows, and a mask of those in range."""
    pages, slots, width, by_slot, by_head, by_page = table
    column = tl.maximum(place, 0) // FORM.tokens
    named = (slot >= 0) & (slot < slots) & (place >= 0) & (column < width)
    if BACKWARD:
        column = width - 1 - column
    at = slot.to(tl.int64) * by_slot + head * by_head + column * by_page
    page = tl.load(pages + at, mask=named, other=-1)
    live = (page >= 0) & (page < page_count * FORM.parts)
    page = tl.where(live, page, 0)
    row = tl.where(live, place % FORM.tokens, 0)
    return arena + page.to(tl.int64) * FORM.page_bytes, row, live


@triton.jit
def given_numbers(
    source, row, live, channel, SOURCE: tl.constexpr, FORM: tl.constexpr, KEYS: tl.constexpr
):  # fmt: skip
    """Channels of vectors to encode, clamped to the range of fp16.

    ``source`` points to each vector or, if ``SOURCE`` is a form, to its page.
    """
    if SOURCE is None:
        mask = live[:, None] & (channel < FORM.dim)[None, :]
        numbers = tl.load(source[:, None] + channel[None, :], mask=mask, other=0.0).to(tl.float32)
    else:
        numbers = numbers_of(source, row, live, channel, SOURCE, KEYS)
    return tl.minimum(tl.maximum(numbers, -65504.0), 65504.0)


@triton.jit
def quantize(
    source, source_row, page, row, live,
    SOURCE: tl.constexpr, FORM: tl.constexpr, KEYS: tl.constexpr,
):  # fmt: skip
    """Encode vectors into pages, with the same operations and rounding as ``quantizer.encode``.

    Adding 1.5 * 2**23 rounds a number below 2**22 to the nearest integer, ties to even, and
    leaves that integer in the low bits.
    """
    if FORM.by_norm:
        if KEYS:
            quantize_segments(source, source_row, page, row, live, SOURCE, FORM)
        else:
            quantize_value(source, source_row, page, row, live, SOURCE, FORM)
    elif KEYS and FORM.is_polar:
        quantize_pairs(source, source_row, page, row, live, SOURCE, FORM)
    else:
        quantize_range(source, source_row, page, row, live, SOURCE, FORM, KEYS)


@triton.jit
def codes_by_norm(
    source, source_row, live, SOURCE: tl.constexpr, FORM: tl.constexpr, KEYS: tl.constexpr,
    BITS: tl.constexpr, FIRST: tl.constexpr, UNITS: tl.constexpr, SHARE: tl.constexpr,
    TILE: tl.constexpr,
):  # fmt: skip
    """Packed codes [vectors, TILE] of some channels, and their scales, as
    ``quantizer.encode_by_norm``.

    ``FIRST``: the first channel; ``UNITS``: bytes of the codes; ``SHARE``: of the norm that is a
    step.
    """
    wide: tl.constexpr = triton.next_power_of_2(FORM.dim)
    TOP: tl.constexpr = 2**BITS - 1
    END: tl.constexpr = FIRST + UNITS * (8 // BITS)
    channel = tl.arange(0, wide)
    numbers = given_numbers(source, source_row, live, channel, SOURCE, FORM, KEYS)
    inside = (channel >= FIRST) & (channel < END)
    exact = tl.where(inside[None, :], numbers, 0.0).to(tl.float64)
    norm = tl.sqrt(tl.sum(exact * exact, 1)).to(tl.float32)
    share = tl.full([1], SHARE, tl.float32)
    step = tl.maximum(norm * share, 1.1754943508222875e-38)[:, None]
    unit = tl.arange(0, TILE)
    packed = tl.full([norm.shape[0], TILE], 0, tl.int32)
    squares = tl.zeros_like(norm)
    for at in tl.static_range(8 // BITS):
        place = FIRST + at * UNITS + unit
        part = given_numbers(source, source_row, live, place, SOURCE, FORM, KEYS)
        code = tl.floor(tl.div_rn(part, tl.broadcast_to(step, part.shape))) + 2 ** (BITS - 1)
        code = tl.minimum(tl.maximum(code, 0.0), TOP)
        odd = tl.where((unit < UNITS)[None, :], 2.0 * code - TOP, 0.0)
        squares += tl.sum(odd * odd, 1)
        packed |= code.to(tl.int32) << (at * BITS)
    return packed, tl.div_rn(norm, tl.sqrt_rn(squares)).to(tl.float16)


@triton.jit
def quantize_segments(
    source, source_row, page, row, live, SOURCE: tl.constexpr, FORM: tl.constexpr
):  # fmt: skip
    """Encode keys segment by segment, as ``quantizer.encode_segments``."""
    SEGMENTS: tl.constexpr = FORM.key_segments
    for at in tl.static_range(len(SEGMENTS)):
        quantize_segment(source, source_row, page, row, live, at, SOURCE, FORM)


@triton.jit
def quantize_segment(
    source, source_row, page, row, live, at: tl.constexpr, SOURCE: tl.constexpr, FORM: tl.constexpr
):  # fmt: skip
    """Encode one segment of keys."""
    SEGMENTS: tl.constexpr = FORM.key_segments
    BITS: tl.constexpr = SEGMENTS[at][0]
    FIRST: tl.constexpr = SEGMENTS[at][1]
    UNITS: tl.constexpr = SEGMENTS[at][2]
    START: tl.constexpr = SEGMENTS[at][3]
    SHARE: tl.constexpr = SEGMENTS[at][5]
    TILE: tl.constexpr = triton.next_power_of_2(UNITS)
    packed, scale = codes_by_norm(
        source, source_row, live, SOURCE, FORM, True, BITS, FIRST, UNITS, SHARE, TILE
    )
    unit = tl.arange(0, TILE)
    to = units_at(page, row, START + unit, FORM, True)
    tl.store(to, packed.to(tl.uint8), mask=live[:, None] & (unit < UNITS)[None, :])
    to = (page + FORM.key_metadata).to(tl.pointer_type(tl.float16))
    tl.store(to + at * FORM.tokens + row, scale, mask=live)


@triton.jit
def quantize_value(
    source, source_row, page, row, live, SOURCE: tl.constexpr, FORM: tl.constexpr
):  # fmt: skip
    """Encode values, as ``quantizer.encode_values_by_norm``."""
    TOP: tl.constexpr = 2**FORM.value_bits - 1
    packed, scale = codes_by_norm(
        source, source_row, live, SOURCE, FORM, False, FORM.value_bits, 0, FORM.value_units,
        FORM.value_step, FORM.value_tile,
    )  # fmt: skip
    unit = tl.arange(0, FORM.value_tile)
    to = units_at(page, row, unit, FORM, False)
    tl.store(to, packed.to(tl.uint8), mask=live[:, None] & (unit < FORM.value_units)[None, :])
    zero = tl.maximum(scale.to(tl.float32) * -TOP, -65504.0).to(tl.float16)
    store_metadata(page, row, live, scale * 2.0, zero, FORM, False)


@triton.jit
def quantize_range(
    source, source_row, page, row, live,
    SOURCE: tl.constexpr, FORM: tl.constexpr, KEYS: tl.constexpr,
):  # fmt: skip
    """Encode vectors by their range, or as float8 numbers or 16-bit ones."""
    bits: tl.constexpr = FORM.key_bits if KEYS else FORM.value_bits
    count: tl.constexpr = FORM.key_units if KEYS else FORM.value_units
    tile: tl.constexpr = FORM.key_tile if KEYS else FORM.value_tile
    wide: tl.constexpr = triton.next_power_of_2(FORM.dim)
    limited: tl.constexpr = FORM.key_limited if KEYS else FORM.value_limited
    channel = tl.arange(0, wide)
    inside = (channel < FORM.dim)[None, :]
    numbers = given_numbers(source, source_row, live, channel, SOURCE, FORM, KEYS)
    most = limit_of(tl.where(inside, tl.abs(numbers), -1.0), limited)[:, None]
    numbers = limited_to(numbers, most)
    if bits == 16:
        at = units_at(page, row, channel, FORM, KEYS)
        tl.store(at, numbers.to(tl.float16), mask=live[:, None] & inside)
    else:
        top = tl.full([1], 448.0 if FORM.is_float else 2**bits - 1, tl.float32)
        low = tl.min(tl.where(inside, numbers, float("inf")), 1)
        high = tl.max(tl.where(inside, numbers, float("-inf")), 1)
        if FORM.is_float:
            largest = tl.maximum(high, -low)
            ratio = tl.div_rn(largest, tl.broadcast_to(top, low.shape))
            bits_up = (tl.cast(ratio, tl.int32, bitcast=True) + 0x7FFFFF) & 0x7F800000
            power = tl.cast(bits_up, tl.float32, bitcast=True)  # the least one above
            scale = tl.maximum(power, 5.9604644775390625e-08).to(tl.float16)  # at least 2**-24
            zero = tl.zeros_like(scale)
            usable = largest > 0.0
        else:
            scale = tl.div_rn(high - low, tl.broadcast_to(top, low.shape)).to(tl.float16)
            zero = low.to(tl.float16)
            usable = (scale > 0.0) & (scale <= 65504.0)  # a step of one bit can be too long
        scale = tl.where(usable, scale, 1.0).to(tl.float16)
        wide_scale = scale.to(tl.float32)[:, None]
        unit = tl.arange(0, tile)
        packed = tl.full([low.shape[0], tile], 0, tl.int32)
        for share in tl.static_range(8 // bits):
            part = given_numbers(source, source_row, live, share * count + unit, SOURCE, FORM, KEYS)
            part = limited_to(part, most)
            part -= zero.to(tl.float32)[:, None]
            steps = tl.div_rn(part, tl.broadcast_to(wide_scale, part.shape))
            end = tl.broadcast_to(top[:, None], part.shape)
            if FORM.is_float:
                code = float8_codes(tl.minimum(tl.maximum(steps, -end), end))
            else:
                code = rounded_codes(tl.minimum(tl.maximum(steps, 0.0), end))
            packed |= tl.where(usable[:, None], code, 0) << (share * bits)
        at = units_at(page, row, unit, FORM, KEYS)
        tl.store(at, packed.to(tl.uint8), mask=live[:, None] & (unit < count)[None, :])
        store_metadata(page, row, live, scale, zero, FORM, KEYS)


@triton.jit
def quantize_pairs(
    source, source_row, page, row, live, SOURCE: tl.constexpr, FORM: tl.constexpr
):  # fmt: skip
    """Encode keys into pages as radius and angle of pairs, with the same operations and rounding as
    ``quantizer.encode_polar``."""
    count: tl.constexpr = FORM.key_units
    unit = tl.arange(0, FORM.key_tile)
    inside = (unit < count)[None, :]
    left = given_numbers(source, source_row, live, unit, SOURCE, FORM, True)
    right = given_numbers(source, source_row, live, unit + count, SOURCE, FORM, True)
    left = tl.where(inside, left.to(tl.float16).to(tl.float32), 0.0)
    right = tl.where(inside, right.to(tl.float16).to(tl.float32), 0.0)
    radius = tl.sqrt_rn(left * left + right * right)
    top = tl.full([1], TOP_RADIUS, tl.float32)
    largest = tl.max(radius, 1)
    step = tl.div_rn(largest, tl.broadcast_to(top, largest.shape)).to(tl.float16)
    usable = step > 0.0
    step = tl.where(usable, step, 1.0).to(tl.float16)
    wide_step = step.to(tl.float32)[:, None]
    steps = tl.div_rn(radius, tl.broadcast_to(wide_step, radius.shape))
    pairs = rounded_codes(tl.minimum(steps, TOP_RADIUS))
    eighth = tl.zeros_like(pairs)
    for border in tl.static_range(7):
        eighth += (tl.abs(right) > tl.abs(left) * TANGENTS[border]).to(tl.int32)
    pairs |= eighth << 3
    pairs |= tl.where(left < 0.0, 64, 0) | tl.where(right < 0.0, 128, 0)
    pairs = tl.where(usable[:, None], pairs, 0)
    at = units_at(page, row, unit, FORM, True)
    tl.store(at, pairs.to(tl.uint8), mask=live[:, None] & inside)
    store_metadata(page, row, live, step, tl.zeros_like(step), FORM, True)


@triton.jit
def limited_to(numbers, most):
    """Numbers whose larger magnitudes become ``most``."""
    return tl.where(tl.abs(numbers) > most, tl.where(numbers > 0, most, -most), numbers)


@triton.jit
def limit_of(sizes, COUNT: tl.constexpr):
    """The magnitude of each row that only ``COUNT`` others exceed, equal ones counted each.

    Magnitudes are removed from the largest on, all equal ones together.
    """
    most = tl.max(sizes, 1)
    above = tl.sum((sizes == most[:, None]).to(tl.int32), 1)
    for _ in tl.static_range(COUNT):
        below = tl.max(tl.where(sizes < most[:, None], sizes, -1.0), 1)
        most = tl.where(above <= COUNT, below, most)
        above = tl.sum((sizes >= most[:, None]).to(tl.int32), 1)
    return most


@triton.jit
def rounded_codes(steps):
    """Integers nearest to numbers from 0 to 255, ties to even."""
    return tl.cast(steps + 12582912.0, tl.int32, bitcast=True) & 0xFF


@triton.jit
def float8_codes(numbers):
    """Float8 numbers (e4m3) nearest to numbers of at most 448, ties to even, as int32."""
    bits = tl.cast(numbers, tl.int32, bitcast=True)
    sign, size = (bits >> 24) & 0x80, bits & 0x7FFFFFFF
    normal = ((size + 0x7FFFF + ((size >> 20) & 1)) >> 20) - (120 << 3)
    below = rounded_codes(tl.abs(numbers) * 512.0)
    return sign | tl.where(tl.abs(numbers) < 0.015625, below, normal)


@triton.jit
def store_metadata(page, row, live, scale, zero, FORM: tl.constexpr, KEYS: tl.constexpr):
    """Write fp16 scales and zeros as one word each."""
    low = tl.cast(scale, tl.uint16, bitcast=True).to(tl.int32)
    high = tl.cast(zero, tl.uint16, bitcast=True).to(tl.int32)
    start = page + (FORM.key_metadata if KEYS else FORM.value_metadata)
    tl.store(start.to(tl.pointer_type(tl.int32)) + row, low | (high << 16), mask=live)


@triton.jit
def copy_segments(
    old, old_row, new, new_row, live, SOURCE: tl.constexpr, TARGET: tl.constexpr
):  # fmt: skip
    """Copy codes and scales of keys with segments."""
    unit = tl.arange(0, triton.next_power_of_2(TARGET.key_bytes))
    mask = live[:, None] & (unit < TARGET.key_bytes)[None, :]
    units = tl.load(units_at(old, old_row, unit, SOURCE, True), mask=mask, other=0)
    tl.store(units_at(new, new_row, unit, TARGET, True), units, mask=mask)
    SEGMENTS: tl.constexpr = TARGET.key_segments
    for at in tl.static_range(len(SEGMENTS)):
        scale = segment_scales(old, old_row, live, at, SOURCE).to(tl.float16)
        to = (new + TARGET.key_metadata).to(tl.pointer_type(tl.float16))
        tl.store(to + at * TARGET.tokens + new_row, scale, mask=live)


@triton.jit
def recode(
    old, old_row, new, new_row, live,
    SOURCE: tl.constexpr, TARGET: tl.constexpr, CONVERSION: tl.constexpr, KEYS: tl.constexpr,
):  # fmt: skip
    """Convert keys or values of a block of slots, as ``reference.transcode`` does."""
    bits: tl.constexpr = SOURCE.key_bits if KEYS else SOURCE.value_bits
    to_bits: tl.constexpr = TARGET.key_bits if KEYS else TARGET.value_bits
    count: tl.constexpr = TARGET.key_units if KEYS else TARGET.value_units
    tile: tl.constexpr = TARGET.key_tile if KEYS else TARGET.value_tile
    unit = tl.arange(0, tile)
    mask = live[:, None] & (unit < count)[None, :]
    if CONVERSION == 0 and KEYS and TARGET.key_widths > 0:
        copy_segments(old, old_row, new, new_row, live, SOURCE, TARGET)
    elif CONVERSION == 0:  # COPY
        units = tl.load(units_at(old, old_row, unit, SOURCE, KEYS), mask=mask, other=0)
        tl.store(units_at(new, new_row, unit, TARGET, KEYS), units, mask=mask)
        if bits < 16:
            start = old + (SOURCE.key_metadata if KEYS else SOURCE.value_metadata)
            word = tl.load(start.to(tl.pointer_type(tl.int32)) + old_row, mask=live, other=0)
            start = new + (TARGET.key_metadata if KEYS else TARGET.value_metadata)
            tl.store(start.to(tl.pointer_type(tl.int32)) + new_row, word, mask=live)
    elif CONVERSION == 1:  # NARROW
        ratio: tl.constexpr = (2**bits - 1) // (2**to_bits - 1)
        packed = tl.full([live.shape[0], tile], 0, tl.int32)
        for share in tl.static_range(8 // to_bits):
            codes = codes_of(old, old_row, live, share * count + unit, SOURCE, KEYS)
            packed |= ((codes + ratio // 2) // ratio) << (share * to_bits)
        at = units_at(new, new_row, unit, TARGET, KEYS)
        tl.store(at, packed.to(tl.uint8), mask=mask)
        scale, zero = metadata_of(old, old_row, live, SOURCE, KEYS)
        scale = (scale * ratio).to(tl.float16)
        store_metadata(new, new_row, live, scale, zero.to(tl.float16), TARGET, KEYS)
    else:
        quantize(old, old_row, new, new_row, live, SOURCE, TARGET, KEYS)
