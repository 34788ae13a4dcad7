"""What the dashboard shows of one moment: plain numbers, bounded in size whatever goes on."""

import base64
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

import numpy as np
from numpy.typing import NDArray

from triptych.core.errors import MessageError
from triptych.core.handles import KVHandle
from triptych.core.messages import Report
from triptych.deployments.monitoring.status import Status
from triptych.kvpool import PREFIX_WORKER, OwnerPages, PageMap, PoolStats
from triptych.kvpool.rpc import page_ranges
from triptych.router import RequestTrace, WorkerLoad

SHOWN_PAGES = 16_384
"""Pages that the map shows at most; of a larger pool it shows every n-th page."""

KINDS = ("free", "stock", "prefix", "request")
"""What a page is, where its format is not known; formats are numbered behind these."""

Json = dict[str, object]
Cells = NDArray[np.uint16]


@dataclass(frozen=True)
class DashboardState:
    """Everything that the dashboard draws, but for the ingress's own metrics."""

    status: Status
    pages: PageMap | None
    """Of the pool on the router's node; None while it does not answer."""
    lives: tuple[RequestTrace, ...]
    handles: Mapping[str, KVHandle]
    """Pages of each request, as they were handed over last: who has which format is in there."""
    report_ages_s: Mapping[str, float]
    """Seconds since the last report of each worker, by name."""
    now: float
    """On the clock of ``lives``."""
    cells: int = 1
    cell: int = 0
    """Which of them this is the board of."""

    def json(self) -> Json:
        """The moment as JSON; requests go by number, so that no id leaves the server."""
        pool, numbers = self._ledger(), {life.request: self._number(life) for life in self.lives}
        return {
            "pool": _pool(pool) if pool else None,
            "map": _map(self.pages, self.handles, numbers) if self.pages else None,
            "router": self._router(),
            "workers": [self._worker(load) for load in self.status.router.workers],
            "requests": [_life(life, self._number(life), self.now) for life in self.lives],
        }

    def _number(self, life: RequestTrace) -> int:
        """One that no request of another cell has; of one cell, the router's own."""
        return (life.number - 1) * self.cells + self.cell + 1

    def _ledger(self) -> PoolStats | None:
        """The books of the pool whose map is shown."""
        ledgers = [ledger for ledger in self.status.pools if ledger is not None]
        if self.pages is None:
            return ledgers[0] if len(self.status.pools) == 1 and ledgers else None
        arena = self.pages.arena
        return next((ledger for ledger in ledgers if ledger.arena == arena), None)

    def _router(self) -> Json:
        router = self.status.router
        return {
            "states": dict(router.requests),
            "blocked_reason": router.blocked_reason,
            "oldest_waiting_s": _seconds(router.oldest_waiting_s),
            "booked_bytes": sum(router.booked_bytes.values()),
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
    kinds, of_cell = page_kinds(pages, handles)
    owners = page_owners(pages, workers, numbers)
    return {
        "pages": pages.pages,
        "stride": pages.stride,
        "kinds": kinds,
        "workers": workers,
        "kind_of": _base64(of_cell.astype(np.uint8)),
        "owner_of": _base64(owners.astype("<u2")),
    }


def page_kinds(pages: PageMap, handles: Mapping[str, KVHandle]) -> tuple[list[str], Cells]:
    """Names of kinds, and which of them each cell is.

    The pool knows owners only. The format of a request's page is the one in the handle with
    which its last stage passed it on; pages that a worker took since are of its stock.

    Shapes: -> (cells,)
    """
    cells = pages.cells.astype(np.int64)
    kinds = list[str](KINDS)
    of_owner = [0, *(KINDS.index(_kind(line)) for line in pages.owners)]
    of_cell = np.array(of_owner, np.uint16)[cells]
    lines = _lines_of_requests(pages)
    for request, handle in handles.items():
        mine = lines.get(request)
        if mine is None or handle.lease_ref.arena != pages.arena:
            continue
        for run in handle.runs:
            if run.format not in kinds:
                kinds.append(run.format)
            shown = _shown(run.pages, pages)
            of_cell[shown[np.isin(cells[shown], mine)]] = kinds.index(run.format)
    return kinds, of_cell


def page_owners(pages: PageMap, workers: list[str], numbers: Mapping[str, int]) -> Cells:
    """Whose each cell is: the worker's place in ``workers``, or the request's number.

    Modulo 2**16; 0 for what is free or a prefix, and for requests that are forgotten.
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
    return np.array(of_owner, np.uint16)[pages.cells]


def _kind(line: OwnerPages) -> str:
    if line.worker == PREFIX_WORKER:
        return "prefix"
    return "stock" if line.kind == "extent" else "request"


def _lines_of_requests(pages: PageMap) -> dict[str, list[int]]:
    """Cell values of each request: two workers may hold leases of one."""
    lines = dict[str, list[int]]()
    for cell, line in enumerate(pages.owners, 1):
        if _kind(line) == "request":
            lines.setdefault(line.label, []).append(cell)
    return lines


def _shown(packed: bytes, pages: PageMap) -> NDArray[np.int64]:
    """The cells of those pages of a run that the map shows."""
    try:
        ids = page_ranges.unpack(packed, pages.pages).astype(np.int64)
    except MessageError:  # a handle from before the pool was started anew
        return np.empty(0, np.int64)
    return ids[ids % pages.stride == 0] // pages.stride


def _life(life: RequestTrace, number: int, now: float) -> Json:
    report = life.report
    return {
        "number": number,
        "attempt": life.attempt,
        "prompt_tokens": life.prompt_tokens,
        "max_tokens": life.max_tokens,
        "steps": [[state, _seconds(now - since)] for state, since in life.steps],
        "end": life.end,
        "code": life.code,
        "ended": _seconds(now - life.ended) if life.end else None,
        "tokens": life.tokens,
        "raw_bytes": report.raw_bytes if report else None,
        "stored_bytes": report.stored_bytes if report else None,
    }


def _base64(cells: NDArray[np.generic]) -> str:
    return base64.b64encode(cells.tobytes()).decode("ascii")


def _seconds(value: float) -> float:
    return round(value, 3)


# ------------------------------------------------------------------ several cells


def joined(boards: Sequence[Json]) -> Json:
    """The boards of all cells as one of the same form: sums, lists behind each other, one map."""
    if len(boards) == 1:
        return boards[0]
    return {
        "pool": _sums([board["pool"] for board in boards if board["pool"]]),
        "map": _one_map([cast("Json", board["map"]) for board in boards if board["map"]]),
        "router": _one_router([cast("Json", board["router"]) for board in boards]),
        **{
            name: [item for board in boards for item in cast("list[object]", board[name])]
            for name in ("workers", "requests")
        },
    }


def _sums(parts: Sequence[object]) -> Any:
    """Numbers added up, key by key; ``page_bytes`` is the same in all, and all must work."""
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

    # A request may be served as long as one cell has all stages.
    return {
        "states": _sums(each("states")),
        "blocked_reason": next((reason for reason in each("blocked_reason") if reason), ""),
        "oldest_waiting_s": max(each("oldest_waiting_s")),
        "booked_bytes": sum(each("booked_bytes")),
        "capacity_bytes": sum(each("capacity_bytes")),
        "decisions": _sums(each("decisions")),
        "missing_stages": min(each("missing_stages"), key=len),
    }


def _one_map(maps: Sequence[Any]) -> Json | None:
    """Maps of several pools behind each other, with one list of kinds and one of workers."""
    if not maps:
        return None
    kinds = list(dict.fromkeys(kind for one in maps for kind in one["kinds"]))
    stocks, before = list[Cells](), 0
    for one in maps:
        kind_of = np.frombuffer(base64.b64decode(one["kind_of"]), np.uint8)
        owners = np.frombuffer(base64.b64decode(one["owner_of"]), "<u2")
        is_stock = kind_of == one["kinds"].index("stock")
        stocks.append(np.where(is_stock, owners + before, owners))
        before += len(one["workers"])
    return {
        "pages": sum(one["pages"] for one in maps),
        "stride": maps[0]["stride"],  # cells are equal
        "kinds": kinds,
        "workers": [worker for one in maps for worker in one["workers"]],
        "kind_of": _base64(np.concatenate([_renamed(one, kinds) for one in maps])),
        "owner_of": _base64(np.concatenate(stocks).astype("<u2")),
    }


def _renamed(one: Any, kinds: list[str]) -> NDArray[np.uint8]:
    """The kind of each page, counted in ``kinds``."""
    places = np.array([kinds.index(kind) for kind in one["kinds"]], np.uint8)
    return places[np.frombuffer(base64.b64decode(one["kind_of"]), np.uint8)]
