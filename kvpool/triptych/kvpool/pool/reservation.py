"""Reserves the memory of an arena: some before the pool starts, and the rest while it runs."""

import logging
import os
import threading

import numpy as np

from triptych.core.errors import PoolError
from triptych.kvpool.pool.arena import Arena
from triptych.kvpool.pool.page_pool import Pool
from triptych.kvpool.pool.processes import this_process

logger = logging.getLogger(__name__)

RESERVING_WORKER = "arena"
"""The pool's own worker, which has the pages whose memory is not reserved yet."""
AT_ONCE_BYTES = 1 << 30
PIECE_BYTES = 64 << 20
LOWEST_PRIORITY = 19


class LateReservation:
    """A thread that reserves the last pages of an arena, and frees them piece by piece.

    The kernel takes a second for a few GiB; workers connect and load models meanwhile. Until a
    page is reserved it is in the extent of a worker of the pool's own, so nobody can write to it.
    If there is no room for it any more, it stays there.
    """

    def __init__(self, pool: Pool, lock: threading.Lock, arena: Arena, first: int) -> None:
        """``first``: the first page that is not reserved."""
        self._pool, self._lock, self._arena, self._first = pool, lock, arena, first
        self._worker = pool.register(RESERVING_WORKER, this_process(), float("inf"))
        pool.free(self._worker, pool.allocate(self._worker, pool.pages)[:first])
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, name="pool-reservation", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        """End the thread; what is not reserved stays so."""
        self._stopping.set()
        if self._thread.is_alive():
            self._thread.join()

    def _run(self) -> None:
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), LOWEST_PRIORITY)
        step = max(1, PIECE_BYTES // self._pool.page_bytes)
        for first in range(self._first, self._pool.pages, step):
            if self._stopping.is_set():
                return
            end = min(first + step, self._pool.pages)
            try:
                self._arena.reserve(first, end)
            except PoolError as error:
                logger.error("%d pages cannot be used: %s", self._pool.pages - first, error)
                return
            with self._lock:
                self._pool.free(self._worker, np.arange(first, end, dtype=np.int32))
        with self._lock:
            self._pool.unregister(self._worker)


def pages_at_once(pages: int, page_bytes: int) -> int:
    """Pages that are reserved before a pool starts."""
    return min(pages, -(-AT_ONCE_BYTES // page_bytes))
