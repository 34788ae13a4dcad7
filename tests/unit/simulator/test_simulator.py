"""The server in virtual time: times by hand, promises of the router, and fitted costs."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from random import Random
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.effort import examples
from triptych.core.config import RouterConfig
from triptych.core.errors import ConfigError
from triptych.core.messages import Compress, Join, Message, Prefill
from triptych.simulator import Cluster, Costs, Job, Simulation, Trial
from triptych.simulator.capacity import saturation_rate
from triptych.simulator.fit import Observation, fit, predict, summary_of
from triptych.simulator.setup import Chain, split_of
from triptych.simulator.worker import SimulatedWorker

COSTS = Costs()
POLICIES = ["greedy_by_memory", "dynamic", "fcfs", "static:p2c2d4"]


def poisson(count: int, rate: float, seed: int = 0, longest: int = 600) -> list[Chain]:
    draw, now, chains = Random(seed), 0.0, list[Chain]()
    for number in range(count):
        prompt, output = draw.randint(1, longest), draw.randint(1, 40)
        chains.append((Job(f"r{number}", prompt, output, now),))
        now += draw.expovariate(rate)
    return chains


def with_policy(name: str, cluster: Cluster | None = None) -> Cluster:
    router = RouterConfig(batch_policy=name, max_queued_requests=10_000)
    return replace(cluster or Cluster(), router=router)


class Watched(Simulation):
    """Keeps what the router sent, and looks at its books after each decision."""

    def __init__(self, cluster: Cluster, costs: Costs = COSTS) -> None:
        self.sent = list[tuple[float, str, Message]]()
        self.capacity = cluster.capacity_bytes
        super().__init__(cluster, costs)
        for worker in self._workers.values():
            self.listen(worker)

    def listen(self, worker: SimulatedWorker) -> None:
        post = worker.post

        def note(messages: Sequence[Message]) -> None:
            self.sent += [(self.clock.now, worker.address, message) for message in messages]
            post(messages)

        worker.post = note  # type: ignore[method-assign]

    def _decide(self, messages: Sequence[Message], sender: str, shard: str) -> None:
        super()._decide(messages, sender, shard)
        now = self.clock.now
        snapshot = self._schedulers[shard].snapshot(now)
        assert all(0 <= booked <= self.capacity for booked in snapshot.booked_bytes.values())
        waiting = snapshot.requests["waiting"]
        assert bool(waiting) == bool(snapshot.blocked_reason)
        if snapshot.blocked_reason == "prefill_busy":  # nobody idles while somebody could be read
            readers = [load for load in snapshot.workers if "prefill" in load.stages]
            assert all(load.prefill_tokens or load.is_full for load in readers)
        if snapshot.blocked_reason == "no_decode_slot":
            free = sum(load.free_slots for load in snapshot.workers)
            states = ("prefilling", "prefilled", "compressing", "planned")
            assert free <= sum(snapshot.requests[state] for state in states)


def test_a_lone_request_takes_what_its_parts_take() -> None:
    trial = Simulation(Cluster(), COSTS).run([(Job("r", 300, 11, 1.0),)])
    (one,) = trial.outcomes
    prefill_s = COSTS.prefill_step_s + 300 * COSTS.prefill_token_s
    prefill_s += 300 * 150 * COSTS.prefill_pair_s
    assert one.due_s == 1.0
    first_s = COSTS.arrive_s + COSTS.hop_s + prefill_s + COSTS.reply_s
    assert one.first_s - one.due_s == pytest.approx(first_s)
    compress_s = COSTS.compress_step_s + 300 * COSTS.compress_token_s
    hops_s = 6 * COSTS.hop_s  # prefilled, compress, planned, encode, compressed, join
    steps_s = sum(
        COSTS.decode_step_s + COSTS.decode_request_s + (300 + step) * COSTS.decode_token_s
        for step in range(10)
    )
    assert one.last_s - one.first_s == pytest.approx(compress_s + hops_s + steps_s)
    assert trial.busy_s["decode"] == pytest.approx(steps_s)


def test_an_answer_of_one_token_ends_with_the_prefill() -> None:
    (one,) = Simulation(Cluster(), COSTS).run([(Job("r", 10, 1),)]).outcomes
    assert one.is_done
    assert one.first_s == one.last_s


def test_on_shared_cores_one_worker_computes_at_a_time() -> None:
    sessions = poisson(40, 5.0)
    shared = Simulation(Cluster(), COSTS).run(sessions)
    own = Simulation(Cluster(shared_cores=False), COSTS).run(sessions)
    assert sum(shared.busy_s.values()) <= shared.duration_s
    assert sum(own.busy_s.values()) > own.duration_s
    assert own.duration_s < shared.duration_s


@pytest.mark.parametrize("policy", POLICIES)
@settings(max_examples=examples(10), deadline=None)
@given(
    seed=st.integers(0, 999),
    rate=st.sampled_from([0.5, 4.0, 50.0]),
    nodes=st.booleans(),
    keeps_raw=st.booleans(),
)
def test_books_hold_and_nobody_is_left_waiting_for_nothing(
    policy: str, seed: int, rate: float, nodes: bool, keeps_raw: bool
) -> None:
    cluster = Cluster(
        prefill=2, compress=1, decode=2, workers_per_node=2 if nodes else 0,
        shared_cores=False, capacity_bytes=40 << 20, max_batch_requests=4,
    )  # fmt: skip
    cluster = replace(cluster, plan=replace(cluster.plan, keeps_raw=keeps_raw))
    trial = Watched(with_policy(policy, cluster)).run(poisson(30, rate, seed))
    assert [one.error for one in trial.outcomes] == [""] * 30
    assert trial.counters["finished"] == 30


def test_raw_pages_that_stay_until_the_end_are_held_beside_the_compressed_ones() -> None:
    """A request alone, long enough that nearly every sample of memory is one of its decode."""
    cluster, held = Cluster(), dict[bool, float]()
    for keeps_raw in (False, True):
        plan = replace(cluster.plan, keeps_raw=keeps_raw)
        trial = Simulation(replace(cluster, plan=plan), COSTS).run([(Job("r", 1024, 2000),)])
        assert [one.error for one in trial.outcomes] == [""]
        held[keeps_raw] = trial.mean_held_bytes
    raw = cluster.plan.raw_bytes(1024)
    assert 0.85 * raw < held[True] - held[False] <= raw


@pytest.mark.parametrize("policy", POLICIES)
def test_the_same_run_has_the_same_decisions(policy: str) -> None:
    def run() -> tuple[list[tuple[float, str, Message]], Trial]:
        simulation = Watched(with_policy(policy, Cluster(max_batch_requests=4)))
        return simulation.sent, simulation.run(poisson(40, 3.0))

    (first, one), (second, other) = run(), run()
    assert first == second
    assert one.outcomes == other.outcomes


def test_a_static_schedule_keeps_its_sizes_while_the_line_is_long() -> None:
    simulation = Watched(with_policy("static:p3c2d6", Cluster(max_batch_requests=6)))
    simulation.run([(Job(f"r{n}", 50, 20, 0.0),) for n in range(36)])
    prefills = [len(m.requests) for _, _, m in simulation.sent if isinstance(m, Prefill)]
    compresses = [len(m.items) for _, _, m in simulation.sent if isinstance(m, Compress)]
    joins = [at for at, _, m in simulation.sent if isinstance(m, Join)]
    assert prefills == [3] * 12
    assert set(compresses) <= {1, 2}
    assert compresses.count(2) > 8
    assert [joins.count(at) for at in sorted(set(joins))] == [6] * 6


def test_a_static_batch_that_is_not_full_goes_after_its_wait() -> None:
    trial = Watched(with_policy("static:p4c4d8")).run([(Job("r", 10, 5, 0.1),)])
    (one,) = trial.outcomes
    # One wait before each of three stages, each noticed at the next tick.
    assert 1.5 < one.last_s - one.due_s < 1.5 + 3 * 0.25 + 0.5


def test_at_a_low_rate_the_dynamic_schedule_waits_for_nobody() -> None:
    sessions = poisson(20, 0.2)
    plain, dynamic = (
        summary_of(Simulation(with_policy(name), COSTS).run(sessions))
        for name in ("fcfs", "dynamic")
    )
    assert dynamic["mean_ttft_s"] <= 1.1 * plain["mean_ttft_s"]


def test_what_cannot_fit_and_what_is_too_much_is_refused_and_the_run_ends() -> None:
    small = replace(Cluster(capacity_bytes=8 << 20), router=RouterConfig(max_queued_requests=1))
    jobs = [(Job("huge", 4000, 9),), *((Job(f"r{n}", 100, 9, 0.01),) for n in range(20))]
    trial = Simulation(small, COSTS).run(jobs)
    errors = {one.job.id: one.error for one in trial.outcomes}
    assert errors["huge"] == "context_length_exceeded"
    assert "rate_limit_exceeded" in errors.values()
    assert len(errors) == 21


def in_shards(count: int, **router: Any) -> Cluster:
    return Cluster(
        prefill=4, compress=2, decode=4, workers_per_node=router.pop("workers_per_node", 0),
        shared_cores=False, capacity_bytes=80 << 20, max_batch_requests=4,
        plan=replace(Cluster().plan, prefix_bytes=20 << 20),
        router=RouterConfig(shards=count, **router),
    )  # fmt: skip


@pytest.mark.parametrize("nodes", [0, 5])
def test_shards_share_the_work_and_each_keeps_its_books(nodes: int) -> None:
    trial = Watched(in_shards(2, workers_per_node=nodes, max_queued_requests=999)).run(
        poisson(60, 8.0)
    )
    assert [one.error for one in trial.outcomes] == [""] * 60
    assert trial.counters["finished"] == 60
    assert sorted(trial.shards) == ["0", "1"]
    assert sum(shard.requests for shard in trial.shards.values()) == 60
    assert all(shard.requests > 15 and shard.router_s > 0 for shard in trial.shards.values())
    assert sum(shard.busy_s for shard in trial.shards.values()) == pytest.approx(
        sum(trial.busy_s.values())
    )


def test_what_one_shard_refuses_the_other_takes_until_both_are_full() -> None:
    """All begin alike, so one shard is home to all of them, and nothing but its line is short."""
    jobs = [
        (Job(f"r{n}", 600, 9, segments=(("common", 500), (f"own {n}", 100))),) for n in range(60)
    ]
    trial = Simulation(in_shards(2, shard_overload=1e9, max_queued_requests=8), COSTS).run(jobs)
    errors = Counter(one.error for one in trial.outcomes)
    assert set(errors) == {"", "rate_limit_exceeded"}
    assert trial.shard_choices["home"] == 60
    passed_on = trial.shard_choices["refused"]
    assert passed_on > errors["rate_limit_exceeded"] > 0
    assert sorted(shard.requests > 0 for shard in trial.shards.values()) == [True, True]


def test_a_stage_that_shards_cannot_share_is_named() -> None:
    with pytest.raises(ConfigError, match=r"compress=2: expected a multiple of the shards \(4\)"):
        in_shards(4)


def test_a_closed_loop_keeps_so_many_under_way() -> None:
    sessions = [(Job(f"r{n}", 50, 10),) for n in range(30)]
    trial = Simulation(Cluster(), COSTS).run(sessions, concurrency=3)
    edges = sorted((at, s) for o in trial.outcomes for at, s in ((o.due_s, 1), (o.last_s, -1)))
    running, most = 0, 0
    for _, step in edges:
        running += step
        most = max(most, running)
    assert most == 3


def test_a_session_sends_its_turns_in_order_with_pauses() -> None:
    chain = tuple(Job(f"t{n}", 20, 5, at_s=2.0 * n) for n in range(3))
    first, second, third = Simulation(Cluster(), COSTS).run([chain]).outcomes
    assert second.due_s == pytest.approx(first.last_s + 2.0)
    assert third.due_s == pytest.approx(second.last_s + 4.0)


def test_more_is_not_served_than_saturation_allows() -> None:
    cluster = Cluster(prefill=2, decode=2, shared_cores=False)
    limit = saturation_rate(cluster, COSTS, 200, 30)
    jobs = [(Job(f"r{n}", 200, 30, 0.0),) for n in range(200)]
    trial = Simulation(with_policy("fcfs", cluster), COSTS).run(jobs)
    assert 0.5 * limit < 200 / trial.duration_s <= limit


def test_a_fit_finds_costs_that_foretell_other_runs() -> None:
    truth = replace(COSTS, prefill_token_s=1.5e-3, decode_step_s=0.04, compress_token_s=2e-4)

    def observe(name: str, sessions: list[Chain], concurrency: int | None) -> Observation:
        measured = summary_of(Simulation(Cluster(), truth).run(sessions, concurrency))
        return Observation(name, sessions, concurrency, 2, 2.0, measured)

    seen = [observe(f"c={n}", poisson(8, 1.0, n), n) for n in (1, 3)]
    fitted = fit(seen, Cluster(), COSTS)
    unseen = observe("open", poisson(12, 1.0, 9), None)
    before, after = (predict(unseen, Cluster(), costs).ratios for costs in (COSTS, fitted.costs))
    for name in ("mean_ttft_s", "mean_tpot_s"):
        assert abs(before[name] - 1) > 0.3
        assert after[name] == pytest.approx(1.0, abs=0.15)


def test_neighbours_make_everything_slower() -> None:
    job = [(Job("r", 300, 11),)]
    for shared in (True, False):
        cluster = Cluster(shared_cores=shared)
        alone = Simulation(cluster, COSTS).run(job)
        beside = Simulation(replace(cluster, free_cores=0.5), COSTS).run(job)
        factor = 4.0 if shared else 2.0  # a step had two cores and has half of one, or had one
        assert beside.busy_s["decode"] == pytest.approx(factor * alone.busy_s["decode"])


def test_costs_that_are_none_are_named() -> None:
    with pytest.raises(ConfigError, match="no cost is called 'speed'"):
        Costs.of({"speed": 1.0}, "x.json")
    with pytest.raises(ConfigError, match=r"costs\.hop_s=-1"):
        Costs(hop_s=-1.0)


@given(st.integers(3, 5000))
def test_replicas_are_split_without_one_too_many(replicas: int) -> None:
    parts = split_of(replicas)
    assert sum(parts) == replicas
    assert min(parts) >= 1


def test_two_workers_are_too_few() -> None:
    with pytest.raises(ConfigError, match="at least 3"):
        split_of(2)


@pytest.mark.parametrize("booking", ["forecast", "bounds"])
def test_steps_that_are_foreseen_end_when_they_would_one_by_one(
    booking: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where messages cut them short, requests ask for pages, and gaps are counted."""

    def run() -> tuple[Trial, int]:
        cluster = Cluster(
            prefill=2, compress=1, decode=2, shared_cores=False,
            capacity_bytes=60 << 20, max_batch_requests=6,
            router=RouterConfig(booking=booking, max_queued_requests=1000),
        )  # fmt: skip
        simulation = Simulation(cluster, COSTS)
        actions = 0
        step = simulation.clock.step

        def count() -> bool:
            nonlocal actions
            actions += 1
            return step()

        simulation.clock.step = count  # type: ignore[method-assign]
        return simulation.run(poisson(60, 6.0)), actions

    foreseen, few = run()
    monkeypatch.setattr(SimulatedWorker, "_foresee", lambda _self, _now: False)
    one_by_one, many = run()
    assert few < many
    times = [(one.job.id, one.first_s, one.last_s) for one in foreseen.outcomes]
    assert times == [(one.job.id, one.first_s, one.last_s) for one in one_by_one.outcomes]
    assert foreseen.gaps == one_by_one.gaps
    assert foreseen.busy_s == one_by_one.busy_s
    assert foreseen.counters == one_by_one.counters
