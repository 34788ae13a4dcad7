"""Decode attention over rotated pages, whose output is rotated back: reference, and two CPU ops."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from triptych.kernels.decode import cpu, reference
from triptych.kernels.page_lists import PageLists
from triptych.kernels.pages import Section
from triptych.kernels.pointwise import cpu_rotation
from triptych.kernels.pointwise.reference import rotate_back


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
    """``rotate_back`` of ``decode_attention``, in ``dtype``; on a GPU it is not a launch more.

    Shapes:  as ``decode_attention``
    Dtypes:  as ``decode_attention``; the output ``dtype``: float32, bfloat16 or float16
    Promise: the same bits as the two ops one after the other on a GPU
    Source:  QuaRot, section 3 (values are rotated); FlashDecoding (the merge of splits)
    """
    mixed = reference.decode_attention(
        query,
        arena,
        sections,
        slots,
        scale=scale,
        window=window,
        softcap=softcap,
        positions=positions,
        lse=lse,
        page_lists=page_lists,
    )
    return rotate_back(mixed, dtype)


def attend_rotated_cpu(
    query: Tensor,
    arena: Tensor,
    sections: Sequence[Section],
    slots: Tensor,
    dtype: torch.dtype,
    **options: Any,
) -> Tensor:
    """See ``attend_rotated``: attention, then the rotation; ``options``: those of attention."""
    mixed = cpu.decode_attention(query, arena, sections, slots, **options)
    return cpu_rotation.rotate_back(mixed, dtype)
