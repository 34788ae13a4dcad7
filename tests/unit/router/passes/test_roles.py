"""Workers of all stages read, write or do both, as the work asks for."""

from collections import Counter
from dataclasses import replace
from random import Random

from hypothesis import given
from hypothesis import strategies as st

from tests.unit.router.driver import Driver, request
from triptych.core.config import RouterConfig
from triptych.core.messages import Cancel, Join, Message, Preempt, Prefill
from triptych.router.passes.roles import CALM_S, DECAY_S, PrefillWork, divide
from triptych.router.snapshot import Role, WorkerLoad
from triptych.simulator import Cluster, Costs, Job, Simulation, Trial
from triptych.simulator.setup import Chain

loads = st.builds(
    WorkerLoad,
    name=st.just(""),
    address=st.just(""),
    arena=st.sampled_from("ab"),
    stages=st.just(("prefill", "decode")),
    is_full=st.just(False),
    running=st.integers(0, 9),
    role=st.sampled_from(["both", "prefill", "decode"]),
)
fleets = st.lists(loads, min_size=1, max_size=9).map(
    lambda membership: [
        replace(load, name=f"w{number}", address=f"w{number}")
        for number, load in enumerate(membership)
    ]
)


@given(workers=fleets, wanted=st.floats(0, 12))
def test_as_many_read_as_are_wanted_and_each_arena_keeps_one_that_writes(
    workers: list[WorkerLoad], wanted: float
) -> None:
    roles = divide(workers, wanted)
    count = Counter(roles.values())
    assert roles.keys() == {worker.address for worker in workers}
    most = len(workers) - len({worker.arena for worker in workers})
    assert count["prefill"] == min(int(wanted), most)
    assert count["prefill"] + count["both"] == min(len(workers), max(1, -int(-wanted // 1)))
    for arena in {worker.arena for worker in workers}:
        there = [roles[worker.address] for worker in workers if worker.arena == arena]
        assert set(there) != {"prefill"}


@given(workers=fleets, wanted=st.floats(0, 12))
def test_the_same_work_again_changes_nobody(workers: list[WorkerLoad], wanted: float) -> None:
    roles = divide(workers, wanted)
    settled = [replace(worker, role=roles[worker.address]) for worker in workers]
    again = divide(settled, wanted)
    assert {one for one, role in again.items() if role == "prefill"} == {
        one for one, role in roles.items() if role == "prefill"
    }


def test_those_begin_to_read_that_write_least() -> None:
    def load(name: str, running: int, role: Role = "decode") -> WorkerLoad:
        return WorkerLoad(name, name, "a", ("prefill", "decode"), False, running=running, role=role)

    membership = [load("x", 5, "prefill"), load("y", 3), load("z", 0)]
    assert divide(membership, 2.0) == {"x": "prefill", "z": "prefill", "y": "decode"}


def test_work_at_a_steady_rate_is_measured_as_it_is() -> None:
    work = PrefillWork()
    for step in range(2000):  # 0.3 s of reading, five times a second
        work.note(0.3, step / 5)
    assert 1.4 < work.at(400.0) < 1.55
    assert work.at(400.0 + 5 * DECAY_S) < 0.02


def run(roles: str, workers: int = 4, **cluster: object) -> tuple[Trial, list[tuple[str, Message]]]:
    """Two minutes of prompts and answers, at a third of what four workers can do."""
    router = RouterConfig(max_queued_requests=10_000, roles=roles)  # pyright: ignore[reportArgumentType]
    base = Cluster(
        prefill=0, compress=0, decode=0, colocated=workers, shared_cores=False, router=router
    )
    simulation = Simulation(replace(base, **cluster), Costs())  # pyright: ignore[reportArgumentType]
    sent = list[tuple[str, Message]]()
    for worker in simulation._workers.values():

        def note(messages, post=worker.post, address=worker.address):  # type: ignore[no-untyped-def]
            sent.extend((address, message) for message in messages)
            post(messages)

        worker.post = note  # type: ignore[method-assign]
    draw, now, sessions = Random(0), 0.0, list[Chain]()
    for number in range(240):
        sessions.append((Job(f"r{number}", draw.randint(300, 700), draw.randint(40, 80), now),))
        now += draw.expovariate(2.0)
    return simulation.run(sessions), sent


def longest_gap_s(trial: Trial, share: float) -> float:
    """The gap between tokens that a share of them does not exceed."""
    left = share * trial.gaps.total()
    for gap, count in sorted(trial.gaps.items()):
        left -= count
        if left <= 0:
            return gap
    raise AssertionError("no gaps")


def test_answers_wait_less_for_the_prompts_of_others() -> None:
    (both, _), (switched, sent) = run("both"), run("dynamic")
    for trial in (both, switched):
        assert all(one.is_done for one in trial.outcomes)
    assert "role_changes" not in both.counters
    assert switched.counters["role_changes"] > 0
    assert longest_gap_s(switched, 0.98) < 0.7 * longest_gap_s(both, 0.98)
    moved = [message for _, message in sent if isinstance(message, Preempt)]
    assert len(moved) >= switched.counters["suspended"] > 0
    reads = Counter(at for at, message in sent if isinstance(message, Prefill))
    writes = Counter(at for at, message in sent if isinstance(message, Join))
    assert len(reads) == len(writes) == 4, "roles go to whoever is free, not for ever"


def test_while_a_line_waits_everybody_does_both() -> None:
    """No worker can be spared, so none only reads; ten calm seconds later some do again."""
    driver = Driver("A", "B", "F", slots=1, roles="dynamic")
    driver.tick(0.5)
    assert roles_of(driver) == ["both", "decode", "decode"]
    for number in range(4):
        driver.submit(request(f"r{number}"))
    driver.tick(0.5)
    assert driver.router.snapshot(driver.now).blocked_reason == "no_decode_slot"
    assert roles_of(driver) == ["both", "both", "both"]
    driver.on(Cancel(requests=tuple(f"r{number}" for number in range(4))), "in")
    driver.tick(CALM_S - 1)
    assert roles_of(driver) == ["both", "both", "both"]
    driver.tick(1.0)
    assert "decode" in roles_of(driver)


def roles_of(driver: Driver) -> list[str]:
    return sorted(load.role for load in driver.router.snapshot(driver.now).workers)


def test_two_machines_keep_a_writer_each() -> None:
    trial, _ = run("dynamic", workers_per_node=2)
    assert all(one.is_done for one in trial.outcomes)
    assert trial.counters["role_changes"] > 0


def test_one_worker_goes_on_doing_both() -> None:
    (both, _), (switched, _) = run("both", workers=1), run("dynamic", workers=1)
    assert both.outcomes == switched.outcomes
