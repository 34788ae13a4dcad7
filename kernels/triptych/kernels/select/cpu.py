"""Page summaries and page selection on the CPU: checks and addresses for the compiled code."""

from collections.abc import Sequence
from dataclasses import dataclass
from struct import Struct

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from triptych.core.errors import ConfigError
from triptych.core.layout import PageLayout
from triptych.kernels.codec import cpu as codec
from triptych.kernels.codec.cpu import form_words
from triptych.kernels.codec.vectors import PART_WORDS
from triptych.kernels.codegen.numba_runtime import team_address, team_threads
from triptych.kernels.hadamard import block_size
from triptych.kernels.page_lists import PageLists, page_list_words
from triptych.kernels.pages import Section, check_arena, check_indices
from triptych.kernels.select import cpu_choice, cpu_summaries
from triptych.kernels.select.key_codes import CENTROIDS
from triptych.kernels.select.reference import code_logits, unrotated, write_summaries
from triptych.kernels.select.score_tile import ScoreTile, score_tile_address
from triptych.kernels.select.summary import (
    CODE_BYTES,
    NUMBERS,
    Rule,
    Summaries,
    check_head_budgets,
    check_summaries,
)


def summarize_pages(
    arena: Tensor,
    layout: PageLayout,
    pages: Tensor,
    summaries: Summaries,
    rows: Tensor,
    columns: Tensor,
) -> None:
    """See ``reference.summarize_pages``."""
    check_arena(arena, layout)
    check_indices(pages, rows, columns)
    if summaries.codebooks is not None:
        _summarize_by_codes(arena, layout, pages, summaries, rows, columns)
        return
    pages, rows, columns = pages.contiguous(), rows.contiguous(), columns.contiguous()
    memory, words = summaries.memory, form_words(layout)
    tokens, _, positions, _, _, *parts = words
    job = np.array(
        (
            0,
            0,
            len(pages),
            arena.data_ptr(),
            *arena.shape,
            layout.head_dim,
            *_form(summaries),
            block_size(summaries.head_dim) if summaries.rotated else 0,
            tokens,
            positions,
            *parts[:PART_WORDS],
            pages.data_ptr(),
            rows.data_ptr(),
            columns.data_ptr(),
            memory.data_ptr(),
            *memory.shape[:3],
            *memory.stride()[:2],
        ),
        np.int64,
    )
    body = cpu_summaries.summarize.address
    if not cpu_summaries.run_summaries(job, team_address(), body, team_threads()):
        raise ConfigError("summarize_pages: a page, a row or a column is out of range")


def _summarize_by_codes(
    arena: Tensor,
    layout: PageLayout,
    pages: Tensor,
    summaries: Summaries,
    rows: Tensor,
    columns: Tensor,
) -> None:
    """Compiled code decodes the keys; the nearest centroids are products of matrices.

    Raises:  ConfigError if a page, a row or a column is out of range
    """
    slots, kv_heads, _, _ = summaries.memory.shape
    for index, count in ((pages, len(arena)), (rows, slots * kv_heads), (columns, summaries.pages)):
        if len(index) and not 0 <= int(index.min()) <= int(index.max()) < count:
            raise ConfigError("summarize_pages: a page, a row or a column is out of range")
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
    """See ``reference.select_pages``."""
    rows, heads, dim = query.shape
    table = sections[0].call_cache.get(
        lambda: _table(sections, summaries, rule, heads, dim),
        *(tuple(sections[1:]), tuple(summaries), rule, heads, dim),
    )
    check_indices(slots, positions)
    check_head_budgets(head_budgets, table.kv_heads)
    if table.summaries.codebooks is not None:
        query = code_logits(query, positions, table.summaries, scale)
    else:
        query = unrotated(query.float(), table.summaries).contiguous()
    slots, positions, lists_of = (
        slots.contiguous(),
        positions.contiguous(),
        page_lists.rows.contiguous(),
    )
    job = np.empty(cpu_choice.JOB_WORDS, np.int64)
    JOB.pack_into(
        job.data,
        0,
        0,
        0,
        query.data_ptr(),
        slots.data_ptr(),
        positions.data_ptr(),
        rows,
        lists_of.data_ptr(),
        *page_list_words(page_lists, rows, table.kv_heads),
        0 if head_budgets is None else head_budgets.data_ptr(),
        *((0, 0, 0) if scores is None else (scores.data_ptr(), *scores.stride()[:2])),
        *table.words,
        scale,
        rule.omitted_mass,
    )
    if not cpu_choice.run_choice(
        job, team_address(), cpu_choice.choose_rows.address, team_threads()
    ):
        raise ConfigError("select_pages: a slot, a token count or a list is out of range")


JOB = Struct("32q 2d")
"""The fields of ``cpu_choice.Job``."""


@dataclass(frozen=True, slots=True)
class Table:
    """Words for compiled code: the sections of a layer, their summaries and a rule."""

    kv_heads: int
    summaries: Summaries
    """Those of the first section that has any; the others have the same kind."""
    words: tuple[int, ...]
    """In the order of ``cpu_choice.Job``; one is the address of ``sections``."""
    sections: NDArray[np.int64]


def _table(
    sections: Sequence[Section],
    summaries: Sequence[Summaries | None],
    rule: Rule,
    heads: int,
    dim: int,
) -> Table:
    """Raises:  ConfigError unless sections, summaries and queries match"""
    known = check_summaries(summaries, rule)
    if known is None:
        raise ConfigError("select_pages: no section has summaries: expected those of one at least")
    kv_heads = sections[0].tokens.shape[1]
    group = heads // kv_heads
    pairs = zip(sections, summaries, strict=True)
    words = np.array([_words(*pair, kv_heads, dim) for pair in pairs], np.int64)
    if known.codebooks is not None:  # a query is its logits with all codes, of all heads together
        shared = kv_heads, 1, CENTROIDS, words.ctypes.data, len(words), 0
    else:
        tile = ScoreTile(known.kind, group, dim, rule.omitted_mass > 0)
        shared = kv_heads, group, dim, words.ctypes.data, len(words), score_tile_address(tile)
    rule_words = rule.keep, rule.budget_tokens, rule.sink_tokens, rule.window_tokens
    return Table(kv_heads, known, (*shared, *rule_words, *_form(known)), words)


def _form(summaries: Summaries) -> tuple[int, ...]:
    """Layout of summaries as words: kind, code vectors, numbers."""
    kind = summaries.kind
    return cpu_choice.WORDS[kind], CODE_BYTES[kind], NUMBERS[kind]


def _words(
    section: Section, summaries: Summaries | None, kv_heads: int, dim: int
) -> tuple[int, ...]:
    """A section as words; ``cpu_choice`` has the names of the columns.

    Raises:  ConfigError unless it matches its summaries and the queries
    """
    tokens = section.tokens
    check_indices(tokens)
    fits = summaries is None or (
        summaries.head_dim == dim and summaries.memory.shape[1] == kv_heads
    )
    if tokens.shape[1] != kv_heads or not fits:
        raise ConfigError(f"select_pages: expected {kv_heads} KV heads of head_dim {dim}")
    slots = min(tokens.shape[0], section.pages.shape[0])
    if summaries is None:
        known = (0, 0, 0, 0)
    else:
        memory = summaries.memory
        slots = min(slots, memory.shape[0])
        known = (memory.data_ptr(), *memory.stride()[:2], memory.shape[2])
    room = section.layout.tokens, section.pages.shape[2]
    parts = section.layout.parts
    return *room, tokens.data_ptr(), *tokens.stride(), slots, *known, parts
