"""What compression may cost at most, with the real model: KL, agreement and bytes."""

from collections.abc import Mapping

import pytest

from triptych.workers.quality.report import Row
from triptych.workers.quality.study import Results, Study, measure, prepare, report

PAPER = "diffkv+alpha_high=1+recent_window_tokens=64+basis=plain"
K8V8, K8V4, K4V4 = (
    f"uniform:{name}+recent_window_tokens=16"  # whatever window the default has
    for name in ("k8v8+basis=plain", "k8v4+basis=plain", "k4v4")
)


def run(**options: object) -> Results:
    prepared = prepare(Study(model="smollm2-135m-instruct", greedy_tokens=0, **options))
    return report(prepared, measure(prepared, lambda _n, _c: None, lambda _n, _c: None))


@pytest.fixture(scope="module")
def rows() -> Mapping[str, Row]:
    results = run(
        methods=(
            "default",
            PAPER,
            K8V8,
            K8V4,
            K4V4,
            "simulated:k4v1",
            "simulated:k4v4:2:2",
            "mean_attention+keep=0.5",
            "moments+keep=0.3",
        ),
        contexts=(1024,),
        documents=3,
        tasks=(),
    )
    return {row.method: row for row in results.rows}


def test_the_default_is_small_and_near_the_full_cache(rows: Mapping[str, Row]) -> None:
    row = rows["default"]
    assert row.bytes_all_in_ratio <= 0.32
    assert row.summary.kl <= 0.01
    assert row.summary.top1_agreement >= 0.95
    assert row.summary.perplexity_ratio <= 1.02


@pytest.mark.parametrize(
    ("method", "kl", "top1", "data"),
    [
        (K8V8, 1e-4, 0.995, 0.56),
        (K8V4, 0.002, 0.985, 0.46),
        (K4V4, 0.009, 0.95, 0.35),
        (PAPER, 0.007, 0.96, 0.40),
        ("simulated:k4v4:2:2", 0.0098, 0.95, 0.37),
        ("mean_attention+keep=0.5", 0.026, 0.93, 0.51),
        ("moments+keep=0.3", 0.0231, 0.92, 0.45),
    ],
)
def test_each_method_keeps_within_its_bounds(
    rows: Mapping[str, Row], method: str, kl: float, top1: float, data: float
) -> None:
    row = rows[method]
    assert row.summary.kl <= kl
    assert row.summary.top1_agreement >= top1
    assert row.bytes_data_ratio <= data


def test_the_harness_sees_damage(rows: Mapping[str, Row]) -> None:
    """One bit a value destroys the model; a harness that did not show it would be broken."""
    assert rows["simulated:k4v1"].summary.kl >= 0.3


def test_a_passkey_is_found_when_the_question_comes_later() -> None:
    """Tokens went low before anybody asked."""
    results = run(
        methods=("default",),
        contexts=(256,),
        documents=1,
        steps=2,
        tasks=("passkey",),
        task_context=750,
        task_count=6,
    )
    for row in results.tasks:
        assert row.full_score >= 0.8
        assert row.score >= row.full_score - 0.2
