"""Single cases of the pool's books that a random walk rarely meets."""

import numpy as np
import pytest

from triptych.core.errors import NotHeld, PoolExhausted, StaleHandle
from triptych.core.handles import LeaseId, LeaseRef
from triptych.kvpool.pool.leases import WorkerId
from triptych.kvpool.pool.page_pool import Pool
from triptych.kvpool.pool.processes import ProcessKey

ME = ProcessKey(1, 1, "here")


@pytest.fixture
def pool() -> Pool:
    return Pool(16, 256, "arena", 10.0)


@pytest.fixture
def worker(pool: Pool) -> WorkerId:
    return pool.register("worker", ME, 0.0)


def test_a_claim_named_twice_in_one_call_is_refused(pool: Pool, worker: WorkerId) -> None:
    ids = pool.allocate(worker, 3)
    [lease_ref] = pool.handoff(worker, [("r", ids)])
    before = pool.stat(0.0)
    with pytest.raises(StaleHandle, match="twice"):
        pool.attach(worker, [(lease_ref, ids), (lease_ref, ids)])
    assert pool.stat(0.0) == before
    assert pool.attach(worker, [(lease_ref, ids)])[0].generation == 2


def test_a_lease_named_twice_in_one_call_is_refused(pool: Pool, worker: WorkerId) -> None:
    [lease_ref] = pool.handoff(worker, [("r", pool.allocate(worker, 3))])
    before = pool.stat(0.0)
    with pytest.raises(StaleHandle, match="twice"):
        pool.release(worker, [lease_ref.lease, lease_ref.lease])
    with pytest.raises(StaleHandle, match="twice"):
        pool.handoff(worker, [], [lease_ref.lease, lease_ref.lease])
    assert pool.stat(0.0) == before


def test_a_claim_of_another_arena_is_refused(pool: Pool, worker: WorkerId) -> None:
    ids = pool.allocate(worker, 3)
    [lease_ref] = pool.handoff(worker, [("r", ids)])
    with pytest.raises(StaleHandle, match="arena that is gone"):
        pool.attach(worker, [(LeaseRef("before", lease_ref.lease, lease_ref.generation), ids)])


def test_a_caller_may_use_its_array_again_after_a_commit(pool: Pool, worker: WorkerId) -> None:
    ids = pool.allocate(worker, 3)
    [lease_ref] = pool.handoff(worker, [("r", ids)])
    ids[:] = 15
    pool.release(worker, [lease_ref.lease])
    assert pool.stat(0.0).free_pages == 16
    assert pool.check() == []


def test_an_extent_is_not_a_request_that_can_be_attached_or_released(
    pool: Pool, worker: WorkerId
) -> None:
    ids = pool.allocate(worker, 3)
    first_lease = LeaseId(1)  # leases count from 1: the extent of the first worker
    with pytest.raises(StaleHandle):
        pool.attach(worker, [(LeaseRef("arena", first_lease, 1), ids)])
    with pytest.raises(StaleHandle):
        pool.release(worker, [first_lease])


def test_commits_of_one_call_cannot_share_a_page(pool: Pool, worker: WorkerId) -> None:
    ids = pool.allocate(worker, 3)
    before = pool.stat(0.0)
    with pytest.raises(NotHeld, match="does not hold 1"):
        pool.handoff(worker, [("a", ids), ("b", ids[:1])])
    assert pool.stat(0.0) == before


def test_while_a_worker_lacks_pages_others_get_no_more_than_they_need(
    pool: Pool, worker: WorkerId
) -> None:
    other = pool.register("other", ME, 0.0)
    pool.allocate(other, 10)
    with pytest.raises(PoolExhausted):
        pool.allocate(worker, 8)
    assert pool.renew(other, 0.0) == 2
    assert pool.renew(worker, 0.0) == 0
    assert pool.allocate(other, 5, at_least=1).size == 1
    pool.free(other, np.arange(3, dtype=np.int32))
    assert pool.allocate(worker, 8).size == 8
    assert pool.renew(other, 0.0) == 0


def test_a_lease_lives_for_its_whole_time_and_not_longer(pool: Pool, worker: WorkerId) -> None:
    pool.allocate(worker, 3)
    pool.renew(worker, 5.0)
    assert pool.sweep(15.0, lambda _: True, pool.silent(15.0)) == []
    assert pool.sweep(15.1, lambda _: True, pool.silent(15.1)) == ["worker"]
    assert pool.stat(15.1).reclaimed_pages_total == 3


# ------------------------------------------------------------------ the map


def drawn(pool: Pool, max_entries: int = 1000) -> list[tuple[str, str] | None]:
    """Kind and label of the owner of each entry."""
    seen = pool.map(max_entries)
    lines = [None, *((line.kind, line.label) for line in seen.owners)]
    return [lines[entry] for entry in seen.entries]


def test_the_map_follows_pages_from_hand_to_hand(pool: Pool, worker: WorkerId) -> None:
    assert drawn(pool) == [None] * 16
    ids = pool.allocate(worker, 4)
    [lease_ref] = pool.handoff(worker, [("r", ids[:3])])
    expected: list[tuple[str, str] | None] = [None] * 16
    for page in ids[:3]:
        expected[page] = ("request", "r")
    expected[ids[3]] = ("extent", "")
    assert drawn(pool) == expected
    other = pool.register("other", ME, 0.0)
    pool.attach(other, [(lease_ref, ids[:3])])
    assert drawn(pool) == expected
    assert {line.worker for line in pool.map(99).owners} == {"worker", "other"}


def test_a_map_has_no_more_entries_than_asked_for_and_each_tells_of_one_page(
    pool: Pool, worker: WorkerId
) -> None:
    pool.handoff(worker, [(f"r{n}", pool.allocate(worker, 1)) for n in range(16)])
    whole = drawn(pool, 16)
    assert len(set(whole)) == 16
    assert pool.map(5).stride == 4
    assert drawn(pool, 5) == whole[::4]
    assert drawn(pool, 1) == whole[:1]


def test_leases_of_one_request_and_worker_are_one_owner(pool: Pool, worker: WorkerId) -> None:
    pool.handoff(worker, [("r", pool.allocate(worker, 2)), ("r", pool.allocate(worker, 2))])
    assert len(pool.map(16).owners) == 1
