"""Builds the engines of one process: loads the model once, then makes one engine per stage."""

from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import torch

from triptych.core.config import ActorConfig, AppConfig, DType
from triptych.core.config.machine import usable_cores
from triptych.core.messages import Stage
from triptych.core.pages import PagePlan
from triptych.kernels import multiplies_words
from triptych.kvpool import WorkerPool
from triptych.workers.compress.compress_engine import CompressEngine
from triptych.workers.core_scheduler import Cores, DedicatedCores, SharedCores
from triptych.workers.decode.decode_engine import DecodeEngine
from triptych.workers.device import CPU, Device, device_for
from triptych.workers.encode.encode_engine import EncodeEngine, Tower
from triptych.workers.encode.feature_cache import FeatureCache
from triptych.workers.kv.prefix_cache import PrefixStore
from triptych.workers.models.kv_rotation import Coordinates
from triptych.workers.models.load import load
from triptych.workers.models.runner import ModelRunner
from triptych.workers.models.vision.vision_traits import describe_vision
from triptych.workers.prefill.block_rows import check_blocks
from triptych.workers.prefill.prefill_engine import PrefillEngine
from triptych.workers.prefill.prompt_statistics import known_frequencies
from triptych.workers.sampling.output import OutputFactory
from triptych.workers.sampling.sampler import Draw, sample
from triptych.workers.stage import Engine


@dataclass(frozen=True)
class ModelContext:
    """The loaded model, shared by all engines of a process."""

    runner: ModelRunner
    answers: OutputFactory
    two_way_images: bool = False
    """Whether the tokens of an image attend to all of it."""
    frequencies: tuple[float, ...] = ()
    """Of RoPE, if a method needs them."""


def load_model(
    config: AppConfig,
    plan: PagePlan,
    model_path: Path,
    stages: Sequence[Stage],
    device: Device = CPU,
) -> ModelContext | None:
    """Load the model on the device of the stages; None if none of them runs it.

    Loading runs in a thread of its own, which then ends. OpenMP keeps a team of threads for every
    thread that ever computed. With more of them than cores, threads that wait for the next kernel
    sleep at once, and a step of one request takes twice as long.
    """
    if not {"prefill", "decode"} & set(stages):
        return None
    with ThreadPoolExecutor(1, "load") as loading:
        return loading.submit(_load_context, config, plan, model_path, stages, device.name).result()


def _load_context(
    config: AppConfig,
    plan: PagePlan,
    model_path: Path,
    stages: Sequence[Stage],
    device: torch.device,
) -> ModelContext:
    model = load(
        model_path,
        config.model.dtype,
        str(device),
        quantization=config.model.quantization,
        prompts=config.prefill.quantization,
        stages=stages,
    )
    two_way = describe_vision(model_path).two_way
    check_blocks(plan, two_way=two_way)
    return ModelContext(
        ModelRunner(model, Coordinates.of(plan.policy.kv_rotation, plan.geometry, device)),
        OutputFactory(model, config.context_tokens(model.context_tokens)),
        two_way,
        known_frequencies(plan, model),
    )


def load_vision(
    config: AppConfig, model_path: Path, stages: Sequence[Stage], device: Device = CPU
) -> Tower | None:
    """Load what the encode stage runs; None without that stage. In a thread, as ``load_model``."""
    if "encode" not in stages:
        return None
    from triptych.workers.models.vision.vision_tower import (  # noqa: PLC0415 - few models have one
        VisionTower,
    )

    with ThreadPoolExecutor(1, "load") as loading:
        read = loading.submit(VisionTower.read, model_path, config.model.dtype, device.name)
        return read.result()


def prefix_store(
    config: AppConfig,
    plan: PagePlan,
    pool: WorkerPool,
    revision: str,
    device: Device = CPU,
) -> PrefixStore | None:
    """Prefix cache access for a model of this revision; None if the prefix cache is off."""
    if plan.prefix_bytes == 0:
        return None
    return PrefixStore(pool, plan, revision, config.arithmetic, device)


def make_engines(
    config: AppConfig,
    plan: PagePlan,
    model_context: ModelContext | None,
    pool: WorkerPool,
    stages: Sequence[Stage],
    draw: Draw = sample,
    prefixes: PrefixStore | None = None,
    device: Device = CPU,
    tower: Tower | None = None,
) -> list[Engine]:
    """Make one engine per stage, with a common registration at the pool.

    Without ``prefixes`` the engines do not use the prefix cache. ``device``: the device of the
    engines and of the model. ``tower``: for the encode stage.
    """
    engines = list[Engine]()
    if tower is not None:
        pages = config.encode.cache_bytes // plan.page_bytes
        cache = FeatureCache(pool, pages)
        engines.append(EncodeEngine(tower, pool, cache, config.encode.max_batch_pixels))
    if model_context is None:
        is_compressor = "compress" in stages
        return [*engines, *([CompressEngine(pool, plan, prefixes, device)] * is_compressor)]
    runner, answers = model_context.runner, model_context.answers
    makers: dict[Stage, Callable[[], Engine]] = {
        "prefill": lambda: PrefillEngine(
            runner.for_prefill(),
            pool,
            plan,
            answers,
            config.prefill.max_num_batched_tokens,
            prefixes,
            draw,
            device,
            _attention_dtype(config.model.dtype, device),
            model_context.two_way_images,
            model_context.frequencies,
        ),
        "compress": lambda: CompressEngine(pool, plan, prefixes, device),
        "decode": lambda: DecodeEngine(
            runner.for_decode(),
            pool,
            plan,
            answers,
            config.decode.max_num_seqs,
            draw,
            config.decode.selection,
            config.decode.steps,
            prefixes,
            config.pool.keep_answers,
            device,
        ),
    }
    return [*engines, *(makers[stage]() for stage in stages if stage in makers)]


def _attention_dtype(dtype: DType, device: Device) -> torch.dtype:
    """Type of the products of prefill attention: 16 bits where that is fast."""
    if dtype == "float32":
        return torch.float32
    if not device.is_host:
        return torch.float16
    is_fast = dtype == "bfloat16" and multiplies_words()
    return torch.bfloat16 if is_fast else torch.float32


def capture_usual_steps(engines: Iterable[Engine]) -> None:
    """Capture the usual decode steps as graphs of a GPU.

    Compiling their kernels can take longer than the router waits for a step, so call this before
    requests come.
    """
    for engine in engines:
        if isinstance(engine, DecodeEngine):
            engine.capture_usual_steps()


def actor_config(config: AppConfig, stage: Stage) -> ActorConfig:
    """Number of replicas and resources of a stage."""
    by_stage: dict[Stage, ActorConfig] = {
        "encode": config.encode.actor,
        "prefill": config.prefill.actor,
        "compress": config.compressor.actor,
        "decode": config.decode.actor,
    }
    return by_stage[stage]


def device_of(config: AppConfig, stages: Sequence[Stage]) -> Device:
    """The device of a process with these stages: a GPU if the settings give it one.

    Raises: ConfigError if torch sees no GPU
    """
    return device_for(actor_config(config, stages[-1]).num_gpus)


def cores_for(config: AppConfig, stages: Sequence[Stage], turns: Path) -> Cores:
    """Dedicated cores if the settings fix the threads or a GPU computes, else shared cores.

    A compressor has one thread beside prefill: in turns its few milliseconds would wait for chunks
    of prompts, and with them the second token of each answer.
    """
    actor = actor_config(config, stages[-1])
    if actor.threads != "auto":
        return DedicatedCores(actor.threads)
    if actor.num_gpus or (list(stages) == ["compress"] and usable_cores() > 1):
        return DedicatedCores(1)
    return SharedCores(turns, is_decode_only=list(stages) == ["decode"])
