# pyright: basic, reportPrivateImportUsage=false, reportArgumentType=false, reportAttributeAccessIssue=false, reportGeneralTypeIssues=false
# Triton's language is not Python: the checker takes tiles for integers.
"""Triton kernels that score pages from their summaries with tensor cores.

Codes are exact in fp16. Queries and their squares are split into two fp16 numbers each, which keeps
float32 accuracy. Squares of deviation codes are split into two bytes.
"""

import triton
import triton.language as tl

from triptych.kernels.select import summary
from triptych.kernels.triton.page_access import halves, held_of, products, unit_of
from triptych.kernels.triton.unpack import half_of

PAGES = tl.constexpr(summary.TILE_PAGES)
BLOCKS = tl.constexpr(summary.BLOCKS)
POSITIONS = tl.constexpr(summary.POSITIONS)
STEP = tl.constexpr(32)
"""Channels that are multiplied at a time; few, so that queries and codes fit in registers."""


@triton.jit
def score_spans(
    query, slots, positions, rows, row_count, sections, scores, by_row, by_head, means, all_pages,
    scale, deviations, sinks, window,
    KNOWN: tl.constexpr, IS_BOX: tl.constexpr, IS_CODES: tl.constexpr, G: tl.constexpr,
    HEADS: tl.constexpr,
    DIM: tl.constexpr, SPAN: tl.constexpr,
):  # fmt: skip
    """Score the pages of requests that have a list, one span of pages per program.

    Grid: spans of all sections, KV heads, requests. The scores of a row are contiguous, section
    after section.
    """
    place = tl.load(rows + tl.program_id(2))
    if (place >= 0) & (place < row_count):
        if IS_CODES:
            query_stats = (logits_of(query, DIM),)
        else:
            query_stats = query_stats_of(query, scale, G, HEADS, DIM)
        span, base = tl.program_id(0), 0
        for at in tl.static_range(len(sections)):
            count, pages, width = pages_of(sections[at], slots)
            if (span >= 0) & (span * SPAN < pages):
                score_pages(
                    query_stats, slots, positions, sections[at], count, pages, base, span * SPAN,
                    scores, by_row, by_head, means, all_pages, deviations, sinks, window,
                    KNOWN[at], IS_BOX, IS_CODES, G, HEADS, DIM, SPAN,
                )  # fmt: skip
            base += pages
            span -= (width + SPAN - 1) // SPAN


@triton.jit
def pages_of(section, slots):
    """Number of tokens and pages of this head row in a section, and the width of its table."""
    tokens, count_slot, count_head, slot_count, room, width, _memory, _by_slot, _by_head = section
    slot = tl.load(slots + tl.program_id(2))
    count, pages = held_of(
        tokens, slot, tl.program_id(1), slot_count, count_slot, count_head, width, room
    )
    return count, pages, width


@triton.jit
def logits_of(query, DIM: tl.constexpr):
    """Pointer to the logits of this head row with all codes."""
    return query + (tl.program_id(2) * tl.num_programs(1) + tl.program_id(1)).to(tl.int64) * DIM


@triton.jit
def code_scores(logits, codes, room, live):
    """The largest logit of the codes of the tokens of pages, [SPAN]."""
    best = tl.full([live.shape[0]], float("-inf"), tl.float32)
    for first in range(0, room, STEP):
        token = first + tl.arange(0, STEP)
        mask = live[:, None] & (token < room)[None, :]
        code = tl.load(codes[:, None] + token[None, :], mask=mask, other=0).to(tl.int32)
        best = tl.maximum(best, tl.max(tl.load(logits + code, mask=mask, other=float("-inf")), 1))
    return best


@triton.jit
def query_stats_of(query, scale, G: tl.constexpr, HEADS: tl.constexpr, DIM: tl.constexpr):
    """Pointers, scale, unit, inverse unit, and sums of the queries of a group, [HEADS] each.

    The two sums are of the positive and of the negative numbers of a query times ``scale``.
    """
    group = (tl.program_id(2) * tl.num_programs(1) + tl.program_id(1)).to(tl.int64) * G
    lines = query + (group + tl.arange(0, HEADS)) * DIM
    largest = tl.zeros([HEADS], tl.float32)
    above, below = largest, largest
    for first in range(0, DIM, STEP):
        part = channels_of(lines, scale, first, G, HEADS, DIM)
        largest = tl.maximum(largest, tl.max(tl.abs(part), 1))
        above += tl.sum(tl.maximum(part, 0.0), 1)
        below += tl.sum(tl.minimum(part, 0.0), 1)
    unit, inverse = unit_of(largest)
    return lines, scale, unit, inverse, above, below


@triton.jit
def channels_of(
    lines, scale, first, G: tl.constexpr, HEADS: tl.constexpr, DIM: tl.constexpr
):  # fmt: skip
    """``STEP`` channels of the queries times ``scale``, [HEADS, STEP]; 0 out of range."""
    channel = first + tl.arange(0, STEP)
    inside = (tl.arange(0, HEADS) < G)[:, None] & (channel < DIM)[None, :]
    return tl.load(lines[:, None] + channel[None, :], mask=inside, other=0.0) * scale


@triton.jit
def score_pages(
    query_stats, slots, positions, section, count, pages, base, first, scores, by_row, by_head,
    means, all_pages, deviations, sinks, window,
    KNOWN: tl.constexpr, IS_BOX: tl.constexpr, IS_CODES: tl.constexpr, G: tl.constexpr,
    HEADS: tl.constexpr,
    DIM: tl.constexpr, SPAN: tl.constexpr,
):  # fmt: skip
    """Write the scores of ``SPAN`` pages of a section; infinity for pages that are always read.

    ``means``: filled with the logarithm of the expected attention of pages from each query head.
    """
    _tokens, _count_slot, _count_head, _slots, room, _width, memory, by_slot, of_head = section
    request, head = tl.program_id(2), tl.program_id(1)
    page = first + tl.arange(0, SPAN)
    live = page < pages
    best = tl.full([SPAN], float("inf"), tl.float32)
    mass = tl.full([HEADS, SPAN], float("-inf"), tl.float32)
    if KNOWN:
        codes: tl.constexpr = (2 if IS_BOX else 3) * DIM * PAGES
        numbers: tl.constexpr = (4 if IS_BOX else 3 * BLOCKS) * PAGES
        before = room * PAGES if IS_CODES else codes + 4 * numbers
        tile_bytes = before + 4 * POSITIONS * PAGES
        row = memory + tl.load(slots + request).to(tl.int64) * by_slot + head * of_head
        tile, place = row + (page // PAGES) * tile_bytes, page % PAGES
        is_stored = page // PAGES * PAGES < pages  # the same for all pages of a tile: wide loads
        at = (tile + codes).to(tl.pointer_type(tl.float32)) + place
        if IS_CODES:
            best = code_scores(query_stats[0], tile + place * room, room, live)[None, :]
        elif IS_BOX:
            best = box_scores(query_stats, tile + place, is_stored, live, at, G, HEADS, DIM)
        else:
            best, mass = moment_scores(
                query_stats,
                tile + place,
                is_stored,
                live,
                at,
                room,
                deviations,
                means is not None,
                G,
                HEADS,
                DIM,
            )
        best = tl.max(tl.where((tl.arange(0, HEADS) < G)[:, None], best, float("-inf")), 0)
        competing = tl.maximum(count - 1, 0) // room
        mass = tl.where((page < competing)[None, :], mass, float("-inf"))
        ends = (tile + before).to(tl.pointer_type(tl.int32)) + place
        oldest = tl.load(ends, mask=live, other=0)
        newest = tl.load(ends + PAGES, mask=live, other=0)
        now = tl.load(positions + request)
        competes = (oldest >= sinks) & (newest <= now - window) & (page < competing)
        best = tl.where(competes, best, float("inf"))
    to = scores + request.to(tl.int64) * by_row + head * by_head + base + page
    tl.store(to, best, mask=live)
    if means is not None:
        member = tl.arange(0, HEADS)
        group = (request * tl.num_programs(1) + head).to(tl.int64) * G
        to = means + (group + member)[:, None] * all_pages + (base + page)[None, :]
        tl.store(to, mass, mask=(member < G)[:, None] & live[None, :])


@triton.jit
def box_scores(
    query_stats, codes, is_stored, live, at, G: tl.constexpr, HEADS: tl.constexpr, DIM: tl.constexpr
):  # fmt: skip
    """Upper bounds [HEADS, SPAN] of the logits of keys in the boxes of pages."""
    lines, scale, unit, inverse, above, below = query_stats
    out = tl.zeros([HEADS, live.shape[0]], tl.float32)
    largest, smallest = out, out
    for first in range(0, DIM, STEP):
        near = channels_of(lines, scale, first, G, HEADS, DIM) * inverse[:, None]
        byte = bytes_of(codes, is_stored, first, 0, DIM)
        high, low = halves(tl.maximum(near, 0.0))
        largest += products(high, low, half_of(byte), True)
        byte = bytes_of(codes, is_stored, first, 1, DIM)
        high, low = halves(tl.minimum(near, 0.0))
        smallest += products(high, low, half_of(byte), True)
    out = largest * unit[:, None] * number_of(at, 0, live)
    out += above[:, None] * number_of(at, 1, live)
    out += smallest * unit[:, None] * number_of(at, 2, live)
    return out + below[:, None] * number_of(at, 3, live)


@triton.jit
def moment_scores(
    query_stats, codes, is_stored, live, at, room, deviations, HAS_MASS: tl.constexpr,
    G: tl.constexpr, HEADS: tl.constexpr, DIM: tl.constexpr,
):  # fmt: skip
    """Estimates [HEADS, SPAN] of the largest logit of a page, over its blocks.

    With ``HAS_MASS`` also the logarithm of the expected attention of the page.
    """
    lines, scale, unit, inverse, above, below = query_stats
    first_mean = tl.zeros([HEADS, live.shape[0]], tl.float32)
    second_mean, third_mean, fourth_mean, variance = first_mean, first_mean, first_mean, first_mean
    for first in range(0, DIM, STEP):
        near = channels_of(lines, scale, first, G, HEADS, DIM) * inverse[:, None]
        high, low = halves(near)
        pair = bytes_of(codes, is_stored, first, 0, DIM)
        first_mean += products(high, low, half_of(pair & 15), True)
        second_mean += products(high, low, half_of(pair >> 4), True)
        pair = bytes_of(codes, is_stored, first, 1, DIM)
        third_mean += products(high, low, half_of(pair & 15), True)
        fourth_mean += products(high, low, half_of(pair >> 4), True)
        square = bytes_of(codes, is_stored, first, 2, DIM).to(tl.uint16)
        square = square * square
        high, low = halves(near * near)
        variance += products(high, low, half_of(square >> 8) * 256.0, True)
        variance += products(high, low, half_of(square & 255), True)
    variance = tl.maximum(variance, 0.0) * (unit * unit)[:, None]
    best = tl.full(variance.shape, float("-inf"), tl.float32)
    mass = best
    means = (first_mean, second_mean, third_mean, fourth_mean)
    for block in tl.static_range(BLOCKS):
        mean = means[block] * unit[:, None] * number_of(at, 3 * block, live)
        mean += (above + below)[:, None] * number_of(at, 3 * block + 1, live)
        spread = number_of(at, 3 * block + 2, live)
        best = tl.maximum(best, mean + deviations * tl.sqrt(variance) * spread)
        if HAS_MASS:
            size = (block + 1) * room // BLOCKS - block * room // BLOCKS
            logit = mean + variance * spread * spread * 0.5
            logit += tl.log(tl.maximum(size, 1).to(tl.float32))
            peak = tl.maximum(mass, logit)
            mass = peak + tl.log(tl.exp(mass - peak) + tl.exp(logit - peak))
    return best, mass


@triton.jit
def bytes_of(codes, is_stored, first, vector: tl.constexpr, DIM: tl.constexpr):
    """Code bytes of ``STEP`` channels of one vector of each page, [STEP, SPAN].

    Those of pages beyond the last one of a head row may be any bytes.
    """
    channel = first + tl.arange(0, STEP)
    at = codes[None, :] + ((vector * DIM + channel) * PAGES)[:, None]
    return tl.load(at, mask=(channel < DIM)[:, None] & is_stored[None, :], other=0)


@triton.jit
def number_of(at, index, live):
    """Number ``index`` of each page, [1, SPAN]."""
    return tl.load(at + index * PAGES, mask=live, other=0.0)[None, :]
