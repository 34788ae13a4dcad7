"""Recognizes the masks that transformers builds: causal, with or without a sliding window.

While a model is observed, ``create_causal_mask`` and its siblings return an ``ObservedMask`` that
holds the function behind the mask. Layers that change the mask, as by adding a bias, pass another
tensor to attention.
"""

from collections.abc import Callable
from typing import Any, cast

import torch
from torch import Tensor
from transformers import AttentionMaskInterface

from triptych.core.errors import ModelError

OBSERVED_ATTENTION = "triptych_observed"
"""Name under which transformers finds attention and mask of an observed model."""

MaskFunction = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]
"""Whether a query sees a key, of the indices of batch, head, query and key."""


class ObservedMask(Tensor):
    """A mask without values; ``visible`` is set only if no operation has changed it."""

    visible: MaskFunction


def observed_mask(
    batch_size: int, q_length: int, kv_length: int, mask_function: MaskFunction, **_: object
) -> Tensor:
    """The mask function for transformers, instead of ``sdpa_mask``."""
    shape = (batch_size, 1, q_length, kv_length)
    mask = torch.empty(shape, device="meta").as_subclass(ObservedMask)
    mask.visible = mask_function
    return mask


def window_of(mask: Tensor, heads: int, context: int) -> int:
    """The sliding window of an observed mask in tokens; 0: none.

    The mask is evaluated for several queries of a sequence of ``context`` tokens.

    Raises: ModelError if a layer has changed the mask, or if it is not causal
    """
    visible = mask.__dict__.get("visible")
    if visible is None:
        raise ModelError("a layer changes the attention mask, as by adding a bias to scores")
    _without_padding(visible)
    last = context - 1
    seen = int(_row(visible, heads, last, context).sum())
    window = 0 if seen == context else seen
    keys = torch.arange(context + 1)
    for query in sorted({0, 1, context // 3, context // 2, last}):
        distance = query - keys
        expected = (distance >= 0) & (distance < (window or context))
        found = _row(visible, heads, query, context)
        if (found & (distance < 0)).any():
            raise ModelError("attention looks ahead: this is not a causal language model")
        if not found.equal(expected):
            raise ModelError("its attention mask is neither causal nor a sliding window")
    return window


def _row(visible: MaskFunction, heads: int, query: int, context: int) -> Tensor:
    """Keys that a query sees in all of the first and the last head, bool (context + 1,)."""
    keys = torch.arange(context + 1)
    zero, at = torch.tensor(0), torch.tensor(query)
    try:
        rows = [visible(zero, torch.tensor(head), at, keys) for head in (0, heads - 1)]
        first, last = (row.broadcast_to(keys.shape) for row in rows)
        if not first.equal(last):
            raise ModelError("its attention mask differs between heads")
    except (RuntimeError, ValueError, TypeError, IndexError, NotImplementedError) as error:
        raise ModelError("its attention mask is not a function of token positions") from error
    return first


def _without_padding(function: object) -> None:
    """Give zeros to the tensors of a mask's closures, which have no values on ``meta``.

    They count padding, of which there is none, or number blocks that see each other.
    """
    for cell in getattr(function, "__closure__", None) or ():
        held = cell.cell_contents
        if isinstance(held, Tensor) and held.is_meta:
            cell.cell_contents = torch.zeros(held.shape, dtype=held.dtype)
        for inner in cast("tuple[object, ...]", held) if isinstance(held, tuple) else (held,):
            _without_padding(inner)


AttentionMaskInterface.register(  # pyright: ignore[reportUnknownMemberType]
    OBSERVED_ATTENTION, cast("Any", observed_mask)
)
