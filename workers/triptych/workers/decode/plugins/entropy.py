# torch leaves some operators untyped.
# pyright: reportUnknownMemberType=false
"""Entropy of the next token's distribution, and answers that end when it stays low."""

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from triptych.core.config import require
from triptych.workers.decode.plugins.plugin import END, MEMORY, Facts, StepPlugin

_LEAST = -100.0
"""Logits further below the best one weigh less than float32 can tell."""


def entropy(logits: Tensor) -> Tensor:
    """Entropy of softmax(logits) in nats: log Z - sum w (l - max) / Z, with w = exp(l - max).

    Row by row, as the numbers of one row stay in the core's cache. No number where a row has none.

    Shapes: logits (B, vocab) -> (B,)
    Dtypes: float32
    """
    found = logits.new_empty(logits.shape[0], dtype=torch.float32)
    for row, line in enumerate(logits):
        centred = (line - line.max()).clamp_(min=_LEAST)
        weights = centred.exp()
        total = weights.sum()
        found[row] = total.log() - weights.dot(centred) / total
    return found


@dataclass(frozen=True)
class EntropyStop(StepPlugin):
    """An answer ends with the last of so many tokens in a row of which the model was sure.

    Sure is: the entropy of the model's own distribution for the token, in nats, before
    temperature, penalties and filters, was below ``threshold``. Entropy is never below 0, so with
    that nothing changes. The prefill draws the first token of an answer; that one does not count.

    Source: TinyServe, sections 3.1 and 4.1 (EntropyStop; which entropy, its unit and for how many
            tokens it has to be low is ours, the paper does not say)
    """

    needs: ClassVar = ("entropy",)
    provides: ClassVar = (END,)
    memory: ClassVar = 1

    threshold: float = 0.0
    """In nats; 0 never ends an answer."""
    patience_tokens: int = 16
    """Tokens in a row whose entropy has to be below it."""

    def __post_init__(self) -> None:
        require(self.threshold >= 0, "threshold", self.threshold, "0 or more")
        require(self.patience_tokens >= 1, "patience_tokens", self.patience_tokens, "1 or more")

    def step(self, facts: Facts) -> Facts:
        is_sure = facts["entropy"] < self.threshold
        streak = (facts[MEMORY][:, 0] + 1) * is_sure
        return {END: streak >= self.patience_tokens, MEMORY: streak[:, None]}
