"""Links between machines in virtual time: their time, and what an adaptive router chooses."""

from dataclasses import replace

import pytest

from tests.unit.simulator.test_simulator import COSTS
from triptych.core.config import AppConfig
from triptych.core.pages import PagePlan
from triptych.core.profile import Profile
from triptych.simulator import Cluster, Job, Simulation
from triptych.simulator.setup import SMOLLM2
from triptych.workers.models.compression_profile import PACKAGED

PROFILE = Profile.read(PACKAGED / "0f450573a792f80c.json")
CONFIG = AppConfig.from_mapping({"compressor": {"adaptive": True}, "pool": {"prefix_bytes": 0}})
PLAN = PagePlan.of(CONFIG, SMOLLM2, PROFILE)
APART = Cluster(decodes_apart=True, workers_per_node=3, shared_cores=False, capacity_bytes=1 << 30)


def test_pages_take_their_bytes_over_the_speed_of_the_link() -> None:
    job = Job("r", 1000, 20)
    at_once, slow = (
        Simulation(replace(APART, links=links), COSTS).run([[job]]).outcomes[0].last_s
        for links in ((), ((0.0, 2e6),))
    )
    count = APART.stored_pages(1000) * APART.plan.page_bytes
    assert slow - at_once == pytest.approx(count / 2e6, abs=2 * COSTS.hop_s)


def test_the_method_follows_the_speed_of_the_link_and_bytes_follow_the_method() -> None:
    cluster = replace(APART, plan=PLAN, links=((0.0, 1e6), (400.0, 1e9)))
    jobs = [[Job(f"r{n}", 1000, 20, 10.0 * n)] for n in range(60)]
    outcomes = {one.job.id: one for one in Simulation(cluster, COSTS).run(jobs).outcomes}
    methods = [outcomes[f"r{n}"].method for n in range(60)]
    assert {methods[0], *methods[-5:]} <= {"uniform:k8v4", "uniform:k8v8"}
    assert set(methods[5:40]) == {"uniform:k4v2"}
    for name in PLAN.adaptive:
        count = cluster.of_method(name).stored_pages(1024) * PLAN.page_bytes
        ratio = PLAN.fidelity[name][0].bytes_ratio
        assert count / PLAN.raw_bytes(1024) == pytest.approx(ratio, rel=0.1)
