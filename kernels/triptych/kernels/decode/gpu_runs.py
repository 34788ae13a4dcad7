# pyright: basic, reportPrivateImportUsage=false, reportArgumentType=false, reportAttributeAccessIssue=false, reportGeneralTypeIssues=false
# Triton's language is not Python: the checker takes tiles for integers.
"""Triton kernels of decode attention: a program reads a run of a section for a group of heads."""

import triton
import triton.language as tl

from triptych.kernels.decode.gpu_page_runs import added, attend_pages
from triptych.kernels.decode.gpu_work import run_at, runs_in, work_of
from triptych.kernels.pointwise.gpu_vectors import mixed_channels
from triptych.kernels.triton.page_access import (
    biased,
    capped,
    halves,
    held_of,
    key_units,
    listed_of,
    metadata_of,
    positions_of,
    row_of,
    slots_of,
    split_query,
    tile_logits,
    unit_of,
    value_units,
)
from triptych.kernels.triton.unpack import numbers_of_codes


@triton.jit
def attend_sections(
    query, arena, slots, positions, partial, peaks, sums, starts, page_count, head_rows,
    wanted, least, scale, cap, window, sections, page_lists,
    FORMS: tl.constexpr, BACKWARD: tl.constexpr, CHUNK: tl.constexpr, BLOCK: tl.constexpr,
    KV_HEADS: tl.constexpr, G: tl.constexpr, HEADS: tl.constexpr, TILE: tl.constexpr,
    EXACT: tl.constexpr, CAPPED: tl.constexpr,
):  # fmt: skip
    """Attention over one run of one section of a head row, for all query heads of its group.

    Grid: the most runs that the work list of ``gpu_work`` can have; ``wanted``, ``least`` and
    ``starts`` are those of ``run_at``. ``page_lists``: None, or the lists of pages to read, of
    which a program reads ``CHUNK`` entries at a time.
    """
    index = tl.program_id(0)
    row, begin, each = run_at(
        index, starts, sections, page_lists, slots, head_rows, wanted, least, KV_HEADS, FORMS, TILE,
        BLOCK,
    )  # fmt: skip
    if row < head_rows:
        work = work_of(sections, page_lists, slots, row, head_rows, KV_HEADS, FORMS, TILE)
        run = index - begin
        for at in tl.static_range(len(sections)):
            runs = runs_in(work[at], each)
            if (run >= 0) & (run < runs):
                attend_run(
                    query, arena, slots, positions, partial, peaks, sums, page_count,
                    row // KV_HEADS, row % KV_HEADS, row, run, runs, scale, cap, window, sections,
                    page_lists, at, FORMS, BACKWARD[at], CHUNK, G, HEADS, TILE, EXACT, CAPPED,
                )  # fmt: skip
            run -= runs


@triton.jit
def tiles_of(count, run, runs, TILE: tl.constexpr):
    """First tile and end tile (exclusive) of run number ``run`` over ``count`` tokens."""
    tiles = (count + TILE - 1) // TILE
    each = (tiles + runs - 1) // runs
    first = run * each
    return first, tl.minimum(first + each, tiles)


@triton.jit
def pages_before(sections, slots, request, head, at: tl.constexpr, FORMS: tl.constexpr):
    """Number of pages of a head row in the sections before number ``at``."""
    slot = tl.load(slots + request)
    base = 0
    for before in tl.static_range(at):
        _table, tokens, count, width, _slot, _head, _page, by_slot, by_head = sections[before]
        room = FORMS[before].tokens
        base += held_of(tokens, slot, head, count, by_slot, by_head, width, room)[1]
    return base


@triton.jit
def oldest_of(positions, request, window):
    """The oldest position that the query of a request may read; 0 without a window."""
    oldest = 0
    if positions is not None:
        oldest = tl.load(positions + request) - window + 1
    return oldest


@triton.jit
def attend_run(
    query, arena, slots, positions, partial, peaks, sums, page_count, request, head, row, run, runs,
    scale, cap, window, sections, page_lists, at: tl.constexpr, FORMS: tl.constexpr,
    BACKWARD: tl.constexpr, CHUNK: tl.constexpr,
    G: tl.constexpr, HEADS: tl.constexpr, TILE: tl.constexpr,
    EXACT: tl.constexpr, CAPPED: tl.constexpr,
):  # fmt: skip
    """Softmax over a run of tokens: writes largest logit, sum, and unnormalised output."""
    FORM: tl.constexpr = FORMS[at]
    table, tokens, slot_count, width, by_slot, by_head, by_page, count_slot, count_head = sections[
        at
    ]
    table, width, count = row_of(
        table, tokens, slots, slot_count, width, by_slot, by_head, count_slot, count_head, request,
        head,
    )  # fmt: skip
    listed = None
    base = 0
    if page_lists is not None:
        base = pages_before(sections, slots, request, head, at, FORMS)
        pages = tl.minimum((count + FORM.tokens - 1) // FORM.tokens, width)
        entries, has_list, count = listed_of(
            page_lists, request, head, base, count, pages, FORM.tokens, CHUNK
        )
        listed = (entries, has_list)
    SPAN: tl.constexpr = TILE if FORM.by_tile else FORM.tokens
    first_tile, last_tile = tiles_of(count, run, runs, SPAN)
    near = query + (row * G).to(tl.int64) * FORM.dim
    split, total, unit = split_query(near, G, HEADS, FORM)
    oldest = oldest_of(positions, request, window)
    if FORM.by_tile:
        peak, weight_sum, out = attend_tokens(
            split[0][0], split[0][1], total, unit * scale, cap, oldest, positions is not None,
            arena, page_count, table, width, by_page, count, first_tile, last_tile, listed, base,
            FORM, BACKWARD, HEADS, TILE, EXACT, CAPPED,
        )  # fmt: skip
        outs = (out,)
    else:
        peak, weight_sum, outs = attend_pages(
            near, split, total, unit, scale, cap, oldest, positions is not None, arena, page_count,
            table, width, by_page, count, first_tile, last_tile, listed, base, FORM, BACKWARD, G,
            HEADS, EXACT, CAPPED,
        )  # fmt: skip
    heads = tl.arange(0, HEADS)
    place = tl.program_id(0) * G + heads
    tl.store(peaks + place, peak, mask=heads < G)
    tl.store(sums + place, weight_sum, mask=heads < G)
    units = tl.arange(0, FORM.value_tile)
    at = partial + place.to(tl.int64)[None, :] * FORM.dim + units[:, None]
    mask = (heads < G)[None, :] & (units < FORM.value_units)[:, None] & (first_tile < last_tile)
    PARTS: tl.constexpr = FORM.parts_of_value
    for share in tl.static_range(PARTS):
        tl.store(at + share * FORM.value_units, outs[share], mask=mask)


@triton.jit
def attend_tokens(
    high, low, total, factor, cap, oldest, is_windowed: tl.constexpr, arena, page_count, table,
    width, stride, count, first, last, listed, base,
    FORM: tl.constexpr, BACKWARD: tl.constexpr, HEADS: tl.constexpr, TILE: tl.constexpr,
    EXACT: tl.constexpr, CAPPED: tl.constexpr,
):  # fmt: skip
    """Softmax over the tiles ``first`` to ``last`` of short pages: 16-bit, or small K8V8 pages.

    Returns peak, sum of weights, and unnormalised output.
    """
    high = tl.trans(high)
    low = tl.trans(low)
    peak = tl.full([HEADS], float("-inf"), tl.float32)
    mass = tl.zeros([HEADS], tl.float32)
    out = tl.full([FORM.value_tile, HEADS], 0.0, tl.float32)
    for tile in range(first, last):
        page, row, live, wrong = slots_of(
            arena, page_count, table, width, stride, tile * TILE, count, FORM,
            BACKWARD, TILE, listed, base,
        )  # fmt: skip
        logits = tl.zeros([TILE, HEADS], tl.float32)
        codes = key_units(page, row, live, FORM)
        if FORM.key_bits == 8:
            numbers = numbers_of_codes(codes, FORM.is_float)
            logits = added(logits, numbers, high, low, EXACT, FORM.slices)
            key_scale, key_zero = metadata_of(page, row, live, FORM, True)
            logits = logits * key_scale[:, None] + total[None, :] * key_zero[:, None]
        else:
            logits = added(logits, codes, high, low, EXACT, FORM.slices)
        logits = biased(capped(logits * factor[None, :], cap, CAPPED), page, row, live, FORM)
        shown = live
        if is_windowed:
            shown = shown & (positions_of(page, row, live, FORM) >= oldest)
        hidden = tl.where(wrong, float("nan"), float("-inf"))
        logits = tl.where(shown[:, None], logits, hidden[:, None])
        before = peak
        peak = tl.maximum(peak, tl.max(logits, 0))
        start = tl.where(peak == float("-inf"), 0.0, peak)
        weights = tl.exp2(logits - start[None, :])
        rescale = tl.exp2(before - start)
        mass = mass * rescale + tl.sum(weights, 0)
        units = value_units(page, row, live, FORM)
        if FORM.value_bits == 8:
            scale, zero = metadata_of(page, row, live, FORM, False)
            unit = tl.max(unit_of(scale)[0], 0)
            first_part, second_part = halves(weights * (scale / unit)[:, None])
            codes = tl.trans(numbers_of_codes(units, FORM.is_float))
            part = added(tl.zeros_like(out), codes, first_part, second_part, EXACT)
            part = part * unit + tl.sum(weights * zero[:, None], 0)[None, :]
        else:
            first_part, second_part = halves(weights)
            part = added(tl.zeros_like(out), tl.trans(units), first_part, second_part, EXACT)
        out = tl.fma(out, rescale[None, :], part)
    return peak, mass, out


@triton.jit
def score_run(
    query, arena, mirror, slots, positions, lse, page_count, scale, cap, window, weight,
    table, tokens, slot_count, width, by_slot, by_head, by_page, count_slot, count_head,
    FORM: tl.constexpr, BACKWARD: tl.constexpr, RUNS: tl.constexpr,
    G: tl.constexpr, HEADS: tl.constexpr, TILE: tl.constexpr,
    EXACT: tl.constexpr, CAPPED: tl.constexpr,
):  # fmt: skip
    """Add weights to the scores of a run of tokens; atomic, as requests may share a page.

    Grid: runs of one section, KV heads, requests. ``mirror``: None, or an arena with the same
    pages, into which the sums are stored.
    """
    request, head = tl.program_id(2), tl.program_id(1)
    table, width, count = row_of(
        table, tokens, slots, slot_count, width, by_slot, by_head, count_slot, count_head, request,
        head,
    )  # fmt: skip
    first_tile, last_tile = tiles_of(count, tl.program_id(0), RUNS, TILE)
    group = (request * tl.num_programs(1) + head) * G
    split, total, unit = split_query(query + group.to(tl.int64) * FORM.dim, G, HEADS, FORM)
    factor = (unit * scale)[:, None]
    oldest = oldest_of(positions, request, window)
    heads = tl.arange(0, HEADS)
    sums = tl.load(lse + group + heads, mask=heads < G, other=float("inf"))
    sums *= 1.4426950408889634  # log2(e)
    for tile in range(first_tile, last_tile):
        page, row, live, _wrong = slots_of(
            arena, page_count, table, width, by_page, tile * TILE, count, FORM, BACKWARD, TILE
        )
        logits = tile_logits(split, total, page, row, live, FORM, EXACT)
        logits = capped(logits * factor, cap, CAPPED)
        received = tl.max(tl.exp2(logits - sums[:, None]), 0) * weight
        # Excludes NaN, which would stay in the score, and numbers that atomic additions take for 0.
        shown = live & (received >= 1.1754944e-38)
        if positions is not None:
            shown = shown & (positions_of(page, row, live, FORM) >= oldest)
        at = (page + FORM.scores).to(tl.pointer_type(tl.float32)) + row
        before = tl.atomic_add(at, received, mask=shown, sem="relaxed")
        if mirror is not None:
            other = mirror + (page.to(tl.int64) - arena.to(tl.int64))
            at = (other + FORM.scores).to(tl.pointer_type(tl.float32)) + row
            tl.store(at, before + received, mask=shown)


@triton.jit
def record_rows(
    progress, slot_count, slots, positions, rows, layer, layers, BLOCK: tl.constexpr
):  # fmt: skip
    """Store the number of layers that are scored; a launch of its own, so that it comes after the
    scores. Grid: 1.
    """
    row = tl.arange(0, BLOCK)
    slot = tl.load(slots + row, mask=row < rows, other=-1)
    position = tl.load(positions + row, mask=row < rows, other=0).to(tl.int64)
    known = (slot >= 0) & (slot < slot_count)
    tl.store(progress + slot, position * layers + layer + 1, mask=known)


@triton.jit
def merge_runs(
    partial, peaks, sums, starts, out, lse, factor,
    G: tl.constexpr, DIM: tl.constexpr, WIDE: tl.constexpr, STAGES: tl.constexpr,
    STEP: tl.constexpr,
):  # fmt: skip
    """Merge the runs of one query head: sum weighted by 2**(peak - largest peak), normalised.

    Runs without a token have written no output; their part of ``partial`` may be NaN. ``starts``:
    the first run of each head row, and the number of all. The output is rotated back in blocks of
    ``2**STAGES`` channels. Grid: query heads of all requests.
    """
    row = tl.program_id(0).to(tl.int64)
    head_row, head = row // G, row % G
    end = tl.load(starts + head_row + 1)
    channel = tl.arange(0, WIDE)
    largest = float("-inf")
    total = 0.0
    mixed = tl.zeros([WIDE], tl.float32)
    for first in range(tl.load(starts + head_row), end, STEP):
        run = first + tl.arange(0, STEP)
        at = run.to(tl.int64) * G + head
        mass = tl.load(sums + at, mask=run < end, other=0.0)
        used = (run < end) & (mass != 0)
        peak = tl.load(peaks + at, mask=used, other=float("-inf"))
        at = partial + at[:, None] * DIM + channel[None, :]
        part = tl.load(at, mask=used[:, None] & (channel < DIM)[None, :], other=0.0)
        before = largest
        largest = tl.maximum(largest, tl.max(peak, 0))
        base = tl.where(largest == float("-inf"), 0.0, largest)
        share = tl.exp2(peak - base)
        rescale = tl.exp2(before - base)
        total = total * rescale + tl.sum(share * mass, 0)
        mixed = mixed * rescale + tl.sum(part * share[:, None], 0)
    mixed = mixed / tl.where(total == 0, 1.0, total)
    if STAGES > 0:
        turned = mixed_channels(tl.reshape(mixed, [1, WIDE]), 1, WIDE, STAGES)
        mixed = tl.reshape(turned, [WIDE]) * factor
    tl.store(out + row * DIM + channel, mixed, mask=channel < DIM)
    if lse is not None:
        natural = (largest + tl.log2(tl.where(total == 0, 1.0, total))) * 0.6931471805599453
        tl.store(lse + row, natural)
