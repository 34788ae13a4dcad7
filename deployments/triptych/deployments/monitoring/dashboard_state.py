"""The snapshot that the dashboard draws: plain numbers of bounded size."""

import base64
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

import numpy as np
from numpy.typing import NDArray

from triptych.core.errors import MessageError
from triptych.core.handles import KVHandle, PageRun
from triptych.core.messages import Report
from triptych.deployments.monitoring.status import Status
from triptych.kvpool import PREFIX_WORKER, OwnerPages, PageMap, PoolStats
from triptych.kvpool.rpc import page_ranges
from triptych.router import RequestTrace, WorkerLoad

SHOWN_PAGES = 16_384
"""Most pages in the map; of a larger pool it has every n-th page."""

KINDS = ("free", "stock", "prefix", "request")
"""Kinds of pages whose format is unknown; formats are numbered after these."""

Json = dict[str, object]
Entries = NDArray[np.uint16]


@dataclass(frozen=True)
class DashboardState:
    """The state of one shard, without the ingress's own metrics."""

    status: Status
    pages: PageMap | None
    """Map of the pool on the router's node; None while the pool does not answer."""
    traces: tuple[RequestTrace, ...]
    handles: Mapping[str, KVHandle]
    """Handle of each request at its last handover, which tells the format of its pages."""
    report_ages_s: Mapping[str, float]
    """Seconds since the last report of each worker, by name."""
    now: float
    """Time of the snapshot, on the clock of ``traces``."""
    shards: int = 1
    shard: int = 0
    """Index of the shard that this is the state of."""

    def json(self) -> Json:
        """The snapshot as JSON; requests are numbered, so that no request id leaves the server.

        Each request has its ``tenant``, by which the ingress selects what a client may see.
        """
        pool = self._pool_stats()
        numbers = {trace.request: self._number(trace) for trace in self.traces}
        return {
            "pool": _pool(pool) if pool else None,
            "map": _map(self.pages, self.handles, numbers) if self.pages else None,
            "router": self._router(),
            "workers": [self._worker(load) for load in self.status.router.workers],
            "requests": [_trace(trace, self._number(trace), self.now) for trace in self.traces],
        }

    def _number(self, trace: RequestTrace) -> int:
        """A request number that is unique over all shards."""
        return (trace.number - 1) * self.shards + self.shard + 1

    def _pool_stats(self) -> PoolStats | None:
        """Statistics of the pool whose map is shown."""
        answering = [stats for stats in self.status.pools if stats is not None]
        if self.pages is None:
            return answering[0] if len(self.status.pools) == 1 and answering else None
        arena = self.pages.arena
        return next((stats for stats in answering if stats.arena == arena), None)

    def _router(self) -> Json:
        router = self.status.router
        return {
            "states": dict(router.requests),
            "blocked_reason": router.blocked_reason,
            "oldest_waiting_s": _seconds(router.oldest_waiting_s),
            "held_bytes": router.held_bytes,
            "booked_bytes": sum(router.booked_bytes.values()),
            "bound_bytes": router.bound_bytes,
            "capacity_bytes": router.capacity_bytes,
            "decisions": dict(router.counters),
            "missing_stages": self.status.missing_stages,
        }

    def _worker(self, load: WorkerLoad) -> Json:
        age_s = self.report_ages_s.get(load.name)
        report = next((one for one in self.status.reports if one.name == load.name), None)
        return {
            "name": load.name,
            "stages": list(load.stages),
            "role": load.role,
            "full": load.is_full,
            "report_age_s": None if age_s is None else _seconds(age_s),
            "encode_pixels": load.encode_pixels,
            "prefill_tokens": load.prefill_tokens,
            "compress_tokens": load.compress_tokens,
            "free_slots": load.free_slots,
            **(_report(report) if report else {}),
        }


def _report(report: Report) -> Json:
    return {
        "running": report.running,
        "waiting": report.waiting,
        "pages_taken": report.pages_held,
        "busy_s": _seconds(report.busy_s),
        "step_age_s": _seconds(report.step_age_s),
        "longest_step_s": _seconds(report.longest_step_s),
        "bytes_copied": report.bytes_copied,
    }


def _pool(pool: PoolStats) -> Json:
    prefix = pool.prefix
    return {
        "pages": pool.pages,
        "page_bytes": pool.page_bytes,
        "free": pool.free_pages,
        "stock": pool.extent_pages,
        "requests": pool.request_pages - pool.prefix_pages,
        "prefixes": pool.prefix_pages,
        "reclaimed_pages": pool.reclaimed_pages_total,
        "reclaimed_workers": pool.reclaimed_workers_total,
        "prefix": {
            "blocks": prefix.blocks,
            "bytes": prefix.bytes,
            "asked_tokens": prefix.asked_tokens,
            "hit_tokens": prefix.hit_tokens,
            "evictions": prefix.evictions,
            "refused": prefix.refused,
        },
        "disk": {
            "bytes": pool.disk.bytes,
            "capacity_bytes": pool.disk.capacity_bytes,
            "stored": pool.disk.stored,
            "loaded": pool.disk.loaded,
            "works": not pool.disk.fault,
        },
    }


def _map(pages: PageMap, handles: Mapping[str, KVHandle], numbers: Mapping[str, int]) -> Json:
    workers = sorted({line.worker for line in pages.owners})
    kinds, of_entry = page_kinds(pages, handles)
    owners = page_owners(pages, workers, numbers)
    return {
        "pages": pages.pages,
        "stride": pages.stride,
        "kinds": kinds,
        "workers": workers,
        "kind_of": _base64(of_entry.astype(np.uint8)),
        "owner_of": _base64(owners.astype("<u2")),
    }


def page_kinds(pages: PageMap, handles: Mapping[str, KVHandle]) -> tuple[list[str], Entries]:
    """Names of kinds, and the kind of each entry of the map, as an index into the names.

    The pool knows only the owner of a page. The format of a page that a running request holds, or
    reads from the prefix cache, is the one in its last handle. Pages that a worker allocated since
    count as its free list, and pages of the prefix cache that nobody reads as ``prefix``.

    Shapes: -> (entries,)
    """
    entries = pages.entries.astype(np.int64)
    kinds = list[str](KINDS)
    of_owner = [0, *(KINDS.index(_kind(line)) for line in pages.owners)]
    of_entry = np.array(of_owner, np.uint16)[entries]
    lines = _owners_of_requests(pages)
    cached = [entry for entry, line in enumerate(pages.owners, 1) if _kind(line) == "prefix"]
    for request, handle in handles.items():
        mine = lines.get(request)
        if mine is None or handle.lease_ref.arena != pages.arena:
            continue
        for run in handle.runs:
            if run.format not in kinds:
                kinds.append(run.format)
            shown = _shown(run, pages)
            of_entry[shown[np.isin(entries[shown], mine + cached)]] = kinds.index(run.format)
    return kinds, of_entry


def page_owners(pages: PageMap, workers: list[str], numbers: Mapping[str, int]) -> Entries:
    """The owner of each entry: an index into ``workers``, or the number of a request.

    Numbers are modulo 2**16. Free pages, prefixes and requests without a trace have 0.
    """
    of_owner = [0]
    for line in pages.owners:
        match _kind(line):
            case "stock":
                of_owner.append(workers.index(line.worker))
            case "request":
                of_owner.append(numbers.get(line.label, 0) % 2**16)
            case _:
                of_owner.append(0)
    return np.array(of_owner, np.uint16)[pages.entries]


def _kind(line: OwnerPages) -> str:
    if line.worker == PREFIX_WORKER:
        return "prefix"
    return "stock" if line.kind == "extent" else "request"


def _owners_of_requests(pages: PageMap) -> dict[str, list[int]]:
    """Owner indices of each request; several, if two workers hold leases of it."""
    lines = dict[str, list[int]]()
    for entry, line in enumerate(pages.owners, 1):
        if _kind(line) == "request":
            lines.setdefault(line.label, []).append(entry)
    return lines


def _shown(run: PageRun, pages: PageMap) -> NDArray[np.int64]:
    """Map entries of those pages of a run that the map shows."""
    try:
        ids = page_ranges.unpack(run.pages, pages.pages * run.parts).astype(np.int64) // run.parts
    except MessageError:  # a handle of a pool that was restarted since
        return np.empty(0, np.int64)
    return ids[ids % pages.stride == 0] // pages.stride


def _trace(trace: RequestTrace, number: int, now: float) -> Json:
    report = trace.report
    return {
        "number": number,
        "tenant": trace.tenant,
        "attempt": trace.attempt,
        "prompt_tokens": trace.prompt_tokens,
        "max_tokens": trace.max_tokens,
        "steps": [[state, _seconds(now - since)] for state, since in trace.steps],
        "end": trace.end,
        "code": trace.code,
        "ended": _seconds(now - trace.ended) if trace.end else None,
        "tokens": trace.tokens,
        "raw_bytes": report.raw_bytes if report else None,
        "stored_bytes": report.stored_bytes if report else None,
    }


def _base64(values: NDArray[np.generic]) -> str:
    return base64.b64encode(values.tobytes()).decode("ascii")


def _seconds(value: float) -> float:
    return round(value, 3)


# ------------------------------------------------------------------ several shards


def merge_states(states: Sequence[Json]) -> Json:
    """Merge the states of all shards into one: sums, concatenated lists, one map."""
    if len(states) == 1:
        return states[0]
    return {
        "pool": _sums([state["pool"] for state in states if state["pool"]]),
        "map": _one_map([cast("Json", state["map"]) for state in states if state["map"]]),
        "router": _one_router([cast("Json", state["router"]) for state in states]),
        **{
            name: [item for state in states for item in cast("list[object]", state[name])]
            for name in ("workers", "requests")
        },
    }


def _sums(parts: Sequence[object]) -> Any:
    """Sums key by key; ``page_bytes`` is the same in all shards, and booleans must all be true."""
    if not parts:
        return None
    first = parts[0]
    if isinstance(first, dict):
        tables = cast("Sequence[Json]", parts)
        keys = dict.fromkeys(key for table in tables for key in table)
        return {
            key: tables[0][key]
            if key == "page_bytes"
            else _sums([table[key] for table in tables if key in table])
            for key in keys
        }
    if isinstance(first, bool):
        return all(parts)
    return sum(cast("Sequence[float]", parts))


def _one_router(routers: Sequence[Json]) -> Json:
    def each(name: str) -> list[Any]:
        return [router[name] for router in routers]

    # Requests are served as long as one shard has all stages.
    return {
        "states": _sums(each("states")),
        "blocked_reason": next((reason for reason in each("blocked_reason") if reason), ""),
        "oldest_waiting_s": max(each("oldest_waiting_s")),
        "held_bytes": sum(each("held_bytes")),
        "booked_bytes": sum(each("booked_bytes")),
        "bound_bytes": sum(each("bound_bytes")),
        "capacity_bytes": sum(each("capacity_bytes")),
        "decisions": _sums(each("decisions")),
        "missing_stages": min(each("missing_stages"), key=len),
    }


def _one_map(maps: Sequence[Any]) -> Json | None:
    """Concatenate the maps of several pools, with one list of kinds and one of workers."""
    if not maps:
        return None
    kinds = list(dict.fromkeys(kind for one in maps for kind in one["kinds"]))
    stocks, before = list[Entries](), 0
    for one in maps:
        kind_of = np.frombuffer(base64.b64decode(one["kind_of"]), np.uint8)
        owners = np.frombuffer(base64.b64decode(one["owner_of"]), "<u2")
        is_stock = kind_of == one["kinds"].index("stock")
        stocks.append(np.where(is_stock, owners + before, owners))
        before += len(one["workers"])
    return {
        "pages": sum(one["pages"] for one in maps),
        "stride": maps[0]["stride"],  # that of all shards
        "kinds": kinds,
        "workers": [worker for one in maps for worker in one["workers"]],
        "kind_of": _base64(np.concatenate([_renamed(one, kinds) for one in maps])),
        "owner_of": _base64(np.concatenate(stocks).astype("<u2")),
    }


def _renamed(one: Any, kinds: list[str]) -> NDArray[np.uint8]:
    """The kind of each entry, as an index into ``kinds``."""
    places = np.array([kinds.index(kind) for kind in one["kinds"]], np.uint8)
    return places[np.frombuffer(base64.b64decode(one["kind_of"]), np.uint8)]
