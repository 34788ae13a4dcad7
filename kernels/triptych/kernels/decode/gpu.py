# pyright: reportUnknownVariableType=false
# The arguments of kernels have no types.
"""Decode attention on the GPU: parallel runs of each section, merged by log-sum-exp."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from triptych.core.errors import ConfigError
from triptych.core.layout import GPU_GROUPS, Geometry
from triptych.kernels.decode.gpu_runs import attend_sections, merge_runs, record_rows, score_run
from triptych.kernels.decode.reference import scored_sections
from triptych.kernels.page_lists import PageLists, check_page_lists
from triptych.kernels.pages import Section, check_arena, check_indices
from triptych.kernels.triton.launch import (
    Launch,
    check_device,
    factors_of,
    has_asm,
    power_of_two,
    processors,
)
from triptych.kernels.triton.triton_layout import (
    MIN_DOT,
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
"""Most registers of a thread by whether queries are exact: 16 or 12 warps at a time on each
multiprocessor. On an H200 128 take 0.75 of the time that 255 take, although they spill."""
PAGE_SPILLS = 512
"""Bytes of these registers that may spill."""
WIDE_DIM = 256
"""Channels of a head above which programs share the query heads of a KV head."""
WIDE_GROUP = 8
"""Most query heads of such a program: the outputs of more do not fit in its registers."""
WIDE_SPILLS = 2048
"""Bytes of its registers that may spill: on an sm_90 120 with 16-bit queries, 1,752 with float32
ones. These kernels were compiled and interpreted, and did not run on a GPU."""
MAX_WARPS = 8
"""Most warps of a program: each thread may then have 255 registers."""
MIN_COLUMNS = 8
"""Fewest columns of a product on NVIDIA's tensor cores."""
WARPS_PER_PROCESSOR = 16
"""Enough to hide the latency of memory, few enough that merging stays cheap."""
MAX_RUNS = 128
"""Most runs of a section of one head row."""


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

    float32 queries are split into two fp16 numbers, which keeps float32 accuracy. bfloat16 queries
    are rounded to fp16, as are weights: errors of about 2**-12 of a value. So are bfloat16 queries
    times the scales of keys that have one for each channel: logits have errors of up to 1e-3, less
    than a fiftieth of what such keys lose. The output of a request
    without a visible token is 0. The host does not wait for the device, so page ids out of range
    do not raise: they give NaN.
    """
    out = torch.empty_like(query, dtype=torch.float32, memory_format=torch.contiguous_format)
    for launch in plan(
        query, arena, sections, slots, scale, window, softcap, positions, lse, page_lists, out
    ):
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
) -> list[Launch]:
    """The launches of ``decode_attention``: one for all sections, and one that merges runs."""
    sections, page_lists = _shared(query, sections, page_lists)
    is_paged = any(section.layout.format.is_quantized for section in sections)
    prepared = _prepare(
        "decode_attention", query, arena, sections, slots, window, positions, lse, is_paged
    )
    rows, heads, dim = query.shape
    total = sum(prepared.runs)
    partial = query.new_empty((rows, heads, total, dim), dtype=torch.float32)
    peaks, sums = query.new_empty((2, rows, heads, total), dtype=torch.float32)
    if page_lists is not None:
        check_page_lists(page_lists, rows, prepared.kv_heads)
        check_device(
            "decode_attention", query, page_lists.ordinals, page_lists.counts, page_lists.rows
        )
    arguments = (
        prepared.query, arena, prepared.slots, prepared.positions, partial, peaks, sums,
        arena.shape[0], total, *factors_of(scale, softcap), window,
        tuple(tuple(section_arguments(section)) for section in sections),
        None if page_lists is None else tuple(page_list_arguments(page_lists)),
    )  # fmt: skip
    constants = prepared.constants(softcap) | {
        "HEADS": max(
            MIN_COLUMNS if has_asm() else MIN_DOT, power_of_two(heads // prepared.kv_heads)
        ),
        "FORMS": tuple(form_of(section.layout) for section in sections),
        "BACKWARD": tuple(section.backward for section in sections),
        "RUNS": tuple(prepared.runs),
        "CHUNK": 0 if page_lists is None else chunk_of(page_lists.ordinals.shape[2]),
    }
    grid = (total, prepared.kv_heads, rows)
    attend = Launch(
        attend_sections, grid, arguments, constants, *prepared.tile.size, *prepared.registers
    )
    merge = {"DIM": dim, "WIDE": power_of_two(dim), "RUNS": power_of_two(total), "STEP": 16}
    merged = (partial, peaks, sums, out, lse, total)
    return [attend, Launch(merge_runs, (rows * heads,), merged, merge, stages=1)]


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
    for section, runs in zip(sections, prepared.runs, strict=True):
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
    runs: list[int]
    """Runs of each section."""

    is_paged: bool
    """Whether there are quantized pages, which are read one by one."""

    @property
    def registers(self) -> tuple[int, int]:
        """Most registers of a thread, and bytes of them that may spill."""
        if self.query.shape[2] > WIDE_DIM:
            return 255, WIDE_SPILLS
        if not self.is_paged or self.tile.warps > 1:
            return 255, 0
        return PAGE_REGISTERS[self.query.dtype == torch.float32], PAGE_SPILLS

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
    runs = _runs(sections, tile, rows * kv_heads, processors(query.device))
    return Prepared(query.contiguous(), slots.contiguous(), seen, kv_heads, tile, runs, is_paged)


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


def _runs(sections: Sequence[Section], tile: Tile, head_rows: int, processors: int) -> list[int]:
    """Runs of each section of a head row: powers of two, by the width of its table.

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
