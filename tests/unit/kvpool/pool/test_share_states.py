"""Every interleaving of a request that reads a cached block with deaths, moves and evictions.

A compressor holds a block and hands it on with a request; two decode workers may join it, put it
on offer again, end it, and take it over from each other. At each point each of them may die, be
swept, or have what it left expire, and the cache may be asked to give up its memory. The block must
stay for as long as anybody can still read it, and go when it is asked for after that.
"""

from collections.abc import Hashable, Iterator
from dataclasses import dataclass, field

import numpy as np

from tests.unit.kvpool.exploration import explore
from triptych.core.errors import NotHeld, StaleHandle
from triptych.core.handles import LeaseRef
from triptych.kvpool.pool.leases import WorkerId
from triptych.kvpool.pool.page_pool import Pool
from triptych.kvpool.pool.processes import ProcessKey
from triptych.kvpool.prefix.blocks import Namespace, PinId, Publication
from triptych.kvpool.prefix.cache import PREFIX_WORKER, PrefixCache, PrefixSettings

PAGES, PAGE_BYTES = 2, 256
SPACE = Namespace(salt=b"", model="m", revision="", profile="p")


@dataclass
class Actor:
    name: str
    ticket: WorkerId
    lease_ref: LeaseRef | None = None
    """Of a decode worker: what it has joined."""
    is_dead: bool = False
    is_swept: bool = False


@dataclass
class World:
    """One block, one request: page ``own`` is its own, page ``shared`` that of the block."""

    pool: Pool = field(default_factory=lambda: Pool(PAGES, PAGE_BYTES, "arena", 10.0, keep_s=1e9))
    own: int = -1
    shared: int = -1
    pin: PinId | None = None
    offer: LeaseRef | None = None
    """The newest claim that was put on offer, good or not."""
    moves_left: int = 1
    is_begun: bool = False

    @classmethod
    def start(cls) -> "World":
        world = cls()
        limits = PrefixSettings(block_tokens=1, total_bytes=PAGE_BYTES, tenant_bytes=PAGE_BYTES)
        world.cache = PrefixCache(world.pool, limits)
        world.compress = world.register("compress", keeps=False)
        world.decode = [world.register(f"decode-{i}", keeps=True) for i in range(2)]
        ids = world.pool.allocate(world.compress.ticket, 1)
        world.shared = int(ids[0])
        new = Publication(namespace=SPACE, tokens=[7], blocks=[ids], seconds=1.0, tenant="t")
        assert world.cache.publish(world.compress.ticket, new).added == 1
        return world

    def register(self, name: str, *, keeps: bool) -> Actor:
        ticket = self.pool.register(name, ProcessKey(1, 1, name), 0.0, keeps=keeps)
        return Actor(name, ticket)

    @property
    def actors(self) -> list[Actor]:
        return [self.compress, *self.decode]

    # ---------------------------------------------------------------- what may happen next

    def moves(self) -> Iterator[tuple[str, int]]:
        if self.is_resident:
            yield "evict", 0
        if not self.compress.is_dead and not self.is_begun:
            yield ("hold", 0) if self.pin is None else ("commit", 0)
        for i, actor in enumerate(self.actors):
            if not actor.is_dead:
                yield "kill", i
            elif not actor.is_swept:
                yield "sweep", i
            elif self.pool.knows(actor.name):
                yield "expel", i
        for i, actor in enumerate(self.decode):
            if actor.is_dead:
                continue
            if actor.lease_ref is None:
                if self.offer is not None:
                    yield "join", i
                if self.decode[1 - i].is_swept:
                    yield "adopt", i
            else:
                yield "release", i
                if self.moves_left:
                    yield "suspend", i

    def do(self, move: str, i: int) -> None:
        match move:
            case "evict":
                self.cache.borrow_cache_memory(PAGE_BYTES)
                self.cache.borrow_cache_memory(0)
            case "hold":
                found = self.cache.pin_all(self.compress.ticket, SPACE, [7])
                self.is_begun = found is None  # evicted: it is encoded, and nothing is shared
                self.pin = found.pin if found else None
            case "commit":
                self.commit()
            case "kill":
                self.actors[i].is_dead = True
            case "sweep":
                self.actors[i].is_swept = True
                swept = {actor.name for actor in self.actors if actor.is_swept}
                self.pool.sweep(0.0, lambda process: process.space not in swept)
                self.cache.forget_lost()
            case "expel":
                self.pool.expel(self.actors[i].name)
                self.cache.forget_lost()
            case "join":
                self.join(self.decode[i])
            case "adopt":
                self.adopt(self.decode[i], self.decode[1 - i])
            case "suspend":
                self.suspend(self.decode[i])
            case "release":
                one = self.decode[i]
                self.pool.release(one.ticket, [one.lease_ref.lease])
                one.lease_ref = None
            case _:
                raise AssertionError(move)

    def commit(self) -> None:
        page = self.pool.allocate(self.compress.ticket, 1)
        self.own, self.is_begun = int(page[0]), True
        [self.offer] = self.cache.handoff(
            self.compress.ticket,
            [("r", self.ids)],
            [],
            keep=False,
            about=(),
            pins=[self.pin],
        )
        self.pin = None

    def join(self, one: Actor) -> None:
        try:
            [one.lease_ref] = self.pool.attach(one.ticket, [(self.offer, self.ids)])
        except (StaleHandle, NotHeld):
            return  # its giver died, or another one was faster
        self.offer = None

    def adopt(self, heir: Actor, dead: Actor) -> None:
        """By its checkpoint, or, if it had put the request on offer, by its label."""
        try:
            heir.lease_ref = self.pool.adopt(heir.ticket, dead.name, "r", None, self.ids)
        except StaleHandle:
            return
        dead.lease_ref = self.offer = None

    def suspend(self, one: Actor) -> None:
        [self.offer] = self.pool.handoff(one.ticket, [("r", self.ids)], [one.lease_ref.lease])
        one.lease_ref, self.moves_left = None, self.moves_left - 1

    @property
    def ids(self) -> np.ndarray:
        return np.array([self.own, self.shared], np.int32)

    # ---------------------------------------------------------------- what must hold

    @property
    def is_resident(self) -> bool:
        return self.cache.resident(SPACE, [7]) == 1

    @property
    def readers(self) -> int:
        """Leases of the request; there is never more than one."""
        return len(self.pool.shares)

    def check(self) -> None:
        assert self.pool.check() == []
        assert self.cache.check() == []
        leases = self.pool.stat(0.0).by_request
        assert self.readers == int("r" in leases) <= 1
        holders = self.readers + (self.pin is not None and not self.compress.is_swept)
        assert self.cache.pins == holders
        if holders:
            seen = self.pool.map(PAGES)
            assert seen.owners[int(seen.entries[self.shared]) - 1].label == PREFIX_WORKER
        for one in self.decode:
            if one.lease_ref is not None and not one.is_dead:
                self.pool.require_lease(one.ticket, one.lease_ref.lease, self.ids)

    def check_end(self) -> None:
        """Once everybody is gone nothing is pinned, and the block can be evicted."""
        for actor in self.actors:
            self.pool.expel(actor.name)
        self.cache.forget_lost()
        assert self.cache.pins == 0
        self.cache.borrow_cache_memory(PAGE_BYTES)
        assert self.pool.free_pages == PAGES

    def key(self) -> Hashable:
        return (
            tuple(
                (one.lease_ref is None, one.is_dead, one.is_swept, self.pool.knows(one.name))
                for one in self.actors
            ),
            (self.own, self.pin is None, self.offer is None, self.moves_left, self.is_begun),
            (self.is_resident, self.readers, self.cache.pins, self.pool.free_pages),
            tuple(
                (line.name, line.request_pages, line.extent_pages)
                for line in self.pool.stat(0.0).workers
            ),
        )


def test_no_interleaving_loses_a_block_that_is_read_or_pins_one_that_is_not() -> None:
    progress = {"hold", "commit", "join", "suspend", "adopt", "release"}
    assert explore(World.start(), progress) == (865, 566)
