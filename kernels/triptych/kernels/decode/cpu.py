"""Decode attention on the CPU: vector code per page, numba around it."""

from collections.abc import Sequence
from dataclasses import dataclass
from math import e, log2

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from triptych.core.errors import ConfigError
from triptych.kernels.compiled import team_address, team_threads
from triptych.kernels.decode import driver
from triptych.kernels.decode.page_step import PageStep, page_step_address, scratch_floats
from triptych.kernels.lists import PageLists, check_lists
from triptych.kernels.pages import Section, check_arena, check_indices, check_page_bytes


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
    lists: PageLists | None = None,
) -> Tensor:
    """See ``reference.decode_attention``."""
    out = torch.empty(query.shape)
    traits = Traits(scale, window, softcap)
    _attend(query, arena, sections, slots, traits, positions, out=out, lse=lse, lists=lists)
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
) -> None:
    """See ``reference.score_tokens``."""
    if weight <= 0:
        raise ConfigError(f"score_tokens: weight={weight}: expected > 0")
    traits = Traits(scale, window, softcap)
    _attend(query, arena, sections, slots, traits, positions, lse=lse, weight=weight)


@dataclass(frozen=True, slots=True)
class Traits:
    """How a layer turns products into logits."""

    scale: float
    window: int
    softcap: float

    @property
    def factors(self) -> tuple[float, float]:
        """What multiplies the query and the cap, so that logits are in powers of two."""
        if self.softcap > 0:
            return self.scale / self.softcap, self.softcap * log2(e)
        return self.scale * log2(e), 0.0


def _attend(
    query: Tensor,
    arena: Tensor,
    sections: Sequence[Section],
    slots: Tensor,
    traits: Traits,
    positions: Tensor | None,
    *,
    out: Tensor | None = None,
    lse: Tensor | None = None,
    weight: float = 0.0,
    lists: PageLists | None = None,
) -> None:
    """Fill ``out`` and ``lse``; or, with a weight, read ``lse`` and add to the scores."""
    rows, heads, dim = query.shape
    kv_heads = sections[0].tokens.shape[1]
    group = heads // kv_heads
    check_arena(arena, sections[0].layout)
    form = arena.shape[1], kv_heads, dim, group, traits.window > 0, traits.softcap > 0, weight > 0
    known = [section.recall(_words_and_scratch, form) for section in sections]
    check_indices(slots, *(() if positions is None else (positions,)))
    if traits.window > 0 and positions is None:
        raise ConfigError("decode attention: a window needs the positions of the queries")
    if lse is not None and (lse.shape != (rows, heads) or not _is_plain_float(lse)):
        raise ConfigError(f"lse {tuple(lse.shape)} {lse.dtype}: expected float32 {(rows, heads)}")
    query = query.float().contiguous()
    slots = slots.contiguous()
    asked = slots if positions is None else positions.contiguous()
    table = np.concatenate([words for words, _ in known])
    job = np.zeros(driver.JOB_WORDS, np.int64)
    job[:16] = (
        query.data_ptr(),
        0 if out is None else out.data_ptr(),
        arena.data_ptr(),
        *arena.shape,
        slots.data_ptr(),
        asked.data_ptr(),
        rows,
        kv_heads,
        group,
        dim,
        max(floats for _, floats in known),
        traits.window,
        table.ctypes.data,
        len(known),
        0 if lse is None else lse.data_ptr(),
    )
    job[16:19].view(np.float64)[:] = (*traits.factors, weight)
    if lists is not None:
        places = lists.rows.contiguous()
        job[19 : 19 + LIST_WORDS] = _lists(lists, places, rows, kv_heads)
    if not driver.attend(job, team_address(), driver.take_runs.address, team_threads()):
        raise ConfigError("decode attention: a slot, a token count or a page id is out of range")


LIST_WORDS = 9


def _lists(lists: PageLists, places: Tensor, rows: int, kv_heads: int) -> tuple[int, ...]:
    """What the driver knows of lists of pages, in the order of its job."""
    check_lists(lists, rows, kv_heads)
    return (
        places.data_ptr(),
        min(lists.ordinals.shape[0], lists.counts.shape[0]),
        lists.ordinals.data_ptr(),
        *lists.ordinals.stride()[:2],
        lists.ordinals.shape[2],
        lists.counts.data_ptr(),
        *lists.counts.stride(),
    )


def _is_plain_float(tensor: Tensor) -> bool:
    return tensor.dtype == torch.float32 and tensor.is_contiguous()


Form = tuple[int, int, int, int, bool, bool, bool]
"""Of a call: bytes of a page, KV heads, head_dim, query heads of one, and is there a window, a cap,
and a weight."""


def _words_and_scratch(section: Section, form: Form) -> tuple[NDArray[np.int64], int]:
    """What the driver knows of a section, and the floats of scratch that its pages need.

    Raises:  ConfigError unless vector code can be made for the section's pages
    """
    page_bytes, kv_heads, dim, group, *flags = form
    layout = section.layout
    check_page_bytes(page_bytes, layout)
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
    step = PageStep(layout, group, *flags)
    return np.array(_words(section, step)), scratch_floats(step)


def _words(section: Section, step: PageStep) -> tuple[int, ...]:
    """What the driver knows of a section; its columns are named there."""
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
    )
