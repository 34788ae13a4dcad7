"""The background mover: loads first, stores at their rate, and nothing lost at the end."""

import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import CancelledError, Future, wait

import pytest
from hypothesis import given
from hypothesis import strategies as st

from triptych.core.errors import PoolError
from triptych.kvpool.disk.io_queue import IoQueue, TokenBucket

# ------------------------------------------------------------------ the bucket

jobs = st.lists(st.tuples(st.integers(1, 300), st.floats(0, 5)), max_size=60)


@given(jobs, st.floats(1, 100), st.integers(1, 200))
def test_no_stretch_of_time_carries_more_than_its_rate(
    asked: list[tuple[int, float]], rate: float, burst: int
) -> None:
    """Everybody goes as soon as the bucket lets it; then every stretch is counted."""
    bucket, now = TokenBucket(rate, burst, 0.0), 0.0
    went = list[tuple[float, int]]()
    for nbytes, idle_s in asked:
        now += idle_s
        now += bucket.wait_s(now) * (1 + 1e-9) + 1e-9
        assert bucket.wait_s(now) == 0
        bucket.take(nbytes, now)
        went.append((now, nbytes))
    for first, (begun, _) in enumerate(went):
        moved = 0
        for ended, nbytes in went[first:]:
            assert moved <= burst + rate * (ended - begun) + 1e-3
            moved += nbytes


@given(st.floats(1, 1e9), st.integers(1, 1 << 30))
def test_who_waits_may_go_after_just_that_time(rate: float, nbytes: int) -> None:
    bucket = TokenBucket(rate, 1, 10.0)
    bucket.take(nbytes, 10.0)
    delay_s = bucket.wait_s(10.0)
    assert delay_s == pytest.approx((nbytes - 1) / rate, abs=1e-5)
    assert bucket.wait_s(10.0 + delay_s * (1 + 1e-6) + 1e-6) == 0


def test_what_is_saved_up_is_bounded_and_time_never_goes_back() -> None:
    bucket = TokenBucket(10.0, 50, 0.0)
    bucket.take(50, 1000.0)
    assert bucket.wait_s(1000.0) > 0
    bucket.take(10, 0.0)
    assert bucket.wait_s(1000.5) == pytest.approx(0.5)


def test_without_a_rate_nobody_waits() -> None:
    bucket = TokenBucket(float("inf"), 1, 0.0)
    for _ in range(3):
        bucket.take(1 << 40, 0.0)
        assert bucket.wait_s(0.0) == 0


@pytest.mark.parametrize(("rate", "burst"), [(0, 1), (1, 0), (-1, 1), (float("nan"), 1)])
def test_a_bucket_that_never_fills_is_refused(rate: float, burst: float) -> None:
    with pytest.raises(ValueError, match="expected > 0"):
        TokenBucket(rate, burst, 0.0)


# ------------------------------------------------------------------ the queue


class Gate:
    """Work that waits until it is let through, so that others queue up behind it."""

    def __init__(self) -> None:
        self.begun, self.open = threading.Event(), threading.Event()

    def __call__(self) -> None:
        self.begun.set()
        assert self.open.wait(60)


@pytest.fixture
def gate() -> Iterator[Gate]:
    made = Gate()
    yield made
    made.open.set()


def behind(queue: IoQueue, gate: Gate) -> "Future[None]":
    """Put the gate to work, and return once nothing else can start."""
    future = queue.submit(gate, 0)
    assert gate.begun.wait(60)
    return future


def test_results_and_errors_come_back() -> None:
    queue = IoQueue()
    assert queue.submit(lambda: 7, 1).result(60) == 7
    failed = queue.submit(lambda: 1 // 0, 1, urgent=True)
    with pytest.raises(ZeroDivisionError):
        failed.result(60)
    assert queue.submit(lambda: 8, 1).result(60) == 8
    queue.close()


def test_loads_go_before_stores_and_each_in_its_order(gate: Gate) -> None:
    queue, order = IoQueue(), list[str]()

    def note(name: str) -> Callable[[], None]:
        return lambda: order.append(name)

    behind(queue, gate)
    for name in ("store 1", "load 1", "store 2", "load 2"):
        queue.submit(note(name), 1, urgent=name.startswith("load"))
    assert len(queue) == 5
    gate.open.set()
    queue.close()
    assert len(queue) == 0
    assert order == ["load 1", "load 2", "store 1", "store 2"]


def test_each_line_is_bounded(gate: Gate) -> None:
    queue = IoQueue(max_waiting=2)
    behind(queue, gate)
    waiting = [queue.submit(lambda: 1, 1) for _ in range(2)]
    with pytest.raises(PoolError, match="2 transfers wait"):
        queue.submit(lambda: 1, 1)
    waiting += [queue.submit(lambda: 1, 1, urgent=True) for _ in range(2)]
    with pytest.raises(PoolError, match="full"):
        queue.submit(lambda: 1, 1, urgent=True)
    gate.open.set()
    assert [future.result(60) for future in waiting] == [1] * 4
    queue.close()


def test_stores_keep_their_rate() -> None:
    """A lower bound of the time: a busy machine cannot break it."""
    queue, begun = IoQueue(rate_bytes_s=10_000, burst_bytes=1000), time.monotonic()
    stores = [queue.submit(lambda: None, 1000) for _ in range(6)]
    wait(stores, timeout=60)
    assert time.monotonic() - begun > 0.39
    assert all(store.done() for store in stores)
    queue.close()


def test_a_load_waits_for_no_rate_even_while_a_store_does() -> None:
    queue = IoQueue(rate_bytes_s=1e-3, burst_bytes=1)
    queue.submit(lambda: None, 1000).result(60)
    held_back = queue.submit(lambda: None, 1)
    assert queue.submit(lambda: 7, 1 << 30, urgent=True).result(60) == 7
    assert not held_back.done()
    queue.close(finish=False)
    assert held_back.cancelled()


def test_closing_finishes_what_waits_at_full_speed(gate: Gate) -> None:
    queue = IoQueue(rate_bytes_s=1e-3, burst_bytes=1)
    behind(queue, gate)
    waiting = [queue.submit(lambda: 1, 1 << 20) for _ in range(5)]
    gate.open.set()
    queue.close()
    assert [future.result(0) for future in waiting] == [1] * 5
    with pytest.raises(PoolError, match="closed"):
        queue.submit(lambda: 1, 1)
    queue.close()


def test_closing_can_drop_what_waits_but_not_what_runs(gate: Gate) -> None:
    queue = IoQueue()
    running = behind(queue, gate)
    waiting = [queue.submit(lambda: 1, 1, urgent=bool(i % 2)) for i in range(4)]
    closing = threading.Thread(target=queue.close, kwargs={"finish": False})
    closing.start()
    for future in waiting:
        with pytest.raises(CancelledError):
            future.result(60)
    assert not running.done()
    gate.open.set()
    closing.join(60)
    assert running.result(0) is None


def test_what_its_owner_cancelled_is_not_run(gate: Gate) -> None:
    queue, ran = IoQueue(), list[int]()
    behind(queue, gate)
    futures = [queue.submit(lambda i=i: ran.append(i), 1) for i in range(3)]
    assert futures[1].cancel()
    gate.open.set()
    queue.close()
    assert ran == [0, 2]
    assert "disk-queue" not in [thread.name for thread in threading.enumerate()]
