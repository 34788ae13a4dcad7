"""What workers do with the pool, the same in one process and through a socket."""

import threading
from collections.abc import Callable

import numpy as np
import pytest

from triptych.core.errors import (
    NotHeld,
    NotRegistered,
    PoolExhausted,
    PoolUnavailable,
    StaleHandle,
)
from triptych.core.handles import LeaseId, LeaseRef
from triptych.kvpool.rpc.client.in_process import LocalPool
from triptych.kvpool.rpc.client.pool_client import PoolClient
from triptych.kvpool.rpc.client.worker_pool import WorkerPool
from triptych.kvpool.rpc.server import PoolServer

Join = Callable[[str], WorkerPool]


def held(pool: WorkerPool) -> dict[str, tuple[int, int]]:
    """Pages in use by extent and by requests, for each worker that is there."""
    return {
        line.name: (line.extent_pages, line.request_pages)
        for line in pool.stat().workers
        if line.name != "bystander"
    }


def test_a_request_passes_three_stages_and_nothing_is_left(join: Join) -> None:
    prefill, compress, decode = join("prefill"), join("compress"), join("decode")
    raw = prefill.allocate(100)
    prefill.arena.data[raw] = 7
    [lease_ref] = prefill.handoff([("r1", raw)])

    [raw_claim] = compress.attach([(lease_ref, raw)])
    assert np.all(compress.arena.data[raw] == 7)
    small = compress.allocate(30)
    compress.arena.data[small] = compress.arena.data[raw[:30]] + 1
    window = raw[90:]
    kept = np.concatenate((small, window))
    [lease_ref] = compress.handoff([("r1", kept)], [raw_claim.lease])
    assert compress.stat().by_request == {"r1": 40}

    [lease_ref] = decode.attach([(lease_ref, kept)])
    assert np.all(decode.arena.data[small] == 8)
    growth = decode.allocate(5)
    decode.release([lease_ref.lease])
    decode.free(growth)
    assert decode.stat().by_request == {}
    assert sum(pool.bytes_copied for pool in (prefill, compress, decode)) == 0
    for pool in (prefill, compress, decode):
        pool.close()


def test_kept_pages_are_as_if_taken(join: Join) -> None:
    prefill, decode = join("prefill"), join("decode")
    ids = prefill.allocate(10)
    [lease_ref] = prefill.handoff([("r", ids)])
    [lease_ref] = decode.attach([(lease_ref, ids)])
    decode.release([lease_ref.lease], keep=True)
    assert decode.stat().by_request == {}
    decode.free(ids[:4])
    [again] = decode.handoff([("r", ids[4:])])
    decode.release([again.lease])


def test_released_raw_pages_may_be_kept_in_the_step_that_commits(join: Join) -> None:
    prefill, compress = join("prefill"), join("compress")
    raw = prefill.allocate(8)
    [lease_ref] = prefill.handoff([("r", raw)])
    [lease_ref] = compress.attach([(lease_ref, raw)])
    compress.handoff([("r", raw[:2])], [lease_ref.lease], keep=True)
    compress.free(raw[2:])
    with pytest.raises(NotHeld):
        compress.free(raw[:2])


def test_a_commit_that_nobody_attached_can_be_taken_back(join: Join) -> None:
    prefill = join("prefill")
    ids = prefill.allocate(10)
    lease_refs = prefill.handoff([("a", ids[:5]), ("b", ids[5:])])
    prefill.release([lease_refs[0].lease])
    prefill.release([lease_refs[1].lease], keep=True)
    prefill.free(ids[5:])
    with pytest.raises(NotHeld):
        prefill.free(ids[:5])


def test_withdrawing_a_request_frees_what_is_held_here_and_nothing_else(join: Join) -> None:
    prefill, decode = join("prefill"), join("decode")
    ids = prefill.allocate(10)
    lease_refs = prefill.handoff([("gone", ids[:3]), ("attached", ids[3:6]), ("other", ids[6:8])])
    decode.attach([(lease_refs[1], ids[3:6])])
    for _ in range(2):
        prefill.withdraw(["gone", "attached", "never heard of"])
        assert prefill.stat().by_request == {"attached": 3, "other": 2}
    assert prefill.allocated_pages == 2
    decode.withdraw(["attached"])
    assert prefill.stat().by_request == {"other": 2}
    assert held(prefill)["decode"] == (0, 0)


def test_the_same_claim_attaches_once(join: Join) -> None:
    prefill, first, second = join("prefill"), join("first"), join("second")
    ids = prefill.allocate(3)
    [lease_ref] = prefill.handoff([("r", ids)])
    first.attach([(lease_ref, ids)])
    with pytest.raises(StaleHandle):
        second.attach([(lease_ref, ids)])
    with pytest.raises(StaleHandle):
        prefill.release([lease_ref.lease])
    assert held(first)["first"][1] == 3


@pytest.mark.parametrize(
    "forge",
    [
        lambda c: LeaseRef(c.arena, LeaseId(c.lease + 1000), c.generation),
        lambda c: LeaseRef(c.arena, LeaseId(1), c.generation),
        lambda c: LeaseRef(c.arena, c.lease, c.generation + 1),
        lambda c: LeaseRef("triptych-0-0123456789abcdef", c.lease, c.generation),
        lambda c: LeaseRef(c.arena, LeaseId(2**63), c.generation),
    ],
)
def test_forged_and_foreign_claims_are_refused_and_change_nothing(
    join: Join, forge: Callable[[LeaseRef], LeaseRef]
) -> None:
    prefill, decode = join("prefill"), join("decode")
    ids = prefill.allocate(3)
    [lease_ref] = prefill.handoff([("r", ids)])
    before = held(prefill)
    with pytest.raises(StaleHandle):
        decode.attach([(lease_ref, ids), (forge(lease_ref), ids)])
    assert held(prefill) == before
    decode.attach([(lease_ref, ids)])


def test_a_true_claim_with_wrong_pages_is_refused(join: Join) -> None:
    prefill, decode = join("prefill"), join("decode")
    ids = prefill.allocate(4)
    [lease_ref] = prefill.handoff([("r", ids[:3])])
    for wrong in (ids, ids[1:], ids[:2], ids[[0, 1, 1]]):
        with pytest.raises(NotHeld):
            decode.attach([(lease_ref, wrong)])
    decode.attach([(lease_ref, ids[[2, 0, 1]])])


def test_giving_twice_or_giving_what_was_never_taken_is_found(join: Join) -> None:
    pool, other = join("a"), join("b")
    ids, theirs = pool.allocate(6), other.allocate(1)
    for wrong in (ids[[0, 0]], np.concatenate((ids[:2], theirs)), np.array([-1], np.int32)):
        with pytest.raises(NotHeld):
            pool.free(wrong)
        with pytest.raises(NotHeld):
            pool.handoff([("r", wrong)])
    pool.free(ids)
    with pytest.raises(NotHeld):
        pool.free(ids)
    with pytest.raises(NotHeld):
        pool.handoff([("r", ids)])


def test_an_empty_request_is_a_request(join: Join) -> None:
    prefill, decode = join("prefill"), join("decode")
    nothing = prefill.allocate(0)
    [lease_ref] = prefill.handoff([("r", nothing)])
    [lease_ref] = decode.attach([(lease_ref, nothing)])
    decode.release([lease_ref.lease])
    assert len(nothing) == 0
    with pytest.raises(StaleHandle):
        decode.attach([(lease_ref, nothing)])


def test_a_pool_that_is_too_small_says_so_and_loses_nothing(join: Join) -> None:
    pool = join("greedy")
    half = pool.allocate(pool.capacity_pages // 2)
    with pytest.raises(PoolExhausted, match=r"raise pool\.kv_cache_memory_bytes"):
        pool.allocate(pool.capacity_pages)
    rest = pool.allocate(pool.capacity_pages - half.size)
    assert np.unique(np.concatenate((half, rest))).size == pool.capacity_pages
    pool.free(rest)
    pool.free(half)


def test_fewer_than_no_pages_is_a_mistake_of_the_caller(join: Join) -> None:
    pool = join("w")
    pool.free(pool.allocate(5))
    with pytest.raises(ValueError, match="-1 pages"):
        pool.allocate(-1)


def test_a_closed_worker_holds_nothing_and_can_do_nothing(join: Join) -> None:
    pool, other = join("leaver"), join("other")
    pool.handoff([("r", pool.allocate(3))])
    pool.allocate(5)
    pool.close()
    pool.close()
    assert "leaver" not in held(other)
    assert other.stat().by_request == {}
    for call in (lambda: pool.allocate(1), lambda: pool.handoff([]), lambda: pool.attach([])):
        with pytest.raises(PoolUnavailable, match="has left"):
            call()


def test_an_expelled_worker_learns_it_at_its_next_call_and_ever_after(join: Join) -> None:
    pool, other = join("expelled"), join("other")
    ids = pool.allocate(5)
    assert other.expel("expelled")
    assert not other.expel("expelled")
    assert "expelled" not in held(other)
    assert not pool.is_lost
    for _ in range(2):
        with pytest.raises(NotRegistered, match="connect again"):
            pool.handoff([("r", ids)])
    with pytest.raises(NotRegistered):
        pool.allocate(0)
    assert pool.is_lost


def test_a_name_that_registers_again_replaces_its_former_self(join: Join) -> None:
    previous_worker = join("worker")
    [lease_ref] = previous_worker.handoff([("r", previous_worker.allocate(5))])
    later = join("worker")
    assert later.stat().by_request == {}
    with pytest.raises(NotRegistered):
        previous_worker.release([lease_ref.lease])
    later.free(later.allocate(3))


def test_threads_share_a_worker_without_sharing_pages(join: Join) -> None:
    pool, failures = join("busy"), list[str]()

    def careful(mark: int) -> None:
        for _ in range(60):
            ids = pool.allocate(40)
            pool.arena.data[ids] = mark
            if not np.all(pool.arena.data[ids] == mark):
                failures.append(f"thread {mark} read another's bytes")
            [lease_ref] = pool.handoff([(f"{mark}", ids)])
            pool.release([lease_ref.lease])

    threads = [threading.Thread(target=careful, args=(mark,)) for mark in range(1, 5)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures
    assert pool.stat().by_request == {}


class TestStock:
    """Through a socket, ``take`` and ``give`` mostly stay at home."""

    def test_small_takes_come_out_of_one_grant(
        self, make_server: Callable[..., PoolServer], make_client: Callable[..., PoolClient]
    ) -> None:
        server = make_server()
        pool = make_client(server, "w")
        pool.allocate(1)
        granted = server.stat().allocated_total
        pool.allocate(63)
        assert server.stat().allocated_total == granted == 64

    def test_idle_pages_above_the_high_water_mark_go_back(
        self, make_server: Callable[..., PoolServer], make_client: Callable[..., PoolClient]
    ) -> None:
        server = make_server()
        pool = make_client(server, "w")
        pool.free(pool.allocate(1000))
        assert pool.idle_pages == server.stat().extent_pages == 64

    def test_near_the_end_a_worker_gets_exactly_what_it_needs(
        self, make_server: Callable[..., PoolServer], make_client: Callable[..., PoolClient]
    ) -> None:
        server = make_server()
        first, second = make_client(server, "first"), make_client(server, "second")
        first.allocate(first.capacity_pages - 10)
        assert second.allocate(7).size == 7

    def test_idle_pages_come_back_when_another_worker_lacks_them(
        self, make_server: Callable[..., PoolServer], make_client: Callable[..., PoolClient]
    ) -> None:
        server = make_server(lease_ttl_s=0.8)  # a heartbeat each 0.2 s
        idler, needy = make_client(server, "idler"), make_client(server, "needy")
        idler.free(idler.allocate(64))
        needed = needy.capacity_pages - 20
        with pytest.raises(PoolExhausted):
            needy.allocate(needed)
        deadline = threading.Event()
        for _ in range(100):
            if server.stat().free_pages >= needed:
                break
            deadline.wait(0.02)
        assert needy.allocate(needed).size == needed
        assert idler.allocate(1).size == 1


def test_a_local_pool_keeps_its_books() -> None:
    with LocalPool(16, 256) as pool:
        ids = pool.allocate(10)
        [lease_ref] = pool.handoff([("r", ids)])
        [lease_ref] = pool.attach([(lease_ref, ids)])
        assert pool.check() == []
        pool.release([lease_ref.lease])
        assert pool.stat().free_pages == 16
