# pyright: reportUnknownVariableType=false
# The arguments of kernels have no types.
"""Decode attention on the GPU: parallel runs of each section, merged by log-sum-exp."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from triptych.core.errors import ConfigError
from triptych.core.layout import GPU_GROUPS, Geometry
from triptych.kernels.decode.gpu_runs import attend_sections, merge_runs, record_rows, score_run
from triptych.kernels.decode.reference import scored_sections
from triptych.kernels.hadamard import block_size
from triptych.kernels.page_lists import PageLists, check_page_lists
from triptych.kernels.pages import Section, check_arena, check_indices, check_window
from triptych.kernels.triton.launch import (
    Launch,
    check_device,
    factors_of,
    has_asm,
    is_for_amd,
    power_of_two,
    processors,
)
from triptych.kernels.triton.triton_layout import (
    MIN_DOT,
    WIDE_DIM,
    chunk_of,
    form_of,
    page_list_arguments,
    section_arguments,
)


@dataclass(frozen=True, slots=True)
class Tile:
    """Tile of tokens that a program reads at a time."""

    tokens: int
    warps: int
    stages: int
    """Tiles that are being loaded, plus one."""

    @property
    def size(self) -> tuple[int, int]:
        return self.warps, self.stages


TILES = {96: Tile(32, 2, 3), 128: Tile(64, 4, 3), 256: Tile(32, 4, 3), 576: Tile(16, 8, 2)}
"""Tile by largest head size; chosen so that no format spills registers and at least 40 KiB are in
flight on each multiprocessor of an H100."""
PAGE_TILES = {
    96: Tile(16, 1, 1),
    128: Tile(16, 1, 1),
    256: Tile(16, 2, 1),
    576: Tile(16, 8, 1),
}
"""Tile of 16-bit pages beside quantized ones, which are read page by page: one warp needs no
barriers, and many of them hide the latency of memory better than copies ahead of time do."""
PAGE_REGISTERS = {False: 128, True: 168}
"""Most registers of a thread by whether a program is heavy: 16 or 12 warps at a time on each
multiprocessor. On an H200 128 take 0.75 of the time that 255 take, although they spill."""
PAGE_SPILLS = 512
"""Bytes of these registers that may spill."""
WIDE_GROUP = 8
"""Most query heads of a program of wide heads: the outputs of more do not fit in its registers.
Programs share the query heads of a KV head."""
WIDE_SPILLS = 2048
"""Bytes of its registers that may spill on GPUs of NVIDIA: on an sm_90 168 with 16-bit queries,
1,768 with float32 ones. These kernels were compiled and interpreted, and did not run on a GPU."""
MAX_WARPS = 8
"""Most warps of a program: each thread may then have 255 registers."""
MIN_COLUMNS = 8
"""Fewest columns of a product on NVIDIA's tensor cores."""
REGISTERS = 65_536
"""Registers of a multiprocessor."""
WAVES = 2
"""Runs for each program that is resident: no run is longer than half of what a program does if all
do the same, so a batch takes at most 1.5 times as long as if its work could be cut anywhere
(Graham's bound). Measured on an H200 with as many."""
LEAST_UNITS = 2
"""Fewest pages of a run, which writes as much as it reads of a third of a page."""
WARPS_PER_PROCESSOR = 16
"""Warps that add scores: enough to hide the latency of memory."""
MAX_RUNS = 128
"""Most runs of a section of one head row when scores are added."""
ROWS_AT_ONCE = (32, 256)
"""Least and most head rows whose work a program reads at a time."""


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
    page_lists: PageLists | None = None,
) -> Tensor:
    """See ``reference.decode_attention``.

    float32 queries and weights are split into several smaller numbers, which keeps float32
    accuracy. Beside bfloat16 queries weights are rounded to fp16: errors of about 2**-12 of a
    value. Queries are rounded to 15 bits of their largest number where keys are codes with a scale
    for each token (``gpu_bytes``), and to fp16 elsewhere; times the scales of channels, logits
    have errors of up to 1e-3, less than a fiftieth of what such keys lose. The output of a request
    without a visible token is 0. The host does not wait for the device, so page ids out of range
    do not raise: they give NaN.
    """
    out = torch.empty_like(query, dtype=torch.float32, memory_format=torch.contiguous_format)
    options = scale, window, softcap, positions, lse, page_lists
    for launch in plan(query, arena, sections, slots, *options, out):
        launch.run()
    return out


def attend_rotated(
    query: Tensor,
    arena: Tensor,
    sections: Sequence[Section],
    slots: Tensor,
    dtype: torch.dtype,
    *,
    scale: float,
    window: int = 0,
    softcap: float = 0.0,
    positions: Tensor | None = None,
    lse: Tensor | None = None,
    page_lists: PageLists | None = None,
) -> Tensor:
    """See ``rotated.attend_rotated``: the kernel that merges runs rotates their sum."""
    out = torch.empty_like(query, dtype=dtype, memory_format=torch.contiguous_format)
    options = scale, window, softcap, positions, lse, page_lists
    for launch in plan(query, arena, sections, slots, *options, out, is_rotated=True):
        launch.run()
    return out


def score_tokens(
    query: Tensor,
    arena: Tensor,
    sections: Sequence[Section],
    slots: Tensor,
    lse: Tensor,
    *,
    scale: float,
    window: int = 0,
    softcap: float = 0.0,
    positions: Tensor | None = None,
    weight: float = 1.0,
    mirror: Tensor | None = None,
) -> None:
    """See ``reference.score_tokens``; a head row with a page id out of range gets no scores.

    Nor does a row with slot -1, so that all rows of a batch can be given.
    """
    for launch in plan_scores(
        query, arena, sections, slots, lse, scale, window, softcap, positions, weight, mirror
    ):
        launch.run()


def record_scores(
    progress: Tensor, slots: Tensor, positions: Tensor, layer: int, layers: int
) -> None:
    """See ``reference.record_scores``."""
    plan_record(progress, slots, positions, layer, layers).run()


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
    page_lists: PageLists | None,
    out: Tensor,
    *,
    is_rotated: bool = False,
) -> list[Launch]:
    """The launches of ``decode_attention``: one for all sections, and one that merges runs.

    ``is_rotated``: the output is rotated back.
    """
    sections, page_lists = _shared(query, sections, page_lists)
    is_paged = any(section.layout.format.is_quantized for section in sections)
    prepared = _prepare(
        "decode_attention", query, arena, sections, slots, window, positions, lse, is_paged
    )
    rows, heads, dim = query.shape
    kv_heads, group = prepared.kv_heads, heads // prepared.kv_heads
    held = rows * kv_heads * sum(_units(section, prepared.tile) for section in sections)
    wanted = WAVES * prepared.resident * processors(query.device)
    wanted = max(1, min(wanted, -(-held // LEAST_UNITS)))
    most = most_runs(wanted, rows * kv_heads * len(sections))
    partial = query.new_empty((most, group, dim), dtype=torch.float32)
    peaks, sums = query.new_empty((2, most, group), dtype=torch.float32)
    starts = slots.new_empty(rows * kv_heads + 1)
    if page_lists is not None:
        check_page_lists(page_lists, rows, kv_heads)
        check_device(
            "decode_attention", query, page_lists.ordinals, page_lists.counts, page_lists.rows
        )
    arguments = (
        prepared.query, arena, prepared.slots, prepared.positions, partial, peaks, sums, starts,
        arena.shape[0], rows * kv_heads, float(wanted), float(LEAST_UNITS),
        *factors_of(scale, softcap), window,
        tuple(tuple(section_arguments(section)) for section in sections),
        None if page_lists is None else tuple(page_list_arguments(page_lists)),
    )  # fmt: skip
    fewest, largest = ROWS_AT_ONCE
    constants = prepared.constants(softcap) | {
        "HEADS": max(MIN_COLUMNS if has_asm() else MIN_DOT, power_of_two(group)),
        "KV_HEADS": kv_heads,
        "FORMS": tuple(form_of(section.layout) for section in sections),
        "BACKWARD": tuple(section.backward for section in sections),
        "CHUNK": 0 if page_lists is None else chunk_of(page_lists.ordinals.shape[2]),
        "BLOCK": min(largest, max(fewest, power_of_two(rows * kv_heads))),
    }
    attend = Launch(
        attend_sections, (most,), arguments, constants, *prepared.tile.size, *prepared.registers
    )
    block = block_size(dim) if is_rotated else 1
    sizes = {"DIM": dim, "WIDE": power_of_two(dim), "STAGES": block.bit_length() - 1}
    merge = {"G": group, **sizes, "STEP": 16}
    merged = (partial, peaks, sums, starts, out, lse, 1.0 / math.sqrt(block))
    return [attend, Launch(merge_runs, (rows * heads,), merged, merge, stages=1)]


def _units(section: Section, tile: Tile) -> int:
    """Most units of work of a head row of a section: pages of its table, or tiles of short ones."""
    layout, width = section.layout, section.pages.shape[2]
    is_tiled = form_of(layout).by_tile
    return -(-width * layout.tokens // tile.tokens) if is_tiled else width


def most_runs(wanted: int, parts: int) -> int:
    """The most runs of a work list of ``parts`` sections of head rows (``gpu_work``).

    Each may have one that is not full, and one more comes from rounding.
    """
    return wanted + parts + 1


def _shared(
    query: Tensor, sections: Sequence[Section], page_lists: PageLists | None
) -> tuple[Sequence[Section], PageLists | None]:
    """The pages of one wide KV head as those of several, which share its query heads.

    Tables are expanded without a copy.
    """
    _, heads, dim = query.shape
    if dim <= WIDE_DIM or sections[0].tokens.shape[1] > 1:
        return sections, page_lists
    parts = next(count for count in range(-(-heads // WIDE_GROUP), heads + 1) if heads % count == 0)
    sections = [
        replace(
            section,
            pages=section.pages.expand(-1, parts, -1),
            tokens=section.tokens.expand(-1, parts),
        )
        for section in sections
    ]
    if page_lists is not None:
        page_lists = replace(
            page_lists,
            ordinals=page_lists.ordinals.expand(-1, parts, -1),
            counts=page_lists.counts.expand(-1, parts),
        )
    return sections, page_lists


def plan_scores(
    query: Tensor,
    arena: Tensor,
    sections: Sequence[Section],
    slots: Tensor,
    lse: Tensor,
    scale: float,
    window: int,
    softcap: float,
    positions: Tensor | None,
    weight: float,
    mirror: Tensor | None,
) -> list[Launch]:
    """The launches of ``score_tokens``: one for each section whose tokens have scores."""
    sections = scored_sections(sections)
    if not sections:
        return []
    if mirror is not None and mirror.shape != arena.shape:
        raise ConfigError(
            f"score_tokens: mirror {tuple(mirror.shape)}: expected {tuple(arena.shape)}"
        )
    check_device("score_tokens", arena, mirror)
    prepared = _prepare(
        "score_tokens", query, arena, sections, slots, window, positions, lse, is_paged=False
    )
    launches: list[Launch] = []
    head_rows = len(query) * prepared.kv_heads
    counts = _score_runs(sections, prepared.tile, head_rows, processors(query.device))
    for section, runs in zip(sections, counts, strict=True):
        arguments = (
            prepared.query, arena, mirror, prepared.slots, prepared.positions, lse,
            arena.shape[0], *factors_of(scale, softcap), window, float(weight),
            *section_arguments(section),
        )  # fmt: skip
        form = {"FORM": form_of(section.layout), "BACKWARD": section.backward, "RUNS": runs}
        constants = {**prepared.constants(softcap), **form}
        grid = (runs, prepared.kv_heads, len(query))
        launches.append(Launch(score_run, grid, arguments, constants, *prepared.tile.size))
    return launches


def plan_record(
    progress: Tensor, slots: Tensor, positions: Tensor, layer: int, layers: int
) -> Launch:
    """The launch of ``record_scores``."""
    check_indices(slots, positions)
    check_device("record_scores", progress, slots, positions)
    if progress.dtype != torch.int64 or progress.dim() != 1 or not progress.is_contiguous():
        raise ConfigError(
            f"record_scores: progress {tuple(progress.shape)} {progress.dtype}: expected "
            "contiguous int64 [slots]"
        )
    rows = len(slots)
    arguments = (
        progress, len(progress), slots.contiguous(), positions.contiguous(), rows, layer, layers,
    )  # fmt: skip
    return Launch(record_rows, (1,), arguments, {"BLOCK": power_of_two(rows)}, warps=1, stages=1)


@dataclass(frozen=True, slots=True)
class Prepared:
    """Checked inputs of a call, and the number of runs of each section."""

    query: Tensor
    slots: Tensor
    positions: Tensor | None
    """None if there is no window."""
    kv_heads: int
    tile: Tile
    is_paged: bool
    """Whether there are quantized pages, which are read one by one."""
    is_heavy: bool
    """Whether queries are exact, or keys of 2 bits have a scale for each channel."""

    @property
    def registers(self) -> tuple[int, int]:
        """Most registers of a thread, and bytes of them that may spill."""
        if self.query.shape[2] > WIDE_DIM:
            return 255, 0 if is_for_amd() else WIDE_SPILLS
        if not self.is_paged or self.tile.warps > 1:
            return 255, 0
        return PAGE_REGISTERS[self.is_heavy], PAGE_SPILLS

    @property
    def resident(self) -> int:
        """Programs that fit on a multiprocessor with as many registers as they may have."""
        of_thread = -(-self.registers[0] // 8) * 8
        return max(1, REGISTERS // (of_thread * 32 * self.tile.warps))

    def constants(self, softcap: float) -> dict[str, object]:
        group = self.query.shape[1] // self.kv_heads
        return {
            "G": group,
            "HEADS": max(MIN_DOT, power_of_two(group)),
            "TILE": self.tile.tokens,
            "EXACT": self.query.dtype == torch.float32,
            "CAPPED": softcap > 0,
        }


def _prepare(
    name: str,
    query: Tensor,
    arena: Tensor,
    sections: Sequence[Section],
    slots: Tensor,
    window: int,
    positions: Tensor | None,
    lse: Tensor | None,
    is_paged: bool,
) -> Prepared:
    """Check the inputs and choose tile and runs; ``is_paged``: see ``Prepared``.

    Raises:  ConfigError if there are no kernels for the inputs
    """
    rows, heads, dim = query.shape
    kv_heads = sections[0].tokens.shape[1]
    check_indices(slots, *(() if positions is None else (positions,)))
    check_device(name, query, arena, slots, positions, lse)
    if window > 0 and positions is None:
        raise ConfigError(f"{name}: a window needs the positions of the queries")
    check_window(sections, window)
    if heads > kv_heads * Geometry(1, kv_heads, dim).gpu_group or heads % kv_heads:
        raise ConfigError(
            f"{name}: head_dim {dim}, {heads} query heads on {kv_heads} KV heads: GPU kernels take "
            f"groups of equal size, the largest by head_dim: {GPU_GROUPS}"
        )
    if lse is not None and not (
        lse.shape == (rows, heads) and lse.dtype == torch.float32 and lse.is_contiguous()
    ):
        raise ConfigError(
            f"{name}: lse {tuple(lse.shape)} {lse.dtype}: expected contiguous float32 "
            f"{(rows, heads)}"
        )
    for section in sections:
        _check_section(name, arena, section, kv_heads, dim)
    tile = tile_of(dim, heads // kv_heads, is_paged)
    seen = positions.contiguous() if window > 0 and positions is not None else None
    is_heavy = query.dtype == torch.float32 or any(
        section.layout.format.codes_whole_pages and section.layout.format.key_bits == 2
        for section in sections
    )
    inputs = query.contiguous(), slots.contiguous(), seen
    return Prepared(*inputs, kv_heads, tile, is_paged, is_heavy)


def _check_section(name: str, arena: Tensor, section: Section, kv_heads: int, dim: int) -> None:
    check_arena(arena, section.layout)
    check_indices(section.pages, section.tokens)
    check_device(name, arena, section.pages, section.tokens)
    if section.layout.head_dim != dim or section.tokens.shape[1] != kv_heads:
        raise ConfigError(
            f"{name}: section of {section.tokens.shape[1]} KV heads, head_dim "
            f"{section.layout.head_dim}: expected {kv_heads}, {dim}"
        )


def tile_of(dim: int, group: int, is_paged: bool) -> Tile:
    """The tile for vectors of ``dim`` channels and ``group`` query heads per KV head."""
    if is_paged:
        tile = next(PAGE_TILES[size] for size in PAGE_TILES if dim <= size)
        return replace(tile, warps=min(MAX_WARPS, tile.warps * max(1, power_of_two(group) // 8)))
    tile = next(TILES[size] for size in TILES if dim <= size)
    return tile if group <= 16 else replace(tile, tokens=32)


def _score_runs(
    sections: Sequence[Section], tile: Tile, head_rows: int, processors: int
) -> list[int]:
    """Runs of ``score_tokens`` for each section: powers of two, by the width of its table.

    Token counts are on the device; reading them would make the host wait. A program computes its
    run from the true count, so a too wide table only adds programs that end at once.
    """
    wanted = -(-WARPS_PER_PROCESSOR * processors // max(1, head_rows * tile.warps))
    widths = [section.pages.shape[2] for section in sections]
    runs: list[int] = []
    for section, width in zip(sections, widths, strict=True):
        tiles = -(-width * section.layout.tokens // tile.tokens)
        share = -(-wanted * width // max(1, sum(widths)))
        runs.append(power_of_two(max(1, min(share, tiles, MAX_RUNS))))
    return runs
