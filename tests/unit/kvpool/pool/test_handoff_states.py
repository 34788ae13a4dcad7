"""Every interleaving of two handoffs with a death at any point: no page is lost or shared.

Two producers each fill a page and hand it on; two consumers attach it, read it and let it go. At
each point each of them may die; then the pool sweeps, and the other consumer may adopt what a
dead one held. All states that can be reached are visited, once each: 13,084.
"""

from collections.abc import Hashable, Iterator
from dataclasses import dataclass, field

import numpy as np

from tests.unit.kvpool.exploration import explore
from triptych.core.errors import NotHeld, NotRegistered, PoolExhausted, StaleHandle
from triptych.core.handles import LeaseRef
from triptych.kvpool.pool.leases import WorkerId
from triptych.kvpool.pool.page_pool import Pool
from triptych.kvpool.pool.processes import ProcessKey

PAGES = 2
"""One for each request, so that a page that is not given back is missed at once."""

PRODUCER = ("take", "write", "commit", "done")
CONSUMER = ("attach", "read", "release", "done")


@dataclass
class Actor:
    """A worker as far as it has come."""

    name: str
    ticket: WorkerId
    step: int = 0
    pages: tuple[int, ...] = ()
    lease_ref: LeaseRef | None = None
    is_dead: bool = False
    is_swept: bool = False


@dataclass
class World:
    """The pool, four workers, two claims on their way, and what is written in the pages."""

    pool: Pool = field(default_factory=lambda: Pool(PAGES, 256, "arena", 10.0, keep_s=1e9))
    producers: list[Actor] = field(default_factory=list[Actor])
    consumers: list[Actor] = field(default_factory=list[Actor])
    sent: list[LeaseRef | None] = field(default_factory=lambda: [None, None])
    written: list[str] = field(default_factory=lambda: [""] * PAGES)

    @classmethod
    def start(cls) -> "World":
        world = cls()
        for i in range(2):
            world.producers.append(world.register(f"producer-{i}", keeps=False))
            world.consumers.append(world.register(f"consumer-{i}", keeps=True))
        return world

    def register(self, name: str, *, keeps: bool) -> Actor:
        ticket = self.pool.register(name, ProcessKey(1, 1, name), 0.0, keeps=keeps)
        return Actor(name, ticket)

    # ---------------------------------------------------------------- what may happen next

    def moves(self) -> Iterator[tuple[str, int]]:
        for i in range(2):
            for kind, actors in (("produce", self.producers), ("consume", self.consumers)):
                actor = actors[i]
                if not actor.is_dead:
                    if actor.step < 3 and self.may_go_on(kind, i):
                        yield kind, i
                    yield f"kill {kind}r", i
                elif not actor.is_swept:
                    yield f"sweep {kind}r", i
            if self.may_adopt(i):
                yield "adopt", i

    def may_go_on(self, kind: str, i: int) -> bool:
        return kind == "produce" or self.consumers[i].step > 0 or self.sent[i] is not None

    def may_adopt(self, i: int) -> bool:
        """Whether consumer i can take over what the other one, dead, was reading."""
        dead = self.consumers[1 - i]
        return dead.is_swept and dead.lease_ref is not None and not self.consumers[i].is_dead

    def do(self, move: str, i: int) -> None:
        match move:
            case "produce":
                self.produce(i, self.producers[i])
            case "consume":
                self.consume(i, self.consumers[i])
            case "kill producer" | "kill consumer":
                self.actor(move, i).is_dead = True
            case "sweep producer" | "sweep consumer":
                self.actor(move, i).is_swept = True
                self.sweep()
            case "adopt":
                self.adopt(i)
            case _:
                raise AssertionError(move)

    def actor(self, move: str, i: int) -> Actor:
        return (self.producers if move.endswith("producer") else self.consumers)[i]

    def produce(self, i: int, actor: Actor) -> None:
        match PRODUCER[actor.step]:
            case "take":
                try:
                    actor.pages = tuple(self.pool.allocate(actor.ticket, 1).tolist())
                except PoolExhausted:
                    return  # somebody who died has not been swept; later
            case "write":
                self.written[actor.pages[0]] = f"r{i}"
            case "commit":
                [self.sent[i]] = self.pool.handoff(actor.ticket, [(f"r{i}", ids(actor.pages))])
        actor.step += 1

    def consume(self, i: int, actor: Actor) -> None:
        match CONSUMER[actor.step]:
            case "attach":
                lease_ref, pages = self.sent[i], self.producers[i].pages
                assert lease_ref is not None
                try:
                    [actor.lease_ref] = self.pool.attach(actor.ticket, [(lease_ref, ids(pages))])
                except (StaleHandle, NotHeld):
                    actor.step = 3  # its producer died: the request is told so
                    return
            case "read":
                assert self.written[self.producers[i].pages[0]] == f"r{i}"
            case "release":
                assert actor.lease_ref is not None
                self.pool.release(actor.ticket, [actor.lease_ref.lease])
                actor.lease_ref = None
        actor.step += 1

    def adopt(self, i: int) -> None:
        """Take over, read, and let go."""
        heir, dead, other = self.consumers[i], self.consumers[1 - i], 1 - i
        assert dead.lease_ref is not None
        pages = ids(self.producers[other].pages)
        lease_ref = self.pool.adopt(
            heir.ticket, dead.name, f"r{other}", dead.lease_ref.lease, pages
        )
        assert self.written[int(pages[0])] == f"r{other}"
        self.pool.release(heir.ticket, [lease_ref.lease])
        dead.lease_ref = None

    def sweep(self) -> None:
        swept = {a.name for a in (*self.producers, *self.consumers) if a.is_swept}
        self.pool.sweep(0.0, lambda process: process.space not in swept)

    # ---------------------------------------------------------------- what must hold

    def check(self) -> None:
        assert self.pool.check() == []
        stat = self.pool.stat(0.0)
        assert stat.free_pages + stat.held_pages == PAGES
        for actor in (*self.producers, *self.consumers):
            if actor.is_swept:
                self.refuses(actor)

    def refuses(self, actor: Actor) -> None:
        """A dead worker's ticket opens nothing any more."""
        try:
            self.pool.allocate(actor.ticket, 0)
        except NotRegistered:
            return
        raise AssertionError(f"{actor.name} is dead and was heard")

    def check_end(self) -> None:
        """Everybody is gone or done: nothing is held once the dead are expelled."""
        for actor in (*self.producers, *self.consumers):
            self.pool.expel(actor.name)
        assert self.pool.stat(0.0).free_pages == PAGES

    def key(self) -> Hashable:
        """What makes two states the same: ids of leases and tickets do not."""
        actors = (*self.producers, *self.consumers)
        return (
            tuple((a.step, a.pages, a.lease_ref is None, a.is_dead, a.is_swept) for a in actors),
            tuple(lease_ref is not None for lease_ref in self.sent),
            tuple(self.written),
            tuple(sorted(self.pool.stat(0.0).by_request.items())),
            tuple(
                (line.name, line.extent_pages, line.request_pages, line.requests)
                for line in self.pool.stat(0.0).workers
            ),
            tuple(self.pool._leases.free_lists[0].peek().tolist()),  # the order matters
        )


def ids(pages: tuple[int, ...]) -> np.ndarray:
    return np.array(pages, np.int32)


def test_no_interleaving_and_no_death_loses_or_shares_a_page() -> None:
    assert explore(World.start(), {"produce", "consume", "adopt"}) == (13_084, 7_990)
