"""Teacher forcing: logits of the served engines at each token of a given text."""

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
class ForcedTokens:
    """Tokens that an output must begin with; after them it is greedy."""

    tokens: Sequence[int]
    keep_logits: bool = True
    """Whether to keep the logits before each forced token."""


@dataclass
class TeacherForcing:
    """A sampler that forces tokens. A request's ``seed`` is the index of its ``outputs`` entry."""

    outputs: Sequence[ForcedTokens]
    logits: dict[int, list[Tensor]] = field(default_factory=dict[int, list[Tensor]])
    """By index, the logits before each forced token: (vocab,) float32."""

    def sample(self, logits: Tensor, rows: Sequence[SamplerRow]) -> list[Drawn]:
        """Shapes: logits (N, vocab), one row each"""
        return [self._next(row, row_logits) for row, row_logits in zip(rows, logits, strict=True)]

    def _next(self, row: SamplerRow, logits: Tensor) -> Drawn:
        number = row.sampling.seed
        output = self.outputs[number]
        if row.length >= len(output.tokens):
            return Drawn(token=int(logits.argmax()))
        if output.keep_logits:
            self.logits.setdefault(number, []).append(logits.to("cpu", copy=True))
        return Drawn(token=output.tokens[row.length])


def teacher_forced_logits(
    config: AppConfig,
    model_path: Path,
    prompts: Sequence[Sequence[int]],
    continuations: Sequence[Sequence[int]],
) -> list[list[Tensor]]:
    """Logits before each token of each continuation, through prefill, compressor and decode.

    Shapes:  -> for each prompt a list of (vocab,) float32, as long as its continuation
    Raises:  ModelError if a request fails
    """
    teacher = TeacherForcing([ForcedTokens(tokens) for tokens in continuations])
    with LocalServer(config, model_path, draw=teacher.sample) as server:
        requests = [
            server.request(prompt, Sampling(max_tokens=len(tokens), ignore_eos=True, seed=number))
            for number, (prompt, tokens) in enumerate(zip(prompts, continuations, strict=True))
        ]
        for answer in server.complete(requests):
            if answer.error is not None:
                raise ModelError(answer.error.message)
    return [teacher.logits[number] for number in range(len(prompts))]
