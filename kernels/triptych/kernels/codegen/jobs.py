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
from numba import types
from numba.extending import intrinsic
from numpy.typing import NDArray

from triptych.core.errors import ConfigError
from triptych.kernels.codegen.kernel_cache import EntryPoint
from triptych.kernels.codegen.numba_runtime import kernel, team_address, team_threads


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
    """Jobs that run one after another in one call."""

    def __init__(self, jobs: Sequence[Job]) -> None:
        self._jobs = jobs
        calls = [(job.start, job.words.ctypes.data, job.body) for job in jobs]
        self._calls = np.array(calls, np.int64).reshape(-1, 3)

    def run(self) -> None:
        """Raises: ConfigError at the first call that fails; the others are not made"""
        failed = _run_jobs(self._calls, team_address(), team_threads())
        if failed >= 0:
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
    """Index of the first job that failed; -1: none did."""
    for index in range(len(calls)):
        if _call_start(calls[index, 0], calls[index, 1], calls[index, 2], team, threads):
            return index
    return -1
