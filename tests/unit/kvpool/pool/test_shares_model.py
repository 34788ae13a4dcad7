"""Requests that read pages of the cache, against dictionaries: what is read stays, no longer."""

from dataclasses import dataclass

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from tests.effort import examples
from triptych.core.errors import NotHeld, PoolError, StaleHandle
from triptych.core.handles import LeaseRef
from triptych.kvpool.pool.leases import WorkerId
from triptych.kvpool.pool.page_pool import Pool
from triptych.kvpool.pool.processes import ProcessKey
from triptych.kvpool.prefix.blocks import Namespace, PinId, Publication
from triptych.kvpool.prefix.cache import PREFIX_WORKER, PrefixCache, PrefixSettings

PAGES, PAGE_BYTES, TTL_S, KEEP_S = 40, 256, 10.0, 20.0
BLOCK, BLOCK_PAGES, TOTAL_PAGES = 2, 2, 12
NAMES = ("compress", "decode-0", "decode-1")
TOKENS = st.lists(st.integers(0, 1), min_size=2, max_size=8)
SPACE = Namespace(salt=b"a", model="m", revision="", profile="p")


@dataclass
class ModelLease:
    worker: str
    lease_ref: LeaseRef
    own: list[int]
    shared: list[int]


def as_ids(pages: list[int]) -> np.ndarray:
    return np.array(pages, np.int32)


class ShareMachine(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.pool = Pool(PAGES, PAGE_BYTES, "arena", TTL_S, KEEP_S)
        total = TOTAL_PAGES * PAGE_BYTES
        limits = PrefixSettings(block_tokens=BLOCK, total_bytes=total, tenant_bytes=total)
        self.cache = PrefixCache(self.pool, limits)
        self.now = 0.0
        self.workers = dict[str, WorkerId]()
        self.left = dict[str, float]()
        """The dead whose requests wait for others, and since when."""
        self.pins = dict[PinId, tuple[str, list[int]]]()
        self.leases = dict[str, ModelLease]()
        """By label: each request has one lease at a time."""
        self.requests = 0
        for name in NAMES:
            self.register(name)

    # ---------------------------------------------------------- workers and their deaths

    def register(self, name: str) -> None:
        """Whoever had the name before loses all that it held, or left."""
        key = ProcessKey(1, 1, name)
        self.workers[name] = self.pool.register(name, key, self.now, keeps=name != "compress")
        self.forget(name)

    def forget(self, name: str) -> None:
        self.leases = {label: one for label, one in self.leases.items() if one.worker != name}
        self.pins = {hold: entry for hold, entry in self.pins.items() if entry[0] != name}
        self.left.pop(name, None)
        self.cache.forget_lost()

    @rule(name=st.sampled_from(NAMES), way=st.sampled_from(["again", "expel", "unregister"]))
    def leave_and_come_back(self, name: str, way: str) -> None:
        if way == "expel":
            self.pool.expel(name)
        elif way == "unregister" and name not in self.left:
            self.pool.unregister(self.workers[name])
        self.register(name)

    @rule(name=st.sampled_from(NAMES), how=st.sampled_from(["dead", "buried", "silent"]))
    def die(self, name: str, how: str) -> None:
        """What a decode worker had is left to others for a while."""
        if name in self.left:
            return
        if how == "buried":
            self.pool.mark_dead(name, self.now)
        else:
            self.now += 2 * TTL_S if how == "silent" else 0.0
            for other, worker in self.workers.items():
                if other != name and other not in self.left:
                    self.pool.renew(worker, self.now)
            lost = self.pool.sweep(
                self.now,
                lambda process: how == "silent" or process.space != name,
                self.pool.silent(self.now),
            )
            assert lost == [name]
        if name == "compress":
            self.register(name)
            return
        self.pins = {hold: entry for hold, entry in self.pins.items() if entry[0] != name}
        self.cache.forget_lost()
        self.left[name] = self.now
        self.expire()

    def expire(self) -> None:
        for name in [name for name, since in self.left.items() if self.now - since > KEEP_S]:
            self.forget(name)
            self.register(name)

    @rule()
    def time_passes(self) -> None:
        self.now += TTL_S
        for name, worker in self.workers.items():
            if name not in self.left:
                self.pool.renew(worker, self.now)
        assert self.pool.sweep(self.now, lambda _: True, self.pool.silent(self.now)) == []
        self.expire()

    def alive(self) -> list[str]:
        return [name for name in NAMES if name not in self.left]

    def some_worker(self, data: st.DataObject) -> tuple[str, WorkerId]:
        name = data.draw(st.sampled_from(self.alive()))
        return name, self.workers[name]

    # ---------------------------------------------------------- prefixes

    @precondition(lambda self: self.alive())
    @rule(data=st.data(), tokens=TOKENS)
    def publish(self, data: st.DataObject, tokens: list[int]) -> None:
        """It evicts what nobody reads."""
        _, worker = self.some_worker(data)
        count = len(tokens) // BLOCK
        if count * BLOCK_PAGES > self.pool.free_pages:
            return
        pages = np.split(self.pool.allocate(worker, count * BLOCK_PAGES), count)
        done = self.cache.publish(
            worker,
            Publication(
                namespace=SPACE,
                tokens=tokens[: count * BLOCK],
                blocks=pages,
                seconds=0.1,
                tenant="t",
            ),
        )
        for ids in pages[: count - done.added]:
            self.pool.free(worker, ids)

    @rule(nbytes=st.integers(0, TOTAL_PAGES * PAGE_BYTES))
    def borrow_cache_memory(self, nbytes: int) -> None:
        lent, _ = self.cache.borrow_cache_memory(nbytes)
        pinned = len({page for pages in self.read_pages() for page in pages})
        assert lent <= (TOTAL_PAGES - pinned) * PAGE_BYTES

    @precondition(lambda self: self.alive())
    @rule(data=st.data(), tokens=TOKENS)
    def pin(self, data: st.DataObject, tokens: list[int]) -> None:
        name, worker = self.some_worker(data)
        known = self.cache.known(worker, SPACE, tokens)
        found = self.cache.pin_all(worker, SPACE, tokens)
        assert (found is not None) == (known == len(tokens) // BLOCK > 0)
        if found is not None:
            assert found.tokens == known * BLOCK
            self.pins[found.pin] = (name, np.concatenate(found.blocks).tolist())

    @precondition(lambda self: self.pins)
    @rule(data=st.data())
    def release_hold(self, data: st.DataObject) -> None:
        hold = data.draw(st.sampled_from(sorted(self.pins)))
        name, _ = self.pins.pop(hold)
        self.cache.release(self.workers[name], hold)

    # ---------------------------------------------------------- requests

    @precondition(lambda self: self.pins)
    @rule(data=st.data(), own=st.integers(0, 2))
    def hand_off(self, data: st.DataObject, own: int) -> None:
        """A request begins: pages of its own, and some of a prefix that its worker holds."""
        hold = data.draw(st.sampled_from(sorted(self.pins)))
        name, pages = self.pins[hold]
        if own > self.pool.free_pages:
            return
        shared = data.draw(st.lists(st.sampled_from(pages), min_size=1, unique=True))
        mine = self.pool.allocate(self.workers[name], own).tolist()
        self.requests += 1
        label = f"r{self.requests}"
        commits = [(label, as_ids(mine + shared))]
        worker = self.workers[name]
        for wrong in (as_ids(shared + mine), as_ids([*mine, *shared, *shared])):
            if wrong.tolist() != mine + shared:
                with pytest.raises(NotHeld):
                    self.hand(worker, [(label, wrong)], [hold])
        with pytest.raises(PoolError):
            self.hand(worker, [*commits, ("thief", as_ids([]))], [hold, hold])
        (lease_ref,) = self.hand(worker, commits, [hold])
        with pytest.raises(PoolError):
            self.hand(worker, [("again", as_ids([]))], [hold])
        del self.pins[hold]
        assert lease_ref.shared == len(shared)
        self.leases[label] = ModelLease(name, lease_ref, mine, shared)

    def hand(
        self, worker: WorkerId, commits: list[tuple[str, np.ndarray]], pins: list[PinId]
    ) -> list[LeaseRef]:
        return self.cache.handoff(worker, commits, [], keep=False, about=(), pins=pins)

    def a_lease(self, data: st.DataObject, *, left: bool) -> str | None:
        labels = [k for k, one in self.leases.items() if (one.worker in self.left) == left]
        return data.draw(st.sampled_from(labels)) if labels else None

    @precondition(lambda self: self.leases and self.alive())
    @rule(data=st.data())
    def attach(self, data: st.DataObject) -> None:
        label = self.a_lease(data, left=False)
        if label is None:
            return
        name, worker = self.some_worker(data)
        one = self.leases[label]
        for wrong in (one.shared + one.own, one.own, one.own + one.shared[1:]):
            if wrong != one.own + one.shared:
                with pytest.raises(NotHeld):
                    self.pool.attach(worker, [(one.lease_ref, as_ids(wrong))])
        named = as_ids(one.own + one.shared[::-1])
        (lease_ref,) = self.pool.attach(worker, [(one.lease_ref, named)])
        self.pool.require_lease(worker, lease_ref.lease, named)
        assert lease_ref.shared == len(one.shared)
        self.leases[label] = ModelLease(name, lease_ref, one.own, one.shared)

    @precondition(lambda self: self.leases)
    @rule(data=st.data(), forgets=st.booleans(), grown=st.integers(0, 2))
    def pass_on(self, data: st.DataObject, forgets: bool, grown: int) -> None:
        """A request is put on offer again, with pages that it grew by; or it shares no more."""
        label = self.a_lease(data, left=False)
        if label is None or grown > self.pool.free_pages:
            return
        one = self.leases[label]
        worker = self.workers[one.worker]
        own = one.own + self.pool.allocate(worker, grown).tolist()
        name = "another" if forgets else label
        shared = [] if forgets else one.shared
        (lease_ref,) = self.pool.handoff(
            worker, [(name, as_ids(own + shared))], [one.lease_ref.lease]
        )
        assert lease_ref.shared == len(shared)
        del self.leases[label]
        self.pool.release(worker, [lease_ref.lease]) if forgets else None
        if not forgets:
            self.leases[label] = ModelLease(one.worker, lease_ref, own, shared)

    @precondition(lambda self: any(one.worker in self.left for one in self.leases.values()))
    @rule(data=st.data(), grown=st.integers(0, 2))
    def adopt(self, data: st.DataObject, grown: int) -> None:
        label = self.a_lease(data, left=True)
        if label is None or not self.alive():
            return
        name, worker = self.some_worker(data)
        one = self.leases[label]
        if one.shared:
            with pytest.raises(NotHeld):
                self.pool.adopt(worker, one.worker, label, one.lease_ref.lease, as_ids(one.own))
        ids = as_ids(one.own + one.shared)
        lease_ref = self.pool.adopt(worker, one.worker, label, one.lease_ref.lease, ids)
        assert lease_ref.shared == len(one.shared)
        self.leases[label] = ModelLease(name, lease_ref, one.own, one.shared)

    @precondition(lambda self: self.leases)
    @rule(data=st.data(), way=st.sampled_from(["release", "keep", "withdraw", "withdraw all"]))
    def end(self, data: st.DataObject, way: str) -> None:
        label = self.a_lease(data, left=False)
        if label is None:
            return
        one = self.leases[label]
        worker, lease = self.workers[one.worker], one.lease_ref.lease
        if way == "withdraw all":
            self.pool.withdraw_all(worker)
            self.leases = {k: v for k, v in self.leases.items() if v.worker != one.worker}
            return
        if way == "withdraw":
            assert self.pool.withdraw(worker, [label]) == [lease]
        else:
            self.pool.release(worker, [lease], keep=way == "keep")
            if way == "keep":
                self.pool.free(worker, as_ids(one.own))
        del self.leases[label]
        with pytest.raises(StaleHandle):
            self.pool.attach(worker, [(one.lease_ref, as_ids(one.own + one.shared))])

    # ---------------------------------------------------------- always

    def read_pages(self) -> list[list[int]]:
        of_requests = [one.shared for one in self.leases.values()]
        return of_requests + [pages for _, pages in self.pins.values()]

    @invariant()
    def the_books_agree_with_each_other(self) -> None:
        assert self.pool.check() == []
        assert self.cache.check() == []

    @invariant()
    def what_is_read_is_the_caches(self) -> None:
        seen = self.pool.map(PAGES)
        for page in {page for pages in self.read_pages() for page in pages}:
            assert seen.owners[int(seen.entries[page]) - 1].label == PREFIX_WORKER

    @invariant()
    def nothing_is_pinned_that_nobody_reads(self) -> None:
        line = self.cache.line()
        assert self.cache.pins == len(self.leases) + len(self.pins)
        assert line.readers == len(self.leases)
        assert line.shared_bytes == PAGE_BYTES * sum(
            len(one.shared) for one in self.leases.values()
        )
        requests = sum(len(one.own) for one in self.leases.values())
        assert self.pool.stat(self.now).request_pages == requests + line.bytes // PAGE_BYTES


ShareMachine.TestCase.settings = settings(
    max_examples=examples(25), stateful_step_count=40, deadline=None
)
TestShares = ShareMachine.TestCase
