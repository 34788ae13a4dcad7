"""What methods cost on the real model, measured once for the tests of a module."""

import signal
from collections.abc import Mapping

import pytest

from triptych.evals.studies.report import Row
from triptych.evals.studies.study import Results, Study, measure, prepare, report

STALLED_S = 900
"""A case takes seconds; where others use the cores, minutes."""

by_progress = pytest.mark.timeout(0)
"""For tests that ``run``: it has a time limit for each case, so the test has none."""


def run(**options: object) -> Results:
    """Raises: TimeoutError if a case takes longer than ``STALLED_S``"""

    def stop(_number: int, _frame: object) -> None:
        raise TimeoutError(f"no case was done in {STALLED_S} s")

    def advance(_name: str, _cases: int) -> None:
        signal.alarm(STALLED_S)

    before = signal.signal(signal.SIGALRM, stop)
    signal.alarm(STALLED_S)
    try:
        prepared = prepare(Study(model="smollm2-135m-instruct", greedy_tokens=0, **options))
        return report(prepared, measure(prepared, advance, advance))
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)


def rows_of(*methods: str, steps: int = 128) -> Mapping[str, Row]:
    """By method, over so many tokens behind two texts of 1,024 tokens: prose and code."""
    results = run(methods=methods, contexts=(1024,), documents=2, steps=steps, tasks=())
    return {row.method: row for row in results.rows}


def assert_within(row: Row, *, kl: float, top1: float, data: float) -> None:
    assert row.summary.kl <= kl
    assert row.summary.top1_agreement >= top1
    assert row.bytes_data_ratio <= data
