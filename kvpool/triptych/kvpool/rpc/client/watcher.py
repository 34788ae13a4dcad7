"""Statistics of a pool for processes that are not workers."""

from triptych.core.errors import PoolUnavailable
from triptych.core.messages import CacheMemoryBorrowed
from triptych.kvpool.pool.stats import PageMap, PoolStats
from triptych.kvpool.rpc import calls, prefix_calls
from triptych.kvpool.rpc.auth import Access
from triptych.kvpool.rpc.channel import FrameChannel
from triptych.kvpool.rpc.stub import PoolStub


class PoolWatcher:
    """Reads statistics of a pool from a process that is not a worker."""

    def __init__(self, address: str, timeout_s: float = 2.0, access: Access | None = None) -> None:
        """``access``: what to show to a pool of another node."""
        self._remote = PoolStub(FrameChannel(address, access), timeout_s)

    def stat(self) -> PoolStats | None:
        """Statistics; None if the pool does not answer."""
        try:
            return self._remote.call(calls.StatPool())
        except PoolUnavailable:
            return None

    def map(self, max_entries: int) -> PageMap | None:
        """The map of pages; None if the pool does not answer."""
        try:
            return self._remote.call(calls.MapPages(max_entries=max_entries))
        except PoolUnavailable:
            return None

    def expel(self, worker: str) -> None:
        """Have the pool reclaim all pages of a dead worker.

        Raises: PoolUnavailable
        """
        self._remote.call(calls.ExpelWorker(name=worker))

    def borrow_cache_memory(self, nbytes: int) -> CacheMemoryBorrowed:
        """Set how many bytes of the prefix cache requests may use, in all.

        Raises: PoolUnavailable
        """
        return self._remote.call(prefix_calls.SetBorrowedMemory(nbytes=nbytes))

    def close(self) -> None:
        self._remote.close()
