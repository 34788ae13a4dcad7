"""Teacher forcing: what would the served engines have said next, given this text so far?"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from torch import Tensor

from triptych.core.config import AppConfig
from triptych.core.messages import Sampling
from triptych.workers.local import LocalServer
from triptych.workers.sampling import Drawn, SamplerRow


@dataclass
class Teacher:
    """Draws the tokens of known continuations, and keeps the logits they were drawn against."""

    continuations: dict[tuple[int, ...], Sequence[int]]
    """Prompt to its continuation."""
    logits: dict[tuple[int, ...], list[Tensor]] = field(
        default_factory=dict[tuple[int, ...], list[Tensor]]
    )

    def draw(self, logits: Tensor, rows: Sequence[SamplerRow]) -> list[Drawn]:
        """Shapes: logits (N, vocab), one row each"""
        drawn = list[Drawn]()
        for row, seen in zip(rows, logits, strict=True):
            prompt = tuple(row.prompt)
            kept = self.logits.setdefault(prompt, [])
            drawn.append(Drawn(token=self.continuations[prompt][len(kept)]))
            kept.append(seen.clone())
        return drawn


def forced_logits(
    config: AppConfig,
    model_path: Path,
    prompts: Sequence[Sequence[int]],
    continuations: Sequence[Sequence[int]],
) -> list[list[Tensor]]:
    """Logits before each token of each continuation, through prefill, compressor and decode.

    The prompts must differ from each other.

    Shapes:  -> for each prompt a list of (vocab,) float32, as long as its continuation
    """
    keys = [tuple(prompt) for prompt in prompts]
    teacher = Teacher(dict(zip(keys, continuations, strict=True)))
    with LocalServer(config, model_path, draw=teacher.draw) as server:
        requests = [
            server.request(key, Sampling(max_tokens=len(said), ignore_eos=True))
            for key, said in zip(keys, continuations, strict=True)
        ]
        server.complete(requests)
    return [teacher.logits[key] for key in keys]
