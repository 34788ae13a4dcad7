# pyright: basic, reportPrivateImportUsage=false, reportArgumentType=false, reportAttributeAccessIssue=false, reportAssignmentType=false, reportGeneralTypeIssues=false
# Triton's language is not Python: the checker sees integers where tiles will be.
"""Kernels that plan where the tokens of a head row go."""

import triton
import triton.language as tl

from triptych.kernels.gpu_pages import cells_of, positions_of, row_of


@triton.jit
def classify(
    scores, by_row, by_token, tokens, high, low, first, window, longest, classes, ranks, counts,
    TILE: tl.constexpr,
):  # fmt: skip
    """One row, from its first token on: ranks go on where the tile before ended."""
    row = tl.program_id(0).to(tl.int64)
    count = tl.load(tokens + row)
    least_high, least_low = tl.load(high + row), tl.load(low + row)
    highs = 0
    lows = 0
    for start in range(0, longest, TILE):
        token = start + tl.arange(0, TILE)
        inside, live = token < longest, (token < count) & (token < longest)
        at = scores + row * by_row + token.to(tl.int64) * by_token
        score = tl.load(at, mask=live, other=0.0)
        kept = (token < first) | (token >= count - window)
        is_high = (live & (kept | (score >= least_high))).to(tl.int32)
        is_low = (live & (score >= least_low)).to(tl.int32) * (1 - is_high)
        rank = tl.where(is_high > 0, highs + tl.cumsum(is_high, 0), lows + tl.cumsum(is_low, 0))
        rank = tl.where(is_high + is_low > 0, rank - 1, 0)
        place = row * longest + token
        named = tl.where(live, 2 * is_high + is_low, 255)
        tl.store(classes + place, named.to(tl.uint8), mask=inside)
        tl.store(ranks + place, rank, mask=inside)
        highs += tl.sum(is_high, 0)
        lows += tl.sum(is_low, 0)
    tl.store(counts + row * 2, highs)
    tl.store(counts + row * 2 + 1, lows)


@triton.jit
def retire_page(
    arena, page_count, leaving, slots, now, limits,
    high_table, high_tokens, high_slots, high_width, high_by_slot, high_by_head, high_by_page,
    high_count_slot, high_count_head,
    low_table, low_tokens, low_slots, low_width, low_by_slot, low_by_head, low_by_page,
    low_count_slot, low_count_head,
    classes, targets, victims, fallen, counts,
    RAW: tl.constexpr, HIGH: tl.constexpr, HIGH_BACKWARD: tl.constexpr, LOW: tl.constexpr,
    LOW_BACKWARD: tl.constexpr, TOKENS: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """The tokens of one raw page of a head row. Grid: 1, KV heads, requests."""
    line = tl.program_id(2) * tl.num_programs(1) + tl.program_id(1)
    seen = tl.load(now + tl.program_id(2))
    least_high = tl.load(limits + tl.program_id(2) * 2)
    least_low = tl.load(limits + tl.program_id(2) * 2 + 1)
    order = tl.arange(0, TOKENS)
    page, row, live, _wrong = cells_of(
        arena, page_count, leaving + line, 1, 1, 0, RAW.tokens, RAW, False, TOKENS
    )
    mean = means_of(page, row, live, seen, RAW).to(tl.float64)
    is_high = live & (mean >= least_high)
    is_low = live & (mean >= least_low) & (mean < least_high)
    rank_high, come_high = ranks_of(is_high)
    rank_low, come_low = ranks_of(is_low)

    table, width, n_high = row_of(
        high_table, high_tokens, slots, high_slots, high_width, high_by_slot, high_by_head,
        high_count_slot, high_count_head,
    )  # fmt: skip
    down, down_means, n_down = least_tokens(
        arena, page_count, table, width, high_by_page, n_high, seen, least_high, come_high,
        HIGH, HIGH_BACKWARD, TOKENS, TILE,
    )  # fmt: skip
    out, n_out, n_low = down, 0, 0
    if LOW is not None:
        table, width, n_low = row_of(
            low_table, low_tokens, slots, low_slots, low_width, low_by_slot, low_by_head,
            low_count_slot, low_count_head,
        )  # fmt: skip
        out, _out_means, n_out = least_tokens(
            arena, page_count, table, width, low_by_page, n_low, seen, least_low, come_low,
            LOW, LOW_BACKWARD, TOKENS, TILE,
        )  # fmt: skip

    to_high = tl.where(rank_high < n_down, picked(down, rank_high), n_high + rank_high - n_down)
    to_low = tl.where(rank_low < n_out, picked(out, rank_low), n_low + rank_low - n_out)
    target = tl.where(is_high, to_high, tl.where(is_low, to_low, -1))
    falls = (order < n_down) & (down_means.to(tl.float64) >= least_low)
    rank, fall = ranks_of(falls)
    # No more low tokens go than come, so those who fall find no free place.
    bottom = tl.where(falls, n_low + come_low + rank - n_out, -1)
    at, inside = line * RAW.tokens + order, order < RAW.tokens
    named = 2 * is_high.to(tl.int32) + is_low.to(tl.int32)
    tl.store(classes + at, named.to(tl.uint8), mask=inside)
    tl.store(targets + at, target, mask=inside)
    tl.store(victims + at, tl.where(order < n_down, down, -1), mask=inside)
    tl.store(fallen + at, bottom, mask=inside)
    tl.store(counts + line * 2, n_high + come_high - n_down)
    tl.store(counts + line * 2 + 1, n_low + come_low - n_out + fall)


@triton.jit
def means_of(page, row, live, seen, FORM: tl.constexpr):
    """Significance of a tile's tokens: score over the tokens that came since; 0 if not live."""
    at = (page + FORM.scores).to(tl.pointer_type(tl.float32)) + row
    score = tl.load(at, mask=live, other=0.0)
    age = seen - tl.where(live, positions_of(page, row, live, FORM), seen - 1)
    return tl.div_rn(score, age.to(tl.float32))


@triton.jit
def ranks_of(chosen):
    """Exclusive prefix sum of a mask, and how many are chosen."""
    number = chosen.to(tl.int32)
    return tl.cumsum(number, 0) - number, tl.sum(number, 0)


@triton.jit
def picked(places, index):
    """``places[index]``, 0 for an index out of range."""
    order = tl.arange(0, places.shape[0])
    return tl.sum(tl.where(index[:, None] == order[None, :], places[None, :], 0), 1)


@triton.jit
def least_tokens(
    arena, page_count, table, width, by_page, count, seen, limit, wanted,
    FORM: tl.constexpr, BACKWARD: tl.constexpr, TOKENS: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """Places and means of at most ``wanted`` tokens below ``limit``, and how many there are.

    The least comes first, of equals the first. Each sweep finds one, by a number that has the
    mean's bits above the place; mostly the first sweep finds that there is none.
    """
    nothing: tl.constexpr = 2**63 - 1
    order = tl.arange(0, TOKENS)
    places = tl.full([TOKENS], -1, tl.int32)
    means = tl.full([TOKENS], 0.0, tl.float32)
    last = tl.full([1], -1, tl.int64)
    found = 0
    turn = 0
    while turn < wanted:
        best = tl.full([1], nothing, tl.int64)
        for first in range(0, count, TILE):
            page, row, live, _wrong = cells_of(
                arena, page_count, table, width, by_page, first, count, FORM, BACKWARD, TILE
            )
            mean = means_of(page, row, live, seen, FORM)
            bits = tl.cast(mean, tl.int32, bitcast=True).to(tl.int64)
            key = (bits << 32) | (first + tl.arange(0, TILE)).to(tl.int64)
            below = live & (mean.to(tl.float64) < limit) & (key > last)
            best = tl.minimum(best, tl.min(tl.where(below, key, nothing), 0))
        one = tl.min(best, 0)
        is_found = one != nothing
        mine = (order == turn) & is_found
        places = tl.where(mine, (one & 0xFFFFFFFF).to(tl.int32), places)
        means = tl.where(mine, tl.cast((one >> 32).to(tl.int32), tl.float32, bitcast=True), means)
        found += is_found.to(tl.int32)
        turn = tl.where(is_found, turn + 1, wanted)
        last = best
    return places, means, found
