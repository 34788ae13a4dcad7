# pyright: basic, reportPrivateImportUsage=false, reportArgumentType=false, reportAttributeAccessIssue=false, reportGeneralTypeIssues=false
# ruff: noqa: SIM102
# Triton's language is not Python: the checker sees integers where tiles will be, and a
# condition on constants must not share an `if` with one on numbers.
"""Decode attention on the GPU: runs of each section in parallel, merged by log-sum-exp."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from math import e, log2

import torch
import triton
import triton.language as tl
from torch import Tensor

from triptych.core.errors import ConfigError
from triptych.kernels.form import form_of
from triptych.kernels.gpu_pages import (
    capped,
    cells_of,
    half_of,
    metadata_of,
    positions_of,
    products,
    split_query,
    tile_logits,
    value_units,
)
from triptych.kernels.launch import Argument, Launch, check_device, power_of_two, processors
from triptych.kernels.pages import Section, check_arena, check_indices

SECTIONS = 3
"""Sections that one launch reads; a program reads one of them."""


@dataclass(frozen=True, slots=True)
class Tile:
    """What one program does at a time."""

    tokens: int
    warps: int
    stages: int
    """Tiles on their way from memory, plus one."""


TILES = {96: Tile(32, 2, 3), 128: Tile(64, 4, 3), 256: Tile(32, 4, 3)}
"""By the largest head size that it is for. Chosen by registers: no spill for any format, and
40 KiB and more on their way on each multiprocessor of an H100."""
MAX_REGISTERS = 255
"""All that a thread can have."""
MAX_GROUP = 32
"""Query heads of a KV head; the tile of one program holds them all."""
PROGRAMS_PER_PROCESSOR = 4
"""Enough to hide the latency of memory, few enough that merging stays cheap."""
MAX_RUNS = 128
"""Runs that a section of one head row is cut into at most."""


def decode_attention(
    query: Tensor,
    arena: Tensor,
    sections: Sequence[Section],
    slots: Tensor,
    *,
    scale: float,
    window: int = 0,
    softcap: float = 0.0,
    positions: Tensor | None = None,
    lse: Tensor | None = None,
) -> Tensor:
    """See ``reference.decode_attention``.

    float32 queries are multiplied as two fp16 halves, which keeps float32 accuracy; bfloat16
    ones once, and weights are rounded to fp16: errors of about 2**-12 of a value. A request
    without a visible token gets zeros. Nothing here waits for the device, so wrong page
    ids cannot raise: they give NaN.
    """
    out = torch.empty_like(query, dtype=torch.float32, memory_format=torch.contiguous_format)
    for launch in plan(query, arena, sections, slots, scale, window, softcap, positions, lse, out):
        launch.run()
    return out


def plan(
    query: Tensor,
    arena: Tensor,
    sections: Sequence[Section],
    slots: Tensor,
    scale: float,
    window: int,
    softcap: float,
    positions: Tensor | None,
    lse: Tensor | None,
    out: Tensor,
) -> list[Launch]:
    """The launches of one call: one for up to three sections, and one that merges."""
    rows, heads, dim = query.shape
    kv_heads = sections[0].tokens.shape[1]
    check_sections("decode_attention", arena, sections, heads, kv_heads, dim)
    check_indices(slots, *(() if positions is None else (positions,)))
    check_device("decode_attention", query, arena, slots, positions, lse)
    if window > 0 and positions is None:
        raise ConfigError("decode_attention: a window needs the positions of the queries")
    query, slots = query.contiguous(), slots.contiguous()
    positions = None if window == 0 or positions is None else positions.contiguous()
    group = heads // kv_heads
    tile = tile_of(dim, group)
    runs = _runs(sections, tile, rows * kv_heads, processors(query.device))
    total = sum(runs)
    partial = query.new_empty((rows, heads, total, dim), dtype=torch.float32)
    peaks, sums = query.new_empty((2, rows, heads, total), dtype=torch.float32)
    constants = {
        "G": group,
        "HEADS": max(16, power_of_two(group)),
        "TILE": tile.tokens,
        "EXACT": query.dtype == torch.float32,
        "CAPPED": softcap > 0,
    }
    launches = [
        Launch(
            attend_sections,
            (sum(runs[first : first + SECTIONS]), kv_heads, rows),
            (
                query, arena, slots, positions, partial, peaks, sums, arena.shape[0], total,
                sum(runs[:first]), *_scales(scale, softcap), window,
                *arguments_of(sections[first : first + SECTIONS], slots),
            ),
            {**constants, **constants_of(sections[first : first + SECTIONS], runs[first:])},
            warps=tile.warps,
            stages=tile.stages,
            registers=MAX_REGISTERS,
        )
        for first in range(0, len(sections), SECTIONS)
    ]  # fmt: skip
    merge = {"DIM": dim, "WIDE": power_of_two(dim), "RUNS": power_of_two(total), "STEP": 16}
    merged = (partial, peaks, sums, out, lse, total)
    return [*launches, Launch(merge_runs, (rows * heads,), merged, merge, stages=1)]


def check_sections(
    name: str, arena: Tensor, sections: Sequence[Section], heads: int, kv_heads: int, dim: int
) -> None:
    """Raise ``ConfigError`` unless a kernel can be compiled for the sections."""
    if dim > max(TILES) or heads > kv_heads * MAX_GROUP or heads % kv_heads:
        raise ConfigError(
            f"{name}: head_dim {dim}, {heads} query heads on {kv_heads} KV heads: GPU kernels take "
            f"head_dim up to {max(TILES)} and groups of equal size up to {MAX_GROUP}"
        )
    for section in sections:
        check_arena(arena, section.layout)
        check_indices(section.pages, section.tokens)
        check_device(name, arena, section.pages, section.tokens)
        if section.layout.head_dim != dim or section.tokens.shape[1] != kv_heads:
            raise ConfigError(
                f"{name}: section of {section.tokens.shape[1]} KV heads, head_dim "
                f"{section.layout.head_dim}: expected {kv_heads}, {dim}"
            )


def tile_of(dim: int, group: int) -> Tile:
    """How much a program reads at a time for vectors of ``dim`` channels."""
    tile = next(TILES[size] for size in TILES if dim <= size)
    return tile if group <= 16 else replace(tile, tokens=32)


def _runs(sections: Sequence[Section], tile: Tile, head_rows: int, processors: int) -> list[int]:
    """Programs for each section of a head row: powers of two, by the width of its table.

    Counts of tokens are on the device; asking for them would make the host wait. A program
    finds its run from the true count, so a table that is far too wide costs nothing but
    programs that end at once.
    """
    wanted = -(-PROGRAMS_PER_PROCESSOR * processors // max(1, head_rows))
    widths = [section.pages.shape[2] for section in sections]
    runs: list[int] = []
    for section, width in zip(sections, widths, strict=True):
        tiles = -(-width * section.layout.tokens // tile.tokens)
        share = -(-wanted * width // max(1, sum(widths)))
        runs.append(power_of_two(max(1, min(share, tiles, MAX_RUNS))))
    return runs


def _scales(scale: float, softcap: float) -> tuple[float, float]:
    """The factor of logits before the cap, and the cap: in powers of two after it."""
    return (scale / softcap, softcap * log2(e)) if softcap > 0 else (scale * log2(e), 0.0)


def arguments_of(sections: Sequence[Section], slots: Tensor) -> Iterator[Argument]:
    """Table, counts and their sizes for each of the places that a launch has for sections."""
    for section in sections:
        yield section.pages
        yield section.tokens
        yield min(section.pages.shape[0], section.tokens.shape[0])
        yield section.pages.shape[2]
        yield from section.pages.stride()
        yield from section.tokens.stride()
    for _ in range(SECTIONS - len(sections)):
        yield from (None, None, 0, 0, 0, 0, 0, 0, 0)


def constants_of(sections: Sequence[Section], runs: Sequence[int]) -> dict[str, object]:
    """What kernels are compiled for: layout, direction and runs of each place."""
    constants: dict[str, object] = {}
    for place in range(SECTIONS):
        section = sections[place] if place < len(sections) else None
        constants[f"FORM_{place}"] = None if section is None else form_of(section.layout)
        constants[f"BACKWARD_{place}"] = section is not None and section.backward
        constants[f"RUNS_{place}"] = 0 if section is None else runs[place]
    return constants


@triton.jit
def attend_sections(
    query, arena, slots, positions, partial, peaks, sums, page_count, all_runs, first_run,
    scale, cap, window,
    table_0, tokens_0, slots_0, width_0, by_slot_0, by_head_0, by_page_0,
    count_slot_0, count_head_0,
    table_1, tokens_1, slots_1, width_1, by_slot_1, by_head_1, by_page_1,
    count_slot_1, count_head_1,
    table_2, tokens_2, slots_2, width_2, by_slot_2, by_head_2, by_page_2,
    count_slot_2, count_head_2,
    FORM_0: tl.constexpr, BACKWARD_0: tl.constexpr, RUNS_0: tl.constexpr,
    FORM_1: tl.constexpr, BACKWARD_1: tl.constexpr, RUNS_1: tl.constexpr,
    FORM_2: tl.constexpr, BACKWARD_2: tl.constexpr, RUNS_2: tl.constexpr,
    G: tl.constexpr, HEADS: tl.constexpr, TILE: tl.constexpr,
    EXACT: tl.constexpr, CAPPED: tl.constexpr,
):  # fmt: skip
    """One program: one run of one section of one head row, for all query heads of its group.

    Grid: runs of the sections side by side, KV heads, requests.
    """
    run = tl.program_id(0)
    if run < RUNS_0:
        attend_run(
            query, arena, slots, positions, partial, peaks, sums, page_count, all_runs,
            first_run + run, run, scale, cap, window, table_0, tokens_0, slots_0, width_0,
            by_slot_0, by_head_0, by_page_0, count_slot_0, count_head_0,
            FORM_0, BACKWARD_0, RUNS_0, G, HEADS, TILE, EXACT, CAPPED,
        )  # fmt: skip
    if FORM_1 is not None:
        if (run >= RUNS_0) & (run < RUNS_0 + RUNS_1):
            attend_run(
                query, arena, slots, positions, partial, peaks, sums, page_count, all_runs,
                first_run + run, run - RUNS_0, scale, cap, window, table_1, tokens_1, slots_1,
                width_1, by_slot_1, by_head_1, by_page_1, count_slot_1, count_head_1,
                FORM_1, BACKWARD_1, RUNS_1, G, HEADS, TILE, EXACT, CAPPED,
            )  # fmt: skip
    if FORM_2 is not None:
        if run >= RUNS_0 + RUNS_1:
            attend_run(
                query, arena, slots, positions, partial, peaks, sums, page_count, all_runs,
                first_run + run, run - RUNS_0 - RUNS_1, scale, cap, window, table_2, tokens_2,
                slots_2, width_2, by_slot_2, by_head_2, by_page_2, count_slot_2, count_head_2,
                FORM_2, BACKWARD_2, RUNS_2, G, HEADS, TILE, EXACT, CAPPED,
            )  # fmt: skip


@triton.jit
def tiles_of_run(tokens, run, RUNS: tl.constexpr, TILE: tl.constexpr):
    """First and last tile (exclusive) of run ``run``: runs differ by no more than one tile."""
    tiles = (tokens + TILE - 1) // TILE
    each = (tiles + RUNS - 1) // RUNS
    first = run * each
    return first, tl.minimum(first + each, tiles)


@triton.jit
def count_of(tokens, slot, head, slot_count, count_slot, count_head):
    """Tokens of a head row; 1 if there is no such slot, which then shows as a wrong page."""
    is_known = (slot >= 0) & (slot < slot_count)
    at = tokens + slot.to(tl.int64) * count_slot + head * count_head
    return tl.load(at, mask=is_known, other=1), is_known


@triton.jit
def attend_run(
    query, arena, slots, positions, partial, peaks, sums, page_count, all_runs, place, run,
    scale, cap, window, table, tokens, slot_count, width, by_slot, by_head, by_page,
    count_slot, count_head,
    FORM: tl.constexpr, BACKWARD: tl.constexpr, RUNS: tl.constexpr,
    G: tl.constexpr, HEADS: tl.constexpr, TILE: tl.constexpr,
    EXACT: tl.constexpr, CAPPED: tl.constexpr,
):  # fmt: skip
    """A softmax over a run of tokens: its largest logit, sum, and unnormalised output."""
    head, request = tl.program_id(1), tl.program_id(2)
    slot = tl.load(slots + request)
    count, is_known = count_of(tokens, slot, head, slot_count, count_slot, count_head)
    width = tl.where(is_known, width, 0)
    table += slot.to(tl.int64) * by_slot + head.to(tl.int64) * by_head
    first_tile, last_tile = tiles_of_run(count, run, RUNS, TILE)
    group = (request * tl.num_programs(1) + head) * G
    first_high, first_low, second_high, second_low, total, unit = split_query(
        query + group.to(tl.int64) * FORM.dim, G, HEADS, FORM
    )
    factor = (unit * scale)[:, None]
    oldest = 0
    if positions is not None:
        oldest = tl.load(positions + request) - window + 1
    peak = tl.full([HEADS], float("-inf"), tl.float32)
    weight_sum = tl.zeros([HEADS], tl.float32)
    out_0 = tl.full([HEADS, FORM.value_tile], 0.0, tl.float32)
    out_1 = out_0
    out_2 = out_0
    out_3 = out_0
    for tile in range(first_tile, last_tile):
        page, row, live, wrong = cells_of(
            arena, page_count, table, width, by_page, tile * TILE, count, FORM, BACKWARD, TILE
        )
        logits = tile_logits(
            first_high, first_low, second_high, second_low, total, page, row, live, FORM, EXACT
        )
        logits = capped(logits * factor, cap, CAPPED)
        shown = live
        if positions is not None:
            shown = shown & (positions_of(page, row, live, FORM) >= oldest)
        hidden = tl.where(wrong, float("nan"), float("-inf"))
        logits = tl.where(shown[None, :], logits, hidden[None, :])
        before = peak
        peak = tl.maximum(peak, tl.max(logits, 1))
        base = tl.where(peak == float("-inf"), 0.0, peak)
        weights = tl.exp2(logits - base[:, None])
        rescale = tl.exp2(before - base)
        weight_sum = weight_sum * rescale + tl.sum(weights, 1)
        out_0, out_1, out_2, out_3 = add_values(
            out_0 * rescale[:, None], out_1 * rescale[:, None], out_2 * rescale[:, None],
            out_3 * rescale[:, None], weights, page, row, live, FORM, EXACT,
        )  # fmt: skip
    heads = tl.arange(0, HEADS)
    slot_of_run = (group + heads) * all_runs + place
    tl.store(peaks + slot_of_run, peak, mask=heads < G)
    tl.store(sums + slot_of_run, weight_sum, mask=heads < G)
    units = tl.arange(0, FORM.value_tile)
    at = partial + slot_of_run.to(tl.int64)[:, None] * FORM.dim + units[None, :]
    mask = (heads < G)[:, None] & (units < FORM.value_units)[None, :] & (first_tile < last_tile)
    tl.store(at, out_0, mask=mask)
    if FORM.value_bits < 8:
        tl.store(at + FORM.value_units, out_1, mask=mask)
    if FORM.value_bits < 4:
        tl.store(at + 2 * FORM.value_units, out_2, mask=mask)
        tl.store(at + 3 * FORM.value_units, out_3, mask=mask)


@triton.jit
def add_values(
    out_0, out_1, out_2, out_3, weights, page, row, live, FORM: tl.constexpr, EXACT: tl.constexpr
):  # fmt: skip
    """Add the values of a tile, times their weights [HEADS, TILE], to each part of the output.

    Weights take the scale of their value before they are rounded to fp16, relative to the
    largest scale of the tile: small scales would be lost otherwise. Zeros are added in
    float32.
    """
    units = value_units(page, row, live, FORM)
    if FORM.value_bits == 16:
        high, low = halves(weights)
        out_0 += products(high, low, units, EXACT)
    else:
        scale, zero = metadata_of(page, row, live, FORM, False)
        top = tl.max(scale, 0)
        relative = scale * (1.0 / tl.where(top > 0, top, 1.0))
        high, low = halves(weights * relative[None, :])
        shift = tl.sum(weights * zero[None, :], 1)[:, None]
        if FORM.value_bits == 8:
            out_0 += products(high, low, half_of(units), EXACT) * top + shift
        if FORM.value_bits == 4:
            out_0 += products(high, low, half_of(units & 15), EXACT) * top + shift
            out_1 += products(high, low, half_of(units >> 4), EXACT) * top + shift
        if FORM.value_bits == 2:
            out_0 += products(high, low, half_of(units & 3), EXACT) * top + shift
            out_1 += products(high, low, half_of((units >> 2) & 3), EXACT) * top + shift
            out_2 += products(high, low, half_of((units >> 4) & 3), EXACT) * top + shift
            out_3 += products(high, low, half_of(units >> 6), EXACT) * top + shift
    return out_0, out_1, out_2, out_3


@triton.jit
def halves(numbers):
    """A float32 tile as fp16, and what rounding lost."""
    high = numbers.to(tl.float16)
    return high, (numbers - high.to(tl.float32)).to(tl.float16)


@triton.jit
def merge_runs(
    partial, peaks, sums, out, lse, all_runs,
    DIM: tl.constexpr, WIDE: tl.constexpr, RUNS: tl.constexpr, STEP: tl.constexpr,
):  # fmt: skip
    """One query head: its runs weighted by exp(peak - largest peak), divided by their sum.

    Runs without a token wrote no output, and their part of ``partial`` may be NaN.
    """
    row = tl.program_id(0).to(tl.int64)
    runs = tl.arange(0, RUNS)
    channel = tl.arange(0, WIDE)
    mass = tl.load(sums + row * all_runs + runs, mask=runs < all_runs, other=0.0)
    peak = tl.load(peaks + row * all_runs + runs, mask=runs < all_runs, other=float("-inf"))
    largest = tl.max(peak, 0)
    base = tl.where(largest == float("-inf"), 0.0, largest)
    total = tl.sum(tl.exp2(peak - base) * mass, 0)
    mixed = tl.zeros([WIDE], tl.float32)
    for first in range(0, all_runs, STEP):
        step = first + tl.arange(0, STEP)
        some_mass = tl.load(sums + row * all_runs + step, mask=step < all_runs, other=0.0)
        used = (step < all_runs) & (some_mass != 0)
        some_peak = tl.load(peaks + row * all_runs + step, mask=used, other=float("-inf"))
        at = partial + (row * all_runs + step)[:, None] * DIM + channel[None, :]
        part = tl.load(at, mask=used[:, None] & (channel < DIM)[None, :], other=0.0)
        mixed += tl.sum(part * tl.exp2(some_peak - base)[:, None], 0)
    mixed = mixed / tl.where(total == 0, 1.0, total)
    tl.store(out + row * DIM + channel, mixed, mask=channel < DIM)
    if lse is not None:
        natural = (largest + tl.log2(tl.where(total == 0, 1.0, total))) * 0.6931471805599453
        tl.store(lse + row, natural)
