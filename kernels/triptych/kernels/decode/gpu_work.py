# pyright: basic, reportPrivateImportUsage=false, reportArgumentType=false, reportAttributeAccessIssue=false, reportGeneralTypeIssues=false
# Triton's language is not Python: the checker takes tiles for integers.
"""The work list of decode attention: runs of about equal size over the pages of all requests.

Each program finds its own run in the token counts, so a list costs no launch and no memory, and the
host needs to know no length. The unit of work is a page, or a tile of short pages, which has about
as many bytes. A section of a head row with u units is cut into ceil(u / s) runs, where s is the
work of all head rows divided by the runs that are wanted. So a long request gets many runs and a
short one gets one; no run is longer than s, and there are at most as many as wanted, plus one for
each section of a head row.

Source: a list of tiles for kernels with few programs, as in Stream-K (Osama et al., 2023) and
FlashInfer (Ye et al., 2025); both compute it on the host.
"""

import triton
import triton.language as tl


@triton.jit
def held_in(section, slot, head, inside, FORM: tl.constexpr):
    """Tokens of head rows in a section, int32; 0 where not ``inside``.

    A slot out of range has one token, as in ``row_of``. Tokens beyond the table are one page: it
    is reported as a wrong one.
    """
    _table, tokens, slot_count, width, _slot, _head, _page, by_slot, by_head = section
    is_known = inside & (slot >= 0) & (slot < slot_count)
    at = tokens + slot.to(tl.int64) * by_slot + head * by_head
    held = tl.load(at, mask=is_known, other=1)
    held = tl.minimum(tl.maximum(held, 0), (width + 1) * FORM.tokens)
    return tl.where(inside, held, 0)


@triton.jit
def units_in(held, FORM: tl.constexpr, TILE: tl.constexpr):
    """Units of work of so many tokens: pages, or tiles of short ones; float32."""
    SPAN: tl.constexpr = TILE if FORM.by_tile else FORM.tokens
    return ((held + SPAN - 1) // SPAN).to(tl.float32)


@triton.jit
def work_of(
    sections, page_lists, slots, row, head_rows,
    KV_HEADS: tl.constexpr, FORMS: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """Work of head rows in each section: a tuple of float32 tiles as ``row``; 0 beyond the end.

    A request with a page list has as much of each section as its list has of all pages.
    """
    inside = row < head_rows
    request, head = row // KV_HEADS, row % KV_HEADS
    slot = tl.load(slots + request, mask=inside, other=0)
    work = ()
    pages = row * 0
    for at in tl.static_range(len(sections)):
        held = held_in(sections[at], slot, head, inside, FORMS[at])
        work = work + (units_in(held, FORMS[at], TILE),)  # noqa: RUF005
        if page_lists is not None:
            pages += (held + FORMS[at].tokens - 1) // FORMS[at].tokens
    if page_lists is not None:
        _ordinals, counts, rows, row_count, _most, _row, _head, by_row, by_head = page_lists
        place = tl.load(rows + request, mask=inside, other=-1)
        has_list = (place >= 0) & (place < row_count)
        at_count = counts + place.to(tl.int64) * by_row + head * by_head
        length = tl.minimum(tl.load(at_count, mask=has_list, other=0), pages)
        part = tl.where(has_list, length.to(tl.float32) / tl.maximum(pages, 1), 1.0)
        listed = ()
        for at in tl.static_range(len(sections)):
            listed = listed + (work[at] * part,)  # noqa: RUF005
        work = listed
    return work


@triton.jit
def runs_in(work, each):
    """Number of runs of some work, int32, for ``each`` runs of a unit of work."""
    return tl.ceil(work * each).to(tl.int32)


@triton.jit
def run_at(
    index, starts, sections, page_lists, slots, head_rows, wanted, least,
    KV_HEADS: tl.constexpr, FORMS: tl.constexpr, TILE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """The head row of run number ``index``, the number of its first run, and runs for a unit.

    Head rows come one after the other, and the runs of each by section. The head row is
    ``head_rows`` if there are fewer runs. ``wanted``: number of runs over which all work is spread,
    float32; ``least``: fewest units of a run, float32. For index 0 the first run of each head row,
    and the number of all runs, are stored in ``starts``.
    """
    every = tl.zeros([BLOCK], tl.float32)
    for first in range(0, head_rows, BLOCK):
        row = first + tl.arange(0, BLOCK)
        work = work_of(sections, page_lists, slots, row, head_rows, KV_HEADS, FORMS, TILE)
        for at in tl.static_range(len(sections)):
            every += work[at]
    each = wanted / tl.maximum(tl.sum(every, 0), wanted * least)
    found, begin, before = 0, 0, 0
    for first in range(0, head_rows, BLOCK):
        row = first + tl.arange(0, BLOCK)
        work = work_of(sections, page_lists, slots, row, head_rows, KV_HEADS, FORMS, TILE)
        runs = tl.zeros([BLOCK], tl.int32)
        for at in tl.static_range(len(sections)):
            runs += runs_in(work[at], each)
        end = before + tl.cumsum(runs, 0)
        is_stored = (row < head_rows) & (index == 0)
        tl.store(starts + row, end - runs, mask=is_stored)
        is_before = end <= index
        found += tl.sum((is_before & (row < head_rows)).to(tl.int32), 0)
        begin = tl.maximum(begin, tl.max(tl.where(is_before, end, 0), 0))
        before += tl.sum(runs, 0)
    tl.store(starts + head_rows, before, mask=index == 0)
    return found, begin, each
