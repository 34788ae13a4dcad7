"""How the busy stages of one machine share its cores.

Prefill and decode of a small machine run on the same cores. If each used all of them at the
same time, their OpenMP threads would wait for each other's time slices (10x slower and more);
if each had a fixed half, one core would idle whenever only one of them works. So every worker
marks itself busy in a page of shared memory for the length of a step, and takes
``cores // busy workers`` threads for the next one.
"""

import fcntl
import mmap
import os
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import psutil
import torch

Board = np.ndarray[tuple[int, int], np.dtype[np.int64]]
"""Process ids, then busy marks, of all workers of the machine."""

SLOTS = 256
CHECK_EVERY_STEPS = 64


class FixedCores:
    """Every step takes the same number of threads."""

    def __init__(self, threads: int) -> None:
        set_threads(threads)

    @contextmanager
    def busy(self) -> Generator[None]:
        yield


class SharedCores:
    """Every step takes this worker's share of the machine's cores.

    ``board`` is a file that all workers of the machine map: one process id per worker, then
    one busy mark per worker. A worker that was killed while busy is struck off by the next
    one that looks.
    """

    def __init__(self, board: Path, cores: int | None = None) -> None:
        self._cores = cores or len(os.sched_getaffinity(0))
        self._marks = _open_board(board)
        self._slot = _claim_slot(board, self._marks)
        self._threads = 0
        self._steps = 0

    @contextmanager
    def busy(self) -> Generator[None]:
        """Mark this worker busy, and set its threads, for the length of a step."""
        self._marks[1, self._slot] = 1
        try:
            self._take_share()
            yield
        finally:
            self._marks[1, self._slot] = 0

    def close(self) -> None:
        self._marks[:, self._slot] = 0

    def _take_share(self) -> None:
        self._steps += 1
        busy = int(self._marks[1].sum())
        if busy > 1 and self._steps % CHECK_EVERY_STEPS == 0:
            _strike_off_dead(self._marks)
            busy = int(self._marks[1].sum())
        threads = max(1, self._cores // max(busy, 1))
        if threads != self._threads:
            set_threads(threads)
            self._threads = threads


Cores = FixedCores | SharedCores


def set_threads(count: int) -> None:
    """Threads of the next matrix products and kernels of this process: they share one pool."""
    torch.set_num_threads(count)


def _open_board(path: Path) -> Board:
    size = 2 * SLOTS * 8
    handle = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
    try:
        if os.fstat(handle).st_size < size:
            os.ftruncate(handle, size)
        memory = mmap.mmap(handle, size)
    finally:
        os.close(handle)
    return np.frombuffer(memory, np.int64).reshape(2, SLOTS)


def _claim_slot(path: Path, marks: Board) -> int:
    with path.open("r+b") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        _strike_off_dead(marks)
        slot = int(np.argmin(marks[0] != 0))
        marks[0, slot] = os.getpid()
    return slot


def _strike_off_dead(marks: Board) -> None:
    for slot in np.flatnonzero(marks[0]):
        if not psutil.pid_exists(int(marks[0, slot])):
            marks[:, slot] = 0
