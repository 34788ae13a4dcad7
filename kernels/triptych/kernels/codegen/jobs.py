# pyright: basic, reportCallIssue=false, reportPrivateImportUsage=false
# numba is untyped: it passes the first argument of an intrinsic.
"""Jobs: calls of compiled code whose arguments are words in memory.

A job can be run again, on the same memory. So a row of jobs is one call of compiled code, without
Python between them, as a captured graph is one launch on a GPU.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from llvmlite import ir
from numba import carray, types
from numba.extending import intrinsic
from numpy.typing import NDArray

from triptych.core.errors import ConfigError
from triptych.kernels.codegen.kernel_cache import CalledKernels, EntryPoint
from triptych.kernels.codegen.numba_runtime import (
    fetch_add,
    kernel,
    pointer,
    run_team,
    team_address,
    team_body,
    team_threads,
)

ROW_WORDS = 5
COUNTER, ROWS, JOBS, CALL_WORDS, FAILED = range(ROW_WORDS)
"""Words of a program of several rows; ``CALL_WORDS`` is the address of its calls."""
NOTHING_FAILED = -1


def job_start(function: Callable[..., Any]) -> EntryPoint:
    """The entry point that begins a job, ``start(words, body, team, threads)``, all int64.

    ``words``: address of the job's words; ``body``: what each thread of a team runs. Returns 0, or
    another number if the job is wrong.
    """
    word = types.int64
    return EntryPoint(function, word(word, word, word, word))


@dataclass(frozen=True, slots=True)
class Job:
    """A call of compiled code."""

    op: str
    start: int
    """Address of a ``job_start``."""
    words: NDArray[np.int64]
    body: int
    kept: tuple[object, ...]
    """Tensors whose addresses are among the words."""
    problem: str = ""
    """What is wrong if the call fails."""

    def run(self) -> None:
        """Raises: ConfigError if the call fails"""
        address = self.words.ctypes.data
        if _run_job(self.start, address, self.body, team_address(), team_threads()):
            raise ConfigError(f"{self.op}: {self.problem}")


class Program:
    """Rows of jobs in one call; those of a row run one after another.

    In a single row a team of threads runs each job. Several rows run beside each other, each in
    one thread, so that threads wait for each other once, and not after each job.
    """

    def __init__(self, *rows: Sequence[Job]) -> None:
        """``rows``: equally many jobs each, which use none of the memory of another row."""
        self._jobs = [job for row in rows for job in row]
        calls = [(job.start, job.words.ctypes.data, job.body) for job in self._jobs]
        self._calls = np.array(calls, np.int64).reshape(-1, 3)
        self._rows, jobs = len(rows), len(rows[0])
        self._words = np.array([0, len(rows), jobs, self._calls.ctypes.data, 0], np.int64)

    def run(self) -> None:
        """Raises: ConfigError at a call that fails; later ones of its row are not made"""
        if self._rows == 1:
            failed = _run_jobs(self._calls, team_address(), team_threads())
        else:
            threads = min(self._rows, team_threads())
            failed = _run_rows(self._words, _take_rows.address, team_address(), threads)
        if failed != NOTHING_FAILED:
            job = self._jobs[failed]
            raise ConfigError(f"{job.op}: {job.problem}")


@intrinsic
def _call_start(typing_context, start, words, body, team, threads):
    def emit(context, builder, signature, arguments):
        word = ir.IntType(64)
        kind = ir.FunctionType(word, (word,) * 4)
        target = builder.inttoptr(arguments[0], kind.as_pointer())
        return builder.call(target, arguments[1:])

    word = types.int64
    return word(word, word, word, word, word), emit


@kernel
def _run_job(start, words, body, team, threads):
    return _call_start(start, words, body, team, threads)


@kernel
def _run_jobs(calls, team, threads):
    """Index of the first job that failed, or ``NOTHING_FAILED``."""
    for index in range(len(calls)):
        if _call_start(calls[index, 0], calls[index, 1], calls[index, 2], team, threads):
            return index
    return NOTHING_FAILED


@kernel
def _run_rows(words, body, team, threads):
    """Index of a job that failed, or ``NOTHING_FAILED``."""
    words[COUNTER], words[FAILED] = 0, NOTHING_FAILED
    run_team(team, body, words, threads)
    return words[FAILED]


@team_body
def _take_rows(address):
    """Run rows until none is left."""
    words = carray(pointer(address), ROW_WORDS, np.int64)
    jobs = words[JOBS]
    while True:
        row = fetch_add(address, 1)
        if row >= words[ROWS]:
            break
        calls = carray(pointer(words[CALL_WORDS]), (words[ROWS] * jobs, 3), np.int64)
        for index in range(row * jobs, (row + 1) * jobs):
            if _call_start(calls[index, 0], calls[index, 1], calls[index, 2], 0, 1):
                words[FAILED] = index
                break


_WORD = types.int64
CALLS = CalledKernels(
    (_run_job, (_WORD,) * 5),
    (_run_jobs, (types.int64[:, ::1], _WORD, _WORD)),
    (_run_rows, (types.int64[::1], _WORD, _WORD, _WORD)),
)
"""How Python calls the kernels."""
