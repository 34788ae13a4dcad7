"""Processes that die at named points while clients wait: one seed; ``__main__`` takes many."""

from pathlib import Path

import pytest

from tests.integration.faults.cluster import Cluster
from tests.integration.faults.points import POINTS
from tests.integration.faults.trial import Trials
from tests.tiny import save_tiny_model

CHOSEN = [point for index, point in enumerate(POINTS) if index % 7 == 3]


@pytest.mark.timeout(240)
async def test_no_death_loses_a_request_or_a_page(tmp_path: Path) -> None:
    async with Cluster(save_tiny_model(tmp_path)) as cluster:
        trials = await Trials.of(cluster)
        bad = [
            trial
            for point in CHOSEN
            if not (trial := await trials.run(point, seed=0)).is_good(point)
        ]
        assert bad == []
        assert set(cluster.deaths) >= {point.role for point in CHOSEN} - {"heir"}
