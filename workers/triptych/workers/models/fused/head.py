"""The head of a fused model."""

from dataclasses import dataclass

import torch
from torch import Tensor

from triptych.kernels import recompute_largest
from triptych.workers.models.weights.linear import Int8Linear, Linear

EXACT_LOGITS = 64
"""Largest logits of a row that are recomputed in float32."""


@dataclass(frozen=True, slots=True)
class Head:
    """The head: float32 logits, of which the largest are exact.

    A 16-bit product rounds logits around 25 to steps of 1/8, often more than the difference of the
    two largest. So the ``EXACT_LOGITS`` largest of each row are recomputed in float32.
    """

    rough: Linear
    weight: Tensor

    @property
    def size_bytes(self) -> int:
        return self.rough.size_bytes

    def for_few_rows(self) -> "Head":
        return Head(self.rough.for_few_rows(), self.weight)

    def __call__(self, hidden: Tensor) -> Tensor:
        """Shapes:  hidden (N, E) float32 -> (N, vocab) float32"""
        logits = self.rough(hidden.to(self.weight.dtype)).float()
        if self.is_exact:
            return logits
        return recompute_largest(logits, hidden, self.weight, EXACT_LOGITS)

    @property
    def is_exact(self) -> bool:
        """Whether the product itself is in float32."""
        return self.weight.dtype == torch.float32 and not isinstance(self.rough, Int8Linear)
