"""A worker's record of its pages: idle, allocated, or in a request's lease."""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from triptych.core.errors import NotHeld
from triptych.core.handles import LeaseId
from triptych.kvpool.pool.free_list import FreeList, PageIds, count_outside, count_repeated

_ELSEWHERE, _IDLE, _TAKEN = 0, -1, -2
"""State of a page; a positive number is the lease that it was last in."""


class PageCache:
    """The pages of a worker's extent, allocated and freed without a call to the pool.

    Every step is a few array operations, so thousands of pages cost microseconds. A page that
    is freed twice, or was never allocated, is found here, before it can be allocated twice.
    """

    def __init__(self, worker: str, pages: int) -> None:
        self._worker = worker
        self._idle = FreeList(pages, full=False)
        self._where: NDArray[np.int64] = np.full(pages, _ELSEWHERE, np.int64)
        self._scratch: PageIds = np.empty(pages, np.int32)
        self._attached = dict[LeaseId, PageIds]()

    def __len__(self) -> int:
        """The number of idle pages."""
        return len(self._idle)

    @property
    def allocated(self) -> int:
        """The number of allocated pages."""
        return int(np.count_nonzero(self._where == _TAKEN))

    def add(self, ids: PageIds) -> None:
        """Add pages that the pool allocated, as idle ones."""
        self._where[ids] = _IDLE
        self._idle.free(ids)

    def allocate(self, count: int) -> PageIds:
        """Allocate idle pages. Raises: PoolExhausted if there are fewer."""
        ids = self._idle.allocate(count)
        self._where[ids] = _TAKEN
        return ids

    def allocate_granted(self, ids: PageIds) -> PageIds:
        """Mark pages from the pool as allocated, without adding them as idle ones first."""
        self._where[ids] = _TAKEN
        return ids

    def free(self, ids: PageIds) -> None:
        """Mark allocated pages as idle.

        Raises: NotHeld if one was not, or comes twice; nothing changes
        """
        self._require_taken(ids)
        self._where[ids] = _IDLE
        self._idle.free(ids)

    def give_back(self, ids: PageIds) -> None:
        """Note that allocated pages go to the pool, without being idle here first.

        Raises: NotHeld if one was not allocated, or comes twice; nothing changes
        """
        self._require_taken(ids)
        self._where[ids] = _ELSEWHERE

    def remove(self, count: int) -> PageIds:
        """Remove idle pages, to free them at the pool."""
        ids = self._idle.allocate(count)
        self._where[ids] = _ELSEWHERE
        return ids

    def require_in_use(self, ids: PageIds) -> None:
        """Raise if pages are idle here, or named twice; the pool checks the rest.

        Raises: NotHeld
        """
        self._require_distinct(ids)
        idle = int(np.count_nonzero(self._where[ids] == _IDLE))
        if idle:
            raise NotHeld(self._worker, idle)

    def left(self, ids: PageIds) -> None:
        """Note that allocated pages now have another owner."""
        self._where[ids] = _ELSEWHERE

    def committed(self, lease: LeaseId, ids: PageIds) -> None:
        """Note that pages are in a new lease."""
        self._where[ids] = lease

    def attached(self, lease: LeaseId, ids: PageIds) -> None:
        """Note that this worker has attached a lease."""
        self._where[ids] = lease
        self._attached[lease] = ids

    def released(self, leases: Sequence[LeaseId], *, keep: bool) -> None:
        """Note that leases ended; ``keep``: the pages left in them are allocated here."""
        for lease in leases:
            ids = self._attached.pop(lease, None)
            if ids is None:  # committed here and never attached by anybody: rare
                ids = np.flatnonzero(self._where == lease)
            left = ids[self._where[ids] == lease]
            self._where[left] = _TAKEN if keep else _ELSEWHERE

    def _require_taken(self, ids: PageIds) -> None:
        self._require_distinct(ids)
        wrong = int(np.count_nonzero(self._where[ids] != _TAKEN))
        if wrong:
            raise NotHeld(self._worker, wrong)

    def _require_distinct(self, ids: PageIds) -> None:
        wrong = count_outside(ids, self._where.size) or count_repeated(ids, self._scratch)
        if wrong:
            raise NotHeld(self._worker, wrong)
