"""What formats without pages, eviction and selection may cost at most, with the real model."""

from collections.abc import Mapping

import pytest

from tests.integration.measured import assert_within, by_progress, rows_of
from triptych.evals.studies.report import Row

pytestmark = by_progress

BOUNDS = {
    "simulated:k4v4:2:2": {"kl": 0.0098, "top1": 0.95, "data": 0.37},
    "mean_attention+keep=0.5": {"kl": 0.026, "top1": 0.93, "data": 0.51},
    "moments+keep=0.3": {"kl": 0.0231, "top1": 0.92, "data": 0.45},
}
OFTEN = "moments+keep=0.3"
"""``make test`` measures it, and ``make conformance`` the others."""
OTHERS = [method for method in BOUNDS if method != OFTEN]
DESTROYED = "simulated:k4v1"


@pytest.fixture(scope="module")
def rows() -> Mapping[str, Row]:
    return rows_of(OFTEN, DESTROYED, steps=64)


def test_pages_that_are_selected_keep_within_their_bounds(rows: Mapping[str, Row]) -> None:
    assert_within(rows[OFTEN], **BOUNDS[OFTEN])


def test_the_harness_sees_damage(rows: Mapping[str, Row]) -> None:
    """One bit a value destroys the model; a harness that did not show it would be broken."""
    assert rows[DESTROYED].summary.kl >= 0.3


@pytest.fixture(scope="module")
def other_rows() -> Mapping[str, Row]:
    return rows_of(*OTHERS)


@pytest.mark.conformance
@pytest.mark.parametrize("method", OTHERS)
def test_each_baseline_keeps_within_its_bounds(other_rows: Mapping[str, Row], method: str) -> None:
    assert_within(other_rows[method], **BOUNDS[method])
