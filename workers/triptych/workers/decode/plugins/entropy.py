# torch leaves some operators untyped.
# pyright: reportUnknownMemberType=false
"""Entropy of the next token's distribution, and a plug-in that ends outputs while it is low."""

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from triptych.core.config import require
from triptych.workers.decode.plugins.plugin import END, MEMORY, Facts, StepPlugin

_LEAST = -100.0
"""Clamp for centred logits: lower ones do not change a float32 sum."""


def entropy(logits: Tensor) -> Tensor:
    """Entropy of softmax(logits) in nats: log Z - sum w (l - max) / Z, with w = exp(l - max).

    Row by row, so that a row stays in the core's cache. NaN for rows with NaN.

    Shapes: logits (B, vocab) -> (B,)
    Dtypes: float32
    """
    found = logits.new_empty(logits.shape[0], dtype=torch.float32)
    for row, values in enumerate(logits):
        centred = (values - values.max()).clamp_(min=_LEAST)
        weights = centred.exp()
        total = weights.sum()
        found[row] = total.log() - weights.dot(centred) / total
    return found


@dataclass(frozen=True)
class EntropyStop(StepPlugin):
    """Ends an output after ``patience_tokens`` tokens in a row with an entropy below ``threshold``.

    The entropy is that of the model's own distribution in nats, before temperature, penalties and
    filters. It is never below 0, so a threshold of 0 changes nothing. The first output token is
    sampled in prefill and does not count.

    Source: TinyServe, sections 3.1 and 4.1 (EntropyStop; which entropy, its unit and for how many
            tokens it has to be low is ours, the paper does not define it)
    """

    needs: ClassVar = ("entropy",)
    provides: ClassVar = (END,)
    memory: ClassVar = 1

    threshold: float = 0.0
    """In nats; 0 never ends an output."""
    patience_tokens: int = 16
    """Number of successive tokens whose entropy must be below the threshold."""

    def __post_init__(self) -> None:
        require(self.threshold >= 0, "threshold", self.threshold, "0 or more")
        require(self.patience_tokens >= 1, "patience_tokens", self.patience_tokens, "1 or more")

    def step(self, facts: Facts) -> Facts:
        is_sure = facts["entropy"] < self.threshold
        streak = (facts[MEMORY][:, 0] + 1) * is_sure
        return {END: streak >= self.patience_tokens, MEMORY: streak[:, None]}
