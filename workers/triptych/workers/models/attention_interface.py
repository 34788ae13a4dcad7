"""The interface between a model and attention over pages.

A ragged batch is one row of tokens with explicit positions; the ``Attend``
that the caller passes knows which tokens see each other, so no mask is built.
"""

from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerTraits:
    """Scale, window and softcap of one layer's attention."""

    scale: float
    window: int = 0
    """Sliding window in tokens; 0: none."""
    softcap: float = 0.0
    """Bound of the logits; 0: none."""


class Attend(Protocol):
    """Attention of one step: stores new keys and values, and attends to each sequence's own."""

    def __call__(
        self,
        layer: int,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        traits: LayerTraits,
        sinks: Tensor | None = None,
    ) -> Tensor:
        """Attention of one layer over T new tokens.

        A key is visible to a query of the same sequence if ``0 <= query position - key
        position``, and ``< window`` where the layer has a sliding window (0: none). With
        a ``softcap``, logits become ``softcap * tanh(logits / softcap)``. ``sinks``: a logit of
        each head that takes part in every softmax and has no value (GPT-OSS); None: none.

        Shapes:  query (T, H, D); key, value (T, KH, D); sinks (H,) -> (T, H, D)
        Dtypes:  all of the model's type; keys and queries are already rotated; sinks
                 float32
        """
        ...


@runtime_checkable
class RotatingAttend(Attend, Protocol):
    """Attention over rotated keys and values that can rotate its output back itself."""

    def rotated_back(
        self,
        layer: int,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        traits: LayerTraits,
        sinks: Tensor | None,
        dtype: torch.dtype,
    ) -> Tensor:
        """``rotate_back`` of what a call returns, in fewer launches of kernels.

        Dtypes:  query, key, value float32, rotated; the output ``dtype``
        """
        ...
