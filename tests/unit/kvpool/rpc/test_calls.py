"""A call is a message with a method ``run``: the same over a socket and within one process."""

import inspect
from dataclasses import is_dataclass, replace
from typing import Any, get_args

import numpy as np
import pytest

from triptych.core.errors import MessageError, NotHeld, PoolExhausted, WritesPending
from triptych.core.messages import Message, pack, unpack
from triptych.kvpool.pool.leases import WorkerId
from triptych.kvpool.pool.page_pool import Pool
from triptych.kvpool.pool.processes import ProcessKey, this_process
from triptych.kvpool.prefix.cache import PrefixSettings
from triptych.kvpool.rpc import calls, local_pool, messages, prefix_calls
from triptych.kvpool.rpc.calls import AllocatePages, FreePages, RegisterWorker, RenewWorker
from triptych.kvpool.rpc.channel import FrameChannel
from triptych.kvpool.rpc.dispatch import answer
from triptych.kvpool.rpc.local_pool import LockedPool, PoolCall
from triptych.kvpool.rpc.page_ranges import PageRanges
from triptych.kvpool.rpc.stub import PoolStub

PAGES = 64
TTL_S = 10.0


class Loopback(FrameChannel):
    """A channel to a pool of this process, or to one that answers whatever a test wants."""

    def __init__(self, pool: LockedPool, reply: Message | None = None) -> None:
        self.pool, self.reply = pool, reply

    def ask(self, frame: bytes, timeout_s: float, *, wait: bool = False) -> bytes:
        return pack([self.reply]) if self.reply else answer(self.pool, frame)


@pytest.fixture
def pool() -> LockedPool:
    return LockedPool(Pool(PAGES, 256, "arena", TTL_S), extent_pages=8)


CALLS: list[type[PoolCall[Any]]] = [
    kind
    for module in (calls, prefix_calls)
    for kind in vars(module).values()
    if inspect.isclass(kind) and issubclass(kind, PoolCall) and kind.__module__ == module.__name__
    if "run" in vars(kind)
]


@pytest.mark.parametrize("kind", CALLS)
def test_a_call_names_the_class_of_its_reply_once(kind: type[PoolCall[Any]]) -> None:
    """The type argument that callers see is the class that a peer's reply is compared with."""
    [base] = kind.__orig_bases__  # type: ignore[attr-defined]
    assert get_args(base) == (kind.reply,)
    assert is_dataclass(kind)
    assert is_dataclass(kind.reply)


def test_both_proxies_return_the_same(pool: LockedPool) -> None:
    stub = PoolStub(Loopback(pool), 1.0)
    register = RegisterWorker(name="w", process=this_process())
    for proxy in (pool, stub):
        worker = proxy.call(register).worker
        ids = proxy.call(AllocatePages(worker=worker, pages=8, at_least=8)).pages.ids(PAGES)
        assert ids.tolist() == sorted(ids.tolist())
        assert ids.dtype == np.int32
        proxy.call(FreePages(worker=worker, pages=PageRanges(ids)))
        with pytest.raises(NotHeld):
            proxy.call(FreePages(worker=worker, pages=PageRanges(ids)))
    assert pool.check() == []


def test_within_one_process_page_ids_stay_the_array_that_they_are(pool: LockedPool) -> None:
    ids = np.arange(5, dtype=np.int32)
    assert PageRanges(ids).ids(PAGES) is ids
    assert PageRanges(ids).pack() == bytes.fromhex("0000000005000000")
    assert PageRanges(ids) == PageRanges(PageRanges(ids).pack())


@pytest.mark.parametrize("packed", [b"1234567", b"\x3f\0\0\0\2\0\0\0", b"\xff" * 8])
def test_pages_from_a_peer_are_compared_with_the_pool(pool: LockedPool, packed: bytes) -> None:
    worker = pool.call(RegisterWorker(name="w", process=this_process())).worker
    [asked] = unpack(pack([FreePages(worker=worker, pages=PageRanges(packed))]))
    with pytest.raises(MessageError, match="page runs"):
        pool.call(asked)


@pytest.mark.parametrize("field", [3, "text", None, [1, 2], {"_ids": b""}])
def test_pages_that_are_no_bytes_are_refused(field: object) -> None:
    frame = pack([FreePages(worker=WorkerId("w"), pages=field)])  # type: ignore[arg-type]
    with pytest.raises(MessageError, match=r"FreePages\.pages=.*expected PageRanges"):
        unpack(frame)


def test_a_reply_of_another_type_is_refused(pool: LockedPool) -> None:
    stub = PoolStub(Loopback(pool, messages.PoolDone()), 1.0)
    with pytest.raises(MessageError, match=r"answered .*PoolDone.*: expected Renewed"):
        stub.call(RenewWorker(worker=WorkerId("w")))


def test_only_what_was_asked_for_is_a_set_of_leases() -> None:
    with pytest.raises(MessageError, match="0 claims from the pool: expected 2"):
        messages.LeaseRefs(lease_refs=()).exactly(2)


def test_a_worker_that_falls_silent_while_another_is_fenced_is_left_to_the_next_sweep(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Its process still runs, and could write into pages that others get."""
    time_s, fenced = [0.0], list[str]()
    pool = LockedPool(Pool(PAGES, 256, "arena", TTL_S), extent_pages=8, clock=lambda: time_s[0])

    def end(process: ProcessKey) -> bool:
        fenced.append(process.space)
        time_s[0] += 5.0  # as long as a kill may take
        return True

    monkeypatch.setattr(local_pool, "end", end)
    for name, registered_s in (("first", 0.0), ("second", 3.0)):
        time_s[0] = registered_s
        worker = pool.register(name, ProcessKey(1, 1, name), 0).worker
        pool.call(AllocatePages(worker=worker, pages=4, at_least=4))
    time_s[0] = 11.0
    assert pool.sweep(lambda _: True) == fenced == ["first"]
    assert pool.stat().held_pages == 4
    assert pool.sweep(lambda _: True) == ["second"]
    assert fenced == ["first", "second"]
    assert pool.stat().held_pages == 0


def test_a_silent_worker_that_holds_nothing_is_lost_only_when_its_process_ends(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It may be loading its model without a core for its heartbeat. Of other machines, whose
    processes cannot be seen, the lease decides."""
    monkeypatch.setattr(local_pool, "end", lambda _: True)
    time_s, here = [0.0], this_process()
    limits = PrefixSettings(block_tokens=4, total_bytes=16 * 256, tenant_bytes=16 * 256)
    pool = LockedPool(
        Pool(PAGES, 256, "arena", TTL_S), extent_pages=8, clock=lambda: time_s[0], prefixes=limits
    )
    names = ("starting", "holding", "waiting", "pinning")
    starting, holding, waiting, pinning = (
        pool.register(name, replace(here, pid=pid), 0).worker for pid, name in enumerate(names, 1)
    )
    pool.register("elsewhere", ProcessKey(5, 1, "other machine"), 0)
    monkeypatch.setattr(pool.prefixes, "has_pins", lambda worker: worker == pinning)
    pool.call(AllocatePages(worker=holding, pages=4, at_least=4))
    with pytest.raises(PoolExhausted):
        pool.call(AllocatePages(worker=waiting, pages=PAGES, at_least=PAGES))
    time_s[0] = 2 * TTL_S
    assert set(pool.sweep(lambda _: True)) == {*names[1:], "elsewhere"}
    pool.call(RenewWorker(worker=starting))
    time_s[0] = 4 * TTL_S
    assert pool.sweep(lambda _: True) == []
    assert set(pool.sweep(lambda process: process.pid != 1)) == {"starting"}


def test_the_pool_logs_which_process_it_ends_and_why(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A worker that is killed says nothing itself; of one that is dead nothing is logged."""
    time_s, running = [0.0], set(range(1, 4))
    pool = LockedPool(Pool(PAGES, 256, "arena", TTL_S), extent_pages=8, clock=lambda: time_s[0])

    def end(process: ProcessKey) -> bool:
        running.discard(process.pid)
        return True

    monkeypatch.setattr(local_pool, "end", end)
    monkeypatch.setattr(local_pool, "is_alive", lambda process: process.pid in running)
    for pid, name in enumerate(("continued", "lost", "silent", "dead"), 1):
        pool.register(name, ProcessKey(pid, 1, ""), 64)
    pool.inherit("continued")
    pool.expel("lost")
    time_s[0] = 2 * TTL_S
    assert pool.sweep(lambda _: True) == ["silent", "dead"]
    assert caplog.messages == [
        "process 1 of worker continued is ended: another worker continues its requests",
        "process 2 of worker lost is ended: the router counts it as lost",
        "process 3 of worker silent is ended: no heartbeat for lease_ttl_s, 10 s",
    ]


def test_a_device_that_is_not_done_delays_only_what_it_may_write_to(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(local_pool, "REVOCATION_S", 0.0)
    time_s, busy = [0.0], {"slow"}
    pool = LockedPool(
        Pool(PAGES, 256, "arena", TTL_S), extent_pages=8, clock=lambda: time_s[0],
        revoke=lambda process: process.space not in busy,
    )  # fmt: skip
    for name in ("slow", "quick"):
        worker = pool.register(name, ProcessKey(1, 1, name), 64).worker
        pool.call(AllocatePages(worker=worker, pages=4, at_least=4))
    for refused in (
        lambda: pool.inherit("slow"),
        lambda: pool.expel("slow"),
        lambda: pool.register("slow", ProcessKey(2, 2, "new"), 0),
    ):
        with pytest.raises(WritesPending, match="try again") as error:
            refused()
        assert error.value.resumable
    assert pool.stat().held_pages == 8
    time_s[0] = 2 * TTL_S
    assert pool.sweep(lambda _: True) == ["quick"]
    assert pool.sweep(lambda _: False) == []
    busy.clear()
    assert pool.inherit("slow").checkpoint_bytes == 64
    assert pool.expel("slow")
    assert [line.name for line in pool.stat().workers] == ["quick"]
    assert pool.check() == []


def test_a_silent_worker_that_nobody_fenced_keeps_its_pages() -> None:
    pool = Pool(PAGES, 256, "arena", TTL_S)
    for name in ("fenced", "not fenced", "dead"):
        pool.allocate(pool.register(name, ProcessKey(1, 1, name), 0.0), 4)

    def is_alive(process: ProcessKey) -> bool:
        return process.space != "dead"

    assert pool.sweep(2 * TTL_S, is_alive, ["fenced"]) == ["fenced", "dead"]
    assert pool.stat(2 * TTL_S).held_pages == 4
