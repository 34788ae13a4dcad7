"""What formats without pages, eviction and selection may cost at most, with the real model."""

from collections.abc import Mapping

import pytest

from tests.integration.measured import assert_within, rows_of
from triptych.evals.studies.report import Row

BOUNDS = {
    "simulated:k4v4:2:2": {"kl": 0.0098, "top1": 0.95, "data": 0.37},
    "mean_attention+keep=0.5": {"kl": 0.026, "top1": 0.93, "data": 0.51},
    "moments+keep=0.3": {"kl": 0.0231, "top1": 0.92, "data": 0.45},
}
DESTROYED = "simulated:k4v1"


@pytest.fixture(scope="module")
def rows() -> Mapping[str, Row]:
    return rows_of(*BOUNDS, DESTROYED)


@pytest.mark.parametrize("method", BOUNDS)
def test_each_baseline_keeps_within_its_bounds(rows: Mapping[str, Row], method: str) -> None:
    assert_within(rows[method], **BOUNDS[method])


def test_the_harness_sees_damage(rows: Mapping[str, Row]) -> None:
    """One bit a value destroys the model; a harness that did not show it would be broken."""
    assert rows[DESTROYED].summary.kl >= 0.3
