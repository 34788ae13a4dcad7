# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false
# Kernels and some methods of tensors have no types.
"""Page summaries and page selection on the GPU: one launch for short rows, two for long rows.

The host does not wait for the device, and shapes depend only on the widths of page tables, so that
a call can be captured in a CUDA graph.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from triptych.core.errors import ConfigError
from triptych.core.layout import PageLayout
from triptych.kernels.codec import gpu as codec
from triptych.kernels.page_lists import PageLists, check_page_lists
from triptych.kernels.pages import Section, check_indices
from triptych.kernels.select.gpu_choice import choose_pages
from triptych.kernels.select.gpu_scores import score_spans
from triptych.kernels.select.key_codes import CENTROIDS
from triptych.kernels.select.reference import code_logits, unrotated, write_summaries
from triptych.kernels.select.summary import (
    DEVIATIONS,
    Rule,
    Summaries,
    check_head_budgets,
    check_summaries,
)
from triptych.kernels.triton.launch import Argument, Launch, check_device, power_of_two, processors
from triptych.kernels.triton.triton_layout import MIN_DOT, chunk_of, page_list_arguments

SPAN = 32
"""Pages that a program scores at a time; half of it if a group fills two tiles of heads."""
FUSED_SPANS = 2
FUSED_PAGES = 1024
"""Limits of a fused launch: in spans for any number of head rows, in pages for many head rows; see
``fuses``."""


def summarize_pages(
    arena: Tensor,
    layout: PageLayout,
    pages: Tensor,
    summaries: Summaries,
    rows: Tensor,
    columns: Tensor,
) -> None:
    """See ``reference.summarize_pages``; a Triton kernel decodes the keys."""
    check_indices(pages, rows, columns)
    check_device("summarize_pages", arena, pages, summaries.memory, rows, columns)
    tokens = torch.full_like(pages, layout.tokens)
    key, _, positions = codec.load_tokens(arena, layout, pages[:, None].contiguous(), tokens)
    write_summaries(key, positions, summaries, rows, columns)


def select_pages(
    query: Tensor,
    sections: Sequence[Section],
    summaries: Sequence[Summaries | None],
    slots: Tensor,
    positions: Tensor,
    rule: Rule,
    page_lists: PageLists,
    *,
    scale: float,
    head_budgets: Tensor | None = None,
    scores: Tensor | None = None,
) -> None:
    """See ``reference.select_pages``.

    The host does not wait for the device, so wrong slots do not raise: their lists are empty.
    """
    for launch in plan(
        query, sections, summaries, slots, positions, rule, page_lists, scale, head_budgets, scores
    ):
        launch.run()


def plan(
    query: Tensor,
    sections: Sequence[Section],
    summaries: Sequence[Summaries | None],
    slots: Tensor,
    positions: Tensor,
    rule: Rule,
    page_lists: PageLists,
    scale: float,
    head_budgets: Tensor | None = None,
    scores: Tensor | None = None,
) -> list[Launch]:
    """The launches of one call: a fused one, or one that scores pages and one that chooses."""
    rows, heads, dim = query.shape
    kv_heads = sections[0].tokens.shape[1]
    group = heads // kv_heads
    known = check_summaries(summaries, rule)
    if known is None:
        raise ConfigError("select_pages: no section has summaries: expected those of one at least")
    check_page_lists(page_lists, rows, kv_heads)
    check_head_budgets(head_budgets, kv_heads)
    check_indices(slots, positions)
    check_device("select_pages", query, slots, positions, scores, head_budgets, page_lists.ordinals)
    pages = sum(section.pages.shape[2] for section in sections)
    scores, head_dim = _scores(query, (rows, kv_heads, pages), scores), dim
    means = None
    if rule.omitted_mass > 0:
        means = query.new_empty((rows, kv_heads, group, pages), dtype=torch.float32)
    if known.codebooks is not None:  # a query is its logits with all codes, of all heads together
        near, group, dim = code_logits(query, positions, known, scale), 1, CENTROIDS
    else:
        near = unrotated(query.float(), known).contiguous()
    given = (near, slots.contiguous(), positions.contiguous())
    places = tuple(
        _place(section, part, kv_heads, head_dim)
        for section, part in zip(sections, summaries, strict=True)
    )
    found = (scores, *scores.stride()[:2], means, pages)
    how = (float(scale), DEVIATIONS, rule.sink_tokens, rule.window_tokens)
    span = SPAN if group <= MIN_DOT else SPAN // 2
    constants: dict[str, object] = {
        "KNOWN": tuple(part is not None for part in summaries),
        "IS_BOX": known.kind == "box",
        "IS_CODES": known.kind == "a2ats",
        "G": group,
        "HEADS": max(MIN_DOT, power_of_two(group)),
        "DIM": dim,
        "SPAN": span,
    }
    is_fused = fuses(pages, rows * kv_heads, processors(query.device))
    wanted = tuple(page_list_arguments(page_lists))
    chunk = chunk_of(pages, 1 if means is None else power_of_two(group))
    choose = Launch(
        choose_pages,
        (1, kv_heads, rows),
        (*given, places, *found, *how, wanted, head_budgets, rule.keep, rule.budget_tokens,
         float(rule.omitted_mass)),
        constants
        | {
            "PARTS": tuple(section.layout.parts for section in sections),
            "FUSED": is_fused,
            "CHUNK": chunk,
            "GROUP": power_of_two(group),
        },
    )  # fmt: skip
    if is_fused:
        return [choose]
    spans = sum(-(-section.pages.shape[2] // span) for section in sections)
    grid = (spans, kv_heads, rows)
    arguments = (*given, *wanted[2:4], places, *found, *how)
    return [Launch(score_spans, grid, arguments, constants), choose]


def fuses(pages: int, head_rows: int, processors: int) -> bool:
    """Whether one program both scores all pages of a head row and chooses among them.

    A fused launch saves one launch, about 1 to 2 us in a CUDA graph, but one multiprocessor reads
    all summaries of the row: a tile of 4 to 7 KB takes about half a launch. So it is used for short
    rows, and if there is a head row for each multiprocessor. These are estimates, not measured on
    a GPU. On AMD Triton's barrier does not wait for writes to global memory: always two launches.
    """
    if torch.version.hip:
        return False
    is_short = pages <= FUSED_SPANS * SPAN
    return is_short or (pages <= FUSED_PAGES and head_rows >= processors)


def _scores(query: Tensor, shape: tuple[int, int, int], given: Tensor | None) -> Tensor:
    """Memory for the scores of a call: ``given`` after a check, or new memory."""
    if given is None:
        return query.new_empty(shape, dtype=torch.float32)
    is_dense = given.dim() == 3 and given.stride(2) == 1 and given.dtype == torch.float32
    if not is_dense or given.shape[:2] != shape[:2] or given.shape[2] < shape[2]:
        raise ConfigError(
            f"select_pages: scores {tuple(given.shape)} {given.dtype}: expected float32 {shape}, "
            "the last dimension dense"
        )
    return given


def _place(section: Section, summaries: Summaries | None, kv_heads: int, dim: int) -> Argument:
    """Arguments of kernels for a section; without summaries the counts are passed, but not read."""
    tokens, width = section.tokens, section.pages.shape[2]
    check_indices(tokens)
    slots = min(tokens.shape[0], section.pages.shape[0])
    room, memory = section.layout.tokens, tokens
    strides = (0, 0)
    if summaries is not None:
        memory, strides = summaries.memory, summaries.memory.stride()[:2]
        slots = min(slots, memory.shape[0])
        if summaries.pages < width or summaries.head_dim != dim or memory.shape[1] != kv_heads:
            raise ConfigError(
                f"select_pages: summaries of {memory.shape[1]} KV heads, {summaries.pages} pages, "
                f"head_dim {summaries.head_dim} for a table of {kv_heads} KV heads, {width} pages, "
                f"head_dim {dim}"
            )
    return (tokens, *tokens.stride(), slots, room, width, memory, *strides)
