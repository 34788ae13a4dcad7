"""Decode attention on the CPU: vector code per page, numba around it."""

from collections.abc import Sequence
from math import e, log2

import numpy as np
import torch
from torch import Tensor

from triptych.core.errors import ConfigError
from triptych.kernels.compiled import team_address, team_threads
from triptych.kernels.decode import driver
from triptych.kernels.decode.page_step import PageStep, page_step_address, scratch_floats
from triptych.kernels.pages import Section, check_arena, check_indices


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
) -> Tensor:
    """See ``reference.decode_attention``."""
    rows, heads, dim = query.shape
    kv_heads = sections[0].tokens.shape[1]
    steps = [
        PageStep(section.layout, heads // kv_heads, window > 0, softcap > 0) for section in sections
    ]
    for section in sections:
        _check(section, arena, kv_heads, dim)
    check_indices(slots, *(() if positions is None else (positions,)))
    if window > 0 and positions is None:
        raise ConfigError("decode_attention: a window needs the positions of the queries")
    query = query.float().contiguous()
    slots = slots.contiguous()
    asked = slots if positions is None else positions.contiguous()
    out = torch.empty_like(query)
    table = np.array([_row(*pair) for pair in zip(sections, steps, strict=True)])
    job = np.zeros(driver.JOB_WORDS, np.int64)
    job[:15] = (
        query.data_ptr(),
        out.data_ptr(),
        arena.data_ptr(),
        *arena.shape,
        slots.data_ptr(),
        asked.data_ptr(),
        rows,
        kv_heads,
        heads // kv_heads,
        dim,
        max(scratch_floats(step) for step in steps),
        window,
        table.ctypes.data,
        len(table),
    )
    job[15:17].view(np.float64)[:] = (
        (scale / softcap, softcap * log2(e)) if softcap > 0 else (scale * log2(e), 0.0)
    )
    if not driver.attend(job, team_address(), driver.take_runs.address, team_threads()):
        raise ConfigError("decode_attention: a slot, a token count or a page id is out of range")
    return out


def _check(section: Section, arena: Tensor, kv_heads: int, dim: int) -> None:
    """Raise ``ConfigError`` unless vector code can be made for the section's pages."""
    check_arena(arena, section.layout)
    check_indices(section.pages, section.tokens)
    form = section.layout.format
    if section.layout.head_dim != dim or dim % 16 or section.tokens.shape[1] != kv_heads:
        raise ConfigError(
            f"decode_attention: section of {section.tokens.shape[1]} KV heads, head_dim "
            f"{section.layout.head_dim}: expected {kv_heads}, {dim} (a multiple of 16)"
        )
    if form.key_groups > 1 or form.value_groups > 1:
        raise ConfigError(f"decode_attention on the CPU reads one group per vector: {form}")


def _row(section: Section, step: PageStep) -> tuple[int, ...]:
    """What the driver knows of a section; its columns are named there."""
    pages, tokens = section.pages, section.tokens
    return (
        page_step_address(step),
        section.layout.tokens,
        pages.shape[2],
        pages.data_ptr(),
        *pages.stride(),
        tokens.data_ptr(),
        *tokens.stride(),
        min(tokens.shape[0], pages.shape[0]),
    )
