"""Tokens that later ones hardly look at are dropped while an answer is written."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

from triptych.core.config import require
from triptych.workers.decode.plugins.plugin import ALPHA_LOW, SCORES, StepPlugin


@dataclass(frozen=True)
class SoftPrune(StepPlugin):
    """Tokens whose mean attention is below ``threshold / n`` are dropped while an answer grows.

    That happens when a page of tokens leaves the window: those that leave the window of high tokens
    with it are judged, and older low ones below the threshold make room for newcomers. It raises
    ``compressor.alpha_low`` after the prompt and never lowers it; from ``alpha_high`` on, whoever
    is not high is dropped.

    Source: TinyServe, sections 3.1 and 4.1 (token-level pruning, SoftPrune; the paper has no
            formula for it: the judgement is DiffKV's)
    """

    needs: ClassVar = (SCORES,)
    provides: ClassVar = (ALPHA_LOW,)

    threshold: float = 0.0
    """Times the mean attention 1/n of n tokens; 0 drops nothing more."""

    def __post_init__(self) -> None:
        require(self.threshold >= 0, "threshold", self.threshold, "0 or more")

    def settings(self) -> Mapping[str, float]:
        return {ALPHA_LOW: self.threshold}
