# pyright: basic, reportPrivateImportUsage=false, reportArgumentType=false, reportAttributeAccessIssue=false, reportGeneralTypeIssues=false
# Triton's language is not Python: the checker sees integers where tiles will be, and a
# condition on constants must not share an `if` with one on numbers.
"""Prefill attention on the GPU: one pass for the output, a second for significance."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from math import e, log2

import torch
import triton
import triton.language as tl
from torch import Tensor

from triptych.core.errors import ConfigError
from triptych.kernels.form import form_of
from triptych.kernels.gpu_pages import capped, cells_of, numbers_of, positions_of
from triptych.kernels.launch import (
    Argument,
    Launch,
    check_device,
    is_interpreted,
    power_of_two,
)
from triptych.kernels.pages import Past, check_arena, check_indices


@dataclass(frozen=True, slots=True)
class Block:
    """What one program does."""

    queries: int
    keys: int
    """At a time."""
    warps: int
    stages: int = 2


BLOCKS = {64: Block(64, 64, 4), 128: Block(64, 64, 8), 256: Block(64, 32, 8)}
"""By the largest head size that it is for. Chosen by registers: no spill for any format."""
EXACT_BLOCKS = {64: Block(32, 32, 4), 128: Block(32, 32, 4), 256: Block(32, 16, 8)}
"""For float32."""


def prefill_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    offsets: Sequence[int],
    *,
    scale: float,
    window: int = 0,
    softcap: float = 0.0,
    past: Past | None = None,
    significance: Tensor | None = None,
) -> Tensor:
    """See ``reference.prefill_attention``.

    bfloat16 is multiplied as such, past keys and values too; float32 keeps its accuracy.
    A page id that the arena does not have gives NaN.

    Source:  FlashAttention (online softmax over blocks); column sums in a second pass over
             the products, from the logarithms of the sums that the first one leaves
    """
    out = torch.empty_like(query, memory_format=torch.contiguous_format)
    launches = plan(
        query, key, value, offsets, scale, window, softcap, past, significance, out
    )  # fmt: skip
    for launch in launches:
        launch.run()
    return out


def plan(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    offsets: Sequence[int],
    scale: float,
    window: int,
    softcap: float,
    past: Past | None,
    significance: Tensor | None,
    out: Tensor,
) -> list[Launch]:
    """The launches of one call: output, and if wanted the sums over new and over past keys."""
    _check(query, key, value, past, significance)
    total, heads, dim = query.shape
    kv_heads, sequences = key.shape[1], len(offsets) - 1
    longest = max((end - start for start, end in pairwise(offsets)), default=0)
    query, key, value = query.contiguous(), _dense(key), _dense(value)
    is_exact = query.dtype == torch.float32
    block = next(
        item for size, item in (EXACT_BLOCKS if is_exact else BLOCKS).items() if dim <= size
    )
    starts = torch.tensor(offsets, dtype=torch.int32, device=query.device)
    first = None
    if past is not None and window > 0:
        first = torch.zeros(sequences, dtype=torch.int32, device=query.device)
    lse = None
    if significance is not None:
        lse = query.new_empty((total, heads), dtype=torch.float32)
    factors = (scale / softcap, softcap * log2(e)) if softcap > 0 else (scale * log2(e), 0.0)
    shared = (*factors, window, *_past_arguments(past))
    constants = {
        "FORM": None if past is None else form_of(past.layout),
        "G": heads // kv_heads,
        "DIM": dim,
        "WIDE": max(16, power_of_two(dim)),
        "QUERIES": block.queries,
        "KEYS": block.keys,
        "CAPPED": softcap > 0,
        "WINDOWED": window > 0,
        # The interpreter cannot multiply bfloat16.
        "TYPE": tl.float32 if is_exact or is_interpreted() else tl.bfloat16,
        "PRECISION": "ieee" if torch.version.hip else "tf32x3",
    }
    size = {"warps": block.warps, "stages": block.stages, "registers": 255}
    launches: list[Launch] = []
    if past is not None and first is not None:
        launches.append(_plan_first(past, first, sequences, kv_heads))
    grid = (-(-longest // block.queries), heads, sequences)
    tensors = (query, key, value, out, lse, starts, first, *key.stride()[:2], *value.stride()[:2])
    launches.append(Launch(attend_chunks, grid, (*tensors, *shared), constants, **size))
    if significance is None or lse is None:
        return launches
    tensors = (
        query,
        key,
        lse,
        starts,
        first,
        significance,
        *key.stride()[:2],
        *significance.stride(),
    )
    seen = [(False, longest)]
    if past is not None:
        seen.append((True, past.pages.shape[2] * past.layout.tokens))
    for is_past, count in seen:
        grid = (-(-count // block.keys), heads, sequences)
        which = {**constants, "PAST": is_past}
        launches.append(Launch(sum_columns, grid, (*tensors, *shared), which, **size))
    return launches


def _plan_first(past: Past, first: Tensor, sequences: int, kv_heads: int) -> Launch:
    """Fill ``first`` with the position of each sequence's first new token."""
    constants = {"FORM": form_of(past.layout), "TILE": 128}
    arguments = (first, *_past_arguments(past))
    return Launch(find_first, (sequences, kv_heads), arguments, constants)


def _past_arguments(past: Past | None) -> Iterator[Argument]:
    """Arena, its pages, table, width, strides, counts and their strides."""
    if past is None:
        yield from (None, 0, None, 0, 0, 0, 0, None, 0, 0)
        return
    yield past.arena
    yield past.arena.shape[0]
    yield past.pages
    yield past.pages.shape[2]
    yield from past.pages.stride()
    yield past.tokens
    yield from past.tokens.stride()


def _check(
    query: Tensor, key: Tensor, value: Tensor, past: Past | None, significance: Tensor | None
) -> None:
    """Raise ``ConfigError`` unless a kernel can be compiled for the inputs."""
    check_device("prefill_attention", query, key, value, significance)
    dim = query.shape[2]
    if query.dtype not in (torch.float32, torch.bfloat16) or {key.dtype, value.dtype} != {
        query.dtype
    }:
        raise ConfigError(
            f"prefill_attention: query {query.dtype}, key {key.dtype}, value {value.dtype}: "
            "expected float32 or bfloat16 for all"
        )
    if dim > max(BLOCKS):
        raise ConfigError(
            f"prefill_attention: head_dim {dim}: GPU kernels take up to {max(BLOCKS)}"
        )
    if past is not None:
        check_arena(past.arena, past.layout)
        check_indices(past.pages, past.tokens)
        check_device("prefill_attention", query, past.arena, past.pages, past.tokens)
        if past.layout.head_dim != dim or past.tokens.shape[1] != key.shape[1]:
            raise ConfigError(
                f"prefill_attention: past of {past.tokens.shape[1]} KV heads, head_dim "
                f"{past.layout.head_dim}: expected {key.shape[1]}, {dim}"
            )


def _dense(vectors: Tensor) -> Tensor:
    return vectors if vectors.stride(2) == 1 else vectors.contiguous()


@triton.jit
def past_of(table, counts, by_sequence, by_head, count_sequence, count_head, sequence, head):
    """A head row's page table, and how many tokens it holds."""
    count = tl.load(counts + sequence.to(tl.int64) * count_sequence + head * count_head)
    return table + sequence.to(tl.int64) * by_sequence + head.to(tl.int64) * by_head, count


@triton.jit
def find_first(
    first, arena, page_count, table, width, by_sequence, by_head, by_page, counts,
    count_sequence, count_head, FORM: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """Raise ``first[sequence]`` to one more than the largest position in one head row."""
    sequence, head = tl.program_id(0), tl.program_id(1)
    table, count = past_of(
        table, counts, by_sequence, by_head, count_sequence, count_head, sequence, head
    )
    largest = tl.full([TILE], -1, tl.int32)
    for start in range(0, count, TILE):
        page, row, live, _wrong = cells_of(
            arena, page_count, table, width, by_page, start, count, FORM, False, TILE
        )
        largest = tl.maximum(largest, positions_of(page, row, live, FORM))
    tl.atomic_max(first + sequence, tl.max(largest, 0) + 1)


@triton.jit
def rows_at(start, stride, row, count, DIM: tl.constexpr, WIDE: tl.constexpr, TYPE: tl.constexpr):
    """Vectors ``row`` of a tensor [count, ...] as a tile [rows, WIDE]; zeros beyond its end."""
    channel = tl.arange(0, WIDE)
    at = start + row.to(tl.int64)[:, None] * stride + channel[None, :]
    if DIM == WIDE:
        mask = (row < count)[:, None]
    else:
        mask = (row < count)[:, None] & (channel < DIM)[None, :]
    return tl.load(at, mask=mask, other=0.0).to(TYPE)


@triton.jit
def soft_step(logits, values, peak, mass, mixed, PRECISION: tl.constexpr):
    """One step of an online softmax in powers of two over a tile of keys."""
    before = peak
    peak = tl.maximum(peak, tl.max(logits, 1))
    base = tl.where(peak == float("-inf"), 0.0, peak)
    weights = tl.exp2(logits - base[:, None])
    rescale = tl.exp2(before - base)
    mass = mass * rescale + tl.sum(weights, 1)
    mixed = mixed * rescale[:, None]
    mixed += tl.dot(weights.to(values.dtype), values, input_precision=PRECISION)
    return peak, mass, mixed


@triton.jit
def attend_chunks(
    query, key, value, out, lse, starts, first, key_token, key_head, value_token, value_head,
    scale, cap, window, arena, page_count, table, width, by_sequence, by_head, by_page, counts,
    count_sequence, count_head,
    FORM: tl.constexpr, G: tl.constexpr, DIM: tl.constexpr, WIDE: tl.constexpr,
    QUERIES: tl.constexpr, KEYS: tl.constexpr, CAPPED: tl.constexpr, WINDOWED: tl.constexpr,
    TYPE: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """A block of queries of one head over the past in pages, then over new keys.

    Grid: blocks of the longest sequence, query heads, sequences.
    """
    head, sequence = tl.program_id(1), tl.program_id(2)
    start = tl.load(starts + sequence)
    count = tl.load(starts + sequence + 1) - start
    if tl.program_id(0) * QUERIES >= count:
        return
    heads = tl.num_programs(1)
    asked = tl.program_id(0) * QUERIES + tl.arange(0, QUERIES)
    line = (start.to(tl.int64) * heads + head) * DIM
    tile = rows_at(query + line, heads * DIM, asked, count, DIM, WIDE, TYPE)
    peak = tl.full([QUERIES], float("-inf"), tl.float32)
    mass = tl.full([QUERIES], 0.0, tl.float32)
    mixed = tl.full([QUERIES, WIDE], 0.0, tl.float32)
    if FORM is not None:
        table, known = past_of(
            table, counts, by_sequence, by_head, count_sequence, count_head, sequence, head // G
        )
        channel = tl.arange(0, WIDE)
        position = asked
        if WINDOWED:
            position = asked + tl.load(first + sequence)
        for at in range(0, known, KEYS):
            page, row, live, wrong = cells_of(
                arena, page_count, table, width, by_page, at, known, FORM, False, KEYS
            )
            keys = numbers_of(page, row, live, channel, FORM, True).to(TYPE)
            logits = tl.dot(tile, tl.trans(keys), input_precision=PRECISION)
            logits = capped(logits * scale, cap, CAPPED)
            shown = live[None, :]
            if WINDOWED:
                age = position[:, None] - positions_of(page, row, live, FORM)[None, :]
                shown = shown & (age < window)
            hidden = tl.where(wrong, float("nan"), float("-inf"))
            logits = tl.where(shown, logits, hidden[None, :])
            values = numbers_of(page, row, live, channel, FORM, False).to(TYPE)
            peak, mass, mixed = soft_step(logits, values, peak, mass, mixed, PRECISION)
    begin = 0
    if WINDOWED:
        begin = tl.maximum(tl.program_id(0) * QUERIES - window + 1, 0) // KEYS * KEYS
    end = tl.minimum((tl.program_id(0) + 1) * QUERIES, count)
    key += start.to(tl.int64) * key_token + (head // G) * key_head
    value += start.to(tl.int64) * value_token + (head // G) * value_head
    for at in range(begin, end, KEYS):
        given = at + tl.arange(0, KEYS)
        keys = rows_at(key, key_token, given, count, DIM, WIDE, TYPE)
        logits = tl.dot(tile, tl.trans(keys), input_precision=PRECISION)
        logits = capped(logits * scale, cap, CAPPED)
        shown = (given[None, :] <= asked[:, None]) & (given < count)[None, :]
        if WINDOWED:
            shown = shown & (asked[:, None] - given[None, :] < window)
        logits = tl.where(shown, logits, float("-inf"))
        values = rows_at(value, value_token, given, count, DIM, WIDE, TYPE)
        peak, mass, mixed = soft_step(logits, values, peak, mass, mixed, PRECISION)
    mass = tl.where(mass == 0, 1.0, mass)  # rows beyond the last query
    channel = tl.arange(0, WIDE)
    to = out + line + asked.to(tl.int64)[:, None] * (heads * DIM) + channel[None, :]
    mask = (asked < count)[:, None] & (channel < DIM)[None, :]
    tl.store(to, (mixed / mass[:, None]).to(out.dtype.element_ty), mask=mask)
    if lse is not None:
        to = lse + (start + asked).to(tl.int64) * heads + head
        tl.store(to, peak + tl.log2(mass), mask=asked < count)


@triton.jit
def sum_columns(
    query, key, lse, starts, first, sums, key_token, key_head, sum_sequence, sum_head, sum_key,
    scale, cap, window, arena, page_count, table, width, by_sequence, by_head, by_page, counts,
    count_sequence, count_head,
    FORM: tl.constexpr, G: tl.constexpr, DIM: tl.constexpr, WIDE: tl.constexpr,
    QUERIES: tl.constexpr, KEYS: tl.constexpr, CAPPED: tl.constexpr, WINDOWED: tl.constexpr,
    TYPE: tl.constexpr, PRECISION: tl.constexpr, PAST: tl.constexpr,
):  # fmt: skip
    """Add the weights that a block of keys gets from all new queries of one head.

    ``lse`` holds log2 of each query's sum, so a weight is one exponential. No two programs
    write one number. Grid: blocks of keys (past or new ones), query heads, sequences.
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
    given = at + tl.arange(0, KEYS)
    begin, end = 0, count
    if PAST:
        if at >= known:
            return
        page, row, live, _wrong = cells_of(
            arena, page_count, table, width, by_page, at, known, FORM, False, KEYS
        )
        keys = numbers_of(page, row, live, tl.arange(0, WIDE), FORM, True).to(TYPE)
        position = given
        if WINDOWED:
            position = positions_of(page, row, live, FORM) - tl.load(first + sequence)
        exists, index = live, given
    else:
        if at >= count:
            return
        key += start.to(tl.int64) * key_token + (head // G) * key_head
        keys = rows_at(key, key_token, given, count, DIM, WIDE, TYPE)
        begin = at // QUERIES * QUERIES
        if WINDOWED:
            end = tl.minimum(count, at + KEYS + window)
        position, exists, index = given, given < count, known + given
    received = tl.full([KEYS], 0.0, tl.float32)
    line = query + (start.to(tl.int64) * heads + head) * DIM
    for other in range(begin, end, QUERIES):
        asked = other + tl.arange(0, QUERIES)
        tile = rows_at(line, heads * DIM, asked, count, DIM, WIDE, TYPE)
        logits = tl.dot(tile, tl.trans(keys), input_precision=PRECISION)
        logits = capped(logits * scale, cap, CAPPED)
        total = tl.load(
            lse + (start + asked).to(tl.int64) * heads + head, mask=asked < count, other=0.0
        )
        shown = exists[None, :] & (asked < count)[:, None]
        if not PAST:
            shown = shown & (given[None, :] <= asked[:, None])
        if WINDOWED:
            shown = shown & (asked[:, None] - position[None, :] < window)
        weights = tl.where(shown, tl.exp2(logits - total[:, None]), 0.0)
        received += tl.sum(weights, 0)
    to = (
        sums + sequence.to(tl.int64) * sum_sequence + head.to(tl.int64) * sum_head + index * sum_key
    )
    tl.store(to, tl.load(to, mask=exists, other=0.0) + received, mask=exists)
