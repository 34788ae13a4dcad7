"""A pool of random arenas against a model: a dictionary of pages and who has them."""

from dataclasses import dataclass, replace

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from tests.effort import examples
from triptych.core.errors import (
    NotHeld,
    NotRegistered,
    PoolError,
    PoolExhausted,
    StaleHandle,
)
from triptych.core.handles import LeaseId, LeaseRef
from triptych.kvpool.pool.leases import About, WorkerId
from triptych.kvpool.pool.page_pool import Pool
from triptych.kvpool.pool.processes import ProcessKey

PAGES, TTL_S, KEEP_S = 24, 10.0, 15.0
NAMES = ("prefill-0", "compress-0", "decode-0")


@dataclass
class ModelWorker:
    id: WorkerId
    seen: float
    keeps: bool
    home: int
    dead: bool = False


@dataclass
class ModelLease:
    worker: str
    lease_ref: LeaseRef
    label: str


class PoolMachine(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.sizes = [PAGES]
        self.pool = Pool(PAGES, 256, "arena", TTL_S, KEEP_S)
        self.now = 0.0
        self.owner = dict[int, str | LeaseId]()
        """Page to the name of the worker (its extent) or to the request lease; free: absent."""
        self.workers = dict[str, ModelWorker]()
        self.left = dict[str, ModelWorker]()
        """The dead whose pages wait for others."""
        self.leases = dict[LeaseId, ModelLease]()
        self.old_claims = [
            LeaseRef("arena", LeaseId(99), 1),
            LeaseRef("arena-of-before", LeaseId(1), 1),
        ]
        self.old_workers = [WorkerId("nobody")]
        self.requests = 0
        self.told = set[str]()
        """Requests whose tenant the pool was told."""

    @initialize(cuts=st.lists(st.integers(1, PAGES - 1), max_size=3, unique=True).map(sorted))
    def have_arenas(self, cuts: list[int]) -> None:
        ends = [*cuts, PAGES]
        self.sizes = [end - first for first, end in zip([0, *cuts], ends, strict=True)]
        self.pool = Pool(self.sizes, 256, "arena", TTL_S, KEEP_S)

    # ---------------------------------------------------------- the model

    def arena_of(self, page: int) -> int:
        return next(i for i in range(len(self.sizes)) if page < sum(self.sizes[: i + 1]))

    def of_one_arena(self, data: st.DataObject, pages: list[int]) -> list[int]:
        """Some of these pages, all of one arena."""
        arena = data.draw(st.integers(0, len(self.sizes) - 1))
        return draw_some(data, [page for page in pages if self.arena_of(page) == arena])

    def free_in(self, arena: int) -> int:
        return self.sizes[arena] - sum(self.arena_of(page) == arena for page in self.owner)

    def pages_of(self, owner: str | LeaseId) -> list[int]:
        return sorted(page for page, has in self.owner.items() if has == owner)

    def leases_of(self, name: str) -> list[LeaseId]:
        return [lease for lease, entry in self.leases.items() if entry.worker == name]

    def pages_within_reach(self, name: str) -> list[int]:
        owners = {name, *self.leases_of(name)}
        return sorted(page for page, has in self.owner.items() if has in owners)

    def end(self, lease: LeaseId, heir: str | None) -> None:
        for page in self.pages_of(lease):
            if heir is None:
                del self.owner[page]
            else:
                self.owner[page] = heir
        self.old_claims.append(self.leases.pop(lease).lease_ref)

    def forget(self, name: str) -> None:
        for lease in self.leases_of(name):
            self.end(lease, None)
        for page in self.pages_of(name):
            del self.owner[page]
        gone = self.workers.pop(name, None) or self.left.pop(name)
        self.old_workers.append(gone.id)

    def forget_if_known(self, name: str) -> bool:
        known = name in self.workers or name in self.left
        if known:
            self.forget(name)
        return known

    def some_worker(self, data: st.DataObject) -> tuple[str, WorkerId]:
        name = data.draw(st.sampled_from(sorted(self.workers)))
        return name, self.workers[name].id

    # ---------------------------------------------------------- workers

    @rule(data=st.data(), name=st.sampled_from(NAMES), keeps=st.booleans())
    def register(self, data: st.DataObject, name: str, keeps: bool) -> None:
        home = data.draw(st.integers(0, len(self.sizes) - 1))
        process, arena = ProcessKey(1, 1, name), self.pool.arenas[home]
        worker = self.pool.register(name, process, self.now, keeps=keeps, home=arena)
        self.forget_if_known(name)
        self.workers[name] = ModelWorker(worker, self.now, keeps, home)

    @precondition(lambda self: self.workers)
    @rule(data=st.data())
    def renew(self, data: st.DataObject) -> None:
        name, worker = self.some_worker(data)
        self.pool.renew(worker, self.now)
        self.workers[name].seen = self.now

    @precondition(lambda self: self.workers)
    @rule(data=st.data())
    def unregister(self, data: st.DataObject) -> None:
        name, worker = self.some_worker(data)
        self.pool.unregister(worker)
        self.forget(name)

    @rule(name=st.sampled_from(NAMES))
    def expel(self, name: str) -> None:
        assert self.pool.expel(name) == self.forget_if_known(name)

    @precondition(lambda self: self.workers)
    @rule(data=st.data())
    def die(self, data: st.DataObject) -> None:
        name, _ = self.some_worker(data)
        self.workers[name].dead = True

    @rule(seconds=st.floats(0, TTL_S))
    def pass_time(self, seconds: float) -> None:
        self.now += seconds

    @rule()
    def sweep(self) -> None:
        def is_alive(process: ProcessKey) -> bool:
            return not self.workers[process.space].dead

        lost = [n for n, w in self.workers.items() if w.dead or self.now - w.seen > TTL_S]
        swept = self.pool.sweep(self.now, is_alive, self.pool.silent(self.now))
        assert sorted(swept) == sorted(lost)
        for name in [n for n, w in self.left.items() if self.now - w.seen > KEEP_S]:
            self.forget(name)
        for name in lost:
            self.bury_in_model(name)

    def bury_in_model(self, name: str) -> None:
        if not self.workers[name].keeps:
            self.forget(name)
            return
        worker = self.left[name] = self.workers.pop(name)
        worker.seen = self.now
        self.old_workers.append(worker.id)

    @rule(name=st.sampled_from(NAMES))
    def mark_dead(self, name: str) -> None:
        assert (self.pool.process_of(name) is None) == (name not in self.workers)
        self.pool.mark_dead(name, self.now)
        if name in self.workers:
            self.bury_in_model(name)

    @precondition(lambda self: self.workers and any(map(self.leases_of, self.left)))
    @rule(data=st.data())
    def adopt(self, data: st.DataObject) -> None:
        name, worker = self.some_worker(data)
        previous_worker = data.draw(
            st.sampled_from([n for n in sorted(self.left) if self.leases_of(n)])
        )
        lease = data.draw(st.sampled_from(self.leases_of(previous_worker)))
        label = self.leases[lease].label
        left = self.pages_of(previous_worker) + self.pages_of(lease)
        pages = self.of_one_arena(data, left)
        lease_ref = self.pool.adopt(worker, previous_worker, label, lease, as_ids(pages))
        assert lease_ref.generation == 1
        assert lease_ref.lease not in self.leases
        self.owner.update(dict.fromkeys(pages, lease_ref.lease))
        self.leases[lease_ref.lease] = ModelLease(name, lease_ref, label)
        self.end(lease, None)

    # ---------------------------------------------------------- pages

    @precondition(lambda self: self.workers)
    @rule(data=st.data(), at_least=st.integers(0, PAGES + 1), more=st.integers(0, 4))
    def allocate(self, data: st.DataObject, at_least: int, more: int) -> None:
        name, worker = self.some_worker(data)
        named = data.draw(st.none() | st.integers(0, len(self.sizes) - 1))
        index = self.workers[name].home if named is None else named
        arena, free = "" if named is None else self.pool.arenas[named], self.free_in(index)
        assert self.pool.free_at_home(worker) == self.free_in(self.workers[name].home)
        if at_least > free:
            with pytest.raises(PoolExhausted) as raised:
                self.pool.allocate(worker, at_least + more, at_least, arena)
            assert (raised.value.wanted, raised.value.free) == (at_least, free)
            return
        got = self.pool.allocate(worker, at_least + more, at_least, arena).tolist()
        assert {self.arena_of(page) for page in got} <= {index}
        assert at_least <= len(got) <= at_least + more
        assert not set(got) & set(self.owner)
        self.owner.update(dict.fromkeys(got, name))

    @precondition(lambda self: self.workers)
    @rule(data=st.data())
    def free(self, data: st.DataObject) -> None:
        name, worker = self.some_worker(data)
        pages = draw_some(data, self.pages_of(name))
        self.pool.free(worker, as_ids(pages))
        for page in pages:
            del self.owner[page]

    @precondition(lambda self: self.workers)
    @rule(data=st.data(), count=st.integers(0, 3), keep=st.booleans())
    def handoff(self, data: st.DataObject, count: int, keep: bool) -> None:
        name, worker = self.some_worker(data)
        left = self.pages_within_reach(name)
        commits = list[tuple[str, list[int]]]()
        for _ in range(count):
            pages = self.of_one_arena(data, left)
            left = [page for page in left if page not in pages]
            self.requests += 1
            commits.append((f"r{self.requests}", pages))
        ending = draw_some(data, self.leases_of(name))
        packed = [(label, as_ids(pages)) for label, pages in commits]
        told = [About(f"tenant of {label}", (("k8v4", len(pages)),)) for label, pages in commits]
        about = data.draw(st.sampled_from([told, []]))
        lease_refs = self.pool.handoff(worker, packed, ending, keep=keep, about=about)
        if about:
            self.told.update(label for label, _ in commits)
        for lease_ref, (label, pages) in zip(lease_refs, commits, strict=True):
            assert lease_ref.generation == 1
            assert lease_ref.lease not in self.leases
            if pages:
                assert lease_ref.arena == self.pool.arenas[self.arena_of(pages[0])]
            self.owner.update(dict.fromkeys(pages, lease_ref.lease))
            self.leases[lease_ref.lease] = ModelLease(name, lease_ref, label)
        for lease in ending:
            self.end(lease, name if keep else None)

    @precondition(lambda self: self.workers and self.leases)
    @rule(data=st.data())
    def attach(self, data: st.DataObject) -> None:
        name, worker = self.some_worker(data)
        chosen = draw_some(data, list(self.leases))
        wanted = [(self.leases[i].lease_ref, as_ids(self.pages_of(i)[::-1])) for i in chosen]
        lease_refs = self.pool.attach(worker, wanted)
        for lease, lease_ref in zip(chosen, lease_refs, strict=True):
            entry = self.leases[lease]
            assert lease_ref == replace(entry.lease_ref, generation=entry.lease_ref.generation + 1)
            self.old_claims.append(entry.lease_ref)
            self.leases[lease] = ModelLease(name, lease_ref, entry.label)

    @precondition(lambda self: self.workers)
    @rule(data=st.data(), keep=st.booleans())
    def release(self, data: st.DataObject, keep: bool) -> None:
        name, worker = self.some_worker(data)
        ending = draw_some(data, self.leases_of(name))
        self.pool.release(worker, ending, keep=keep)
        for lease in ending:
            self.end(lease, name if keep else None)

    @precondition(lambda self: self.workers)
    @rule(data=st.data())
    def withdraw(self, data: st.DataObject) -> None:
        name, worker = self.some_worker(data)
        labels = draw_some(data, sorted(entry.label for entry in self.leases.values()))
        mine = [i for i in self.leases_of(name) if self.leases[i].label in labels]
        assert sorted(self.pool.withdraw(worker, [*labels, "unknown"])) == sorted(mine)
        for lease in mine:
            self.end(lease, None)

    @precondition(lambda self: self.workers)
    @rule(data=st.data())
    def withdraw_all(self, data: st.DataObject) -> None:
        name, worker = self.some_worker(data)
        mine = self.leases_of(name)
        assert sorted(self.pool.withdraw_all(worker)) == sorted(mine)
        for lease in mine:
            self.end(lease, None)

    # ---------------------------------------------------------- what must be refused

    @precondition(lambda self: self.workers)
    @rule(data=st.data())
    def a_lease_of_two_arenas_is_refused(self, data: st.DataObject) -> None:
        name, worker = self.some_worker(data)
        pages = draw_some(data, self.pages_within_reach(name))
        if len({self.arena_of(page) for page in pages}) > 1:
            with pytest.raises(PoolError):
                self.pool.handoff(worker, [("two", as_ids(pages))])

    @precondition(lambda self: self.leases and self.workers and len(self.sizes) > 1)
    @rule(data=st.data())
    def a_claim_for_another_arena_is_refused(self, data: st.DataObject) -> None:
        _, worker = self.some_worker(data)
        lease = data.draw(st.sampled_from(sorted(self.leases)))
        mine = self.leases[lease].lease_ref
        others = [arena for arena in self.pool.arenas if arena != mine.arena]
        wrong = replace(mine, arena=data.draw(st.sampled_from([*others, "arena/9"])))
        with pytest.raises(StaleHandle):
            self.pool.attach(worker, [(wrong, as_ids(self.pages_of(lease)))])

    @precondition(lambda self: self.workers)
    @rule(data=st.data())
    def an_old_claim_is_refused_even_in_good_company(self, data: st.DataObject) -> None:
        _, worker = self.some_worker(data)
        good = [(e.lease_ref, as_ids(self.pages_of(i))) for i, e in self.leases.items()]
        old = data.draw(st.sampled_from(self.old_claims))
        with pytest.raises(StaleHandle):
            self.pool.attach(worker, [*good, (old, as_ids(self.pages_of(old.lease)))])

    @precondition(lambda self: self.workers and self.leases)
    @rule(data=st.data())
    def a_claim_with_other_pages_than_its_own_is_refused(self, data: st.DataObject) -> None:
        _, worker = self.some_worker(data)
        lease = data.draw(st.sampled_from(sorted(self.leases)))
        pages = self.pages_of(lease)
        named = data.draw(st.lists(st.integers(-1, PAGES), max_size=6))
        if sorted(named) != pages:
            with pytest.raises(NotHeld):
                self.pool.attach(worker, [(self.leases[lease].lease_ref, as_ids(named))])

    @precondition(lambda self: self.workers)
    @rule(data=st.data(), stolen=st.lists(st.integers(-1, PAGES), min_size=1, max_size=3))
    def pages_of_others_are_refused(self, data: st.DataObject, stolen: list[int]) -> None:
        name, worker = self.some_worker(data)
        mine = self.pages_of(name)
        if set(stolen) - set(mine) or len(set(stolen)) < len(stolen):
            with pytest.raises(NotHeld):
                self.pool.free(worker, as_ids(stolen))
        reach = self.pages_within_reach(name)
        if set(stolen) - set(reach) or len(set(stolen)) < len(stolen):
            with pytest.raises(NotHeld):
                self.pool.handoff(worker, [("fine", as_ids([])), ("thief", as_ids(stolen))])

    @precondition(lambda self: self.workers)
    @rule(data=st.data(), lease=st.integers(0, 40))
    def leases_of_others_are_refused(self, data: st.DataObject, lease: int) -> None:
        name, worker = self.some_worker(data)
        mine = self.leases_of(name)
        if lease not in mine:
            with pytest.raises(StaleHandle):
                self.pool.release(worker, [*mine, LeaseId(lease)])
            commits = [("r", as_ids(self.pages_within_reach(name)))]
            with pytest.raises(StaleHandle):
                self.pool.handoff(worker, commits, [LeaseId(lease)])

    @precondition(lambda self: self.workers and self.leases)
    @rule(data=st.data(), stolen=st.lists(st.integers(-1, PAGES), min_size=1, max_size=3))
    def only_what_the_dead_left_is_adopted(self, data: st.DataObject, stolen: list[int]) -> None:
        _, worker = self.some_worker(data)
        previous_worker = data.draw(st.sampled_from(NAMES))
        lease = data.draw(st.sampled_from(sorted(self.leases)))
        entry = self.leases[lease]
        if previous_worker not in self.left or entry.worker != previous_worker:
            with pytest.raises(StaleHandle):
                self.pool.adopt(
                    worker, previous_worker, entry.label, lease, as_ids(self.pages_of(lease))
                )
            return
        with pytest.raises(StaleHandle):
            self.pool.adopt(worker, previous_worker, "another", lease, as_ids(self.pages_of(lease)))
        left = self.pages_of(previous_worker) + self.pages_of(lease)
        if set(stolen) - set(left) or len(set(stolen)) < len(stolen):
            with pytest.raises(NotHeld):
                self.pool.adopt(worker, previous_worker, entry.label, lease, as_ids(stolen))

    @rule(data=st.data())
    def a_former_worker_is_refused_everywhere(self, data: st.DataObject) -> None:
        old = data.draw(st.sampled_from(self.old_workers))
        for call in (
            lambda: self.pool.renew(old, self.now),
            lambda: self.pool.allocate(old, 1),
            lambda: self.pool.free(old, as_ids([])),
            lambda: self.pool.handoff(old, []),
            lambda: self.pool.attach(old, []),
            lambda: self.pool.release(old, []),
            lambda: self.pool.withdraw(old, []),
            lambda: self.pool.withdraw_all(old),
            lambda: self.pool.unregister(old),
            lambda: self.pool.adopt(old, "anybody", "r", LeaseId(1), as_ids([])),
        ):
            with pytest.raises(NotRegistered):
                call()

    # ---------------------------------------------------------- always

    @invariant()
    def the_books_agree_with_each_other(self) -> None:
        assert self.pool.check() == []

    @invariant()
    def the_books_agree_with_the_model(self) -> None:
        ledger = self.pool.stat(self.now)
        assert ledger.faults == []
        told = {e.label: len(self.pages_of(lease)) for lease, e in self.leases.items()}
        tenants = {f"tenant of {label}": n for label, n in told.items() if label in self.told}
        assert {name: n for name, n in ledger.by_tenant.items() if name} == tenants
        assert ledger.by_format.get("k8v4", 0) <= sum(tenants.values())
        assert ledger.free_pages == PAGES - len(self.owner)
        assert ledger.free_pages + ledger.held_pages == PAGES
        each = [(one.arena, one.pages, one.free_pages) for one in ledger.arenas]
        free = map(self.free_in, range(len(self.sizes)))
        assert each == list(zip(self.pool.arenas, self.sizes, free, strict=True))
        lines = {line.name: line for line in ledger.workers}
        assert set(lines) == {*self.workers, *self.left}
        for name, line in lines.items():
            leases = self.leases_of(name)
            assert line.extent_pages == len(self.pages_of(name))
            assert line.request_pages == sum(len(self.pages_of(lease)) for lease in leases)
            assert line.requests == len(leases)
        assert ledger.by_request == {
            entry.label: len(self.pages_of(lease)) for lease, entry in self.leases.items()
        }

    @invariant()
    def the_map_agrees_with_the_model(self) -> None:
        seen = self.pool.map(PAGES)
        for page, entry in enumerate(seen.entries.tolist()):
            owner = self.owner.get(page)
            if owner is None:
                assert entry == 0
                continue
            line = seen.owners[entry - 1]
            if isinstance(owner, str):
                assert (line.kind, line.worker, line.label) == ("extent", owner, "")
            else:
                assert (line.kind, line.label) == ("request", self.leases[owner].label)
                assert line.worker == self.leases[owner].worker


def as_ids(pages: list[int]) -> np.ndarray:
    return np.array(pages, np.int32)


def draw_some(data: st.DataObject, items: list) -> list:
    if not items:
        return []
    return data.draw(st.lists(st.sampled_from(items), unique=True, max_size=len(items)))


PoolMachine.TestCase.settings = settings(
    max_examples=examples(60), stateful_step_count=40, deadline=None
)
TestPool = PoolMachine.TestCase
