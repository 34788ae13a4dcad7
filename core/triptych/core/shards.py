"""Settings of one shard of an application."""

from dataclasses import replace
from pathlib import Path

from triptych.core.config import (
    ActorConfig,
    AppConfig,
    Auto,
    AutoscalingConfig,
    PoolConfig,
    RouterConfig,
)


def shard_of(config: AppConfig, index: int) -> AppConfig:
    """The settings of one of ``router.shards`` shards: an application of one router.

    Replicas, bytes and the length of the line are divided; what is said of one worker, and what
    clients see, is the same everywhere. Of one shard that is the configuration itself.
    """
    shards = config.router.shards
    if shards == 1:
        return config
    return replace(
        config,
        encode=replace(
            config.encode,
            actor=_actor(config.encode.actor, shards),
            autoscaling=_autoscaling(config.encode.autoscaling, shards),
        ),
        prefill=replace(
            config.prefill,
            actor=_actor(config.prefill.actor, shards),
            autoscaling=_autoscaling(config.prefill.autoscaling, shards),
        ),
        compressor=replace(
            config.compressor,
            actor=_actor(config.compressor.actor, shards),
            autoscaling=_autoscaling(config.compressor.autoscaling, shards),
        ),
        decode=replace(
            config.decode,
            actor=_actor(config.decode.actor, shards),
            autoscaling=_autoscaling(config.decode.autoscaling, shards),
        ),
        pool=_pool(config.pool, shards, index),
        router=_router(config.router, index),
    )


def _actor(actor: ActorConfig, shards: int) -> ActorConfig:
    """At least 1. With ``topology: colocated`` only the decode stage sets the number of workers."""
    return replace(actor, num_replicas=max(1, actor.num_replicas // shards))


def _autoscaling(scaling: AutoscalingConfig, shards: int) -> AutoscalingConfig:
    if not scaling.is_on:
        return scaling
    least, most = scaling.min_replicas // shards, scaling.max_replicas // shards
    return replace(scaling, min_replicas=max(1, least), max_replicas=max(1, most))


def _pool(pool: PoolConfig, shards: int, index: int) -> PoolConfig:
    def part(value: int | Auto) -> int | Auto:
        return "auto" if value == "auto" else value // shards

    return replace(
        pool,
        kv_cache_memory_bytes=pool.kv_cache_memory_bytes // shards,
        prefix_bytes=part(pool.prefix_bytes),
        prefix_tenant_bytes=part(pool.prefix_tenant_bytes),
        session_tenant_bytes=part(pool.session_tenant_bytes),
        disk_path=str(Path(pool.disk_path) / f"shard-{index}") if pool.disk_path else "",
        disk_bytes=pool.disk_bytes // shards,
        disk_tenant_bytes=part(pool.disk_tenant_bytes),
        disk_write_bytes_s=pool.disk_write_bytes_s / shards,
    )


def _router(router: RouterConfig, index: int) -> RouterConfig:
    return replace(
        router,
        shards=1,
        max_queued_requests=-(-router.max_queued_requests // router.shards),
        record=f"{router.record}.shard-{index}" if router.record else "",
    )
