"""How many workers are wanted: single moments, and loads that come and go."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from triptych.core.config import RouterConfig
from triptych.core.messages import Register, Report, Request, Sampling, Slo, Stage, Submit
from triptych.router.events.peers import Timeouts
from triptych.router.passes.autoscaling import BusyTime, Demand, wanted
from triptych.router.scheduler import Scheduler
from triptych.simulator import Cluster

STAGES: tuple[Stage, ...] = ("prefill", "compress", "decode")
PLAN = Cluster().plan
QUIET = Demand(workers=dict.fromkeys(STAGES, 2), busy={"prefill": 0.1, "compress": 0.1})
TARGET = 0.5


def report(busy_s: float, step_age_s: float = 0.0) -> Report:
    return Report(
        name="w", running=0, waiting=0, pages_held=0, busy_s=busy_s, step_age_s=step_age_s
    )


# ------------------------------------------------------------------------ one moment


def test_each_stage_is_asked_for_by_its_own_time() -> None:
    demand = replace(QUIET, busy={"prefill": 1.8, "compress": 0.2}, slots_used=1, worker_slots=4)
    counts = [wanted(stage, demand, TARGET) for stage in STAGES]
    assert counts == [3.6, 0.4, 0.5]


def test_work_that_waits_is_to_be_read_in_the_time_that_is_left_for_it() -> None:
    queue = replace(
        QUIET, waiting_tokens=6000, queued_tokens=2000, prefill_token_s=1e-3, drain_s=2.0
    )
    assert wanted("prefill", queue, TARGET) == pytest.approx(4.0)
    assert wanted("prefill", replace(queue, drain_s=1.0), TARGET) == pytest.approx(8.0)
    assert wanted("compress", queue, TARGET) == wanted("compress", QUIET, TARGET)


def test_nobody_is_asked_for_on_behalf_of_what_waits_for_bytes() -> None:
    queue = replace(
        QUIET,
        waiting_tokens=9000,
        waiting_requests=90,
        prefill_token_s=1e-3,
        drain_s=1.0,
        fitting=0.0,
    )
    for stage in STAGES:
        assert wanted(stage, queue, TARGET) == wanted(stage, QUIET, TARGET)


def test_decode_is_asked_for_by_slots_and_by_the_strictest_limit_on_tpot() -> None:
    demand = replace(QUIET, slots_used=12, waiting_requests=4, worker_slots=8)
    assert wanted("decode", demand, TARGET) == 4.0
    assert wanted("decode", replace(QUIET, tpot_ratio=1.5), TARGET) == 3.0
    assert wanted("decode", replace(QUIET, tpot_ratio=0.9), TARGET) == 0.0


@given(
    busy=st.floats(0, 2),
    more=st.floats(0, 2),
    tokens=st.integers(0, 10**6),
    extra=st.integers(0, 99),
)
def test_more_to_do_never_asks_for_fewer(busy: float, more: float, tokens: int, extra: int) -> None:
    less = replace(
        QUIET, busy=dict.fromkeys(STAGES, busy), waiting_tokens=tokens, prefill_token_s=1e-3
    )
    greater = replace(
        less,
        busy=dict.fromkeys(STAGES, busy + more),
        waiting_tokens=tokens + extra,
        waiting_requests=extra,
    )
    for stage in STAGES:
        assert wanted(stage, greater, TARGET) >= wanted(stage, less, TARGET)


# ------------------------------------------------------------------------ time


def test_busy_time_is_that_between_two_looks_long_steps_included() -> None:
    busy = BusyTime()
    assert busy.look([("w", report(10.0))], 100.0) == {"w": 0.0}  # it has only come
    assert busy.look([("w", report(11.0))], 104.0) == {"w": 0.25}
    assert busy.look([("w", report(11.0, step_age_s=4.0))], 108.0) == {"w": 1.0}
    assert busy.look([("w", report(0.0))], 110.0) == {"w": 0.0}  # another process, same address
    assert busy.look([("w", None)], 112.0) == {"w": 1.0}  # nobody knows: busy, never idle


def test_a_load_that_comes_and_goes_is_followed_and_answered_once() -> None:
    """Busy workers double until they have what they need; when they idle, fewer are wanted."""
    work, count, seen = 3.0, 1, list[int]()  # three workers' time
    for step in range(12):
        if step == 6:
            work = 0.4
        demand = Demand(workers={"prefill": count}, busy={"prefill": min(work, count)})
        count = min(8, max(1, -(-wanted("prefill", demand, TARGET) // 1).__int__()))
        seen.append(count)
    assert seen == [2, 4, 6, 6, 6, 6, 1, 1, 1, 1, 1, 1]


class ClusterState:
    """A coordinator with one worker of all stages, which reports as it is told."""

    def __init__(self) -> None:
        config = RouterConfig(max_overtake_s=5.0)
        self.router = Scheduler(config, PLAN, 600 << 20, Timeouts())
        self.router.on(
            Register(name="w", address="w", stages=STAGES, max_requests=4, arena="a"), "w", 0.0
        )

    def submit(self, name: str, tokens: int, now: float, slo: Slo) -> None:
        sampling = Sampling(max_tokens=8)
        request = Request(id=name, prompt=(0,) * tokens, sampling=sampling, reply_to="i", slo=slo)
        self.router.on(Submit(request=request), "i", now)


def test_the_books_say_what_waits_and_what_runs() -> None:
    cluster = ClusterState()
    assert cluster.router.demand(0.0).busy == {}  # it decodes
    cluster.router.on(report(1.0), "w", 1.0)
    for number in range(3):
        cluster.submit(f"r{number}", 1000, 1.0, Slo(ttft_s=20.0))
    demand = cluster.router.demand(2.5)
    assert (demand.queued_tokens, demand.waiting_tokens) == (2000, 1000)
    assert (demand.waiting_requests, demand.slots_used, demand.worker_slots) == (1, 2, 4)
    assert demand.fitting == 1.0
    assert demand.drain_s == 5.0  # patience ends before the limit
    assert cluster.router.demand(3.0) is demand  # one look in a while


def test_bytes_that_lack_are_said() -> None:
    cluster = ClusterState()
    cluster.router.on(report(1.0), "w", 1.0)
    for number in range(40):
        cluster.submit(f"r{number}", 2000, 1.0, Slo())
    demand = cluster.router.demand(2.5)
    assert 0.0 < demand.fitting < 0.6


def test_a_worker_that_decodes_one_request_all_the_time_is_not_one_too_few() -> None:
    """Three streams on two workers wanted a third one, and so on up to the limit."""
    router = Scheduler(RouterConfig(), PLAN, 600 << 20, Timeouts())
    names = dict[str, Stage](p="prefill", c="compress", d1="decode", d2="decode")
    for name, stage in names.items():
        register = Register(name=name, address=name, stages=(stage,), max_requests=4, arena="a")
        router.on(register, name, 0.0)
        router.on(report(0.0), name, 0.0)
    router.demand(0.0)
    for name in names:
        router.on(report(10.0), name, 10.0)
    demand = router.demand(10.0)
    assert demand.busy == {"prefill": 1.0, "compress": 1.0}
    assert wanted("decode", demand, TARGET) == 0.0
