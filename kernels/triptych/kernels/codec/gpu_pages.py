# pyright: basic, reportPrivateImportUsage=false, reportArgumentType=false, reportAttributeAccessIssue=false, reportGeneralTypeIssues=false
# Triton's language is not Python: the checker takes tiles for integers.
"""The Triton kernel that encodes whole pages: keys by channel, values by token."""

import triton
import triton.language as tl

from triptych.kernels.codec import page_codecs
from triptych.kernels.codec.gpu_slots import (
    copy_tracked,
    placed_slots,
    rounded_codes,
    store_metadata,
)
from triptych.kernels.triton.page_access import (
    numbers_of,
    units_at,
)

LEAST_DEVIATION = tl.constexpr(page_codecs.LEAST_DEVIATION)


@triton.jit
def encode_pages(
    arena, page_count, slots, places, by_row, by_head, to, to_by_row, to_by_head, table, to_table,
    SOURCE: tl.constexpr, TARGET: tl.constexpr, SOURCE_BACKWARD: tl.constexpr,
    TARGET_BACKWARD: tl.constexpr, NORMALIZATIONS: tl.constexpr,
):  # fmt: skip
    """Encode the tokens of one page, as ``page_codecs.encode_pages`` does, with float32 sums.

    Grid: pages, KV heads, requests.
    """
    token = tl.arange(0, TARGET.page_tile)
    is_token = token < TARGET.tokens
    head, row = tl.program_id(1), tl.program_id(2).to(tl.int64)
    at = tl.program_id(0) * TARGET.tokens + token
    slot = tl.load(slots + row) + tl.zeros_like(token)
    place = tl.load(places + row * by_row + head * by_head + at, mask=is_token, other=-1)
    to_place = tl.load(to + row * to_by_row + head * to_by_head + at, mask=is_token, other=-1)
    old, old_row, is_old = placed_slots(
        arena, page_count, table, slot, head, place, SOURCE, SOURCE_BACKWARD
    )
    new, new_row, is_new = placed_slots(
        arena, page_count, to_table, slot, head, to_place, TARGET, TARGET_BACKWARD
    )
    is_good = is_old & is_new & (new_row == token)
    wrong = tl.sum((is_token & (is_good == 0)).to(tl.int32), 0)
    live = is_token & (wrong == 0)
    encode_vectors(old, old_row, new, token, live, SOURCE, TARGET, NORMALIZATIONS, True)
    encode_vectors(old, old_row, new, token, live, SOURCE, TARGET, NORMALIZATIONS, False)
    copy_tracked(old, old_row, new, token, live, SOURCE, TARGET)


@triton.jit
def encode_vectors(
    old, old_row, new, token, live, SOURCE: tl.constexpr, TARGET: tl.constexpr,
    NORMALIZATIONS: tl.constexpr, KEYS: tl.constexpr,
):  # fmt: skip
    """Encode the keys or the values of a page."""
    bits: tl.constexpr = TARGET.key_bits if KEYS else TARGET.value_bits
    count: tl.constexpr = TARGET.key_units if KEYS else TARGET.value_units
    tile: tl.constexpr = TARGET.key_tile if KEYS else TARGET.value_tile
    scale_of_token = tl.full([TARGET.page_tile], 1.0, tl.float32)
    if NORMALIZATIONS > 0:
        channel = tl.arange(0, triton.next_power_of_2(TARGET.dim))
        numbers = clamped(numbers_of(old, old_row, live, channel, SOURCE, KEYS))
        inside = live[:, None] & (channel < TARGET.dim)[None, :]
        by_token, by_channel = balanced(numbers, inside, TARGET, NORMALIZATIONS)
        if KEYS:
            half = by_token.to(tl.float16)
            at = (new + TARGET.token_scales).to(tl.pointer_type(tl.float16)) + token
            tl.store(at, half, mask=live)
            scale_of_token = half.to(tl.float32)
        else:
            half = tl.zeros_like(numbers).to(tl.float16) + by_channel.to(tl.float16)[None, :]
            at = (new + TARGET.channel_scales).to(tl.pointer_type(tl.float16))
            # One row writes; the others have the same numbers.
            tl.store(at[:, None] + channel[None, :], half, mask=inside & (token == 0)[:, None])
            tl.debug_barrier()
    unit = tl.arange(0, tile)
    top = tl.full([1], 2**bits - 1, tl.float32)
    low = tl.full([TARGET.page_tile], float("inf"), tl.float32)
    high = tl.full([TARGET.page_tile], float("-inf"), tl.float32)
    if not KEYS:
        for share in tl.static_range(8 // bits):
            part, inside = scaled_part(
                old, old_row, new, live, scale_of_token, share, SOURCE, TARGET, KEYS
            )
            low = tl.minimum(low, tl.min(tl.where(inside, part, float("inf")), 1))
            high = tl.maximum(high, tl.max(tl.where(inside, part, float("-inf")), 1))
        low = tl.where(live, low, 0.0)
        high = tl.where(live, high, 0.0)
        scale, zero, usable = range_of(low, high, top)
        store_metadata(new, token, live, scale, zero, TARGET, False)
    packed = tl.full([TARGET.page_tile, tile], 0, tl.int32)
    for share in tl.static_range(8 // bits):
        part, inside = scaled_part(
            old, old_row, new, live, scale_of_token, share, SOURCE, TARGET, KEYS
        )
        if KEYS:
            low = tl.min(tl.where(inside, part, float("inf")), 0)
            high = tl.max(tl.where(inside, part, float("-inf")), 0)
            written = (unit < count) & (low <= high)
            low = tl.where(written, low, 0.0)
            high = tl.where(written, high, 0.0)
            key_scale, key_zero, key_usable = range_of(low, high, top)
            codes = codes_of_part(
                part, key_scale[None, :], key_zero[None, :], key_usable[None, :], top
            )
            store_channels(new, token, share * count + unit, written, key_scale, key_zero, TARGET)
        else:
            codes = codes_of_part(part, scale[:, None], zero[:, None], usable[:, None], top)
        packed |= codes << (share * bits)
    at = units_at(new, token, unit, TARGET, KEYS)
    tl.store(at, packed.to(tl.uint8), mask=live[:, None] & (unit < count)[None, :])


@triton.jit
def clamped(numbers):
    """Numbers clamped to the range of fp16."""
    return tl.minimum(tl.maximum(numbers, -65504.0), 65504.0)


@triton.jit
def divisor(mean, variance):
    """Divisor of a row: its standard deviation, but at least ``LEAST_DEVIATION`` of its size."""
    least = LEAST_DEVIATION * tl.sqrt(variance + mean * mean)
    deviation = tl.maximum(tl.sqrt(variance), least)
    return tl.where(deviation > 0.0, deviation, 1.0)


@triton.jit
def balanced(rest, inside, FORM: tl.constexpr, NORMALIZATIONS: tl.constexpr):
    """Scales of tokens and channels, as ``page_codecs.balance`` finds them."""
    by_token = tl.full([rest.shape[0]], 1.0, tl.float32)
    by_channel = tl.full([rest.shape[1]], 1.0, tl.float32)
    rest = tl.where(inside, rest, 0.0)
    for _pair in range(NORMALIZATIONS // 2):
        mean = tl.sum(rest, 0) / FORM.tokens
        apart = tl.where(inside, rest - mean[None, :], 0.0)
        deviation = divisor(mean, tl.sum(apart * apart, 0) / FORM.tokens)
        rest = rest / deviation[None, :]
        by_channel = by_channel * deviation
        mean = tl.sum(rest, 1) / FORM.dim
        apart = tl.where(inside, rest - mean[:, None], 0.0)
        deviation = divisor(mean, tl.sum(apart * apart, 1) / FORM.dim)
        rest = rest / deviation[:, None]
        by_token = by_token * deviation
    is_token = tl.arange(0, FORM.page_tile) < FORM.tokens
    logs = tl.where(is_token, tl.log2(by_token), 0.0)
    size = tl.exp2(tl.sum(logs, 0) / FORM.tokens)
    return by_token / size, by_channel * size


@triton.jit
def scaled_part(
    old, old_row, new, live, scale_of_token, share: tl.constexpr,
    SOURCE: tl.constexpr, TARGET: tl.constexpr, KEYS: tl.constexpr,
):  # fmt: skip
    """Channels of one part of the vectors, divided by the scales of the other axis."""
    count: tl.constexpr = TARGET.key_units if KEYS else TARGET.value_units
    tile: tl.constexpr = TARGET.key_tile if KEYS else TARGET.value_tile
    unit = tl.arange(0, tile)
    channel = share * count + unit
    inside = live[:, None] & (unit < count)[None, :]
    part = clamped(numbers_of(old, old_row, live, channel, SOURCE, KEYS))
    if TARGET.is_balanced:
        if KEYS:
            by = tl.broadcast_to(scale_of_token[:, None], part.shape)
        else:
            at = (new + TARGET.channel_scales).to(tl.pointer_type(tl.float16))[:, None]
            by = tl.load(at + channel[None, :], mask=inside, other=1.0).to(tl.float32)
        part = clamped(tl.div_rn(part, by))
    return part, inside


@triton.jit
def range_of(low, high, top):
    """Scale and zero of ranges, float16, and whether a range is not a point."""
    scale = tl.div_rn(high - low, tl.broadcast_to(top, low.shape)).to(tl.float16)
    usable = (scale > 0.0) & (scale <= 65504.0)
    return tl.where(usable, scale, 1.0).to(tl.float16), low.to(tl.float16), usable


@triton.jit
def codes_of_part(part, scale, zero, usable, top):
    """Codes of numbers by scales and zeros that broadcast to them."""
    apart = part - zero.to(tl.float32)
    steps = tl.div_rn(apart, tl.broadcast_to(scale.to(tl.float32), apart.shape))
    steps = tl.minimum(tl.maximum(steps, 0.0), tl.broadcast_to(top[:, None], apart.shape))
    return tl.where(usable, rounded_codes(steps), 0)


@triton.jit
def store_channels(new, token, channel, written, scale, zero, FORM: tl.constexpr):
    """Write scales and zeros of channels, from the first row of the page's pointers."""
    low = tl.cast(scale, tl.uint16, bitcast=True).to(tl.int32)
    high = tl.cast(zero, tl.uint16, bitcast=True).to(tl.int32)
    word = tl.zeros([token.shape[0], channel.shape[0]], tl.int32) + (low | (high << 16))[None, :]
    at = (new + FORM.key_metadata).to(tl.pointer_type(tl.int32))[:, None] + channel[None, :]
    tl.store(at, word, mask=(token == 0)[:, None] & written[None, :])
