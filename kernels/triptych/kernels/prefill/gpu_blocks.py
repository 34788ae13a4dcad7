# pyright: basic, reportPrivateImportUsage=false, reportArgumentType=false, reportAttributeAccessIssue=false, reportGeneralTypeIssues=false
# Triton's language is not Python: the checker takes tiles for integers. A condition on constants
# must not share an `if` with one on numbers, nor stand in an expression.
# ruff: noqa: SIM108
"""Triton kernels of prefill attention: output of a query block, and column sums of a key block."""

import triton
import triton.language as tl

from triptych.kernels.triton.page_access import (
    capped,
    numbers_of,
    online_softmax,
    positions_of,
    sliced_dot,
    slots_of,
)


@triton.jit
def past_of(table, counts, by_sequence, by_head, count_sequence, count_head, sequence, head):
    """Page table and number of tokens of a head row."""
    count = tl.load(counts + sequence.to(tl.int64) * count_sequence + head * count_head)
    return table + sequence.to(tl.int64) * by_sequence + head.to(tl.int64) * by_head, count


@triton.jit
def find_first(
    first, arena, page_count, table, width, by_sequence, by_head, by_page, counts,
    count_sequence, count_head, FORM: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """Set ``first[sequence]`` to at least one more than the largest position of one head row."""
    sequence, head = tl.program_id(0), tl.program_id(1)
    table, count = past_of(
        table, counts, by_sequence, by_head, count_sequence, count_head, sequence, head
    )
    largest = tl.full([TILE], -1, tl.int32)
    for start in range(0, count, TILE):
        page, row, live, _wrong = slots_of(
            arena, page_count, table, width, by_page, start, count, FORM, False, TILE
        )
        largest = tl.maximum(largest, positions_of(page, row, live, FORM))
    tl.atomic_max(first + sequence, tl.max(largest, 0) + 1)


@triton.jit
def rows_at(start, stride, count, ROWS: tl.constexpr, DIM: tl.constexpr, WIDE: tl.constexpr,
            TYPE: tl.constexpr):  # fmt: skip
    """Load ``count`` vectors as a tile [ROWS, WIDE]; 0 beyond the end."""
    row, channel = tl.arange(0, ROWS), tl.arange(0, WIDE)
    at = start + (row[:, None] * stride + channel[None, :])
    if DIM == WIDE:
        mask = (row < count)[:, None]
    else:
        mask = (row < count)[:, None] & (channel < DIM)[None, :]
    return tl.load(at, mask=mask, other=0.0).to(TYPE)


@triton.jit
def full_rows(start, stride, ROWS: tl.constexpr, DIM: tl.constexpr, WIDE: tl.constexpr,
              TYPE: tl.constexpr):  # fmt: skip
    """``rows_at`` of rows that all exist."""
    row, channel = tl.arange(0, ROWS), tl.arange(0, WIDE)
    at = start + (row[:, None] * stride + channel[None, :])
    if DIM == WIDE:
        vectors = tl.load(at)
    else:
        vectors = tl.load(at, mask=(channel < DIM)[None, :], other=0.0)
    return vectors.to(TYPE)


@triton.jit
def products_of_rows(queries, keys, SLICES: tl.constexpr):
    """Products of queries [n, WIDE] and keys [m, WIDE], float32 [n, m]."""
    if SLICES > 1:
        products = sliced_dot(queries, tl.trans(keys), SLICES)
    else:
        products = tl.dot(queries, tl.trans(keys), input_precision="ieee")
    return products


@triton.jit
def add_tile(logits, values, peak, mass, mixed):
    """Add a tile of values to the output ``mixed``, weighted by an online softmax."""
    weights, rescale, peak, mass = online_softmax(logits, peak, mass)
    mixed = mixed * rescale[:, None]
    mixed += tl.dot(weights.to(values.dtype), values, input_precision="ieee")
    return peak, mass, mixed


@triton.jit
def add_seen(products, hidden, values, scale, cap, peak, mass, mixed, CAPPED: tl.constexpr):
    """``add_tile`` where each query has seen a key, so that no largest logit is infinite.

    ``hidden``: None, or a tile that is -inf for keys that a query may not read, and otherwise 0.
    The difference to the largest logit is one fused operation with the scale.
    """
    before = peak
    if CAPPED:
        logits = capped(products * scale, cap, CAPPED)
        if hidden is not None:
            logits += hidden
        peak = tl.maximum(peak, tl.max(logits, 1))
        weights = tl.exp2(logits - peak[:, None])
    elif hidden is not None:
        logits = products * scale + hidden
        peak = tl.maximum(peak, tl.max(logits, 1))
        weights = tl.exp2(logits - peak[:, None])
    else:
        peak = tl.maximum(peak, tl.max(products, 1) * scale)
        weights = tl.exp2(products * scale - peak[:, None])
    rescale = tl.exp2(before - peak)
    mass = mass * rescale + tl.sum(weights, 1)
    weights = weights.to(values.dtype)
    mixed = tl.dot(weights, values, mixed * rescale[:, None], input_precision="ieee")
    return peak, mass, mixed


@triton.jit
def attend_before(
    tile, key, value, end, key_token, value_token, scale, cap, peak, mass, mixed,
    DIM: tl.constexpr, WIDE: tl.constexpr, KEYS: tl.constexpr, CAPPED: tl.constexpr,
    TYPE: tl.constexpr, SLICES: tl.constexpr,
):  # fmt: skip
    """Attend to the first ``end`` keys, all of which each query sees: tiles without masks.

    Source: FlashAttention-2, section 3.1 (blocks below the diagonal need no causal mask)
    """
    for at in range(0, end, KEYS):
        keys = full_rows(key + tl.cast(at, tl.int64) * key_token, key_token, KEYS, DIM, WIDE, TYPE)
        products = products_of_rows(tile, keys, SLICES)
        near = value + tl.cast(at, tl.int64) * value_token
        values = full_rows(near, value_token, KEYS, DIM, WIDE, TYPE)
        peak, mass, mixed = add_seen(products, None, values, scale, cap, peak, mass, mixed, CAPPED)
    return peak, mass, mixed


@triton.jit
def attend_chunks(
    query, key, value, out, lse, sinks, starts, two_way, first, key_token, key_head, value_token,
    value_head, scale, cap, window, arena, page_count, table, width, by_sequence, by_head, by_page,
    counts, count_sequence, count_head,
    FORM: tl.constexpr, G: tl.constexpr, DIM: tl.constexpr, WIDE: tl.constexpr,
    QUERIES: tl.constexpr, KEYS: tl.constexpr, CAPPED: tl.constexpr, WINDOWED: tl.constexpr,
    TYPE: tl.constexpr, SLICES: tl.constexpr,
):  # fmt: skip
    """Attention of a block of queries of one head over past keys in pages, then new keys.

    ``two_way[sequence]``: whether new tokens attend to all new ones; None: of no sequence.

    Grid: blocks of the longest sequence, query heads, sequences.
    """
    head, sequence = tl.program_id(1), tl.program_id(2)
    start = tl.load(starts + sequence)
    count = tl.load(starts + sequence + 1) - start
    if tl.program_id(0) * QUERIES >= count:
        return
    heads = tl.num_programs(1)
    query_index = tl.program_id(0) * QUERIES + tl.arange(0, QUERIES)
    line = ((start + tl.program_id(0) * QUERIES).to(tl.int64) * heads + head) * DIM
    left = count - tl.program_id(0) * QUERIES
    tile = rows_at(query + line, heads * DIM, left, QUERIES, DIM, WIDE, TYPE)
    if sinks is not None:
        peak = tl.full([QUERIES], 1.4426950408889634, tl.float32) * tl.load(sinks + head)
        mass = tl.full([QUERIES], 1.0, tl.float32)
    else:
        peak = tl.full([QUERIES], float("-inf"), tl.float32)
        mass = tl.full([QUERIES], 0.0, tl.float32)
    mixed = tl.full([QUERIES, WIDE], 0.0, tl.float32)
    if FORM is not None:
        table, known = past_of(
            table, counts, by_sequence, by_head, count_sequence, count_head, sequence, head // G
        )
        channel = tl.arange(0, WIDE)
        position = query_index
        if WINDOWED:
            position = query_index + tl.load(first + sequence)
        # A pipeline can prefetch codes, which are bytes, only into registers.
        for at in tl.range(0, known, KEYS, num_stages=1):
            page, row, live, wrong = slots_of(
                arena, page_count, table, width, by_page, at, known, FORM, False, KEYS
            )
            keys = numbers_of(page, row, live, channel, FORM, True).to(TYPE)
            logits = products_of_rows(tile, keys, SLICES)
            logits = capped(logits * scale, cap, CAPPED)
            visible = live[None, :]
            if WINDOWED:
                age = position[:, None] - positions_of(page, row, live, FORM)[None, :]
                visible = visible & (age < window)
            hidden = tl.where(wrong, float("nan"), float("-inf"))
            logits = tl.where(visible, logits, hidden[None, :])
            values = numbers_of(page, row, live, channel, FORM, False).to(TYPE)
            peak, mass, mixed = add_tile(logits, values, peak, mass, mixed)
    begin = 0
    if WINDOWED:
        begin = tl.maximum(tl.program_id(0) * QUERIES - window + 1, 0) // KEYS * KEYS
    end = tl.minimum((tl.program_id(0) + 1) * QUERIES, count)
    if two_way is not None:
        reads_all = tl.load(two_way + sequence) != 0
        begin = tl.where(reads_all, 0, begin)  # for windows; without one all before are seen
        end = tl.where(reads_all, count, end)
    key += start.to(tl.int64) * key_token + (head // G) * key_head
    value += start.to(tl.int64) * value_token + (head // G) * value_head
    if not WINDOWED:
        peak, mass, mixed = attend_before(
            tile, key, value, tl.program_id(0) * QUERIES, key_token, value_token, scale, cap, peak,
            mass, mixed, DIM, WIDE, KEYS, CAPPED, TYPE, SLICES,
        )  # fmt: skip
        begin = tl.program_id(0) * QUERIES
    for at in range(begin, end, KEYS):
        near = key + tl.cast(at, tl.int64) * key_token
        keys = rows_at(near, key_token, count - at, KEYS, DIM, WIDE, TYPE)
        products = products_of_rows(tile, keys, SLICES)
        key_index = at + tl.arange(0, KEYS)
        visible = (key_index[None, :] <= query_index[:, None]) & (key_index < count)[None, :]
        if WINDOWED:
            visible = visible & (query_index[:, None] - key_index[None, :] < window)
        if two_way is not None:
            visible = visible | (reads_all & (key_index < count)[None, :])
        near = value + tl.cast(at, tl.int64) * value_token
        values = rows_at(near, value_token, count - at, KEYS, DIM, WIDE, TYPE)
        if WINDOWED:
            logits = tl.where(visible, capped(products * scale, cap, CAPPED), float("-inf"))
            peak, mass, mixed = add_tile(logits, values, peak, mass, mixed)
        else:  # the first key of the block is seen by each query
            hidden = tl.where(visible, 0.0, float("-inf"))
            peak, mass, mixed = add_seen(
                products, hidden, values, scale, cap, peak, mass, mixed, CAPPED
            )
    mass = tl.where(mass == 0, 1.0, mass)  # rows beyond the last query
    channel = tl.arange(0, WIDE)
    to = out + line + (tl.arange(0, QUERIES)[:, None] * (heads * DIM) + channel[None, :])
    mask = (query_index < count)[:, None] & (channel < DIM)[None, :]
    tl.store(to, (mixed / mass[:, None]).to(out.dtype.element_ty), mask=mask)
    if lse is not None:
        to = lse + (start + query_index).to(tl.int64) * heads + head
        tl.store(to, peak + tl.log2(mass), mask=query_index < count)


@triton.jit
def products_of(
    line, lse, keys, first, count, heads, QUERIES: tl.constexpr, DIM: tl.constexpr,
    WIDE: tl.constexpr, TYPE: tl.constexpr, SLICES: tl.constexpr,
):  # fmt: skip
    """Products of queries from ``first`` on with ``keys``, and log2 of the sum of each query.

    That of queries beyond the last is infinite, so their weights are 0 without a mask.
    """
    line += tl.cast(first, tl.int64) * (heads * DIM)
    tile = rows_at(line, heads * DIM, count - first, QUERIES, DIM, WIDE, TYPE)
    row = tl.arange(0, QUERIES)
    at = lse + tl.cast(first, tl.int64) * heads + row * heads
    total = tl.load(at, mask=row < count - first, other=float("inf"))
    return products_of_rows(tile, keys, SLICES), total


@triton.jit
def sum_columns(
    query, key, lse, starts, two_way, first, sums, key_token, key_head, sum_sequence, sum_head,
    sum_key, scale, cap, window, arena, page_count, table, width, by_sequence, by_head, by_page,
    counts, count_sequence, count_head,
    FORM: tl.constexpr, G: tl.constexpr, DIM: tl.constexpr, WIDE: tl.constexpr,
    QUERIES: tl.constexpr, KEYS: tl.constexpr, CAPPED: tl.constexpr, WINDOWED: tl.constexpr,
    TYPE: tl.constexpr, SLICES: tl.constexpr, PAST: tl.constexpr,
):  # fmt: skip
    """Add the weights of a block of keys over all new queries of one head to ``sums``.

    ``lse`` has log2 of the sum of each query, so a weight takes one exponential. No two programs
    write the same number. Grid: blocks of past or of new keys, query heads, sequences.
    """
    head, sequence = tl.program_id(1), tl.program_id(2)
    heads = tl.num_programs(1)
    start = tl.load(starts + sequence)
    count = tl.load(starts + sequence + 1) - start
    known = 0
    if FORM is not None:
        table, known = past_of(
            table, counts, by_sequence, by_head, count_sequence, count_head, sequence, head // G
        )
    at = tl.program_id(0) * KEYS
    key_index = at + tl.arange(0, KEYS)
    begin, end = 0, count
    if PAST:
        if at >= known:
            return
        page, row, live, _wrong = slots_of(
            arena, page_count, table, width, by_page, at, known, FORM, False, KEYS
        )
        keys = numbers_of(page, row, live, tl.arange(0, WIDE), FORM, True).to(TYPE)
        position = key_index
        if WINDOWED:
            position = positions_of(page, row, live, FORM) - tl.load(first + sequence)
        exists, index = live, key_index
    else:
        if at >= count:
            return
        key += (start + at).to(tl.int64) * key_token + (head // G) * key_head
        keys = rows_at(key, key_token, count - at, KEYS, DIM, WIDE, TYPE)
        begin = at // QUERIES * QUERIES
        if WINDOWED:
            end = tl.minimum(count, at + KEYS + window)
        if two_way is not None:
            reads_all = tl.load(two_way + sequence) != 0
            begin = tl.where(reads_all, 0, begin)
            end = tl.where(reads_all, count, end)
        position, exists, index = key_index, key_index < count, known + key_index
    received = tl.full([KEYS], 0.0, tl.float32)
    line = query + (start.to(tl.int64) * heads + head) * DIM
    lse += start.to(tl.int64) * heads + head
    is_causal: tl.constexpr = (not PAST) and (not WINDOWED) and (two_way is None)
    masked = end
    if PAST and not WINDOWED:
        masked = begin
    if is_causal:
        masked = tl.minimum(end, (at + KEYS + QUERIES - 1) // QUERIES * QUERIES)
    for other in range(begin, masked, QUERIES):
        products, total = products_of(
            line, lse, keys, other, count, heads, QUERIES, DIM, WIDE, TYPE, SLICES
        )
        query_index = other + tl.arange(0, QUERIES)
        visible = exists[None, :] & (query_index < count)[:, None]
        if not PAST:
            visible = visible & (key_index[None, :] <= query_index[:, None])
        if WINDOWED:
            visible = visible & (query_index[:, None] - position[None, :] < window)
        if two_way is not None and not PAST:
            visible = visible | (reads_all & exists[None, :] & (query_index < count)[:, None])
        logits = capped(products * scale, cap, CAPPED)
        weights = tl.where(visible, tl.exp2(logits - total[:, None]), 0.0)
        received += tl.sum(weights, 0)
    for other in range(masked, end, QUERIES):
        products, total = products_of(
            line, lse, keys, other, count, heads, QUERIES, DIM, WIDE, TYPE, SLICES
        )
        logits = capped(products * scale, cap, CAPPED)
        received += tl.sum(tl.exp2(logits - total[:, None]), 0)
    to = (
        sums + sequence.to(tl.int64) * sum_sequence + head.to(tl.int64) * sum_head + index * sum_key
    )
    tl.store(to, tl.load(to, mask=exists, other=0.0) + received, mask=exists)
