"""A recorded router, replayed: the same decisions, or the first that differs."""

import gzip
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import msgpack
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.effort import examples
from tests.unit.simulator.test_simulator import COSTS, POLICIES, poisson, with_policy
from triptych.core.config import RouterConfig
from triptych.core.errors import ConfigError
from triptych.core.pages import PagePlan
from triptych.router import Timeouts
from triptych.router.replay import RecordingScheduler, replay
from triptych.simulator import Cluster, Simulation

DATA = Path(__file__).parent / "data"


def record(path: Path, cluster: Cluster, count: int = 25) -> None:
    made = list[RecordingScheduler]()

    def make(
        config: RouterConfig, plan: PagePlan, capacity: int, timeouts: Timeouts
    ) -> RecordingScheduler:
        made.append(RecordingScheduler(path, config, plan, capacity, timeouts))
        return made[0]

    simulation = Simulation(cluster, COSTS, make=make)
    simulation.run(poisson(count, 4.0))
    made[0].lost("d0", simulation.clock.now)
    made[0].tick(simulation.clock.now)
    made[0].close()


@pytest.mark.parametrize("policy", POLICIES)
def test_a_recorded_run_is_decided_the_same_again(tmp_path: Path, policy: str) -> None:
    path = tmp_path / "r"
    record(path, with_policy(policy))
    found = replay(path)
    assert found.difference == ""
    assert found.starts == 1
    assert found.calls > 100
    assert found.sent > 50
    assert path.stat().st_mode & 0o077 == 0


def test_a_router_that_began_again_is_followed(tmp_path: Path) -> None:
    path = tmp_path / "r"
    for _ in range(2):
        record(path, Cluster(), 5)
    assert (replay(path).starts, replay(path).difference) == (2, "")


def test_the_first_decision_that_differs_is_told(tmp_path: Path) -> None:
    path = tmp_path / "r"
    record(path, with_policy("fcfs"))
    with path.open("rb") as file:
        records = list(msgpack.Unpacker(file))
    records[0]["config"]["batch_policy"] = "static:p4c4d8"
    path.write_bytes(b"".join(map(msgpack.packb, records)))
    assert "recorded Prefill to p0, replayed nothing" in replay(path).difference


def test_bookings_by_bounds_decide_as_they_did_before_there_were_others(tmp_path: Path) -> None:
    """Inputs of six routers of the last version without forecasts: all policies, several nodes,
    roles. What they send was recorded again when pages of the newest tokens became smaller, and of
    ``dynamic`` when its batch sizes followed memory. Since then only messages have other fields,
    and leave out those that have their default."""
    path = tmp_path / "r"
    path.write_bytes(gzip.decompress((DATA / "decisions_by_bounds.gz").read_bytes()))
    found = replay(path)
    assert (found.starts, found.calls, found.difference) == (6, 2841, "")


@settings(max_examples=examples(60), deadline=None)
@given(data=st.data())
def test_no_file_makes_the_replay_fail_in_another_way(
    tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    path = tmp_path_factory.mktemp("r") / "r"
    record(path, Cluster(), 2)
    content = bytearray(path.read_bytes())
    cut = data.draw(st.integers(0, len(content)))
    content = content[:cut]
    if content:
        content[data.draw(st.integers(0, len(content) - 1))] ^= data.draw(st.integers(1, 255))
    path.write_bytes(content)
    with suppress(ConfigError):
        assert replay(path)


def test_what_is_not_there_or_cannot_be_written_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot be read"):
        replay(tmp_path / "none")
    config = replace(RouterConfig(), record=str(tmp_path / "no" / "r"))
    with pytest.raises(ConfigError, match=r"router\.record"):
        RecordingScheduler(Path(config.record), config, Cluster().plan, 1 << 20)
