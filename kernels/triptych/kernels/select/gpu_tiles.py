# pyright: basic, reportPrivateImportUsage=false, reportArgumentType=false, reportAttributeAccessIssue=false, reportGeneralTypeIssues=false
# Triton's language is not Python: the checker sees integers where tiles will be.
"""Scores of pages from their summaries: a program takes the pages of one tile."""

import triton
import triton.language as tl

PAGES = tl.constexpr(16)
BLOCKS = tl.constexpr(4)
POSITIONS = tl.constexpr(2)
"""``TILE_PAGES``, ``BLOCKS`` and ``POSITIONS`` of ``summary``, as kernels need them."""


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
    codes: tl.constexpr = (2 if IS_BOX else 3) * DIM
    numbers_end: tl.constexpr = codes + 4 * (4 if IS_BOX else 3 * BLOCKS)
    tile = memory + slot * by_slot + head * by_head
    tile += tl.program_id(0) * PAGES * (numbers_end + 4 * POSITIONS)
    channel = tl.arange(0, WIDE)
    inside = channel < DIM
    at = tile + channel[:, None] * PAGES + place[None, :]
    numbers = (tile + codes * PAGES).to(tl.pointer_type(tl.float32)) + place
    ends = (tile + numbers_end * PAGES).to(tl.pointer_type(tl.int32)) + place
    near = query + ((request * tl.num_programs(1) + head) * G).to(tl.int64) * DIM
    row = (request * tl.num_programs(1) + head).to(tl.int64)
    best = tl.full([PAGES], float("-inf"), tl.float32)
    for member in range(G):
        asked = tl.load(near + member * DIM + channel, mask=inside, other=0.0).to(tl.float32)
        asked = asked * scale
        if IS_BOX:
            low, high = tl.minimum(asked, 0.0), tl.maximum(asked, 0.0)
            most = tl.load(at, mask=inside[:, None], other=0).to(tl.float32)
            score = tl.sum(high[:, None] * most, 0) * tl.load(numbers)
            score += tl.sum(high, 0) * tl.load(numbers + PAGES)
            least = tl.load(at + DIM * PAGES, mask=inside[:, None], other=0).to(tl.float32)
            score += tl.sum(low[:, None] * least, 0) * tl.load(numbers + 2 * PAGES)
            score += tl.sum(low, 0) * tl.load(numbers + 3 * PAGES)
        else:
            total = tl.sum(asked, 0)
            above = tl.load(at + 2 * DIM * PAGES, mask=inside[:, None], other=0).to(tl.float32)
            variance = tl.sum((asked * asked)[:, None] * (above * above), 0)
            score = tl.full([PAGES], float("-inf"), tl.float32)
            mass = tl.full([PAGES], float("-inf"), tl.float32)
            for block in tl.static_range(BLOCKS):
                pair = tl.load(at + block // 2 * DIM * PAGES, mask=inside[:, None], other=0)
                code = ((pair >> (4 * (block % 2))) & 15).to(tl.float32)
                at_numbers = numbers + 3 * block * PAGES
                mean = tl.sum(asked[:, None] * code, 0) * tl.load(at_numbers)
                mean += total * tl.load(at_numbers + PAGES)
                spread = tl.load(at_numbers + 2 * PAGES)
                score = tl.maximum(score, mean + deviations * tl.sqrt(variance) * spread)
                if means is not None:
                    start = block * room // BLOCKS
                    size = tl.maximum((block + 1) * room // BLOCKS - start, 1).to(tl.float32)
                    logit = mean + variance * spread * spread * 0.5 + tl.log(size)
                    peak = tl.maximum(mass, logit)
                    mass = peak + tl.log(tl.exp(mass - peak) + tl.exp(logit - peak))
            if means is not None:
                to = means + (row * G + member) * all_pages + first + page
                known = tl.where(page < competing, mass, float("-inf"))
                tl.store(to, known, mask=page < width)
        best = tl.maximum(best, score)
    oldest, newest = tl.load(ends), tl.load(ends + PAGES)
    now = tl.load(positions + request)
    competes = (oldest >= sinks) & (newest <= now - window) & (page < competing)
    best = tl.where(competes, best, float("inf"))
    best = tl.where(page < (count + room - 1) // room, best, float("-inf"))
    best = tl.where(is_row, best, float("nan"))
    tl.store(scores + row * all_pages + first + page, best, mask=page < width)
