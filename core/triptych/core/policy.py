"""The compression policy, resolved: which formats hold a request's tokens, and by what rule."""

from dataclasses import dataclass
from typing import Self

from triptych.core.config import CompressorConfig


@dataclass(frozen=True, slots=True, kw_only=True)
class Policy:
    """What becomes of each token.

    The first ``sink_tokens`` and the newest ``window_tokens`` stay in 16 bits, since most
    attention rests on them. Of the others, those whose mean attention from later tokens
    reaches ``alpha_high / n`` of ``n`` tokens are high; from ``alpha_low / n`` on they are low;
    the rest is dropped. A uniform policy is the case in which all are high.

    Source: DiffKV, section 4 (thresholds relative to the mean weight 1/n). Sink and window in 16
            bits are ours (docs/log.md): the papers keep the window in the high format
    """

    name: str
    """As configured, such as ``uniform:k8v4``."""
    high_format: str
    low_format: str | None = None
    """None: there is no low class, and nothing is dropped."""
    alpha_high: float = 0.0
    alpha_low: float = 0.0
    window_tokens: int = 64
    sink_tokens: int = 1

    @classmethod
    def of(cls, config: CompressorConfig) -> Self:
        kind, _, form = config.policy.partition(":")
        window, sink = config.recent_window_tokens, config.sink_tokens
        if kind == "uniform":
            return cls(
                name=config.policy,
                high_format=form.lower(),
                window_tokens=window,
                sink_tokens=sink,
            )
        return cls(
            name=config.policy,
            high_format=config.high_format.lower(),
            low_format=config.low_format.lower(),
            alpha_high=config.alpha_high,
            alpha_low=config.alpha_low,
            window_tokens=window,
            sink_tokens=sink,
        )

    @property
    def needs_significance(self) -> bool:
        """Whether tokens are told apart by the attention that they receive."""
        return self.low_format is not None and self.alpha_high > 0
