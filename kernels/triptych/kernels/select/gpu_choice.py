# pyright: basic, reportPrivateImportUsage=false, reportArgumentType=false, reportAttributeAccessIssue=false, reportGeneralTypeIssues=false
# Triton's language is not Python: the checker takes tiles for integers.
"""Triton kernel of page selection: a radix select over the scores of a head row.

Scores are mapped to uint32 keys of the same order, four digits of 8 bits. Each of four sweeps over
the row counts the next digit of the keys that equal the threshold in the digits before. They find
the smallest key to read, for any length of the row; a fifth sweep writes the list in ascending
order. One program handles one head row.
"""

import triton
import triton.language as tl

from triptych.core import head_budgets as core_budgets
from triptych.kernels.select import summary
from triptych.kernels.select.gpu_scores import logits_of, pages_of, query_stats_of, score_pages

WHOLE = tl.constexpr(summary.WHOLE)
STEPS = tl.constexpr(core_budgets.BUDGET_STEPS)
DIGITS = tl.constexpr(256)


@triton.jit
def choose_pages(
    query, slots, positions, sections, scores, by_row, by_head, means, all_pages,
    scale, deviations, sinks, window, page_lists, head_budgets, keep, budget, omitted,
    KNOWN: tl.constexpr, PARTS: tl.constexpr, IS_BOX: tl.constexpr, IS_CODES: tl.constexpr,
    G: tl.constexpr, HEADS: tl.constexpr, DIM: tl.constexpr, SPAN: tl.constexpr,
    FUSED: tl.constexpr, CHUNK: tl.constexpr, GROUP: tl.constexpr,
):  # fmt: skip
    """Write the page lists of the requests that have one. Grid: 1, KV heads, requests.

    ``FUSED``: the kernel computes the scores first; otherwise ``score_spans`` has written them.
    """
    ordinals, counts, rows, row_count, most, list_row, list_head, count_row, count_head = page_lists
    request, head = tl.program_id(2), tl.program_id(1)
    place = tl.load(rows + request)
    if (place >= 0) & (place < row_count):
        total, small, tokens = 0, 0, 0
        if FUSED:
            if IS_CODES:
                query_stats = (logits_of(query, DIM),)
            else:
                query_stats = query_stats_of(query, scale, G, HEADS, DIM)
        for at in tl.static_range(len(sections)):
            count, pages, _width = pages_of(sections[at], slots)
            if FUSED:
                for first in range(0, pages, SPAN):
                    score_pages(
                        query_stats, slots, positions, sections[at], count, pages, total, first,
                        scores, by_row, by_head, means, all_pages, deviations, sinks, window,
                        KNOWN[at], IS_BOX, IS_CODES, G, HEADS, DIM, SPAN,
                    )  # fmt: skip
            total += pages
            small += pages - (pages + PARTS[at] - 1) // PARTS[at]
            tokens += count
        if FUSED:
            tl.debug_barrier()  # threads read scores that others wrote
        found = scores + request.to(tl.int64) * by_row + head * by_head
        share = share_of(total - small, tokens, head_budgets, keep, budget)
        wanted = tl.minimum(share + small, total)
        wanted = tl.maximum(wanted, always_read(found, total, CHUNK))
        if means is not None:
            row = (request * tl.num_programs(1) + head).to(tl.int64)
            masses = means + row * G * all_pages
            needed = count_for_mass(found, masses, all_pages, total, omitted, G, GROUP, CHUNK)
            wanted = tl.maximum(wanted, needed)
        last, ties = threshold(found, total, wanted, CHUNK)
        entries = ordinals + place.to(tl.int64) * list_row + head * list_head
        length = write_list(entries, most, found, total, last, ties, CHUNK)
        at_count = counts + place.to(tl.int64) * count_row + head * count_head
        tl.store(at_count, tl.minimum(length, most))


@triton.jit
def share_of(total, tokens, head_budgets, keep, budget):
    """``Rule.pages`` without the limit by the number of pages."""
    # A tensor, since an argument of 1 becomes a constant, which cannot be cast to int64.
    whole = tl.full([], WHOLE, tl.int64)
    own = tl.minimum(budget * whole // tl.maximum(tokens, 1), whole).to(tl.int32)
    own = tl.maximum(own, keep)
    if head_budgets is not None:
        size: tl.constexpr = WHOLE // STEPS
        steps = head_budgets + tl.program_id(1) * (STEPS + 1)
        step, rest = own // size, own % size
        low, high = tl.load(steps + step), tl.load(steps + tl.minimum(step + 1, STEPS))
        own = low + ((high - low) * rest + size - 1) // size
    return ((whole - 1 + total * own.to(tl.int64)) // whole).to(tl.int32)


@triton.jit
def always_read(found, total, CHUNK: tl.constexpr):
    """Number of pages that are always read, those with an infinite score."""
    number = 0
    for first in range(0, total, CHUNK):
        page = first + tl.arange(0, CHUNK)
        score = tl.load(found + page, mask=page < total, other=0.0)
        number += tl.sum((score == float("inf")).to(tl.int32), 0)
    return number


@triton.jit
def ordered(found, page, live):
    """Scores as uint32 keys of the same order; -0.0 equals 0.0."""
    score = tl.load(found + page, mask=live, other=0.0)
    bits = tl.cast(tl.where(score == 0.0, 0.0, score), tl.uint32, bitcast=True)
    return tl.where((bits >> 31) > 0, bits ^ 0xFFFFFFFF, bits | 0x80000000)


@triton.jit
def threshold(found, total, wanted, CHUNK: tl.constexpr):
    """Key of the smallest of the ``wanted`` largest scores, and how many of them have this key."""
    digit = tl.arange(0, DIGITS)
    last = tl.full([], 0, tl.uint32)
    left = wanted
    for shift in tl.static_range(24, -8, -8):
        number = tl.zeros([DIGITS], tl.int32)
        for first in range(0, total, CHUNK):
            page = first + tl.arange(0, CHUNK)
            key = ordered(found, page, page < total)
            alike = page < total
            if shift < 24:
                alike = alike & ((key >> (shift + 8)) == last)
            number += tl.histogram(((key >> shift) & 255).to(tl.int32), DIGITS, mask=alike)
        reached = tl.cumsum(number, 0, reverse=True)
        at = tl.sum((reached >= left).to(tl.int32), 0) - 1
        left -= tl.sum(tl.where(digit > at, number, 0), 0)
        last = (last << 8) | at.to(tl.uint32)
    return last, left


@triton.jit
def write_list(entries, most, found, total, last, ties, CHUNK: tl.constexpr):
    """Write the pages above key ``last`` and the first ``ties`` at it; returns their number."""
    length, equal = 0, 0
    for first in range(0, total, CHUNK):
        page = first + tl.arange(0, CHUNK)
        key = ordered(found, page, page < total)
        is_tie = (key == last) & (page < total)
        tie = equal + tl.cumsum(is_tie.to(tl.int32), 0)
        chosen = (page < total) & ((key > last) | (is_tie & (tie <= ties)))
        to = length + tl.cumsum(chosen.to(tl.int32), 0) - 1
        tl.store(entries + to, page, mask=chosen & (to < most))
        length += tl.sum(chosen.to(tl.int32), 0)
        equal += tl.sum(is_tie.to(tl.int32), 0)
    return length


@triton.jit
def count_for_mass(
    found, masses, by_member, total, omitted,
    G: tl.constexpr, GROUP: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    """``reference.count_for_mass``: finds the largest sufficient key, bit by bit.

    masses: logarithms of the expected attention of pages from each of the G heads.
    """
    largest = tl.full([GROUP, CHUNK], float("-inf"), tl.float32)
    for first in range(0, total, CHUNK):
        largest = tl.maximum(largest, masses_of(masses, by_member, first, total, G, GROUP, CHUNK))
    peak = tl.max(largest, 1)
    peak = tl.where(peak == float("-inf"), 0.0, peak)[:, None]
    last = tl.full([], 0, tl.uint32)
    whole = received(found, masses, by_member, total, peak, last, G, GROUP, CHUNK)
    unit = 1.0 / tl.where(whole > 0, whole, 1.0)
    for bit in range(32):
        tried = last | (tl.full([], 0x80000000, tl.uint32) >> bit)
        got = received(found, masses, by_member, total, peak, tried, G, GROUP, CHUNK)
        left = tl.max(rest_of((got * unit)[:, None], G, GROUP), 0)
        last = tl.where(left <= omitted, tried, last)
    # No key is 2**32 - 1, so ``last + 1`` does not overflow.
    got = received(found, masses, by_member, total, peak, last + 1, G, GROUP, CHUNK)
    number = 1
    for first in range(0, total, CHUNK):
        page = first + tl.arange(0, CHUNK)
        key = ordered(found, page, page < total)
        tie = (page < total) & (key == last)
        mass = masses_of(masses, by_member, first, total, G, GROUP, CHUNK)
        sums = got[:, None] + tl.cumsum(tl.where(tie[None, :], tl.exp(mass - peak), 0.0), 1)
        more = tie & (rest_of(sums * unit[:, None], G, GROUP) > omitted)
        number += tl.sum((((page < total) & (key > last)) | more).to(tl.int32), 0)
        got = tl.max(sums, 1)
    return tl.where(tl.max(whole, 0) > 0, number, 0)


@triton.jit
def received(
    found, masses, by_member, total, peak, least,
    G: tl.constexpr, GROUP: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    """Expected attention, [GROUP], of the pages with keys of at least ``least``."""
    # Sums are kept per column and reduced at the end: a reduction in the loop is slower, and one
    # whose result is used twice does not compile (Triton 3.6 and 3.7).
    sums = tl.zeros([GROUP, CHUNK], tl.float32)
    for first in range(0, total, CHUNK):
        page = first + tl.arange(0, CHUNK)
        reached = ordered(found, page, page < total) >= least
        mass = masses_of(masses, by_member, first, total, G, GROUP, CHUNK)
        sums += tl.where(reached[None, :], tl.exp(mass - peak), 0.0)
    return tl.sum(sums, 1)


@triton.jit
def rest_of(shares, G: tl.constexpr, GROUP: tl.constexpr):
    """One minus the smallest share among the heads: shares [GROUP, n] -> [n]."""
    return 1.0 - tl.min(tl.where((tl.arange(0, GROUP) < G)[:, None], shares, 1.0), 0)


@triton.jit
def masses_of(
    masses, by_member, first, total,
    G: tl.constexpr, GROUP: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    """Load masses [GROUP, CHUNK]; minus infinity beyond the last page or head."""
    page, member = first + tl.arange(0, CHUNK), tl.arange(0, GROUP)
    at = masses + member[:, None] * by_member + page[None, :]
    mask = (member < G)[:, None] & (page < total)[None, :]
    return tl.load(at, mask=mask, other=float("-inf"))
