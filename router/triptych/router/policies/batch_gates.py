"""Schedules: batch sizes of the three stages, fixed, adaptive or continuous."""

import re
from dataclasses import dataclass

from triptych.core.errors import ConfigError
from triptych.router.policies.batching import BatchPolicy, fcfs, greedy_by_memory
from triptych.router.queue.waiting_queue import QueueView
from triptych.router.snapshot import Budget, Waiting

STATIC = "static:"
STATIC_WAIT_S = 0.5
"""Time after which a static schedule dispatches a batch that is not full."""
LARGEST_BATCH = 64


@dataclass(frozen=True, slots=True, kw_only=True)
class Gate:
    """Lets a batch into a stage once it is large enough, or has waited long enough.

    Source: FastCache, Algorithm 1 (lines 4 to 6: B_min, B_max and a maximum wait)
    """

    least: int = 1
    """Requests that are dispatched at once."""
    most: int | None = None
    """Requests of one batch; None: continuous, as many as the stage has room for."""
    wait_s: float = 0.0
    """Time after which fewer are dispatched."""

    def opens(self, count: int, oldest_wait_s: float) -> bool:
        """Whether ``count`` requests are dispatched, of which the oldest has waited this long.

        >>> gate = Gate(least=4, most=4, wait_s=1.0)
        >>> gate.opens(4, 0.0), gate.opens(3, 0.9), gate.opens(3, 1.0), gate.opens(0, 9.0)
        (True, False, True, False)
        """
        return count >= self.least or (count > 0 and oldest_wait_s >= self.wait_s)

    def has_room(self, running: int) -> bool:
        """Whether a batch with ``running`` requests takes one more from a dead worker."""
        return self.most is None or running < self.most


@dataclass(frozen=True, slots=True, kw_only=True)
class Schedule:
    """A batch policy, and the batch sizes of the stages."""

    choose: BatchPolicy
    prefill: Gate = Gate()
    compress: Gate = Gate()
    decode: Gate = Gate()
    """With ``most``, a decode batch runs to its end before another one joins."""
    is_adaptive: bool = False
    """Whether batch sizes follow the queue and forecasts of memory (``batch_sizes``)."""

    def __call__(self, queue: QueueView, budget: Budget) -> list[Waiting]:
        """Call the policy, so that a schedule can be used as a policy."""
        return self.choose(queue, budget)

    @property
    def has_batch_sizes(self) -> bool:
        """Whether any stage is dispatched in batches, not continuously."""
        sizes = (self.prefill.most, self.compress.most, self.decode.most)
        return self.is_adaptive or any(size is not None for size in sizes)

    @property
    def runs_batches_to_end(self) -> bool:
        """Whether a decode batch ends before another one joins, on the worker where it began."""
        return self.decode.most is not None

    def slots(self, worker_slots: int) -> int:
        """Requests that may be chosen for a decode worker that holds ``worker_slots`` at once.

        With fixed batches the next one gathers while one runs.
        """
        return worker_slots if self.decode.most is None else 2 * self.decode.most

    def check(self, decode_slots: int, name: str) -> None:
        """Raise ConfigError if decode workers cannot hold a whole batch."""
        size = self.decode.most
        if size is not None and size > decode_slots:
            raise ConfigError(
                f"router.batch_policy={name!r}: batches of {size} do not fit "
                f"decode.max_num_seqs={decode_slots}: raise it, or lower the d"
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class StageLoad:
    """Number of requests before each stage, workers of the stages, and how many fit into memory."""

    waiting: int
    """Requests that have not started."""
    startable: int
    """Requests that fit into memory beside those that run, by the forecasts of their bytes and
    lengths."""
    prefilled: int
    """Prompts that wait for a compressor."""
    started: int
    """Requests that have started and have not ended."""
    prefill_workers: int = 1
    compressors: int = 1


@dataclass(frozen=True, slots=True)
class BatchSizes:
    """FastCache's X, Y and Z: the largest batches of the stages."""

    prefill: int
    compress: int
    decode: int
    """Requests that decode at once, or will."""


def batch_sizes(load: StageLoad) -> BatchSizes:
    """The batch sizes of the next round: the paper's ADJUSTBATCH, which it does not spell out.

    Waiting requests that memory has room for are divided among the prefill workers, and prompts
    among the compressors, so none is idle while another has a queue. As many requests decode as
    fit.

    >>> batch_sizes(StageLoad(waiting=9, startable=6, prefilled=3, started=20, prefill_workers=2))
    BatchSizes(prefill=3, compress=3, decode=26)
    """
    return BatchSizes(
        prefill=_divided(min(load.waiting, load.startable), load.prefill_workers),
        compress=_divided(load.prefilled, load.compressors),
        decode=max(1, load.started + load.startable),
    )


def _divided(requests: int, workers: int) -> int:
    return min(LARGEST_BATCH, max(1, -(-requests // max(1, workers))))


def static_schedule(name: str) -> Schedule:
    """Fixed sizes, in order of arrival: ``static:p2c2d8`` reads 2, compresses 2, decodes 8.

    A batch goes to a worker that has nothing else, and a decode batch runs to its end.

    Source: FastCache, section 4.2 (the static baselines p1c1d8, p2c2d8, p3c3d6, p4c4d8)
    Raises: ConfigError if the name is no such schedule
    """
    found = re.fullmatch(r"static:p([1-9]\d{0,3})c([1-9]\d{0,3})d([1-9]\d{0,3})", name)
    if found is None:
        raise ConfigError(
            f"router.batch_policy={name!r}: expected static:p<X>c<Y>d<Z> with batch sizes from 1 "
            "to 9999, such as static:p2c2d8"
        )
    sizes = [int(size) for size in found.groups()]
    prefill, compress, decode = (Gate(least=n, most=n, wait_s=STATIC_WAIT_S) for n in sizes)
    return Schedule(choose=fcfs, prefill=prefill, compress=compress, decode=decode)


DYNAMIC = Schedule(
    choose=greedy_by_memory,
    prefill=Gate(most=1),
    compress=Gate(most=1),
    is_adaptive=True,
)
"""Greedy by memory, in batches whose sizes follow load and forecasts: FastCache's dynamic schedule.

An idle worker gets a batch at once, so no request waits for others at a low rate.

Source: FastCache, section 3.3 (dynamic multi-stage batching)
"""
