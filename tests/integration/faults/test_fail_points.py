"""Processes that die at named points while clients wait: one seed; ``__main__`` takes many.

``make test`` tries some points of each role, and ``make conformance`` more.
"""

from pathlib import Path

import pytest

from tests.integration.faults.cluster import Cluster
from tests.integration.faults.points import (
    LOWERING_POINTS,
    PART_POINTS,
    TAKEOVER,
    WHOLE_POINTS,
    Point,
)
from tests.integration.faults.trial import Trial, Trials
from tests.tiny import save_tiny_model


def some_and_others(points: list[Point], first: int, step: int) -> pytest.MarkDecorator:
    """Every ``step``-th point, and for ``make conformance`` those half way between them."""
    others = points[(first + step // 2) % step :: step]
    return pytest.mark.parametrize(
        "points",
        [
            pytest.param(points[first::step], id="some"),
            pytest.param(others, id="others", marks=pytest.mark.conformance),
        ],
    )


@pytest.mark.timeout(600)
@some_and_others(WHOLE_POINTS, 3, 14)
async def test_no_death_loses_a_request_or_a_page(tmp_path: Path, points: list[Point]) -> None:
    async with Cluster(save_tiny_model(tmp_path)) as cluster:
        assert await die_at(cluster, points) == []
        assert set(cluster.deaths) >= {point.role for point in points} - {TAKEOVER}


ON_DEVICES = [
    Point("compress", "before", "commit"),
    Point("decode", "after", "lower"),
    Point("decode", "after", "close a retirement"),
    Point(TAKEOVER, "after", "adopt"),
    Point("pool", "after", "handoff"),
]


@pytest.mark.timeout(600)
async def test_nor_with_pages_on_devices(tmp_path: Path) -> None:
    """All points: ``--devices``."""
    async with Cluster(save_tiny_model(tmp_path), on_devices=True) as cluster:
        assert await die_at(cluster, ON_DEVICES) == []


APART = [
    Point("prefill", "after", "commit"),
    Point("compress", "after", "attach"),
    Point("compress", "before", "commit"),
    Point("compress", "after", "commit"),
    Point("decode", "after", "close a retirement"),
    Point("decode", "after", "publish the answer"),
    Point(TAKEOVER, "after", "adopt"),
]


@pytest.mark.conformance  # half a minute, and the case before has the same stages
@pytest.mark.timeout(600)
async def test_nor_where_devices_do_not_access_each_other(tmp_path: Path) -> None:
    """Raw pages are on the device of prefill and compressor. All points: ``--apart``."""
    async with Cluster(save_tiny_model(tmp_path), are_apart=True) as cluster:
        assert await die_at(cluster, APART) == []
        assert cluster.late_writes["refused"] > 0


@pytest.mark.timeout(600)
@some_and_others(PART_POINTS, 0, 4)
async def test_nor_while_a_prompt_is_encoded_layer_by_layer(
    tmp_path: Path, points: list[Point]
) -> None:
    async with Cluster(save_tiny_model(tmp_path, layers=7), in_parts=True) as cluster:
        assert await die_at(cluster, points) == []
        assert set(cluster.deaths) == {point.role for point in points}


@pytest.mark.timeout(600)
@some_and_others(LOWERING_POINTS, 0, 3)
async def test_nor_while_requests_are_lowered(tmp_path: Path, points: list[Point]) -> None:
    async with Cluster(save_tiny_model(tmp_path), is_lowering=True) as cluster:
        assert await die_at(cluster, points, seeds=4) == []
        assert set(cluster.deaths) == {point.role for point in points}


@pytest.mark.conformance  # it waits until the router counts the worker as lost
@pytest.mark.timeout(120)
async def test_a_frozen_worker_is_ended_and_counted_with_the_reason(tmp_path: Path) -> None:
    async with Cluster(save_tiny_model(tmp_path)) as cluster:
        await cluster.settled()
        cluster.freeze("decode")
        await cluster.until(lambda: bool(cluster.deaths), "the frozen worker is replaced")
        assert list(cluster.deaths) == [
            "decode, ended by the pool: the router counts it as lost, "
            "no report for 8 s, or a step without an end"
        ]
        await cluster.settled()


async def die_at(cluster: Cluster, points: list[Point], seeds: int = 1) -> list[Trial]:
    """What went wrong when a process died at each of some points.

    ``seeds``: how often a point is tried until a process comes to it.
    """
    trials, tried = await Trials.of(cluster), list[tuple[Point, Trial]]()
    for point in points:
        trial = await trials.run(point, seed=0)
        for seed in range(1, seeds):
            wrong = trial.wrong_at_once if point not in LOWERING_POINTS else 0  # at random
            if trial.died or trial.lost or wrong or trial.faults:
                break
            trial = await trials.run(point, seed=seed)
        tried.append((point, trial))
    return [trial for point, trial in tried if not trial.is_good(point)]
