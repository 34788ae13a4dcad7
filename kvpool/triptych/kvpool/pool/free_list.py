"""The circular free list: ids of free pages."""

import numpy as np
from numpy.typing import NDArray

from triptych.core.errors import PoolExhausted

PageIds = NDArray[np.int32]


class FreeList:
    """A ring of page ids with two counters that only grow.

    ``allocated`` ids were consumed from the ring and ``freed`` ids produced into it, so
    ``freed - allocated`` are free, and a counter's slot is the counter modulo the capacity.
    Wrapped indices could not tell an empty ring from a full one. Pages come back in the
    order they were freed, so a request that had consecutive pages leaves consecutive ones.

    Source: DiffKV and LeanKV (circular free page list); monotonic counters are ours.
    """

    def __init__(self, capacity: int, *, full: bool = True) -> None:
        self._ring: PageIds = np.arange(capacity, dtype=np.int32)
        self.allocated = 0
        self.freed = capacity if full else 0

    def __len__(self) -> int:
        """How many ids are free."""
        return self.freed - self.allocated

    @property
    def capacity(self) -> int:
        return self._ring.size

    def allocate(self, count: int) -> PageIds:
        """Remove the ``count`` ids that have been free longest.

        Shapes:  -> (count,)
        Raises:  PoolExhausted if fewer are free; nothing changes
        """
        if count < 0:
            raise ValueError(f"{count} pages wanted")
        if count > len(self):
            raise PoolExhausted(count, len(self))
        ids = self._window(self.allocated, count)
        self.allocated += count
        return ids

    def free(self, ids: PageIds) -> None:
        """Add ids that are not in the list; the caller knows that they are not.

        Raises: OverflowError if there would be more ids than pages, so some came twice
        """
        if len(self) + ids.size > self.capacity:
            raise OverflowError(f"{ids.size} ids given to a list with {len(self)}/{self.capacity}")
        start = self.freed % self.capacity if self.capacity else 0
        head = min(ids.size, self.capacity - start)
        self._ring[start : start + head] = ids[:head]
        self._ring[: ids.size - head] = ids[head:]
        self.freed += ids.size

    def peek(self) -> PageIds:
        """All free ids, those that are allocated next first; a copy."""
        return self._window(self.allocated, len(self))

    def _window(self, counter: int, count: int) -> PageIds:
        start = counter % self.capacity if self.capacity else 0
        head = self._ring[start : start + count]
        if head.size == count:
            return head.copy()
        return np.concatenate((head, self._ring[: count - head.size]))


def count_outside(ids: PageIds, pages: int) -> int:
    """How many ids are not in [0, pages)."""
    return int(np.count_nonzero((ids < 0) | (ids >= pages)))


def count_repeated(ids: PageIds, scratch: PageIds) -> int:
    """How many ids are followed by the same id; ``scratch`` has an entry per page, content any.

    Writing each id's place and reading it back finds them in linear time, where sorting takes
    ten times as long.
    """
    places = np.arange(ids.size, dtype=np.int32)
    scratch[ids] = places
    return int(np.count_nonzero(scratch[ids] != places))
