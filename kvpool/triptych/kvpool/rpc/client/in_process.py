"""A pool in the process of its workers."""

import math
from pathlib import Path

from triptych.core.messages import CacheMemoryBorrowed
from triptych.kvpool.disk.tier import Disk, DiskSettings
from triptych.kvpool.pool.arena import Arena
from triptych.kvpool.pool.page_pool import Pool
from triptych.kvpool.prefix.cache import PrefixSettings
from triptych.kvpool.rpc import prefix_calls
from triptych.kvpool.rpc.client.worker_pool import WorkerPool
from triptych.kvpool.rpc.local_pool import LockedPool
from triptych.kvpool.rpc.messages import Registered


class LocalPool(WorkerPool):
    """A pool, its memory and one worker in this process, for stages that share it.

    There is no process in between and no page cache: each ``allocate`` goes to the pool.
    """

    def __init__(
        self,
        pages: int,
        page_bytes: int,
        worker: str = "local",
        prefixes: PrefixSettings | None = None,
        disk: DiskSettings | None = None,
        arena_directory: Path | None = None,
    ) -> None:
        """Without ``arena_directory`` the pages are memory of this process.

        Raises: PoolError if a directory cannot be had
        """
        self._memory = (
            Arena.create(pages, page_bytes, arena_directory)
            if arena_directory
            else Arena.private(pages, page_bytes)
        )
        books = Pool(pages, page_bytes, self._memory.id, math.inf)
        self._disk = Disk.open(disk, self._memory.data) if disk and prefixes else None
        self._pool = LockedPool(books, extent_pages=0, prefixes=prefixes, disk=self._disk)
        super().__init__(self._pool, worker, self._arena_of, self._checkpoint_of)

    def join(self, worker: str, checkpoint_bytes: int = 0) -> WorkerPool:
        """Another worker of the same pool."""
        return WorkerPool(self._pool, worker, self._arena_of, self._checkpoint_of, checkpoint_bytes)

    def _arena_of(self, _: Registered) -> Arena:
        return self._memory

    def _checkpoint_of(self, name: str, _: int) -> Arena:
        return self._pool.checkpoint(name)

    def borrow_cache_memory(self, nbytes: int) -> CacheMemoryBorrowed:
        """Set how many bytes of the prefix cache requests may use, in all."""
        return self._pool.call(prefix_calls.SetBorrowedMemory(nbytes=nbytes))

    def check(self) -> list[str]:
        """Contradictions between the pool's tables; empty if there are none."""
        return self._pool.check()

    def close(self) -> None:
        super().close()
        if self._disk:
            self._disk.close()
        self._memory.unlink()
        self._memory.close()
