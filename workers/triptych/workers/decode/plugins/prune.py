"""Token pruning in decode: drops tokens that receive little attention."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

from triptych.core.config import require
from triptych.workers.decode.plugins.plugin import ALPHA_LOW, SCORES, StepPlugin


@dataclass(frozen=True)
class SoftPrune(StepPlugin):
    """Drops tokens whose mean attention is below ``threshold / n`` during decode.

    Tokens are dropped when a page retires from the window: tokens that leave the high window are
    classified, and older low ones below the threshold give their places to downgraded tokens. The
    threshold raises ``compressor.alpha_low`` for output tokens and never lowers it; from
    ``alpha_high`` on, no token becomes low.

    Source: TinyServe, sections 3.1 and 4.1 (token-level pruning, SoftPrune; the paper has no
            formula for it: the classification is DiffKV's)
    """

    needs: ClassVar = (SCORES,)
    provides: ClassVar = (ALPHA_LOW,)

    threshold: float = 0.0
    """Times the mean attention 1/n of n tokens; 0 drops nothing more."""

    def __post_init__(self) -> None:
        require(self.threshold >= 0, "threshold", self.threshold, "0 or more")

    def settings(self) -> Mapping[str, float]:
        return {ALPHA_LOW: self.threshold}
