"""Every interleaving of a fetch between two pools with a death at any point: no byte is lost.

A producer commits two pages in the far pool. Two workers of the near one have the claim, as when
the router took the first for dead, and each fetches: reserve, hold, copy page by page, commit,
release. Producer, workers and the far pool may die at each point; pools sweep later, or never.
The steps are those of ``Fetcher``, which says them over a wire. All states that can be reached
are visited, once each: 8,226.
"""

from collections.abc import Hashable, Iterator
from dataclasses import dataclass, field

import numpy as np
import pytest

from tests.unit.kvpool.exploration import explore
from triptych.core.errors import NotHeld, NotRegistered, PoolExhausted, StaleHandle
from triptych.core.handles import LeaseRef
from triptych.kvpool.pool.leases import WorkerId
from triptych.kvpool.pool.page_pool import Pool
from triptych.kvpool.pool.processes import ELSEWHERE, ProcessKey

PAGES = 2
STEPS = ("reserve", "hold", "copy", "copy", "commit", "release", "use", "done")
USE, DONE = STEPS.index("use"), STEPS.index("done")
NEVER = 1e9


def ids(pages: tuple[int, ...]) -> np.ndarray:
    return np.array(pages, np.int32)


@dataclass
class Worker:
    """A worker of the near pool, and its guest in the far one."""

    name: str
    ticket: WorkerId
    guest: WorkerId
    step: int = 0
    mine: tuple[int, ...] = ()
    made: LeaseRef | None = None
    gave_up: bool = False
    is_dead: bool = False
    is_swept_near: bool = False
    is_swept_far: bool = False


@dataclass
class World:
    """Two pools with what is written in their pages, a producer, and two workers."""

    far: Pool = field(default_factory=lambda: Pool(PAGES, 256, "far", 10.0))
    near: Pool = field(default_factory=lambda: Pool(2 * PAGES, 256, "near", 10.0))
    far_bytes: list[str] = field(default_factory=lambda: [""] * PAGES)
    near_bytes: list[str] = field(default_factory=lambda: [""] * 2 * PAGES)
    workers: list[Worker] = field(default_factory=list[Worker])
    producer: str = "lives"
    far_is_up: bool = True
    lease_ref: LeaseRef = field(init=False)
    pages: tuple[int, ...] = ()

    @classmethod
    def start(cls) -> "World":
        world = cls()
        producer = world.far.register("producer", ProcessKey(1, 1, "producer"), 0.0)
        world.pages = tuple(world.far.allocate(producer, PAGES).tolist()[::-1])
        for page, text in zip(world.pages, ("one", "two"), strict=True):
            world.far_bytes[page] = text
        [world.lease_ref] = world.far.handoff(producer, [("r", ids(world.pages))])
        for name in ("a", "b"):
            ticket = world.near.register(name, ProcessKey(2, 2, name), 0.0)
            guest = world.far.register(f"guest/{name}", ELSEWHERE, 0.0)
            world.workers.append(Worker(name, ticket, guest))
        return world

    # ---------------------------------------------------------------- what may happen next

    def moves(self) -> Iterator[tuple[str, int]]:
        for i, worker in enumerate(self.workers):
            if not worker.is_dead and worker.step < DONE:
                yield "go on", i
                yield "kill", i
            if worker.is_dead and not worker.is_swept_near:
                yield "sweep near", i
            if worker.is_dead and not worker.is_swept_far and self.far_is_up:
                yield "sweep far", i
        if self.producer == "lives":
            yield "kill producer", 0
        if self.producer == "dead" and self.far_is_up:
            yield "sweep producer", 0
        if self.far_is_up:
            yield "kill far pool", 0

    def do(self, move: str, i: int) -> None:
        worker = self.workers[i]
        match move:
            case "go on":
                self.go_on(worker)
            case "kill":
                worker.is_dead = True
            case "sweep near":
                worker.is_swept_near = True
                self.near.sweep(0.0, lambda process: process.space != worker.name)
            case "sweep far":
                worker.is_swept_far = True
                self.far.expel(f"guest/{worker.name}")  # as when its lease ran out
            case "kill producer":
                self.producer = "dead"
            case "sweep producer":
                self.producer = "swept"
                self.far.sweep(0.0, lambda process: process.space != "producer")
            case "kill far pool":
                self.far_is_up = False
            case _:
                raise AssertionError(move)

    def go_on(self, worker: Worker) -> None:
        try:
            self.act(worker, STEPS[worker.step])
        except (StaleHandle, NotHeld, NotRegistered, ConnectionError):
            self.give_up(worker)
            return
        except PoolExhausted:
            return  # the other one has the pages, or died and was not swept; later
        worker.step += 1

    def act(self, worker: Worker, step: str) -> None:
        if step in ("hold", "copy") and not self.far_is_up:
            raise ConnectionError
        match step:
            case "reserve":
                worker.mine = tuple(self.near.allocate(worker.ticket, PAGES).tolist())
            case "hold":
                self.far.attach(worker.guest, [(self.lease_ref, ids(self.pages))])
            case "copy":
                at = worker.step - STEPS.index("copy")
                self.far.require_lease(
                    worker.guest, self.lease_ref.lease, ids(self.pages[at : at + 1])
                )
                self.near_bytes[worker.mine[at]] = self.far_bytes[self.pages[at]]
            case "commit":
                [worker.made] = self.near.handoff(worker.ticket, [("r", ids(worker.mine))])
            case "release":
                self.let_go(worker)
            case "use":
                assert worker.made is not None
                assert self.read(worker) == ["one", "two"]
                self.near.release(worker.ticket, [worker.made.lease])

    def let_go(self, worker: Worker) -> None:
        """Release there; it is no fault if nothing is held any more, or nobody is there."""
        if self.far_is_up:
            try:
                self.far.release(worker.guest, [self.lease_ref.lease])
            except StaleHandle:
                return
            self.far_bytes = [""] * PAGES  # the next holder may write over them at once

    def give_up(self, worker: Worker) -> None:
        self.let_go(worker)
        if worker.mine:
            self.near.free(worker.ticket, ids(worker.mine))
        worker.gave_up, worker.step = True, DONE

    def read(self, worker: Worker) -> list[str]:
        return [self.near_bytes[page] for page in worker.mine]

    # ---------------------------------------------------------------- what must hold

    def check(self) -> None:
        assert self.near.check() == []
        assert self.far.check() == []
        for pool, pages in ((self.near, 2 * PAGES), (self.far, PAGES)):
            stat = pool.stat(0.0)
            assert stat.free_pages + stat.held_pages == pages
        assert sum(worker.made is not None for worker in self.workers) <= 1
        for worker in self.workers:
            if worker.made is not None and not worker.is_swept_near and worker.step <= USE:
                assert self.read(worker) == ["one", "two"]
        if self.is_calm():
            assert self.bytes_are_held()

    def is_calm(self) -> bool:
        """Whether nobody died, gave up holding it, or has read it to the end."""
        return (
            self.producer == "lives"
            and self.far_is_up
            and not any(w.is_dead or (w.step == DONE and not w.gave_up) for w in self.workers)
        )

    def bytes_are_held(self) -> bool:
        """Whether all that was committed can still be read from one of the pools."""
        there = self.far.stat(0.0).by_request == {"r": PAGES} and "" not in self.far_bytes
        here = self.near.stat(0.0).by_request == {"r": PAGES}
        return there or here

    def check_end(self) -> None:
        """Everybody is done or dead: once the dead are expelled, nothing is held."""
        for worker in self.workers:
            self.near.expel(worker.name)
            self.far.expel(f"guest/{worker.name}")
        self.far.expel("producer")
        assert self.near.stat(0.0).free_pages == 2 * PAGES
        assert self.far.stat(0.0).free_pages == PAGES

    def key(self) -> Hashable:
        """What makes two states the same: ids of leases and tickets do not."""
        return (
            tuple(
                (w.step, w.mine, w.gave_up, w.is_dead, w.is_swept_near, w.is_swept_far)
                for w in self.workers
            ),
            self.producer,
            self.far_is_up,
            tuple(self.far_bytes),
            tuple(self.near_bytes),
            *(
                tuple(
                    (line.name, line.extent_pages, line.request_pages, line.requests)
                    for line in pool.stat(0.0).workers
                )
                for pool in (self.far, self.near)
            ),
        )


@pytest.mark.slow
def test_no_interleaving_and_no_death_loses_a_byte_or_a_page() -> None:
    assert explore(World.start(), {"go on"}) == (8_226, 5_644)
