"""Which waiting requests start next."""

from collections.abc import Iterable, Sequence
from typing import Protocol

from triptych.router.snapshot import Budget, Waiting


class BatchPolicy(Protocol):
    """Chooses which waiting requests start, in this order."""

    def __call__(self, queue: Sequence[Waiting], budget: Budget, /) -> list[Waiting]:
        """Choose from ``queue``, oldest first, no more than ``budget`` allows."""
        ...


def greedy_by_memory(queue: Sequence[Waiting], budget: Budget) -> list[Waiting]:
    """Fit as many waiting requests as the free bytes allow.

    Smallest first over the whole line, which maximises the number admitted; but a request
    that has waited longer than the patience goes to the front, oldest first, and nothing
    overtakes it, even while it does not fit.

    Source: FastCache, memory-aware greedy batching. The patience rule is ours: the paper's
    rule alone can starve a large request for ever.
    """
    late = sorted(
        (one for one in queue if one.waited_s > budget.patience_s), key=lambda one: -one.waited_s
    )
    rest = sorted(
        (one for one in queue if one.waited_s <= budget.patience_s), key=lambda one: one.bytes
    )
    return _take_while_it_fits([*late, *rest], budget)


def fifo(queue: Sequence[Waiting], budget: Budget) -> list[Waiting]:
    """In order of arrival; the first that does not fit stops the line. The baseline."""
    return _take_while_it_fits(queue, budget)


def _take_while_it_fits(line: Iterable[Waiting], budget: Budget) -> list[Waiting]:
    batch, left = list[Waiting](), budget.free_bytes
    for one in line:
        if len(batch) >= budget.max_requests or one.bytes > left:
            break
        batch.append(one)
        left -= one.bytes
    return batch
