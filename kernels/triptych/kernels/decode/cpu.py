"""Decode attention on the CPU: checks and addresses for the compiled code."""

from collections.abc import Sequence
from dataclasses import dataclass
from math import e, log2
from struct import Struct
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from triptych.core.errors import ConfigError
from triptych.kernels.codegen.jobs import Job
from triptych.kernels.decode import flash_decoding, reference
from triptych.kernels.decode.page_step import PageStep, page_step_address, scratch_floats
from triptych.kernels.page_lists import PageLists, page_list_words
from triptych.kernels.pages import Section, check_arena, check_indices, check_window


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
    """See ``reference.decode_attention``."""
    out = torch.empty_like(query, dtype=torch.float32, memory_format=torch.contiguous_format)
    transform = LogitTransform(scale, window, softcap)
    attention_job(query, arena, sections, slots, transform, positions, out, lse, page_lists).run()
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
    """See ``reference.score_tokens``."""
    if weight <= 0:
        raise ConfigError(f"score_tokens: weight={weight}: expected > 0")
    transform = LogitTransform(scale, window, softcap)
    job = score_job(query, arena, sections, slots, transform, positions, lse, weight)
    if job is None:
        return
    job.run()
    if mirror is not None:
        reference.copy_scores(arena, mirror, reference.scored_sections(sections), slots)


def record_scores(
    progress: Tensor, slots: Tensor, positions: Tensor, layer: int, layers: int
) -> None:
    """See ``reference.record_scores``."""
    record_job(progress, slots, positions, layer, layers).run()


def record_job(progress: Tensor, slots: Tensor, positions: Tensor, layer: int, layers: int) -> Job:
    """The job of ``record_scores``."""
    check_indices(slots, positions)
    if progress.dtype != torch.int64 or not progress.is_contiguous():
        raise ConfigError(f"record_scores: progress {progress.dtype}: expected dense int64")
    kept = progress, slots.contiguous(), positions.contiguous()
    words = np.array(
        [*(each.data_ptr() for each in kept), len(slots), layer, layers, len(progress)]
    )
    problem = f"a slot is out of range: there are {len(progress)}"
    return Job("record_scores", flash_decoding.record.address, words, 0, kept, problem)


class LogitTransform(NamedTuple):
    """Parameters that turn dot products into logits: scale, window and cap."""

    scale: float
    window: int
    softcap: float

    @property
    def factors(self) -> tuple[float, float]:
        """Factor of the query, and cap, for logits in powers of two."""
        if self.softcap > 0:
            return self.scale / self.softcap, self.softcap * log2(e)
        return self.scale * log2(e), 0.0


def attention_job(
    query: Tensor,
    arena: Tensor,
    sections: Sequence[Section],
    slots: Tensor,
    transform: LogitTransform,
    positions: Tensor | None,
    out: Tensor,
    lse: Tensor | None = None,
    page_lists: PageLists | None = None,
) -> Job:
    """The job of ``decode_attention``, with its results in ``out`` and ``lse``."""
    return _job(
        "decode_attention", query, arena, sections, slots, transform, positions, out, lse,
        page_lists=page_lists,
    )  # fmt: skip


def score_job(
    query: Tensor,
    arena: Tensor,
    sections: Sequence[Section],
    slots: Tensor,
    transform: LogitTransform,
    positions: Tensor | None,
    lse: Tensor,
    weight: float,
) -> Job | None:
    """The job of ``score_tokens``; None: no section has scores."""
    scored = reference.scored_sections(sections)
    if not scored:
        return None
    return _job(
        "score_tokens", query, arena, scored, slots, transform, positions, None, lse, weight
    )


def _job(
    op: str,
    query: Tensor,
    arena: Tensor,
    sections: Sequence[Section],
    slots: Tensor,
    transform: LogitTransform,
    positions: Tensor | None,
    out: Tensor | None,
    lse: Tensor | None,
    weight: float = 0.0,
    page_lists: PageLists | None = None,
) -> Job:
    """Fill ``out`` and ``lse``; with a weight instead read ``lse`` and add to token scores."""
    rows, heads, dim = query.shape
    spec = StepSpec(heads, dim, transform, weight > 0)
    table = sections[0].call_cache.get(
        lambda: _table(arena, sections, spec), arena, tuple(sections[1:]), spec
    )
    check_indices(slots) if positions is None else check_indices(slots, positions)
    if transform.window > 0 and positions is None:
        raise ConfigError("decode attention: a window needs the positions of the queries")
    if lse is not None and (lse.shape != (rows, heads) or not _is_plain_float(lse)):
        raise ConfigError(f"lse {tuple(lse.shape)} {lse.dtype}: expected float32 {(rows, heads)}")
    query = query.float()
    if query.stride(2) != 1 or query.stride(1) != dim:
        query = query.contiguous()
    slots = slots.contiguous()
    positions = slots if positions is None else positions.contiguous()
    places, listed = None, NO_LISTS
    if page_lists is not None:
        places = page_lists.rows.contiguous()
        listed = page_list_words(page_lists, rows, table.kv_heads)
    words = np.empty(flash_decoding.JOB_WORDS, np.int64)
    JOB.pack_into(
        words.data,
        0,
        query.data_ptr(),
        query.stride(0),
        0 if out is None else out.data_ptr(),
        slots.data_ptr(),
        positions.data_ptr(),
        0 if lse is None else lse.data_ptr(),
        rows,
        transform.window,
        *table.words,
        weight,
        0 if places is None else places.data_ptr(),
        *listed,
    )
    kept = query, arena, table, out, slots, positions, lse, page_lists, places
    start, body = flash_decoding.attend.address, flash_decoding.take_runs.address
    return Job(op, start, words, body, kept, "a slot, a token count or a page id is out of range")


JOB = Struct("15q 3d 9q")
"""The fields of ``flash_decoding.Job`` that are set here."""

NO_LISTS = (0,) * 8


def _is_plain_float(tensor: Tensor) -> bool:
    return tensor.dtype == torch.float32 and tensor.is_contiguous()


class StepSpec(NamedTuple):
    """Parameters of the vector code of a layer besides its page layouts."""

    heads: int
    dim: int
    transform: LogitTransform
    is_scoring: bool


@dataclass(frozen=True, slots=True)
class Table:
    """Words for compiled code: an arena and the sections of a layer."""

    kv_heads: int
    words: tuple[float, ...]
    """In the order of ``flash_decoding.Job``; one is the address of ``sections``."""
    sections: NDArray[np.int64]


def _table(arena: Tensor, sections: Sequence[Section], spec: StepSpec) -> Table:
    """Raises:  ConfigError unless there is vector code for the pages of all sections"""
    heads, dim, transform, is_scoring = spec
    kv_heads = sections[0].tokens.shape[1]
    group = heads // kv_heads
    check_window(sections, transform.window)
    for section in sections:
        check_arena(arena, section.layout)
        _check_section(section, kv_heads, dim)
    flags = transform.window > 0, transform.softcap > 0, is_scoring
    steps = [PageStep(section.layout, group, *flags) for section in sections]
    count = len(arena)
    words = np.array([_words(*each, count) for each in zip(sections, steps, strict=True)], np.int64)
    scratch = max(scratch_floats(step) for step in steps)
    shared = arena.data_ptr(), kv_heads, group, dim, scratch
    return Table(kv_heads, (*shared, words.ctypes.data, len(words), *transform.factors), words)


def _check_section(section: Section, kv_heads: int, dim: int) -> None:
    layout = section.layout
    check_indices(section.pages, section.tokens)
    if layout.head_dim != dim or dim % 16 or section.tokens.shape[1] != kv_heads:
        raise ConfigError(
            f"decode attention: section of {section.tokens.shape[1]} KV heads, head_dim "
            f"{layout.head_dim}: expected {kv_heads}, {dim} (a multiple of 16)"
        )
    if layout.format.key_groups > 1 or layout.format.value_groups > 1:
        raise ConfigError(
            f"decode attention on the CPU reads one group per vector: {layout.format}"
        )


def _words(section: Section, step: PageStep, arena_pages: int) -> tuple[int, ...]:
    """A section as words; ``flash_decoding`` has the names of the columns."""
    pages, tokens = section.pages, section.tokens
    slot, head, entry = pages.stride()
    last = 4 * entry * (pages.shape[2] - 1)
    first = pages.data_ptr() + (last if section.backward else 0)
    return (
        page_step_address(step),
        section.layout.tokens,
        pages.shape[2],
        first,
        slot,
        head,
        -entry if section.backward else entry,
        tokens.data_ptr(),
        *tokens.stride(),
        min(tokens.shape[0], pages.shape[0]),
        section.layout.size_bytes,
        arena_pages * section.layout.parts,
    )
