"""Thresholds of each head row: fewest bytes at the error of one threshold for all."""

from itertools import product
from pathlib import Path

import numpy as np
import pytest
import torch

from triptych.core.profile import Profile, Settings
from triptych.evals.studies.alpha_scales import (
    SCALES,
    ScaleCosts,
    ScalesPlan,
    Unit,
    cheapest_scales,
    fit_alpha_scales,
)
from triptych.workers.models.facts import describe

EVEN = SCALES.index(1.0)


def random_costs(seed: int, units: int) -> ScaleCosts:
    """Errors that rise with the scale, sizes that fall; convex in neither."""
    generator = np.random.default_rng(seed)
    rising = generator.exponential(1.0, (units, len(SCALES))).cumsum(1)
    falling = generator.exponential(1.0, (units, len(SCALES)))[:, ::-1].cumsum(1)[:, ::-1]
    return ScaleCosts(torch.from_numpy(rising), torch.from_numpy(falling.copy()))


@pytest.mark.parametrize("seed", range(20))
def test_scales_take_no_more_bytes_at_no_more_error(seed: int) -> None:
    costs = random_costs(seed, units=40)
    at = torch.tensor(cheapest_scales(costs))[:, None]
    assert costs.errors.gather(1, at).sum() <= costs.errors[:, EVEN].sum()
    assert costs.sizes.gather(1, at).sum() <= costs.sizes[:, EVEN].sum()


@pytest.mark.parametrize("seed", range(5))
def test_no_choice_of_as_little_error_on_the_hull_takes_fewer_bytes(seed: int) -> None:
    """All choices of three units: the found one has the fewest bytes for its error."""
    costs = random_costs(seed, units=3)
    found = cheapest_scales(costs)

    def total(part: torch.Tensor, chosen: tuple[int, ...]) -> float:
        return sum(float(part[unit, index]) for unit, index in enumerate(chosen))

    mine = total(costs.errors, tuple(found)), total(costs.sizes, tuple(found))
    for chosen in product(range(len(SCALES)), repeat=3):
        error, size = total(costs.errors, chosen), total(costs.sizes, chosen)
        assert error > mine[0] - 1e-9 or size > mine[1] - 1e-9 or found == [EVEN] * 3


@pytest.mark.parametrize("unit", ["head", "layer"])
def test_a_model_gets_a_scale_for_each_head_row(tiny_model: Path, unit: Unit) -> None:
    facts = describe(tiny_model)
    profile = Profile(
        model="tiny",
        weights=facts.weights,
        geometry=facts.geometry,
        settings=Settings(policy="diffkv", alpha_high=1.0),
    )
    calls = list[None]()
    plan = ScalesPlan(unit=unit, context=200, documents=2, steps=16)
    found = fit_alpha_scales(str(tiny_model), profile, plan, lambda: calls.append(None))
    assert len(calls) == 2
    assert len(found) == facts.geometry.head_rows
    assert set(found) <= set(SCALES)
    if unit == "layer":
        each = facts.geometry.kv_heads
        assert all(len(set(found[at : at + each])) == 1 for at in range(0, len(found), each))
