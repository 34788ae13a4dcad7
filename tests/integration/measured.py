"""What methods cost on the real model, measured once for the tests of a module."""

from collections.abc import Mapping

from triptych.evals.studies.report import Row
from triptych.evals.studies.study import Results, Study, measure, prepare, report


def run(**options: object) -> Results:
    prepared = prepare(Study(model="smollm2-135m-instruct", greedy_tokens=0, **options))
    return report(prepared, measure(prepared, lambda _n, _c: None, lambda _n, _c: None))


def rows_of(*methods: str) -> Mapping[str, Row]:
    """By method, over two texts of 1,024 tokens: prose and code."""
    results = run(methods=methods, contexts=(1024,), documents=2, tasks=())
    return {row.method: row for row in results.rows}


def assert_within(row: Row, *, kl: float, top1: float, data: float) -> None:
    assert row.summary.kl <= kl
    assert row.summary.top1_agreement >= top1
    assert row.bytes_data_ratio <= data
