# pyright: basic
# numba is untyped.
"""Programs: rows of jobs in one call."""

import numpy as np
import pytest
import torch
from numba import carray

from triptych.core.errors import ConfigError
from triptych.kernels.codegen.jobs import Job, Program, job_start
from triptych.kernels.codegen.numba_runtime import pointer

NUMBER, FACTOR, IS_WRONG, TARGET = range(4)


@job_start
def _multiply(words, body, team, threads):
    """The number at an address becomes itself times a factor."""
    job = carray(pointer(words), 4, np.int64)
    target = carray(pointer(job[TARGET]), 1, np.int64)
    target[0] *= job[FACTOR]
    return job[IS_WRONG]


def job(target: np.ndarray, factor: int, *, is_wrong: bool = False) -> Job:
    words = np.array([0, factor, is_wrong, target.ctypes.data], np.int64)
    return Job(f"times {factor}", _multiply.address, words, 0, (target,), "a wrong factor")


@pytest.mark.parametrize("threads", [1, 2, 5])
@pytest.mark.parametrize("rows", [1, 2, 3])
def test_each_row_runs_all_of_its_jobs(rows: int, threads: int) -> None:
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        numbers = [np.array([start + 1], np.int64) for start in range(rows)]
        program = Program(*([job(one, 2), job(one, 3), job(one, 5)] for one in numbers))
        program.run()
        program.run()
    finally:
        torch.set_num_threads(before)
    assert [one[0] for one in numbers] == [900 * (start + 1) for start in range(rows)]


@pytest.mark.parametrize("rows", [1, 2, 3])
def test_a_job_that_fails_is_named_and_ends_its_row_alone(rows: int) -> None:
    numbers = [np.ones(1, np.int64) for _ in range(rows)]
    last = numbers[-1]
    program = Program(
        *([job(one, 2), job(one, 3, is_wrong=one is last), job(one, 5)] for one in numbers)
    )
    with pytest.raises(ConfigError, match="times 3: a wrong factor"):
        program.run()
    assert [one[0] for one in numbers] == [30] * (rows - 1) + [6]
