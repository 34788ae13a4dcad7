"""What the coordinator does when workers, compressors and ingresses die, and who takes over."""

from dataclasses import replace

import pytest

from tests.unit.router.driver import (
    REPORT,
    TIMEOUTS,
    WORKERS,
    Driver,
    Step,
    expel,
    failures,
    handle,
    request,
    whole,
)
from triptych.core.errors import StageLost, StaleHandle
from triptych.core.messages import (
    Cancel,
    Encode,
    Finished,
    Join,
    PageLimit,
    Prefill,
    Report,
    Resume,
    Resumed,
    Sampling,
    Send,
    failed,
)


@pytest.mark.parametrize(
    ("step", "dead", "stage", "told"),
    [
        ("prefilling", "P", "prefill", []),
        ("compressing", "C", "compress", ["P"]),
        ("encoding", "C", "compress", []),
    ],
)
def test_a_lost_worker_fails_its_requests_and_frees_what_others_hold(
    step: Step, dead: str, stage: str, told: list[str]
) -> None:
    driver = whole()
    driver.bring_to(step)
    sends = driver.router.lost(dead, driver.now)
    [failure] = failures(sends)
    assert failure == failed("r", StageLost(stage))
    assert [send.to for send in sends if isinstance(send.message, Cancel)] == told


def test_the_death_of_a_worker_may_overtake_the_end_of_an_answer() -> None:
    """An ingress that still waits for it then hears that it must ask again; once."""
    driver = whole()
    for name in ("early", "late"):
        driver.bring_to("decoding", request(name))
        assert driver.on(Finished(request=name, tokens=10), "D") == []
        driver.tick(4.0)
    assert failures(driver.router.lost("D", driver.now)) == [failed("late", StageLost("decode"))]
    driver.register("D", start=2)
    assert failures(driver.router.lost("D", driver.now)) == []


def resume(previous_worker: str = "D#1", age_s: float = 0.0) -> Resume:
    join = Join(
        request=request(),
        output_tokens=(7,),
        handle=handle("r", "final"),
        report=REPORT,
        age_s=age_s,
    )
    return Resume(previous_worker=previous_worker, join=join)


def test_another_decode_worker_takes_over_from_a_dead_one() -> None:
    driver = whole()
    driver.bring_to("decoding")
    booked = driver.booked
    assert driver.router.lost("D", driver.now) == [Send("E", resume())]
    assert driver.tick(1.0) == []  # the pool keeps what the dead one left
    assert driver.on(Resumed(request="r"), "E") == []
    assert driver.tick(1.0) == [expel()]
    assert (driver.state(), driver.booked) == ("decoding", booked)
    assert driver.on(Finished(request="r", tokens=9), "E") == []
    assert (driver.state(), driver.booked) == (None, 0)


def test_orphans_wait_for_a_decode_worker() -> None:
    driver = Driver("P", "C", "D")
    driver.bring_to("decoding")
    assert driver.router.lost("D", driver.now) == []
    assert driver.state() == "orphaned"
    assert driver.tick(20.0) == []
    assert driver.register("D", start=2) == [Send("D", resume(age_s=20.0))]


def test_an_orphan_waits_for_a_place_in_a_batch_of_fixed_size() -> None:
    """Its heir has a slot more than it runs, but that is for the batch that gathers meanwhile."""
    driver = Driver("P", "C", "D", "E", batch_policy="static:p1c1d1")
    for name in ("one", "two"):
        driver.bring_to("decoding", request(name))
    assert driver.router.lost("D", driver.now) == []
    assert (driver.state("one"), driver.state("two")) == ("orphaned", "decoding")
    [send] = driver.on(Finished(request="two", tokens=9), "E")
    assert isinstance(send.message, Resume)
    assert (driver.state("one"), send.to) == ("decoding", "E")


@pytest.mark.parametrize("step", ["compressed", "decoding"])
def test_finished_pages_are_left_when_decode_workers_live_in_another_arena_only(step: Step) -> None:
    """Their pool died, and a worker has joined the next one."""
    driver = Driver("P", "C", "D", arenas={"D": "old", "P": "old", "C": "old", "E": "new"})
    driver.bring_to("encoding" if step == "compressed" else step)
    driver.router.lost("D", driver.now)
    if step == "compressed":
        driver.compressed("r")
    assert failures(driver.tick(5.0)) == []
    driver.register("E")
    assert failures(driver.tick(0.5)) == [failed("r", StageLost("decode"))]


def test_orphans_that_nobody_takes_fail_after_the_grace_time() -> None:
    driver = Driver("P", "C", "D")
    driver.bring_to("decoding")
    driver.router.lost("D", driver.now)
    sends = driver.tick(TIMEOUTS.grace_s)
    assert "no decode worker" in failures(sends)[0].message
    assert driver.tick(0.5) == [expel()]


@pytest.mark.parametrize("how", ["refused", "died", "cancelled"])
def test_a_take_over_that_fails_leaves_nothing(how: str) -> None:
    driver = whole()
    driver.bring_to("decoding")
    driver.router.lost("D", driver.now)
    lost = failed("r", StageLost("decode"))
    if how == "refused":
        assert failures(driver.on(Finished(request="r", tokens=0, error=lost), "E")) == [lost]
    elif how == "died":
        assert failures(driver.router.lost("E", driver.now)) == [lost]
    else:
        driver.on(Cancel(requests=("r",)), "in")
        driver.on(Finished(request="r", tokens=0), "E")
    driver.on(Finished(request="r", tokens=0), "C")
    expelled = driver.tick(0.5)
    assert expelled == ([expel(), expel("E#1")] if how == "died" else [expel()])
    assert driver.booked > 0  # the pool may not have heard it yet
    driver.tick(TIMEOUTS.reclaim_s)
    assert driver.booked == 0


def test_who_asks_for_log_probabilities_is_taken_over_like_everybody() -> None:
    driver = whole()
    asked = replace(request(), sampling=Sampling(max_tokens=50, logprobs=2))
    driver.bring_to("decoding", asked)
    limit, send = driver.router.lost("D", driver.now)
    assert isinstance(limit.message, PageLimit)
    assert isinstance(send.message, Resume)
    assert (limit.to, send.to, send.message.join.request) == ("E", "E", asked)


def stall_driver() -> Driver:
    driver = whole(timeouts=replace(TIMEOUTS, silent_s=5.0))
    driver.bring_to("decoding")
    return driver


def beat(driver: Driver, address: str, **measured: float) -> None:
    report = Report(name=f"{address}#1", running=1, waiting=0, pages_held=0, busy_s=0.0, **measured)
    assert driver.on(report, address) == []


def pass_time(driver: Driver, seconds: float, silent: str) -> list[Send]:
    """Ticks and reports, but of one."""
    sends = list[Send]()
    for _ in range(round(2 * seconds)):
        for address in set(WORKERS) - {silent}:
            beat(driver, address, longest_step_s=0.1)
        sends += driver.tick(0.5)
    return sends


def test_a_worker_that_falls_silent_is_succeeded_and_ended() -> None:
    driver = stall_driver()
    beat(driver, "D", longest_step_s=0.1)
    assert pass_time(driver, 5.0, silent="D") == []
    assert pass_time(driver, 0.5, silent="D") == [Send("E", resume(age_s=5.5))]
    driver.on(Resumed(request="r"), "E")
    assert pass_time(driver, 0.5, silent="D") == [expel()]
    assert driver.count("stalled") == 1


@pytest.mark.parametrize(("longest", "limit"), [(0.0, 60.0), (0.1, 60.0), (4.0, 80.0)])
def test_how_long_a_step_may_take_goes_by_those_that_were_measured(
    longest: float, limit: float
) -> None:
    driver = stall_driver()
    beat(driver, "D", longest_step_s=longest, step_age_s=limit)
    assert pass_time(driver, 0.5, silent="D") == []
    beat(driver, "D", longest_step_s=longest, step_age_s=limit + 0.5)
    assert pass_time(driver, 0.5, silent="D") == [Send("E", resume(age_s=1.0))]


def test_a_silent_prefill_worker_is_ended_too() -> None:
    driver = whole(timeouts=replace(TIMEOUTS, silent_s=5.0))
    driver.bring_to("prefilling")
    beat(driver, "P", longest_step_s=0.1)
    sends = pass_time(driver, 6.0, silent="P")
    assert failures(sends) == [failed("r", StageLost("prefill"))]
    assert expel("P#1") in sends


def test_a_router_that_stood_still_blames_nobody() -> None:
    driver = stall_driver()
    beat(driver, "D", longest_step_s=0.1)
    assert driver.tick(60.0) == []
    assert pass_time(driver, 4.0, silent="") == []


def test_only_the_heir_can_say_that_it_took_over() -> None:
    driver = whole()
    driver.bring_to("decoding")
    driver.on(Resumed(request="r"), "D")
    driver.router.lost("D", driver.now)
    driver.on(Resumed(request="r"), "C")
    driver.on(Resumed(request="?"), "E")
    assert driver.count("stray_resumed") == 3
    assert driver.tick(0.5) == []


def test_raw_pages_that_nobody_attached_are_lost_with_their_prefill_worker() -> None:
    driver = Driver("P", "D")
    driver.bring_to("prefilled")
    assert failures(driver.router.lost("P", driver.now)) == [failed("r", StageLost("prefill"))]


def test_bytes_of_a_dead_worker_are_free_when_the_pool_has_reclaimed_them() -> None:
    driver = whole()
    driver.bring_to("encoding")
    driver.router.lost("C", driver.now)
    driver.tick(9.9)
    assert driver.booked > 0
    driver.tick(0.1)
    assert driver.booked == 0


def test_bytes_of_a_dead_worker_stay_booked_while_another_request_is_to_be_taken_over() -> None:
    """The pool keeps all pages of the dead worker until then, those of a cancelled one too."""
    driver = Driver("P", "C", "D")
    for name in ("cancelled", "kept"):
        driver.bring_to("decoding", request(name))
    both = driver.booked
    driver.on(Cancel(requests=("cancelled",)), "in")
    driver.router.lost("D", driver.now)
    assert driver.state("kept") == "orphaned"
    assert driver.tick(2 * TIMEOUTS.reclaim_s) == []
    assert (driver.state("cancelled"), driver.booked) == ("leaving", both)
    driver.register("E")
    driver.on(Resumed(request="kept"), "E")
    assert driver.tick(1.0) == [expel()]
    driver.tick(1.0)
    assert driver.state("cancelled") is None
    assert 0 < driver.booked < both


def test_who_comes_to_a_dead_worker_s_address_cannot_free_what_it_held() -> None:
    driver = whole()
    driver.bring_to("encoding")
    driver.router.lost("C", driver.now)
    driver.register("C", start=2)
    assert driver.planned("r") == [Send("C", Cancel(requests=("r",)))]  # late news of the dead one
    driver.on(Finished(request="r", tokens=0), "C")
    assert driver.booked > 0
    driver.tick(TIMEOUTS.reclaim_s)
    assert driver.booked == 0


def test_a_living_worker_is_waited_for_longer_than_the_dead_one_beside_it() -> None:
    driver = whole(timeouts=replace(TIMEOUTS, cancel_timeout_s=60.0))
    driver.bring_to("compressing")
    driver.router.lost("C", driver.now)
    driver.tick(TIMEOUTS.reclaim_s)
    assert driver.booked > 0
    driver.on(Finished(request="r", tokens=0), "P")
    assert driver.booked == 0


def test_a_request_that_lost_its_worker_goes_to_the_front_and_finds_the_line_never_full() -> None:
    driver = Driver("C", "D", max_queued_requests=1)
    assert failures(driver.submit(request("first"))) == []
    assert len(failures(driver.submit(request("late")))) == 1
    again = replace(request("again~1"), output_tokens=(5, 6), attempt=1)
    assert failures(driver.submit(again)) == []
    [send] = driver.register("P")
    assert isinstance(send.message, Prefill)
    assert send.message.requests[0] == again


@pytest.mark.parametrize(("step", "source_worker"), [("compressing", "P"), ("decoding", "C")])
def test_the_death_of_the_stage_before_costs_nothing(step: Step, source_worker: str) -> None:
    driver = whole()
    driver.bring_to(step)
    assert driver.router.lost(source_worker, driver.now) == []
    assert driver.state() == step


def test_a_stage_that_found_no_pages_ends_the_request() -> None:
    driver = whole()
    driver.bring_to("compressing")
    driver.router.lost("P", driver.now)
    error = failed("r", StaleHandle(3, "its holder is gone"))
    assert failures(driver.on(Finished(request="r", tokens=1, error=error), "C")) == [error]
    assert driver.booked == 0


@pytest.mark.parametrize("step", ["encoding", "compressed"])
def test_another_decode_worker_is_chosen_if_the_first_died_before_the_join(step: str) -> None:
    driver = whole()
    driver.bring_to("encoding")
    if step == "compressed":
        driver.router.lost("E", driver.now)
        driver.router.lost("D", driver.now)
        assert driver.compressed("r") == []
        [send] = driver.register("E", start=2)
    else:
        driver.router.lost("D", driver.now)
        [send] = driver.compressed("r")
    assert send.to == "E"
    assert isinstance(send.message, Join)


def test_slots_that_come_back_go_to_requests_in_the_order_of_planning() -> None:
    driver = Driver("P", "C", "D", slots=2)
    for name in "ab":
        driver.bring_to("compressing", request(name))
    driver.router.lost("D", driver.now)
    assert driver.planned("b") == driver.planned("a") == []
    driver.slots = 1
    [send] = driver.register("D", start=2)
    assert send.message == Encode(requests=("b",), arena="arena")


def test_a_new_process_at_a_known_address_means_that_the_old_one_died() -> None:
    driver = whole()
    driver.bring_to("decoding")
    [send] = driver.register("D", start=2)
    assert isinstance(send.message, Resume)
    assert send.message.previous_worker == "D#1"


def test_the_same_process_saying_hello_again_changes_nothing() -> None:
    driver = whole()
    driver.bring_to("decoding")
    assert driver.register("D") == []
    assert driver.state() == "decoding"


def test_requests_of_a_lost_ingress_are_cancelled_everywhere() -> None:
    driver = whole()
    driver.bring_to("decoding")
    driver.submit(request("other", to="in2"))
    sends = driver.router.lost("in", driver.now)
    assert sends == [Send(address, Cancel(requests=("r",))) for address in ("D", "C")]
    assert driver.state("other") == "prefilling"
