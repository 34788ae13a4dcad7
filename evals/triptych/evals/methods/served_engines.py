"""The served engines as methods, with teacher forcing."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from triptych.core.config import AppConfig
from triptych.core.errors import ModelError
from triptych.core.handles import KVHandle
from triptych.core.messages import Compressed, Message, Sampling
from triptych.core.methods.table import policy_of
from triptych.core.pages import PagePlan
from triptych.evals.data.cases import Case, Outcome
from triptych.evals.metrics.footprint import of_handle
from triptych.evals.metrics.teacher_forcing import ForcedTokens, TeacherForcing
from triptych.workers.compress.learned.known_networks import find_networks
from triptych.workers.local import LocalServer
from triptych.workers.models.compression_profile import find_profile
from triptych.workers.models.facts import describe


@dataclass(frozen=True)
class EngineMethod:
    """Prefill, compress and decode stage with a server's settings."""

    name: str
    config: AppConfig
    model_path: Path
    has_prefix_cache: bool = False

    def check(self) -> None:
        """Raise ConfigError if a server of the model could not offer the method."""
        facts = describe(self.model_path)
        profile, learned = find_profile(self.config, facts), find_networks(self.config, facts)
        policy_of(self.config.compressor, profile, learned)

    def run(self, cases: Sequence[Case]) -> list[Outcome]:
        """Serve the cases together; they share no prefix.

        Raises:  ModelError if a request fails, as when the pool is too small for it
        """
        teacher = TeacherForcing(
            [ForcedTokens(case.forced, keep_logits=case.scored) for case in cases]
        )
        handles = dict[str, Compressed]()

        def on_message(message: Message) -> None:
            if isinstance(message, Compressed):
                handles[message.request] = message

        pool = replace(self.config.pool, disk_path="", disk_bytes=0)
        if not self.has_prefix_cache:
            pool = replace(pool, prefix_bytes=0)
        config = replace(self.config, pool=pool)
        with LocalServer(config, self.model_path, teacher.sample, on_message) as server:
            plan = server.plan
            requests = [
                replace(server.request(case.prompt, _sampling(case, number)), cache_salt=case.name)
                for number, case in enumerate(cases)
            ]
            answers = server.complete(requests)
        outcomes = list[Outcome]()
        for number, (case, answer) in enumerate(zip(cases, answers, strict=True)):
            if answer.error is not None:
                raise ModelError(f"{self.name}, {case.name}: {answer.error.message}")
            outcomes.append(
                Outcome(
                    logits=torch.stack(teacher.logits[number][1:]) if case.scored else None,
                    tokens=tuple(answer.tokens[len(case.forced) :]),
                    footprint=of_handle(handles[requests[number].id].handle, plan),
                )
            )
        return outcomes


def compressed_prompts(
    config: AppConfig, model_path: Path, prompts: Sequence[Sequence[int]]
) -> tuple[PagePlan, list[KVHandle]]:
    """The page plan, and what the decode stage receives of each prompt, without a prefix cache.

    Raises: ModelError if a request fails
    """
    handles = dict[str, KVHandle]()

    def on_message(message: Message) -> None:
        if isinstance(message, Compressed):
            handles[message.request] = message.handle

    pool = replace(config.pool, disk_path="", disk_bytes=0, prefix_bytes=0)
    with LocalServer(replace(config, pool=pool), model_path, watch=on_message) as server:
        sampling = Sampling(temperature=0.0, max_tokens=2, ignore_eos=True)
        requests = [server.request(prompt, sampling) for prompt in prompts]
        for answer in server.complete(requests):
            if answer.error is not None:
                raise ModelError(answer.error.message)
        return server.plan, [handles[request.id] for request in requests]


def _sampling(case: Case, number: int) -> Sampling:
    return Sampling(temperature=0.0, max_tokens=case.answer_tokens, ignore_eos=True, seed=number)
