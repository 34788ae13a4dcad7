"""Workers that are registered with the pool, and dead ones whose pages wait to be adopted."""

from collections.abc import Callable, Collection

from triptych.core.errors import NotRegistered
from triptych.core.handles import LeaseId
from triptych.kvpool.pool.leases import Lease, Worker, WorkerId
from triptych.kvpool.pool.processes import ProcessKey


class WorkerTable:
    """Registered workers with the time of their last call, and dead workers that left pages."""

    def __init__(self, pool_id: str, lease_ttl_s: float) -> None:
        self._pool_id, self._lease_ttl_s = pool_id, lease_ttl_s
        self.by_id = dict[WorkerId, Worker]()
        self.by_name = dict[str, Worker]()
        self.dead = dict[str, Worker]()
        """Dead workers whose pages are kept for other workers, by name."""
        self._last = 0

    @property
    def all(self) -> list[Worker]:
        """The registered workers, then the dead ones that left pages."""
        return [*self.by_id.values(), *self.dead.values()]

    def add(self, name: str, process: ProcessKey, now: float, *, keeps: bool, home: int) -> Worker:
        """Register a worker under a new id; its name must not be registered."""
        self._last += 1
        ticket = WorkerId(f"{name}@{self._pool_id}/{self._last}")
        worker = Worker(ticket, name, process, now, keeps, home)
        self.by_id[worker.id] = self.by_name[name] = worker
        return worker

    def require(self, worker: WorkerId) -> Worker:
        """The worker with this id. Raises: NotRegistered"""
        try:
            return self.by_id[worker]
        except KeyError:
            raise NotRegistered(worker) from None

    def named(self, name: str) -> list[Worker]:
        """The registered and the dead worker of this name, if there are such."""
        return [group[name] for group in (self.by_name, self.dead) if name in group]

    def silent(self, now: float) -> list[Worker]:
        """Registered workers whose leases have expired."""
        return [worker for worker in self.by_id.values() if self._is_silent(worker, now)]

    def lost(
        self, now: float, is_alive: Callable[[ProcessKey], bool], fenced: Collection[str]
    ) -> list[Worker]:
        """Registered workers that are dead, and fenced ones whose leases have expired."""
        return [
            worker
            for worker in self.by_id.values()
            if (worker.name in fenced and self._is_silent(worker, now))
            or not is_alive(worker.process)
        ]

    def _is_silent(self, worker: Worker, now: float) -> bool:
        return now - worker.seen > self._lease_ttl_s

    def forget(self, worker: Worker) -> None:
        """Remove a worker, registered or dead."""
        group = self.by_name if worker.id in self.by_id else self.dead
        del group[worker.name]
        self.by_id.pop(worker.id, None)

    def keep_dead(self, worker: Worker, now: float) -> None:
        """Unregister a dead worker, but keep its leases for other workers."""
        self.forget(worker)
        worker.seen, worker.unmet_pages = now, 0
        self.dead[worker.name] = worker

    def unmet_pages(self, but: Worker, arena: int) -> int:
        """Pages of an arena that other workers asked for last and could not get."""
        others = (w for w in self.by_id.values() if w is not but)
        return sum(w.unmet_pages for w in others if w.unmet_arena == arena)


def left_by(dead: Worker, lease: LeaseId | None, label: str) -> Lease | None:
    """The lease that a dead worker has for a request; None for ``lease``: its last one."""
    named = [one for one in dead.requests.values() if one.label == label]
    return next((one for one in reversed(named) if lease in (None, one.id)), None)
