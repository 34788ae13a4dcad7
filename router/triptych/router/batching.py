"""Which waiting requests start next."""

from collections.abc import Iterable, Iterator
from dataclasses import replace
from itertools import chain, takewhile
from typing import Protocol

from triptych.router.line import Line
from triptych.router.snapshot import Budget, Waiting


class BatchPolicy(Protocol):
    """Chooses which waiting requests start, in this order."""

    def __call__(self, line: Line, budget: Budget, /) -> list[Waiting]:
        """Choose from ``line`` no more than ``budget`` allows.

        The router asks again while a whole ``budget.max_requests`` could start, so a policy
        that goes on in the same order with the next call is one that took all at once.
        """
        ...


def greedy_by_memory(line: Line, budget: Budget) -> list[Waiting]:
    """Fit as many waiting requests as the free bytes allow.

    Smallest first over the whole line, which maximises the number admitted; but a request
    that has waited longer than the patience goes to the front, oldest first, and nothing
    overtakes it, even while it does not fit. Where bytes are short and the oldest requests
    would fill more of them, those go first, and small ones fill what is left: so never fewer
    requests than ``fifo`` would start, and never fewer bytes.

    Source: FastCache, memory-aware greedy batching. The patience rule is ours: the paper's
    rule alone can starve a large request for ever. So is the look at the oldest: the paper
    wants most requests, and most bytes, which is not always the same batch.
    """

    def is_late(one: Waiting) -> bool:
        return one.waited_s > budget.patience_s

    late = takewhile(is_late, line.oldest_first())
    rest = (one for one in line.smallest_first() if not is_late(one))
    smallest = _take_while_it_fits(chain(late, rest), budget)
    if len(smallest) in (budget.max_requests, len(line)):
        return smallest  # bytes are not what is short
    oldest = _take_while_it_fits(line.oldest_first(), budget)
    if _bytes(smallest) >= _bytes(oldest):
        return smallest
    taken = {one.id for one in oldest}
    left = replace(
        budget,
        free_bytes=budget.free_bytes - _bytes(oldest),
        max_requests=budget.max_requests - len(oldest),
    )
    others = (one for one in line.smallest_first() if one.id not in taken)
    return [*oldest, *_take_while_it_fits(others, left)]


def fifo(line: Line, budget: Budget) -> list[Waiting]:
    """In order of arrival; the first that does not fit stops the line. The baseline."""
    return _take_while_it_fits(line.in_order(), budget)


def _take_while_it_fits(line: Iterable[Waiting], budget: Budget) -> list[Waiting]:
    batch, left = list[Waiting](), budget.free_bytes
    ordered: Iterator[Waiting] = iter(line)
    while len(batch) < budget.max_requests:
        one = next(ordered, None)
        if one is None or one.bytes > left:
            break
        batch.append(one)
        left -= one.bytes
    return batch


def _bytes(batch: Iterable[Waiting]) -> int:
    return sum(one.bytes for one in batch)
