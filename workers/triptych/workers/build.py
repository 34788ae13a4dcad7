"""Puts the engines of one process together: weights once, then a stage at a time."""

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from triptych.core.config import ActorConfig, AppConfig
from triptych.core.messages import Stage
from triptych.core.pages import PagePlan
from triptych.kvpool import WorkerPool
from triptych.workers.answer import AnswerFactory
from triptych.workers.compress import CompressEngine
from triptych.workers.cores import Cores, OwnCores, Turns
from triptych.workers.decode import DecodeEngine
from triptych.workers.models import Coordinates, ModelRunner, load
from triptych.workers.prefill import PrefillEngine
from triptych.workers.prefixes import PrefixStore
from triptych.workers.sampling import Draw, sample
from triptych.workers.stage import Engine


@dataclass(frozen=True)
class Brain:
    """What takes long to load, and serves any number of engines."""

    runner: ModelRunner
    answers: AnswerFactory


def load_brain(
    config: AppConfig, plan: PagePlan, model_path: Path, stages: Sequence[Stage]
) -> Brain | None:
    """Load what the stages need; a lone compressor needs no weights.

    In a thread that ends with it. OpenMP keeps threads for every thread that ever computed; once
    there are more of them than cores, those that wait for the next kernel sleep at once, and a
    step of one request takes twice as long.
    """
    if all(stage == "compress" for stage in stages):
        return None
    with ThreadPoolExecutor(1, "load") as loading:
        return loading.submit(_load_brain, config, plan, model_path).result()


def _load_brain(config: AppConfig, plan: PagePlan, model_path: Path) -> Brain:
    model = load(model_path, config.model.dtype)
    return Brain(
        ModelRunner(model, Coordinates.of(plan.policy.basis, plan.geometry)),
        AnswerFactory(model, context_tokens(config, model.context_tokens)),
    )


def prefix_store(
    config: AppConfig, plan: PagePlan, pool: WorkerPool, weights: str
) -> PrefixStore | None:
    """A worker's access to kept prefixes, for weights with this hash; None if none is kept."""
    keeps = plan.prefix_bytes > 0
    return PrefixStore(pool, plan, weights, config.model.dtype) if keeps else None


def make_engines(
    config: AppConfig,
    plan: PagePlan,
    brain: Brain | None,
    pool: WorkerPool,
    stages: Sequence[Stage],
    draw: Draw = sample,
    prefixes: PrefixStore | None = None,
) -> list[Engine]:
    """One engine a stage, around a registration with the pool.

    Without ``prefixes`` no prefix of a prompt is kept or read.
    """
    if brain is None:
        return [CompressEngine(pool, plan, prefixes)]
    runner, answers = brain.runner, brain.answers
    makers: dict[Stage, Callable[[], Engine]] = {
        "prefill": lambda: PrefillEngine(
            runner, pool, plan, answers, config.prefill.chunk_tokens, prefixes, draw
        ),
        "compress": lambda: CompressEngine(pool, plan, prefixes),
        "decode": lambda: DecodeEngine(
            runner,
            pool,
            plan,
            answers,
            config.decode.max_batch_requests,
            draw,
            config.decode.selection,
            config.decode.steps,
            prefixes,
            config.pool.keep_answers,
        ),
    }
    return [makers[stage]() for stage in stages]


def actor_config(config: AppConfig, stage: Stage) -> ActorConfig:
    """The copies and resources of a stage."""
    by_stage: dict[Stage, ActorConfig] = {
        "prefill": config.prefill.actor,
        "compress": config.compressor.actor,
        "decode": config.decode.actor,
    }
    return by_stage[stage]


def cores_for(config: AppConfig, stages: Sequence[Stage], turns: Path) -> Cores:
    """Threads of its own if the settings name a number, else turns on all cores."""
    threads = actor_config(config, stages[-1]).threads
    return Turns(turns) if threads == "auto" else OwnCores(threads)


def context_tokens(config: AppConfig, trained_tokens: int) -> int:
    """Longest prompt plus answer: the setting, or what the model was trained for."""
    asked = config.model.max_context_tokens
    return trained_tokens if asked == "auto" else min(asked, trained_tokens)
