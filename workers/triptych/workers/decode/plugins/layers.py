"""Tokens of which the model is sure before its last layer skip the rest."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

from triptych.core.config import require
from triptych.workers.decode.plugins.plugin import EXIT_DEPTH, EXIT_ENTROPY, EXITS, StepPlugin


@dataclass(frozen=True)
class LayerExit(StepPlugin):
    """A token whose next one is clear after a share of the layers skips the others.

    Clear is: the hidden state, through the model's last norm and head, stands for a distribution of
    less than ``threshold`` nats. A token that leaves has keys and values in all layers, made of the
    hidden state with which it left (``models/exits.py``). Models that were not trained for it
    change what they say.

    Source: TinyServe, section 4.1 (early exit); CALM (what becomes of the layers that are skipped)
    """

    needs: ClassVar = (EXITS,)
    provides: ClassVar = (EXIT_ENTROPY, EXIT_DEPTH)

    threshold: float = 0.0
    """In nats; 0 never skips a layer."""
    depth: float = 0.8
    """Share of the layers after which a token is asked, once."""

    def __post_init__(self) -> None:
        require(self.threshold >= 0, "threshold", self.threshold, "0 or more")
        require(0 < self.depth < 1, "depth", self.depth, "above 0 and below 1")

    def settings(self) -> Mapping[str, float]:
        return {EXIT_ENTROPY: self.threshold, EXIT_DEPTH: self.depth}
