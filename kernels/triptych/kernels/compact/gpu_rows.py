# pyright: basic, reportPrivateImportUsage=false, reportArgumentType=false, reportAttributeAccessIssue=false, reportAssignmentType=false, reportGeneralTypeIssues=false
# Triton's language is not Python: the checker takes tiles for integers.
"""Triton kernels that classify the tokens of a head row and plan retirements."""

import triton
import triton.language as tl

from triptych.kernels.triton.page_access import positions_of, row_of, slots_of


@triton.jit
def classify(
    scores, by_row, by_token, tokens, high, low, first, window, longest, classes, ranks, counts,
    TILE: tl.constexpr,
):  # fmt: skip
    """Classify and rank the tokens of one row, tile by tile; counts carry over between tiles."""
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
def retire_tokens(
    arena, page_count, slots, now, first_leaving, limits, count,
    high_table, high_tokens, high_slots, high_width, high_by_slot, high_by_head, high_by_page,
    high_count_slot, high_count_head,
    low_table, low_tokens, low_slots, low_width, low_by_slot, low_by_head, low_by_page,
    low_count_slot, low_count_head,
    found,
    HIGH: tl.constexpr, HIGH_BACKWARD: tl.constexpr, LOW: tl.constexpr,
    LOW_BACKWARD: tl.constexpr, COUNT: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """Plan the retirement of one head row for ``count`` new tokens. Grid: 1, KV heads, requests.

    ``found``: the plan of each head row, in the order of ``Retirement``.
    """
    line = tl.program_id(2) * tl.num_programs(1) + tl.program_id(1)
    seen, first = tl.load(now + tl.program_id(2)), tl.load(first_leaving + tl.program_id(2))
    is_high = tl.load(limits + line * 2)
    is_low = tl.load(limits + line * 2 + 1)
    order = tl.arange(0, COUNT)
    table, width, n_high = row_of(
        high_table, high_tokens, slots, high_slots, high_width, high_by_slot, high_by_head,
        high_count_slot, high_count_head, tl.program_id(2), tl.program_id(1),
    )  # fmt: skip
    leaving, is_dropped, n_leaving, still_high = least_tokens(
        arena, page_count, table, width, high_by_page, n_high, seen, first, first + count,
        is_high, is_low, count, HIGH, HIGH_BACKWARD, True, COUNT, TILE,
    )  # fmt: skip
    victims, bits, n_victims, _rest = least_tokens(
        arena, page_count, table, width, high_by_page, n_high, seen, -1, first,
        is_high, is_low, still_high, HIGH, HIGH_BACKWARD, False, COUNT, TILE,
    )  # fmt: skip
    leaving_to_low = (order < n_leaving) & (is_dropped == 0)
    to_low = tl.sum(leaving_to_low.to(tl.int32), 0)
    dropped_low, n_low, n_out = victims, 0, 0
    if LOW is not None:
        table, width, n_low = row_of(
            low_table, low_tokens, slots, low_slots, low_width, low_by_slot, low_by_head,
            low_count_slot, low_count_head, tl.program_id(2), tl.program_id(1),
        )  # fmt: skip
        if LOW.is_tracked:
            dropped_low, _bits, n_out, _rest = least_tokens(
                arena, page_count, table, width, low_by_page, n_low, seen, -1, 2**31 - 1,
                is_low, is_low, to_low, LOW, LOW_BACKWARD, False, COUNT, TILE,
            )  # fmt: skip
    n_downgraded = n_leaving + n_victims
    downgraded = tl.where(order < n_leaving, leaving, picked(victims, order - n_leaving))
    is_low_victim = (tl.cast(bits, tl.float32, bitcast=True).to(tl.float64) >= is_low).to(tl.int32)
    victim_to_low = (
        (order >= n_leaving)
        & (order < n_downgraded)
        & (picked(is_low_victim, order - n_leaving) > 0)
    )
    number = (leaving_to_low | victim_to_low).to(tl.int32)
    rank = tl.cumsum(number, 0) - number
    below = tl.where(rank < n_out, picked(dropped_low, rank), n_low + rank - n_out)
    counts, inside = found + line * (2 + 3 * count), order < count
    tl.store(counts, n_high + count - n_downgraded)
    tl.store(counts + 1, n_low + tl.sum(number, 0) - n_out)
    places = counts + 2 + order
    tl.store(
        places,
        tl.where(order < n_downgraded, downgraded, n_high + order - n_downgraded),
        mask=inside,
    )
    tl.store(places + count, tl.where(order < n_downgraded, downgraded, -1), mask=inside)
    tl.store(places + 2 * count, tl.where(number > 0, below, -1), mask=inside)


@triton.jit
def picked(numbers, index):
    """``numbers[index]``, 0 for an index out of range."""
    order = tl.arange(0, numbers.shape[0])
    return tl.sum(tl.where(index[:, None] == order[None, :], numbers[None, :], 0), 1)


@triton.jit
def least_tokens(
    arena, page_count, table, width, by_page, tokens, seen, first, end, limit, is_low, wanted,
    FORM: tl.constexpr, BACKWARD: tl.constexpr, BY_CLASS: tl.constexpr, COUNT: tl.constexpr,
    TILE: tl.constexpr,
):  # fmt: skip
    """At most ``wanted`` tokens at positions from ``first`` to ``end`` with means below ``limit``.

    They are in ascending order, equal ones by place; with ``BY_CLASS`` means of at least ``is_low``
    come first. Each sweep over the row finds one token, by a key with the bits of the mean (or the
    class) above the place. Usually the first sweep finds none. Returns places, the upper bits of
    the keys, number of tokens found, and number of tokens that are not below ``limit``.
    """
    nothing: tl.constexpr = 2**63 - 1
    order = tl.arange(0, COUNT)
    places = tl.full([COUNT], -1, tl.int32)
    tops = tl.full([COUNT], 0, tl.int32)
    last = tl.full([1], -1, tl.int64)
    found, rest, turn = 0, 0, 0
    while turn < wanted:
        best = tl.full([1], nothing, tl.int64)
        rest = 0
        for start in range(0, tokens, TILE):
            page, row, live, _wrong = slots_of(
                arena, page_count, table, width, by_page, start, tokens, FORM, BACKWARD, TILE
            )
            position = positions_of(page, row, live, FORM)
            in_range = live & (position >= first) & (position < end)
            at = (page + FORM.scores).to(tl.pointer_type(tl.float32)) + row
            score = tl.load(at, mask=in_range, other=0.0)
            age = tl.where(in_range, seen - position, 1)
            mean = tl.div_rn(score, age.to(tl.float32))
            if BY_CLASS:
                top = (mean.to(tl.float64) < is_low).to(tl.int64)
            else:
                top = tl.cast(mean, tl.int32, bitcast=True).to(tl.int64)
            key = (top << 32) | (start + tl.arange(0, TILE)).to(tl.int64)
            below = in_range & (mean.to(tl.float64) < limit)
            rest += tl.sum((in_range & (mean.to(tl.float64) >= limit)).to(tl.int32), 0)
            best = tl.minimum(best, tl.min(tl.where(below & (key > last), key, nothing), 0))
        one = tl.min(best, 0)
        is_found = one != nothing
        is_turn = (order == turn) & is_found
        places = tl.where(is_turn, (one & 0xFFFFFFFF).to(tl.int32), places)
        tops = tl.where(is_turn, (one >> 32).to(tl.int32), tops)
        found += is_found.to(tl.int32)
        turn = tl.where(is_found, turn + 1, wanted)
        last = best
    return places, tops, found, rest
