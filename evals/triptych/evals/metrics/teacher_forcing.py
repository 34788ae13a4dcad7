"""Teacher forcing: what would the served engines have said next, given this text so far?"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from torch import Tensor

from triptych.core.config import AppConfig
from triptych.core.errors import ModelError
from triptych.core.messages import Sampling
from triptych.workers.local import LocalServer
from triptych.workers.sampling.sampler import Drawn, SamplerRow


@dataclass(frozen=True)
class Script:
    """Tokens that an answer begins with, whatever the model finds likely; then it is greedy."""

    forced: Sequence[int]
    keep: bool = True
    """Whether to keep the logits that the forced tokens were drawn against."""


@dataclass
class Teacher:
    """Draws answers by script. A request's ``seed`` is the number of its script."""

    scripts: Sequence[Script]
    logits: dict[int, list[Tensor]] = field(default_factory=dict[int, list[Tensor]])
    """By script, the logits before each of its forced tokens: (vocab,) float32."""

    def draw(self, logits: Tensor, rows: Sequence[SamplerRow]) -> list[Drawn]:
        """Shapes: logits (N, vocab), one row each"""
        return [self._next(row, seen) for row, seen in zip(rows, logits, strict=True)]

    def _next(self, row: SamplerRow, seen: Tensor) -> Drawn:
        number = row.sampling.seed
        script = self.scripts[number]
        if row.length >= len(script.forced):
            return Drawn(token=int(seen.argmax()))
        if script.keep:
            self.logits.setdefault(number, []).append(seen.to("cpu", copy=True))
        return Drawn(token=script.forced[row.length])


def forced_logits(
    config: AppConfig,
    model_path: Path,
    prompts: Sequence[Sequence[int]],
    continuations: Sequence[Sequence[int]],
) -> list[list[Tensor]]:
    """Logits before each token of each continuation, through prefill, compressor and decode.

    Shapes:  -> for each prompt a list of (vocab,) float32, as long as its continuation
    Raises:  ModelError if a request fails
    """
    teacher = Teacher([Script(said) for said in continuations])
    with LocalServer(config, model_path, draw=teacher.draw) as server:
        requests = [
            server.request(prompt, Sampling(max_tokens=len(said), ignore_eos=True, seed=number))
            for number, (prompt, said) in enumerate(zip(prompts, continuations, strict=True))
        ]
        for answer in server.complete(requests):
            if answer.error is not None:
                raise ModelError(answer.error.message)
    return [teacher.logits[number] for number in range(len(prompts))]
