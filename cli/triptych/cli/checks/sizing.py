"""Capacity of a pool in pages, tokens and requests, by policy, from the page layouts."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from triptych.cli.checks.diagnosis import processes_bytes
from triptych.core.config import MIB, AppConfig, CompressorConfig
from triptych.core.errors import ConfigError
from triptych.core.layout import Geometry
from triptych.core.methods.learned_files import LearnedFile
from triptych.core.pages import PagePlan
from triptych.core.profile import Profile
from triptych.core.shards import shard_of
from triptych.deployments.app_plan import AppPlan
from triptych.router.models.memory_estimate import ByteModel, RequestBytes
from triptych.workers.decode.checkpoint import checkpoint_bytes

OBJECT_STORE_BYTES = 256 * MIB
"""What the manifests of ``k8s/`` give Ray's own store, which lies in /dev/shm too."""


@dataclass(frozen=True, slots=True)
class Load:
    """Lengths of a typical request."""

    prompt_tokens: int
    answer_tokens: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Fit:
    """Capacity of one pool under one policy. A token counts with all its layers and KV heads."""

    policy: str
    formats: str
    page_bytes: int
    pages: int
    tokens_per_page: int
    """Of one KV head, in the format of significant tokens."""
    token_bytes: float
    """Page memory of one token of all layers and KV heads, in that format, pages being full. Layers
    with a sliding window drop it later."""
    of_fp16: float
    """Its share of the bytes of keys and values in 16 bits."""
    bookable_bytes: int
    """What requests may book: the pool less what workers keep in stock and prefixes."""
    tokens: int
    """Lower bound of tokens that fit, in requests of the load: all of them significant."""
    expected_tokens: int | None
    """Tokens that fit at the calibrated compression ratio; None without a calibration."""
    peak_bytes: int
    """Peak bytes of a request: raw pages and their compressed copies."""
    decoding_bytes: int
    """Peak bytes of a request during decode."""
    requests: int
    """Lower bound of concurrent requests: one in prefill, the others in decode."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Sizes:
    """Memory that a pod or machine needs."""

    capacity_bytes: int
    prefix_bytes: int
    stock_bytes: int
    checkpoint_bytes: int
    """Of all decode workers, beside the pages."""
    shared_memory_bytes: int
    """Size of /dev/shm: pages and checkpoints of all shards, and Ray's object store."""
    workers: int
    """Maximum number of worker processes."""
    memory_bytes: int
    """The memory limit of a pod: /dev/shm, Ray, and the workers; all but compressors have the
    weights."""


def policies(config: AppConfig, profile: Profile | None) -> Iterator[AppConfig]:
    """The configured policy, then the formats for all tokens that are worth their bytes."""
    yield config
    names = [f"uniform:{name}" for name in ("fp16", "k8v8", "k8v4", "k4v4", "k4v2")]
    if profile is None:
        names.append("diffkv")
    for name in names:
        compressor = CompressorConfig(
            actor=config.compressor.actor, policy=name, profile=config.compressor.profile
        )
        yield replace(config, compressor=compressor)


def fits(
    config: AppConfig,
    geometry: Geometry,
    context_tokens: int,
    load: Load,
    profile: Profile | None,
    *,
    is_plain: bool = False,
    learned: Sequence[LearnedFile] = (),
) -> list[Fit]:
    """Requests that fit in the pool of ``config``, by policy.

    ``is_plain``, ``learned``: as for ``PagePlan.of``.

    Raises: ConfigError if the pool is too small for the model, or the load for its context
    """
    if load.prompt_tokens + load.answer_tokens > context_tokens:
        raise ConfigError(
            f"--prompt-tokens={load.prompt_tokens} and --answer-tokens={load.answer_tokens}: "
            f"together they exceed the model's context of {context_tokens} tokens"
        )
    plans = [
        app_plan(each, geometry, context_tokens, profile, is_plain=is_plain, learned=learned)
        for each in policies(config, profile)
    ]
    return [_fit(plan, load, profile) for plan in plans]


def app_plan(
    config: AppConfig,
    geometry: Geometry,
    context_tokens: int,
    profile: Profile | None,
    *,
    is_plain: bool = False,
    learned: Sequence[LearnedFile] = (),
) -> AppPlan:
    """The application plan of the first shard, without addresses.

    Raises: ConfigError if the pool is too small
    """
    one = shard_of(config, 0)
    plan = AppPlan(
        config=one,
        model_path=Path(),
        pages=PagePlan.of(one, geometry, profile, is_plain=is_plain, learned=learned),
        context_tokens=context_tokens,
        revision="",
        run_dir=Path(),
        shards=config.router.shards,
    )
    plan.check()
    return plan


def sizes(plan: AppPlan, weights_bytes: int) -> Sizes:
    """Memory of a plan by part; ``weights_bytes``: the weights in one process."""
    capacity, decode = plan.config.pool.kv_cache_memory_bytes, plan.config.decode
    checkpoint = checkpoint_bytes(plan.pages, decode.max_num_seqs, plan.context_tokens)
    checkpoints = checkpoint * decode.autoscaling.most(decode.actor)
    shared = plan.shards * (plan.config.pool.shared_bytes + checkpoints) + OBJECT_STORE_BYTES
    groups = plan.config.worker_groups().items()
    readers = sum(group.most for name, group in groups if name != "compressor")
    processes = processes_bytes(plan.config, plan.shards)
    return Sizes(
        capacity_bytes=capacity,
        prefix_bytes=plan.pages.prefix_bytes,
        stock_bytes=plan.pool_pages * plan.pages.page_bytes
        - plan.bookable_bytes
        - plan.pages.prefix_bytes,
        checkpoint_bytes=checkpoints,
        shared_memory_bytes=shared,
        workers=plan.shards * plan.workers,
        memory_bytes=shared + processes + plan.shards * readers * weights_bytes,
    )


def _fit(plan: AppPlan, load: Load, profile: Profile | None) -> Fit:
    pages = plan.pages
    rows = pages.geometry.head_rows
    token_bytes = pages.page_bytes * rows / pages.high.tokens
    model, tokens = ByteModel(pages), (load.prompt_tokens, load.answer_tokens)
    estimate = model.estimate_in_parts(*tokens) or model.estimate(*tokens)
    low = pages.low
    return Fit(
        policy=pages.policy.name,
        formats=pages.high.format.name + (f"+{low.format.name}" if low else ""),
        page_bytes=pages.page_bytes,
        pages=plan.pool_pages,
        tokens_per_page=pages.high.tokens,
        token_bytes=token_bytes,
        of_fp16=token_bytes / pages.raw_bytes(1),
        bookable_bytes=plan.bookable_bytes,
        tokens=plan.cache_tokens_in(load.prompt_tokens + load.answer_tokens),
        expected_tokens=_expected_tokens(plan, profile),
        peak_bytes=estimate.peak,
        decoding_bytes=estimate.grown,
        requests=_requests(plan.bookable_bytes, estimate),
    )


def _requests(bookable_bytes: int, request: RequestBytes) -> int:
    if request.peak > bookable_bytes:
        return 0
    return 1 + (bookable_bytes - request.peak) // request.grown


def _expected_tokens(plan: AppPlan, profile: Profile | None) -> int | None:
    """By the ratio at the longest context that calibration measured, for the policy it measured."""
    if profile is None or not profile.measured or plan.pages.policy.name != profile.settings.policy:
        return None
    longest = max(profile.measured, key=lambda one: one.context)
    return int(plan.bookable_bytes / (longest.bytes_ratio * plan.pages.raw_bytes(1)))
