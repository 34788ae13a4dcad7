"""Batch policies: which waiting requests start next."""

from collections.abc import Iterable, Iterator
from dataclasses import replace
from typing import Protocol

from triptych.router.queue.waiting_queue import QueueView
from triptych.router.snapshot import Budget, Waiting


class BatchPolicy(Protocol):
    """Chooses which waiting requests start, in this order."""

    def __call__(self, queue: QueueView, budget: Budget, /) -> list[Waiting]:
        """Choose from ``queue`` no more than ``budget`` allows.

        The router calls it again while a whole ``budget.max_requests`` could start.
        """
        ...


def greedy_by_memory(queue: QueueView, budget: Budget) -> list[Waiting]:
    """Fit as many waiting requests as the free bytes allow.

    Smallest first over the whole queue, which maximises the number of admitted requests. Where
    bytes are short and the queue in order would fill more of them, that goes first and small
    requests fill the rest: so never fewer bytes than ``fcfs`` would start. The queue itself
    implements tenants, priorities, and that no request overtakes an overdue one, even while that
    does not fit.

    Source: FastCache, memory-aware greedy batching. The bound on overtaking is ours: the
    paper's rule alone can starve a large request for ever. So is the comparison with the order of
    the queue: the paper wants most requests and most bytes, which can be different batches.
    """
    smallest = _take_while_it_fits(queue.smallest_first(), budget)
    if len(smallest) in (budget.max_requests, len(queue)):
        return smallest  # bytes are not what is short
    ordered = _take_while_it_fits(queue.in_order(), budget)
    if _bytes(smallest) >= _bytes(ordered):
        return smallest
    taken = {one.id for one in ordered}
    left = replace(
        budget,
        free_bytes=budget.free_bytes - _bytes(ordered),
        max_requests=budget.max_requests - len(ordered),
    )
    others = (one for one in queue.smallest_first() if one.id not in taken)
    return [*ordered, *_take_while_it_fits(others, left)]


def fcfs(queue: QueueView, budget: Budget) -> list[Waiting]:
    """In the order of the queue; the first that does not fit stops it. The baseline.

    ``fifo`` is an alias of this policy in ``router.batch_policy``.
    """
    return _take_while_it_fits(queue.in_order(), budget)


def _take_while_it_fits(queue: Iterable[Waiting], budget: Budget) -> list[Waiting]:
    batch, left = list[Waiting](), budget.free_bytes
    ordered: Iterator[Waiting] = iter(queue)
    while len(batch) < budget.max_requests:
        one = next(ordered, None)
        if one is None or one.bytes > left:
            break
        batch.append(one)
        left -= one.bytes
    return batch


def _bytes(batch: Iterable[Waiting]) -> int:
    return sum(one.bytes for one in batch)
