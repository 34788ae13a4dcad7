"""The background mover: one thread that runs loads before stores, and stores at a limited rate."""

import math
import threading
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any, TypeVar

from triptych.core.errors import PoolError

T = TypeVar("T")


class TokenBucket:
    """Token bucket over bytes: a rate per second, and a burst.

    Whoever comes while the bucket holds anything may go, however large it is; what it took too
    much is a debt that those after it wait for. So over any time that starts with a full bucket
    at most ``burst_bytes + rate x time`` go, plus the last one's excess.

    Units: ``now`` in seconds of any clock that never goes back
    """

    def __init__(self, rate_bytes_s: float, burst_bytes: float, now: float) -> None:
        if not (rate_bytes_s > 0 and burst_bytes > 0):
            raise ValueError(f"{rate_bytes_s} bytes/s in bursts of {burst_bytes}: expected > 0")
        self.rate_bytes_s, self.burst_bytes = rate_bytes_s, burst_bytes
        self._level, self._seen = burst_bytes, now

    def wait_s(self, now: float) -> float:
        """Seconds until the next transfer may start; 0: now."""
        self._fill(now)
        return 0.0 if self._level > 0 else max(1e-6, -self._level / self.rate_bytes_s)

    def take(self, nbytes: int, now: float) -> None:
        """Note that so many bytes went."""
        self._fill(now)
        self._level -= nbytes

    def _fill(self, now: float) -> None:
        if math.isinf(self.rate_bytes_s):
            self._level = self.burst_bytes
        else:
            gained = self.rate_bytes_s * max(0.0, now - self._seen)
            self._level = min(self.burst_bytes, self._level + gained)
        self._seen = max(self._seen, now)


@dataclass(frozen=True, slots=True)
class _Job:
    work: Callable[[], Any]
    nbytes: int
    future: Future[Any] = field(default_factory=Future[Any])

    def run(self) -> None:
        try:
            result = self.work()
        except BaseException as error:  # noqa: BLE001 - as every executor: the future's owner hears it
            self.future.set_exception(error)
        else:
            self.future.set_result(result)


class IoQueue:
    """Runs work that moves bytes, one piece at a time, in a thread of its own.

    An urgent piece (a load: a request waits for it) goes before all others. The rate is that of
    the others (stores: nobody waits for them): it keeps them from crowding out loads. If loads
    counted too, a stream of them would keep every store waiting for ever. A standard executor
    has neither an order nor a rate, so this is a thread with two lines; its futures are the
    standard ones.
    """

    def __init__(
        self,
        rate_bytes_s: float = math.inf,
        burst_bytes: float = 64 << 20,
        max_waiting: int = 256,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._bucket = TokenBucket(rate_bytes_s, burst_bytes, clock())
        self._max_waiting, self._clock = max_waiting, clock
        self._urgent, self._others = deque[_Job](), deque[_Job]()
        self._changed = threading.Condition()
        self._closed = False
        self._runs = False
        self._thread = threading.Thread(target=self._run, name="disk-queue", daemon=True)
        self._thread.start()

    def __len__(self) -> int:
        """Pieces that wait or run."""
        with self._changed:
            return len(self._urgent) + len(self._others) + self._runs

    def submit(self, work: Callable[[], T], nbytes: int, *, urgent: bool = False) -> Future[T]:
        """Run ``work``, which moves ``nbytes``, as soon as its turn comes.

        Each of the two lines is bounded, so a flood of stores shuts out no load.

        Raises: PoolError if the line is full, or the queue closed
        """
        line, job = self._urgent if urgent else self._others, _Job(work, nbytes)
        with self._changed:
            if self._closed:
                raise PoolError("the disk queue is closed")
            if len(line) >= self._max_waiting:
                raise PoolError(f"the disk queue is full: {len(line)} transfers wait")
            line.append(job)
            self._changed.notify()
        return job.future

    def close(self, *, finish: bool = True) -> None:
        """Refuse new work, finish or cancel queued work at full speed, and end the thread.

        What runs already is finished in both cases.
        """
        with self._changed:
            self._closed = True
            dropped = [] if finish else [*self._urgent, *self._others]
            if not finish:
                self._urgent.clear()
                self._others.clear()
            self._changed.notify()
        for job in dropped:
            job.future.cancel()
        self._thread.join()

    def _run(self) -> None:
        while job := self._next():
            job.run()
            with self._changed:
                self._runs = False

    def _next(self) -> _Job | None:
        """The next piece of work, once there is one; None when the queue is closed."""
        with self._changed:
            while True:
                while line := self._line():
                    job = line.popleft()
                    if not job.future.set_running_or_notify_cancel():
                        continue
                    if line is self._others:
                        self._bucket.take(job.nbytes, self._clock())
                    self._runs = True
                    return job
                if self._closed:
                    return None
                wait_s = self._bucket.wait_s(self._clock()) if self._others else None
                self._changed.wait(wait_s)

    def _line(self) -> deque[_Job] | None:
        """Which line's first piece may go now."""
        if self._urgent:
            return self._urgent
        may_go = self._closed or self._bucket.wait_s(self._clock()) == 0
        return self._others if self._others and may_go else None
