"""Prompts of an exact length, none of which shares a prefix with another."""

import random
from dataclasses import dataclass
from typing import Literal

PromptForm = Literal["tokens", "text"]
Endpoint = Literal["completions", "chat"]

_TEXT = """
time year people way day man thing woman life child world school state family student group
country problem hand part place case week company system program question work government number
night point home water room mother area money story fact month lot right study book eye job word
business issue side kind head house service friend father power hour game line end member law
car city community name president team minute idea body information back parent face others
level office door health person art war history party result change morning reason research girl
guy moment air teacher force education
"""

WORDS = tuple(_TEXT.split())
"""Common English words: most vocabularies have each of them, with its space, as one token."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Workload:
    """What every request of a run looks like."""

    model: str
    prompt_tokens: int
    output_tokens: int
    endpoint: Endpoint = "completions"
    form: PromptForm = "tokens"
    """``tokens``: prompts are token ids (exact); ``text``: words (exact after calibration)."""

    vocab_size: int = 32_000
    """Ids are drawn below this; lower it for a model with a smaller vocabulary."""

    words: int = 0
    """Words of a text prompt that come to ``prompt_tokens`` tokens; 0: as many as tokens."""

    temperature: float = 0.0
    seed: int = 0

    def body(self, index: int) -> dict[str, object]:
        """The JSON body of request number ``index``: the same for the same seed."""
        prompt = self._prompt(random.Random(f"{self.seed}/{index}"))
        shared: dict[str, object] = {
            "model": self.model,
            "max_tokens": self.output_tokens,
            "temperature": self.temperature,
            "ignore_eos": True,
            "stream": True,
            "stream_options": {"include_usage": True, "continuous_usage_stats": True},
        }
        if self.endpoint == "chat":
            return shared | {"messages": [{"role": "user", "content": prompt}]}
        return shared | {"prompt": prompt}

    def _prompt(self, draw: random.Random) -> list[int] | str:
        if self.form == "tokens":
            low = min(1000, self.vocab_size // 2)  # special tokens and bytes have the lowest ids
            return [draw.randrange(low, self.vocab_size) for _ in range(self.prompt_tokens)]
        return " ".join(draw.choice(WORDS) for _ in range(self.words or self.prompt_tokens))


def poisson_arrivals_s(count: int, rate_per_s: float, seed: int) -> list[float]:
    """When each of ``count`` requests is due, in seconds from the start of the run."""
    draw, now = random.Random(seed), 0.0
    times = list[float]()
    for _ in range(count):
        times.append(now)
        now += draw.expovariate(rate_per_s)
    return times
