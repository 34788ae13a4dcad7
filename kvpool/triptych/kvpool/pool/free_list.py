"""The free list: ids of free pages, those that were freed last in front."""

import numpy as np
from numpy.typing import NDArray

from triptych.core.errors import PoolExhausted

PageIds = NDArray[np.int32]


class FreeList:
    """A stack of page ids.

    Pages that were freed last are allocated first. So the memory that a pool touches grows with the
    pages in use and not with time, and the pages are in caches still. Pages are allocated in the
    order in which they were freed, so a request that had consecutive pages leaves consecutive ones.

    Source: DiffKV and LeanKV have a circular list, which uses each page before it uses one again
    """

    def __init__(self, capacity: int, *, full: bool = True, first: int = 0) -> None:
        """``first``: the smallest id."""
        self._ids: PageIds = np.arange(first, first + capacity, dtype=np.int32)
        """The free ids are the last ones."""
        self._first = 0 if full else capacity
        self.allocated = 0
        """How many were ever allocated."""

    def __len__(self) -> int:
        """How many ids are free."""
        return self._ids.size - self._first

    @property
    def capacity(self) -> int:
        return self._ids.size

    def allocate(self, count: int) -> PageIds:
        """Remove the ``count`` ids in front.

        Shapes:  -> (count,)
        Raises:  PoolExhausted if fewer are free; nothing changes
        """
        if count < 0:
            raise ValueError(f"{count} pages wanted")
        if count > len(self):
            raise PoolExhausted(count, len(self))
        ids = self._ids[self._first : self._first + count].copy()
        self._first += count
        self.allocated += count
        return ids

    def free(self, ids: PageIds) -> None:
        """Put ids in front that are not in the list; the caller knows that they are not.

        Raises: OverflowError if there would be more ids than pages, so some came twice
        """
        if ids.size > self._first:
            raise OverflowError(f"{ids.size} ids given to a list with {len(self)}/{self.capacity}")
        self._ids[self._first - ids.size : self._first] = ids
        self._first -= ids.size

    def peek(self) -> PageIds:
        """All free ids, those that are allocated next first; a copy."""
        return self._ids[self._first :].copy()


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
