"""A plug-in of the decode step: end an answer that repeats one token.

In config.yaml, with this file on PYTHONPATH:

    decode:
      plugins:
        - name: loop_stop:LoopStop
          options: {times: 8}
          request_bounds: {times: [2, 64]}

A request may then say ``"plugins": {"LoopStop": {"times": 4}}``, or ``{"LoopStop": false}``.
"""

import sys
from dataclasses import dataclass
from typing import ClassVar

import torch

from triptych.core.config import AppConfig, require
from triptych.core.messages import Sampling
from triptych.workers.decode.plugins import Facts, StepPlugin
from triptych.workers.local import LocalServer


@dataclass(frozen=True)
class LoopStop(StepPlugin):
    """Ends an answer after a number of equal tokens in a row."""

    needs: ClassVar = ("token",)
    provides: ClassVar = ("end",)
    memory: ClassVar = 2  # previous token, and the length of its run

    times: int = 8

    def __post_init__(self) -> None:
        require(self.times >= 2, "times", self.times, "2 or more")

    def step(self, facts: Facts) -> Facts:
        """Process all requests of a step, one row each."""
        token, (before, count) = facts["token"], facts["memory"].unbind(dim=1)
        count = torch.where(token == before, count + 1, 1)
        return {"end": count >= self.times, "memory": torch.stack([token.double(), count], dim=1)}


def main(model: str = "smollm2-135m-instruct", times: int = 2) -> tuple[list[int], list[int]]:
    """Print an answer without the plug-in, and one with it."""
    answers = list[list[int]]()
    for plugins in ([], [{"name": "loop_stop:LoopStop", "options": {"times": times}}]):
        config = {
            "model": {"name": model},
            "pool": {"kv_cache_memory_bytes": 64 << 20},
            "decode": {"plugins": plugins},
        }
        with LocalServer(AppConfig.from_mapping(config)) as server:
            sampling = Sampling(temperature=0.0, max_tokens=60, ignore_eos=True)
            prompt = [5, 6, 7, 8] * 8
            (answer,) = server.complete([server.request(prompt, sampling)])
        print(f"{len(answer.tokens)} tokens: {answer.text!r}")
        answers.append(answer.tokens)
    plain, ended = answers
    return plain, ended


if __name__ == "__main__":
    main(*sys.argv[1:2])
