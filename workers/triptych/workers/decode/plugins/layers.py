"""Early exit: tokens with a confident prediction before the last layer skip the rest."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

from triptych.core.config import require
from triptych.workers.decode.plugins.plugin import EXIT_DEPTH, EXIT_ENTROPY, EXITS, StepPlugin


@dataclass(frozen=True)
class LayerExit(StepPlugin):
    """A token exits after the share ``depth`` of the layers if its prediction is confident there.

    Confident: the hidden state, through the model's last norm and head, gives a distribution with
    an entropy below ``threshold`` nats. The skipped layers get keys and values from the hidden
    state at the exit (``models/early_exit.py``). Models that were not trained for it give other
    outputs.

    Source: TinyServe, section 4.1 (early exit); CALM (state propagation to the skipped layers)
    """

    needs: ClassVar = (EXITS,)
    provides: ClassVar = (EXIT_ENTROPY, EXIT_DEPTH)

    threshold: float = 0.0
    """In nats; 0 never skips a layer."""
    depth: float = 0.8
    """Share of the layers after which the exit is decided, once per token."""

    def __post_init__(self) -> None:
        require(self.threshold >= 0, "threshold", self.threshold, "0 or more")
        require(0 < self.depth < 1, "depth", self.depth, "above 0 and below 1")

    def settings(self) -> Mapping[str, float]:
        return {EXIT_ENTROPY: self.threshold, EXIT_DEPTH: self.depth}
