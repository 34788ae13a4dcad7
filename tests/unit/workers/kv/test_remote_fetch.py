"""Messages with pages of another node: what the engines see, and what the router hears."""

import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace

import numpy as np
import pytest

from triptych.core.errors import Cancelled, PoolExhausted, PoolUnavailable, TriptychError
from triptych.core.handles import KVHandle, LeaseId, LeaseRef, PageRun
from triptych.core.messages import (
    Cancel,
    Compress,
    CompressionReport,
    CompressItem,
    Fetched,
    Finished,
    Join,
    Message,
    Report,
    Request,
    Sampling,
    Send,
)
from triptych.kvpool import About, LocalPool
from triptych.kvpool.rpc import page_ranges
from triptych.kvpool.transfer.fetcher import Traffic
from triptych.kvpool.transfer.link_meter import LinkMeter
from triptych.workers.kv.handle_codec import pages_by_run
from triptych.workers.kv.remote_fetch import RemoteFetch


@dataclass
class FakeFetcher:
    """Fetches when it is let, or fails."""

    pool: LocalPool
    error: TriptychError | None = None
    may_end: threading.Event = field(default_factory=threading.Event)
    began: threading.Event = field(default_factory=threading.Event)
    traffic: Traffic = field(default_factory=lambda: Traffic(resumed=3, bad_chunks=1))
    link: LinkMeter = field(default_factory=lambda: LinkMeter(bytes_s=5e6))

    def fetch(
        self,
        label: str,
        lease_ref: LeaseRef,
        ids: np.ndarray,
        cancelled: Callable[[], bool],
        about: About,
    ) -> tuple[LeaseRef, np.ndarray]:
        self.began.set()
        assert self.may_end.wait(10)
        if cancelled():
            raise Cancelled(label)
        if self.error:
            raise self.error
        mine = self.pool.allocate(ids.size)
        [made] = self.pool.handoff([(label, mine)], about=[about])
        return made, mine

    def close(self) -> None:
        self.may_end.set()


@dataclass
class Worker:
    """An inbound with a place for what it says."""

    pool: LocalPool
    fetcher: FakeFetcher
    posted: list[Message] = field(default_factory=list[Message])
    sent: list[Send] = field(default_factory=list[Send])
    output_tokens: threading.Semaphore = field(default_factory=lambda: threading.Semaphore(0))

    def __post_init__(self) -> None:
        def post(message: Message) -> None:
            self.posted.append(message)
            self.output_tokens.release()

        def deliver(sends: list[Send]) -> None:
            self.sent += sends
            self.output_tokens.release()

        self.inbound = RemoteFetch(self.pool, self.fetcher, post, deliver)  # type: ignore[arg-type]

    def wait(self, count: int = 1) -> None:
        for _ in range(count):
            assert self.output_tokens.acquire(timeout=10)


@pytest.fixture
def worker() -> Iterator[Worker]:
    with LocalPool(32, 256) as pool:
        worker = Worker(pool, FakeFetcher(pool))
        yield worker
        worker.inbound.close()


def handle(arena: str, *pages: list[int]) -> KVHandle:
    packed = (page_ranges.pack(np.array(ids, np.int32)) for ids in pages)
    return KVHandle(
        LeaseRef(arena, LeaseId(5), 2), tuple(PageRun("k8v4", b"tokens", p) for p in packed), 9
    )


def join(where: KVHandle, name: str = "r") -> Join:
    return Join(
        request=Request(id=name, prompt=(1,), sampling=Sampling(), reply_to="in"),
        output_tokens=(7,),
        handle=where,
        report=CompressionReport(policy="p", raw_bytes=1, stored_bytes=1),
    )


def test_pages_of_this_node_are_passed_on_at_once(worker: Worker) -> None:
    message = join(handle(worker.pool.arena.id, [1]))
    worker.inbound.take(message)
    assert worker.posted == [message]
    assert worker.sent == []


def test_pages_of_another_node_come_first_and_the_engine_sees_them_here(worker: Worker) -> None:
    worker.inbound.take(join(handle("far", [20, 3], [], [9, 8, 7])))
    assert worker.posted == []
    worker.fetcher.may_end.set()
    worker.wait(2)
    [message] = worker.posted
    assert isinstance(message, Join)
    parts = [page_ranges.unpack(run.pages, 32) for run in message.handle.runs]
    assert [part.size for part in parts] == [2, 0, 3]
    worker.pool.attach([(message.handle.lease_ref, np.concatenate(parts))])
    assert [send.message for send in worker.sent] == [Fetched(request="r")]


def test_small_pages_keep_their_place_in_the_copies_of_their_pages(worker: Worker) -> None:
    far = handle("far", [81, 80, 14, 83], [9])
    small = replace(far.runs[0], parts=4)
    worker.inbound.take(join(replace(far, runs=(small, far.runs[1]))))
    worker.fetcher.may_end.set()
    worker.wait(2)
    [message] = worker.posted
    assert isinstance(message, Join)
    ids = page_ranges.unpack(message.handle.runs[0].pages, 4 * 32)
    assert message.handle.runs[0].parts == 4
    assert (ids % 4).tolist() == [1, 0, 2, 3]
    pages = ids // 4
    assert pages[0] == pages[1] == pages[3] != pages[2]
    owned = np.concatenate(pages_by_run(message.handle, 32))
    assert set(pages.tolist()) < set(owned.tolist())
    worker.pool.attach([(message.handle.lease_ref, owned)])


def test_a_run_of_more_small_pages_than_any_page_has_is_refused(worker: Worker) -> None:
    far = handle("far", [1])
    worker.inbound.take(join(replace(far, runs=(replace(far.runs[0], parts=1 << 20),))))
    worker.wait()
    [send] = worker.sent
    assert isinstance(send.message, Finished)
    assert send.message.error is not None


@pytest.mark.parametrize(
    ("error", "code"),
    [(PoolUnavailable("gone"), "worker_lost"), (PoolExhausted(3, 1), "overloaded")],
)
def test_pages_that_do_not_come_end_the_attempt(
    worker: Worker, error: TriptychError, code: str
) -> None:
    worker.fetcher.error = error
    worker.inbound.take(join(handle("far", [1])))
    worker.fetcher.may_end.set()
    worker.wait()
    [send] = worker.sent
    assert isinstance(send.message, Finished)
    assert send.message.error is not None
    assert (send.message.error.code, worker.posted) == (code, [])


def test_a_cancelled_request_is_let_go_when_nothing_of_it_comes_any_more(worker: Worker) -> None:
    worker.inbound.take(join(handle("far", [1])))
    assert worker.fetcher.began.wait(10)
    worker.inbound.take(Cancel(requests=("r", "other")))
    assert worker.posted == [Cancel(requests=("other",))]
    worker.fetcher.may_end.set()
    worker.wait(2)
    assert worker.posted == [Cancel(requests=("other",)), Cancel(requests=("r",))]
    assert worker.sent == []


def test_raw_pages_are_fetched_for_those_requests_that_need_it(worker: Worker) -> None:
    here = CompressItem(request="here", handle=handle(worker.pool.arena.id, [1]))
    there = CompressItem(request="there", handle=handle("far", [1, 2]))
    worker.inbound.take(Compress(items=(here, there)))
    assert worker.posted == [Compress(items=(here,))]
    worker.fetcher.may_end.set()
    worker.wait(3)
    last = worker.posted[-1]
    assert isinstance(last, Compress)
    assert [item.request for item in last.items] == ["there"]
    assert last.items[0].handle.lease_ref.arena == worker.pool.arena.id


def test_what_went_wrong_on_the_way_is_reported(worker: Worker) -> None:
    report = Report(name="w", running=0, waiting=0, pages_held=0, busy_s=0.0)
    told = worker.inbound.completed(report)
    assert (told.transfers_resumed, told.chunks_refused, told.link_bytes_s) == (3, 1, 5e6)
