"""Puts the engines of one process together: weights once, then a stage at a time."""

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import torch

from triptych.core.config import ActorConfig, AppConfig
from triptych.core.messages import Stage
from triptych.core.pages import PagePlan
from triptych.kvpool import WorkerPool
from triptych.workers.compress.compress_engine import CompressEngine
from triptych.workers.core_scheduler import Cores, OwnCores, Turns
from triptych.workers.decode.decode_engine import DecodeEngine
from triptych.workers.device import CPU, Device, device_for
from triptych.workers.kv.prefix_cache import PrefixStore
from triptych.workers.models.kv_rotation import Coordinates
from triptych.workers.models.load import load
from triptych.workers.models.runner import ModelRunner
from triptych.workers.prefill.prefill_engine import PrefillEngine
from triptych.workers.sampling.output import OutputFactory
from triptych.workers.sampling.sampler import Draw, sample
from triptych.workers.stage import Engine


@dataclass(frozen=True)
class ModelContext:
    """What takes long to load, and serves any number of engines."""

    runner: ModelRunner
    answers: OutputFactory


def load_model(
    config: AppConfig,
    plan: PagePlan,
    model_path: Path,
    stages: Sequence[Stage],
    device: Device = CPU,
) -> ModelContext | None:
    """Load what the stages need, to where they compute; a lone compressor needs no weights.

    In a thread that ends with it. OpenMP keeps threads for every thread that ever computed; once
    there are more of them than cores, those that wait for the next kernel sleep at once, and a
    step of one request takes twice as long.
    """
    if all(stage == "compress" for stage in stages):
        return None
    with ThreadPoolExecutor(1, "load") as loading:
        return loading.submit(_load_brain, config, plan, model_path, device.name).result()


def _load_brain(
    config: AppConfig, plan: PagePlan, model_path: Path, device: torch.device
) -> ModelContext:
    model = load(model_path, config.model.dtype, str(device))
    return ModelContext(
        ModelRunner(model, Coordinates.of(plan.policy.kv_rotation, plan.geometry, device)),
        OutputFactory(model, context_tokens(config, model.context_tokens)),
    )


def prefix_store(
    config: AppConfig,
    plan: PagePlan,
    pool: WorkerPool,
    weights: str,
    device: Device = CPU,
) -> PrefixStore | None:
    """A worker's access to kept prefixes, for weights with this hash; None if none is kept."""
    if plan.prefix_bytes == 0:
        return None
    return PrefixStore(pool, plan, weights, config.model.dtype, device)


def make_engines(
    config: AppConfig,
    plan: PagePlan,
    brain: ModelContext | None,
    pool: WorkerPool,
    stages: Sequence[Stage],
    draw: Draw = sample,
    prefixes: PrefixStore | None = None,
    device: Device = CPU,
) -> list[Engine]:
    """One engine a stage, around a registration with the pool.

    Without ``prefixes`` no prefix of a prompt is kept or read. ``device``: where they compute, and
    where the model is.
    """
    if brain is None:
        return [CompressEngine(pool, plan, prefixes, device)]
    runner, answers = brain.runner, brain.answers
    half = not device.is_host and config.model.dtype != "float32"
    makers: dict[Stage, Callable[[], Engine]] = {
        "prefill": lambda: PrefillEngine(
            runner, pool, plan, answers, config.prefill.chunk_tokens, prefixes, draw, device, half
        ),
        "compress": lambda: CompressEngine(pool, plan, prefixes, device),
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
            device,
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


def device_of(config: AppConfig, stages: Sequence[Stage]) -> Device:
    """Where a process with these stages computes: on the GPU that the settings give it, if any.

    Raises: ConfigError if torch sees no GPU
    """
    return device_for(actor_config(config, stages[-1]).num_gpus)


def cores_for(config: AppConfig, stages: Sequence[Stage], turns: Path) -> Cores:
    """Threads of its own if the settings say so or a GPU computes, else turns on all cores."""
    actor = actor_config(config, stages[-1])
    if actor.threads != "auto":
        return OwnCores(actor.threads)
    return OwnCores(1) if actor.num_gpus else Turns(turns)


def context_tokens(config: AppConfig, trained_tokens: int) -> int:
    """Longest prompt plus answer: the setting, or what the model was trained for."""
    asked = config.model.max_context_tokens
    return trained_tokens if asked == "auto" else min(asked, trained_tokens)
