# torch leaves some operators untyped.
# pyright: reportUnknownMemberType=false
"""Tokens that leave a step before the last layer."""

from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import Tensor

from triptych.workers.decode.plugins.entropy import entropy


@dataclass(frozen=True, eq=False)
class Exits:
    """When each token of a step may leave it.

    After ``layers`` layers a token is asked once: what would its hidden state say as it is, through
    the model's last norm and head? If that has less entropy than ``entropy``, it is what the token
    says, and the layers behind are skipped. Their keys and values are made of the hidden state with
    which it left, as if they had added nothing: tokens that come later find it in every layer.

    Source: CALM (Schuster et al., 2022), section 3 (state propagation); TinyServe, section 4.1
            (early exit)
    """

    entropy: Tensor
    """In nats, float32 (T,); 0: the token never leaves."""
    layers: Tensor
    """int64 (T,)"""


@dataclass
class Leaving:
    """Follows the tokens of one step through the layers."""

    exits: Exits
    logits: Callable[[Tensor], Tensor]
    """Of hidden states, (N, E) -> (N, vocab)."""
    _stays: Tensor = field(init=False)
    _all_stay: bool = True

    def __post_init__(self) -> None:
        self._stays = torch.ones_like(self.exits.layers, dtype=torch.bool)

    def staying(self, layers: int, hidden: Tensor) -> Tensor | None:
        """Which tokens go on after so many layers; None: all of them.

        Shapes:  hidden (T, E) -> (N,) indices
        """
        asked = ((self.exits.layers == layers) & (self.exits.entropy > 0)).nonzero()[:, 0]
        if len(asked):
            is_sure = entropy(self.logits(hidden[asked])) < self.exits.entropy[asked]
            self._stays[asked[is_sure]] = False
            self._all_stay = bool(self._stays.all())
        return None if self._all_stay else self._stays.nonzero()[:, 0]
