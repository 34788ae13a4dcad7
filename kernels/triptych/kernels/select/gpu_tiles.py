# pyright: basic, reportPrivateImportUsage=false, reportArgumentType=false, reportAttributeAccessIssue=false, reportGeneralTypeIssues=false
# Triton's language is not Python: the checker sees integers where tiles will be.
"""Scores of pages from their summaries: a program takes the pages of one tile."""

import triton
import triton.language as tl

PAGES = tl.constexpr(16)
"""``summary.TILE_PAGES``, as kernels need it."""


@triton.jit
def score_tiles(
    query, memory, slots, positions, tokens, scores, means, slot_count, by_slot, by_head,
    count_slot, count_head, room, sinks, window, scale, deviations, first, width, all_pages,
    IS_BOX: tl.constexpr, G: tl.constexpr, DIM: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    """Write the scores of a tile: infinity for a page that is read in any case, NaN in a row that
    is not there, and minus infinity beyond the end of a row.

    Grid: tiles, KV heads, requests.
    """
    request, head = tl.program_id(2), tl.program_id(1)
    slot = tl.load(slots + request)
    is_row = (slot >= 0) & (slot < slot_count)
    slot = tl.where(is_row, slot, 0).to(tl.int64)
    count = tl.load(tokens + slot * count_slot + head * count_head)
    competing = tl.maximum(count - 1, 0) // room
    place = tl.arange(0, PAGES)
    page = tl.program_id(0) * PAGES + place
    tile = memory + slot * by_slot + head * by_head + tl.program_id(0) * PAGES * (2 * DIM + 24)
    channel = tl.arange(0, WIDE)
    inside = channel < DIM
    at = tile + channel[:, None] * PAGES + place[None, :]
    first_codes = tl.load(at, mask=inside[:, None], other=0).to(tl.float32)
    second_codes = tl.load(at + DIM * PAGES, mask=inside[:, None], other=0).to(tl.float32)
    numbers = (tile + 2 * DIM * PAGES).to(tl.pointer_type(tl.float32)) + place
    first_scale, first_zero = tl.load(numbers), tl.load(numbers + PAGES)
    second_scale, second_zero = tl.load(numbers + 2 * PAGES), tl.load(numbers + 3 * PAGES)
    ends = (tile + (2 * DIM + 16) * PAGES).to(tl.pointer_type(tl.int32)) + place
    near = query + ((request * tl.num_programs(1) + head) * G).to(tl.int64) * DIM
    row = (request * tl.num_programs(1) + head).to(tl.int64)
    best = tl.full([PAGES], float("-inf"), tl.float32)
    for member in range(G):
        asked = tl.load(near + member * DIM + channel, mask=inside, other=0.0).to(tl.float32)
        asked = asked * scale
        if IS_BOX:
            low, high = tl.minimum(asked, 0.0), tl.maximum(asked, 0.0)
            score = tl.sum(high[:, None] * first_codes, 0) * first_scale
            score += tl.sum(high, 0) * first_zero
            score += tl.sum(low[:, None] * second_codes, 0) * second_scale
            score += tl.sum(low, 0) * second_zero
        else:
            score = tl.sum(asked[:, None] * first_codes, 0) * first_scale
            score += tl.sum(asked, 0) * first_zero
            spread = (asked * asked)[:, None] * (second_codes * second_codes)
            variance = tl.sum(spread, 0) * second_scale * second_scale
            if means is not None:
                to = means + (row * G + member) * all_pages + first + page
                more = tl.log(room.to(tl.float32))
                known = tl.where(page < competing, score + variance * 0.5 + more, float("-inf"))
                tl.store(to, known, mask=page < width)
            score += deviations * tl.sqrt(variance)
        best = tl.maximum(best, score)
    oldest, newest = tl.load(ends), tl.load(ends + PAGES)
    now = tl.load(positions + request)
    competes = (oldest >= sinks) & (newest <= now - window) & (page < competing)
    best = tl.where(competes, best, float("inf"))
    best = tl.where(page < (count + room - 1) // room, best, float("-inf"))
    best = tl.where(is_row, best, float("nan"))
    tl.store(scores + row * all_pages + first + page, best, mask=page < width)
