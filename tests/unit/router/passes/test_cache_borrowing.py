"""Memory for prefixes that requests borrow instead of waiting."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from triptych.core.messages import (
    POOL,
    BorrowCacheMemory,
    CacheMemoryBorrowed,
    Register,
    Request,
    Sampling,
    Send,
)
from triptych.router.models.memory_estimate import RequestBytes
from triptych.router.passes.cache_borrowing import ASK_AGAIN_S, KEEP_S, CacheBorrowing, enough
from triptych.router.policies.batch_gates import Schedule
from triptych.router.policies.batching import fcfs
from triptych.router.state.cluster_state import ClusterState
from triptych.router.state.request_table import Entry

CAPACITY, LIMIT = 100, 40


@given(st.lists(st.integers(-50, 80), min_size=1), st.integers(0, LIMIT))
def test_what_is_asked_helps_somebody_and_never_takes_back(short: list[int], lent: int) -> None:
    total = enough(short, lent, LIMIT)
    assert lent <= total <= LIMIT
    if total > lent:
        assert total - lent in short
    oldest = lent + max(0, short[0])
    if oldest <= LIMIT:
        assert total == oldest
    elif any(lent + max(0, each) <= LIMIT for each in short):
        assert all(total - lent <= max(0, each) for each in short)


class Bench:
    """Books with one worker, and what they say to the pool."""

    def __init__(self, *arenas: str) -> None:
        self.cluster = ClusterState.open(CAPACITY, 3.0, Schedule(choose=fcfs))
        self.borrowing = CacheBorrowing(self.cluster, LIMIT)
        for arena in arenas or ("a",):
            stages = ("prefill", "compress", "decode")
            registration = Register(
                name=arena, address=arena, stages=stages, arena=arena, max_requests=4
            )
            self.cluster.membership.join(registration)
            self.cluster.load_index.join(registration)

    def wait(self, name: str, nbytes: int) -> None:
        request = Request(id=name, prompt=(1,), sampling=Sampling(), reply_to="c")
        sizes = RequestBytes(raw=nbytes, encoded=0, compressed=0, growth=0, grown=0)
        self.cluster.requests.add(Entry(request=request, sizes=sizes, arrived=0.0, since=0.0))

    def output_tokens(self, blocked_reason: str, now: float) -> list[int]:
        self.borrowing.run(blocked_reason, now)  # type: ignore[arg-type]
        sends = self.cluster.outbox.take()
        assert all(isinstance(send, Send) and send.to == POOL for send in sends)
        return [send.message.bytes for send in sends if isinstance(send.message, BorrowCacheMemory)]

    def answer(self, nbytes: int, now: float) -> None:
        self.borrowing.on_borrowed(CacheMemoryBorrowed(arena="a", bytes=nbytes), now)


def test_nothing_is_borrowed_where_pages_are_on_devices() -> None:
    """The cache is in host memory: its bytes are of no use in the arena of a GPU."""
    for arena, wants in (("pool/1", False), ("pool", True)):
        bench = Bench(arena)
        bench.wait("a", CAPACITY + 1)
        assert bool(bench.output_tokens("no_bytes", 1.0)) is wants


def test_memory_comes_when_somebody_waits_and_goes_back_when_nobody_does() -> None:
    bench = Bench()
    ledger = bench.cluster.ledger
    assert bench.output_tokens("", 0.0) == [0]  # what did an earlier router borrow?
    bench.answer(0, 0.0)
    assert bench.output_tokens("", 0.1) == []
    ledger.book("running", {"a": 90})
    bench.wait("next", 30)
    assert bench.output_tokens("no_bytes", 1.0) == [20]
    assert bench.output_tokens("no_bytes", 1.1) == []  # the question is open
    assert ledger.free("a") == 10
    bench.answer(20, 1.2)
    assert ledger.free("a") == 30
    assert ledger.book("next", {"a": 30})
    assert bench.output_tokens("", 1.3) == []
    ledger.release("running")
    assert bench.output_tokens("", 1.0 + KEEP_S / 2) == []
    assert bench.output_tokens("", 1.0 + KEEP_S) == [0]
    assert ledger.free("a") == CAPACITY - 30
    assert bench.cluster.counters == {"memory_asked": 1, "memory_returned": 1}


def test_only_what_is_not_booked_goes_back() -> None:
    bench = Bench()
    bench.answer(40, 0.0)
    bench.cluster.ledger.book("running", {"a": 125})
    assert bench.output_tokens("", 10.0) == [25]
    assert bench.cluster.ledger.free("a") == 0


@pytest.mark.parametrize("answers", [True, False])
def test_a_pool_that_cannot_lend_is_not_asked_all_the_time(answers: bool) -> None:
    bench = Bench()
    bench.answer(0, 0.0)
    bench.cluster.ledger.book("running", {"a": 100})
    bench.wait("next", 30)
    assert bench.output_tokens("no_bytes", 1.0) == [30]
    if answers:
        bench.answer(10, 1.0)
    assert bench.output_tokens("no_bytes", 1.0 + ASK_AGAIN_S / 2) == []
    assert bench.output_tokens("no_bytes", 1.0 + ASK_AGAIN_S) == [30]


def test_nobody_borrows_where_memory_has_more_than_one_place() -> None:
    bench = Bench("a", "b")
    bench.wait("next", 130)
    assert bench.output_tokens("no_bytes", 0.0) == []


@given(st.lists(st.integers(-50, 80), min_size=1), st.integers(0, LIMIT))
def test_the_oldest_and_the_smallest_answer_for_all(short: list[int], lent: int) -> None:
    assert enough([short[0], min(short)], lent, LIMIT) == enough(short, lent, LIMIT)


def test_running_requests_that_lack_memory_borrow_before_waiting_ones() -> None:
    bench = Bench()
    bench.wait("r", CAPACITY + 30)
    bench.borrowing.run("no_bytes", 0.0, short_bytes=10)
    assert [send.message for send in bench.cluster.outbox.take()] == [BorrowCacheMemory(bytes=10)]


def test_nothing_is_expected_of_a_pool_that_refuses_or_does_not_answer() -> None:
    bench = Bench()
    assert bench.borrowing.may_lend(LIMIT, 0.0)
    assert not bench.borrowing.may_lend(LIMIT + 1, 0.0)
    bench.borrowing.run("no_bytes", 0.0, short_bytes=10)
    assert bench.borrowing.may_lend(10, 0.1)
    assert not bench.borrowing.may_lend(10, 1.0)  # no answer
    bench.borrowing.on_borrowed(CacheMemoryBorrowed(arena="a", bytes=4), 1.0)
    assert not bench.borrowing.may_lend(6, 1.1)  # less than was requested
    bench.borrowing.run("no_bytes", 1.0 + ASK_AGAIN_S, short_bytes=6)
    assert bench.borrowing.may_lend(6, 1.0 + ASK_AGAIN_S)
    two = Bench("a", "b")
    assert not two.borrowing.may_lend(1, 0.0)
