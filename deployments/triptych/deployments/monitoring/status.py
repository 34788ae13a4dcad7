"""The state of routers, pools and workers, as /health and /metrics show it."""

import math
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Self

from triptych.core.messages import STAGES, Report, Stage
from triptych.kvpool import DiskStats, PoolStats
from triptych.router import RouterSnapshot
from triptych.router.snapshot import HeldBy
from triptych.router.state.stage_times import BOUNDS_S, StageTime

PREEMPTIONS = ("preempted", "growth:preempted", "growth:evicted")
"""Decisions by which a running request has to wait."""


@dataclass(frozen=True)
class Status:
    """The router's snapshot, statistics of all pools, and the last report of each worker."""

    router: RouterSnapshot
    pools: tuple[PoolStats | None, ...]
    """None for a pool that does not answer."""
    reports: tuple[Report, ...]
    """The last report of each worker."""
    stages: tuple[Stage, ...] = STAGES
    """Stages of the application."""

    @classmethod
    def of(cls, shards: "Sequence[Status]") -> Self:
        """The merged status of all shards."""
        routers = [status.router for status in shards]
        held: list[HeldBy] = [one.blocked_reason for one in routers if one.blocked_reason]
        return cls(
            router=RouterSnapshot(
                requests=_sum(one.requests for one in routers),
                booked_bytes={arena: n for one in routers for arena, n in one.booked_bytes.items()},
                capacity_bytes=sum(one.capacity_bytes for one in routers),
                blocked_reason=held[0] if held else "",
                oldest_waiting_s=max(one.oldest_waiting_s for one in routers),
                counters=_sum(one.counters for one in routers),
                workers=tuple(worker for one in routers for worker in one.workers),
                held_bytes=sum(one.held_bytes for one in routers),
                bound_bytes=sum(one.bound_bytes for one in routers),
                stage_times=_sum_of_times(one.stage_times for one in routers),
            ),
            pools=tuple(pool for status in shards for pool in status.pools),
            reports=tuple(report for status in shards for report in status.reports),
            stages=shards[0].stages,
        )

    @property
    def missing_stages(self) -> list[str]:
        """Stages without a worker."""
        there = {stage for worker in self.router.workers for stage in worker.stages}
        return [stage for stage in self.stages if stage not in there]

    def gauges(self) -> Mapping[str, float]:
        """Metrics by name and labels."""
        return {**self._router_gauges(), **self._pool_gauges(), **self._worker_gauges()}

    def _worker_gauges(self) -> dict[str, float]:
        gauges = dict[str, float]()
        for report in self.reports:
            values = {
                "requests": report.running,
                "pages_taken": report.pages_held,
                "bytes_copied": report.bytes_copied,
                "busy_seconds": report.busy_s,
                "transfers_resumed": report.transfers_resumed,
                "chunks_refused": report.chunks_refused,
                "link_bytes_per_second": report.link_bytes_s,
            }
            for name, value in values.items():
                gauges[f'triptych_workers_{name}{{worker="{report.name}"}}'] = float(value)
            for reason, count in report.prefixes_skipped.items():
                labels = f'worker="{report.name}",reason="{reason}"'
                gauges[f"triptych_prefix_skipped{{{labels}}}"] = float(count)
        return gauges

    def _router_gauges(self) -> dict[str, float]:
        router = self.router
        capacity, booked = router.capacity_bytes, sum(router.booked_bytes.values())
        waiting, leaving = (router.requests.get(state, 0) for state in ("waiting", "leaving"))
        gauges = {
            "triptych_num_requests_running": float(
                sum(router.requests.values()) - waiting - leaving
            ),
            "triptych_num_requests_waiting": float(waiting),
            "triptych_kv_cache_usage_perc": router.held_bytes / capacity if capacity else 0.0,
            "triptych_num_preemptions": float(
                sum(router.counters.get(reason, 0) for reason in PREEMPTIONS)
            ),
            "triptych_router_capacity_bytes": float(capacity),
            "triptych_router_booked_bytes": float(booked),
            "triptych_router_held_bytes": float(router.held_bytes),
            "triptych_router_bound_bytes": float(router.bound_bytes),
            "triptych_router_oldest_waiting_seconds": router.oldest_waiting_s,
        }
        for state, count in router.requests.items():
            gauges[f'triptych_router_requests{{state="{state}"}}'] = float(count)
        for reason, count in router.counters.items():
            gauges[f'triptych_router_decisions{{reason="{reason}"}}'] = float(count)
        for stage in self.stages:
            workers = [worker for worker in router.workers if stage in worker.stages]
            gauges[f'triptych_workers{{stage="{stage}"}}'] = float(len(workers))
        for part, times in router.stage_times.items():
            gauges.update(_histogram(f"triptych_request_{part}_time_seconds", times))
        return gauges

    def _pool_gauges(self) -> dict[str, float]:
        """Sums over all pools, and the free pages of each pool if there are several."""
        answering = [stats for stats in self.pools if stats is not None]
        gauges = {"triptych_pool_up": float(bool(answering) and len(answering) == len(self.pools))}
        for stats in answering:
            for name, value in _gauges_of(stats).items():
                gauges[name] = gauges.get(name, 0.0) + value
        if answering:
            gauges["triptych_pool_page_bytes"] = float(answering[0].page_bytes)
        if "triptych_disk_up" in gauges:
            gauges["triptych_disk_up"] = float(not any(one.disk.fault for one in answering))
        if len(self.pools) > 1:
            for stats in answering:
                free = f'triptych_node_pool_pages_free{{arena="{stats.arena}"}}'
                gauges[free] = float(stats.free_pages)
        return gauges


def _histogram(name: str, times: StageTime) -> Iterator[tuple[str, float]]:
    """The series of a Prometheus histogram, in the order of its buckets."""
    bounds = (*BOUNDS_S, math.inf)
    for bound, count in zip(bounds, accumulate(times.counts), strict=True):
        le = "+Inf" if math.isinf(bound) else str(bound)
        yield f'{name}_bucket{{le="{le}"}}', float(count)
    yield f"{name}_count", float(sum(times.counts))
    yield f"{name}_sum", times.total_s


def _sum_of_times(shards: Iterable[Mapping[str, StageTime]]) -> dict[str, StageTime]:
    total = dict[str, StageTime]()
    for times in shards:
        for part, one in times.items():
            total[part] = total.get(part, StageTime()) + one
    return total


def _sum(counts: Iterable[Mapping[str, int]]) -> dict[str, int]:
    total = Counter[str]()
    for one in counts:
        total.update(one)
    return dict(total)


def _gauges_of(pool: PoolStats) -> dict[str, float]:
    """Gauges of one pool that can be summed over pools."""
    prefix, network = pool.prefix, pool.network
    return {
        **_disk_gauges(pool.disk),
        "triptych_prefix_cache_queries": float(prefix.asked_tokens),
        "triptych_prefix_cache_hits": float(prefix.hit_tokens),
        'triptych_prefix_lookups{result="hit"}': float(prefix.hits),
        'triptych_prefix_lookups{result="miss"}': float(prefix.misses),
        "triptych_prefix_blocks": float(prefix.blocks),
        "triptych_prefix_window_entries": float(prefix.windows),
        "triptych_prefix_bytes": float(prefix.bytes),
        "triptych_prefix_lent_bytes": float(prefix.borrowed_bytes),
        "triptych_prefix_evictions": float(prefix.evictions),
        "triptych_prefix_refused": float(prefix.refused),
        "triptych_sessions": float(prefix.sessions),
        "triptych_session_bytes": float(prefix.session_bytes),
        "triptych_prefix_readers": float(prefix.readers),
        "triptych_prefix_shared_bytes": float(prefix.shared_bytes),
        "triptych_pool_pages": float(pool.pages),
        "triptych_pool_pages_free": float(pool.free_pages),
        "triptych_pool_pages_in_stock": float(pool.extent_pages),
        "triptych_pool_pages_in_requests": float(pool.request_pages - pool.prefix_pages),
        "triptych_pool_pages_in_prefixes": float(pool.prefix_pages),
        "triptych_pool_pages_reclaimed": float(pool.reclaimed_pages_total),
        "triptych_pool_workers_reclaimed": float(pool.reclaimed_workers_total),
        "triptych_pool_sent_bytes": float(network.sent_bytes),
        "triptych_pool_refused_frames": float(network.refused_frames),
        "triptych_pool_refused_calls": float(network.refused_calls),
    }


def _disk_gauges(disk: DiskStats) -> dict[str, float]:
    """Gauges of the disk tier; empty if none is configured."""
    if not disk.capacity_bytes and not disk.fault:
        return {}
    return {
        "triptych_disk_up": float(not disk.fault),
        "triptych_disk_objects": float(disk.objects),
        "triptych_disk_bytes": float(disk.bytes),
        "triptych_disk_capacity_bytes": float(disk.capacity_bytes),
        "triptych_disk_waiting": float(disk.waiting),
        "triptych_disk_coming": float(disk.coming),
        "triptych_disk_stored": float(disk.stored),
        "triptych_disk_stored_bytes": float(disk.stored_bytes),
        "triptych_disk_loaded": float(disk.loaded),
        "triptych_disk_loaded_bytes": float(disk.loaded_bytes),
        "triptych_disk_evictions": float(disk.evictions),
        "triptych_disk_damaged": float(disk.damaged),
        "triptych_disk_failed": float(disk.failed),
        **{
            f'triptych_disk_skipped{{reason="{reason}"}}': float(count)
            for reason, count in disk.skipped.items()
        },
    }
