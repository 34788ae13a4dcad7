# torch leaves some operators untyped.
# pyright: reportUnknownMemberType=false
"""Early exit: tokens of a step that skip the last layers."""

from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import Tensor

from triptych.workers.decode.plugins.entropy import entropy


@dataclass(frozen=True, eq=False)
class Exits:
    """Exit condition of each token of a step.

    After ``layers`` layers the final norm and head are applied to a token's hidden state, once. If
    the entropy of these logits is below ``entropy``, the token exits: they are its logits, and the
    remaining layers are skipped. Keys and values of those layers are computed from its last hidden
    state, so that later tokens find it in every layer.

    Source: CALM (Schuster et al., 2022), section 3 (state propagation); TinyServe, section 4.1
            (early exit)
    """

    entropy: Tensor
    """Threshold in nats, float32 (T,); 0: the token never exits."""
    layers: Tensor
    """Layers before the check, int64 (T,)."""


@dataclass
class ExitTracker:
    """Tracks which tokens of one step have exited."""

    exits: Exits
    logits: Callable[[Tensor], Tensor]
    """Of hidden states, (N, E) -> (N, vocab)."""
    _is_active: Tensor = field(init=False)
    _all_active: bool = True

    def __post_init__(self) -> None:
        self._is_active = torch.ones_like(self.exits.layers, dtype=torch.bool)

    def active_tokens(self, layers: int, hidden: Tensor) -> Tensor | None:
        """Tokens that continue after this many layers; None: all of them.

        Shapes:  hidden (T, E) -> (N,) indices
        """
        checked = ((self.exits.layers == layers) & (self.exits.entropy > 0)).nonzero()[:, 0]
        if len(checked):
            exits = entropy(self.logits(hidden[checked])) < self.exits.entropy[checked]
            self._is_active[checked[exits]] = False
            self._all_active = bool(self._is_active.all())
        return None if self._all_active else self._is_active.nonzero()[:, 0]
