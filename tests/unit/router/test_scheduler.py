"""The coordinator's rules one by one: each message in, the messages that must come out."""

from dataclasses import replace

import numpy as np
import pytest

from tests.unit.router.driver import (
    MODEL,
    REPORT,
    TIMEOUTS,
    WORKERS,
    Driver,
    Step,
    failures,
    handle,
    request,
    started,
    whole,
)
from triptych.core.config import RouterConfig
from triptych.core.errors import RequestTooLarge, StageLost
from triptych.core.messages import (
    POOL,
    Cancel,
    Compress,
    Compressed,
    CompressItem,
    Confirm,
    Encode,
    Expel,
    Failed,
    Fetched,
    Finished,
    Join,
    Message,
    Planned,
    Prefill,
    Prefilled,
    Prefix,
    Register,
    RegisterAgain,
    Report,
    Send,
    Stage,
    Tokens,
    Unknown,
    failed,
)
from triptych.router import Scheduler
from triptych.router.queue.waiting_queue import QueueView
from triptych.router.snapshot import Budget, Waiting

# ------------------------------------------------------------------ the way of one request


def test_a_request_passes_the_three_stages() -> None:
    driver, one = whole(), request()
    assert driver.submit(one) == [Send("P", Prefill(requests=(one,)))]
    raw = handle("r", "raw")
    assert driver.prefilled("r") == [
        Send("C", Compress(items=(CompressItem(request="r", handle=raw),)))
    ]
    assert driver.planned("r") == [Send("C", Encode(requests=("r",), arena="arena"))]
    join = Join(request=one, output_tokens=(7,), handle=handle("r", "final"), report=REPORT)
    assert driver.compressed("r") == [Send("D", join)]
    assert driver.on(Finished(request="r", tokens=10), "D") == []
    assert driver.state() is None
    assert driver.booked == 0
    assert driver.count("finished") == 1


def test_the_compressor_hears_what_may_be_kept_of_a_prompt() -> None:
    plan = replace(MODEL.plan, prefix_bytes=1 << 20)
    router = Scheduler(RouterConfig(), plan, 10**9, TIMEOUTS)
    driver = whole()
    driver.router = router
    for worker in WORKERS:
        driver.register(worker)
    one = replace(request(), output_tokens=(5, 6), cache_salt="salt", tenant="me")
    driver.submit(one)
    done = Prefilled(request="r", first_token=7, handle=handle("r", "raw"), token_s=0.25)
    (send,) = driver.on(done, "P")
    assert send.message.items[0].prefix == Prefix(
        tokens=np.array([1] * 50 + [5, 6], "<i4").tobytes(),
        cache_salt="salt",
        tenant="me",
        token_s=0.25,
        prompt_tokens=50,
    )


def test_an_answer_of_one_token_ends_at_prefill() -> None:
    driver = whole()
    driver.bring_to("prefilling")
    assert driver.on(Prefilled(request="r", first_token=2, handle=None), "P") == []
    assert driver.state() is None
    assert driver.booked == 0


def test_messages_of_one_frame_are_sent_on_as_one_batch() -> None:
    driver = whole()
    driver.submit(request("a"))
    driver.submit(request("b"))
    frame = [Prefilled(request=n, first_token=7, handle=handle(n, "raw")) for n in ("a", "b")]
    [send] = driver.router.receive(frame, "P", driver.now)
    assert [item.request for item in send.message.items] == ["a", "b"]


def test_decode_is_chosen_only_after_planning() -> None:
    driver = whole()
    driver.bring_to("compressing")
    explanation = driver.router.explain("r", driver.now)
    assert explanation is not None
    assert explanation.decode_worker == ""
    driver.planned("r")
    explanation = driver.router.explain("r", driver.now)
    assert explanation is not None
    assert explanation.decode_worker == "D"


def test_encoding_goes_to_the_arena_of_the_chosen_decode_worker() -> None:
    driver = whole(arenas={"P": "gpu0", "C": "gpu0", "D": "gpu0", "E": "gpu1"})
    [send] = driver.bring_to("encoding")
    assert send.message == Encode(requests=("r",), arena="gpu1")  # raw pages fill gpu0
    assert set(driver.router.snapshot(0).booked_bytes) == {"gpu0", "gpu1"}
    driver.compressed("r")
    assert driver.state("r") == "decoding"
    assert set(driver.router.snapshot(0).booked_bytes) == {"gpu0", "gpu1"}
    assert driver.on(Fetched(request="r"), "C") == []  # somebody else's word
    assert set(driver.router.snapshot(0).booked_bytes) == {"gpu0", "gpu1"}
    driver.on(Fetched(request="r"), "E")
    assert set(driver.router.snapshot(0).booked_bytes) == {"gpu1"}


def test_raw_pages_stay_where_a_compressor_is_and_else_go_to_the_next() -> None:
    near = whole(arenas={"P": "gpu0", "C": "gpu1", "D": "gpu1", "E": "gpu1"})
    registration = Register(name="F#1", address="F", stages=("compress",), arena="gpu0")
    near.on(registration, "F")
    near.on(Report(name="F#1", running=0, waiting=0, pages_held=0, busy_s=0), "F")
    [send] = near.bring_to("compressing")
    assert send.to == "F"
    far = whole(arenas={"P": "gpu0", "C": "gpu1", "D": "gpu1", "E": "gpu1"})
    [send] = far.bring_to("compressing")
    assert send.to == "C"
    assert set(far.router.snapshot(0).booked_bytes) == {"gpu0", "gpu1"}
    far.planned("r")
    assert set(far.router.snapshot(0).booked_bytes) == {"gpu1"}


# ------------------------------------------------------------------ the ledger


def test_bytes_are_booked_before_prefill_and_corrected_by_facts() -> None:
    driver, sizes = whole(), MODEL.estimate(50, 10)
    driver.bring_to("prefilling")
    assert driver.booked == sizes.peak == max(sizes.raw + sizes.encoded, sizes.grown)
    driver.prefilled("r")
    driver.planned("r", pages=1)
    driver.compressed("r")
    assert driver.booked == sizes.corrected(3584).grown < sizes.peak


def test_a_plan_that_does_not_fit_fails_the_request_instead_of_overbooking() -> None:
    driver = whole(capacity=MODEL.estimate(50, 10).peak)
    driver.bring_to("compressing")
    [failure] = failures(driver.planned("r", pages=1000))
    assert failure.status == 503
    assert driver.count("estimate_too_low") == 1


def test_a_request_that_can_never_fit_is_refused_with_both_numbers() -> None:
    driver = whole(capacity=10_000)
    [failure] = failures(driver.submit(request(prompt=500, max_tokens=9)))
    assert failure.status == 400
    assert failure.code == "context_length_exceeded"
    assert "500 prompt tokens and 9 new tokens" in failure.message
    assert str(MODEL.estimate(500, 9).peak) in failure.message
    assert "10000" in failure.message


# ------------------------------------------------------------------ the waiting line


def test_a_full_line_is_answered_with_429_and_a_time() -> None:
    driver = Driver(max_queued_requests=2)
    assert driver.submit(request("a")) == driver.submit(request("b")) == []
    [send] = driver.submit(request("c"))
    assert send.to == "in"
    assert isinstance(send.message, Failed)
    assert send.message.status == 429
    assert send.message.retry_after_s == 5.0
    assert driver.state("c") is None


def test_no_more_requests_are_let_in_than_decode_slots_will_be_free() -> None:
    driver = Driver("P", "C", "D", slots=2)
    assert [bool(driver.submit(request(name))) for name in "abc"] == [True, True, False]
    assert driver.router.snapshot(0).blocked_reason == "no_decode_slot"
    for name in "ab":
        driver.prefilled(name)
        driver.planned(name)
        driver.compressed(name)
    assert driver.state("c") == "waiting"
    assert started(driver.on(Finished(request="a", tokens=3), "D")) == ["c"]


def test_prefill_gets_no_more_tokens_than_its_limit() -> None:
    driver = whole(prefill_batch_tokens=100)
    assert [bool(driver.submit(request(name))) for name in "abc"] == [True, True, False]
    assert driver.router.snapshot(0).blocked_reason == "prefill_busy"
    assert started(driver.prefilled("a")) == ["c"]


def test_while_prefill_is_busy_the_policy_is_not_asked_again() -> None:
    driver = Driver("P", "C", "D", slots=9, prefill_batch_tokens=100)
    for name, prompt in (("a", 50), ("b", 40), ("c", 50)):
        driver.submit(request(name, prompt=prompt))
    dispatch, asked = driver.router._dispatch, list[int]()
    choose = dispatch.schedule.choose

    def counted(queue: QueueView, budget: Budget) -> list[Waiting]:
        asked.append(len(queue))
        return choose(queue, budget)

    dispatch.schedule = replace(dispatch.schedule, choose=counted)
    assert driver.on(Finished(request="x", tokens=1), "D") == []
    assert asked == []
    assert driver.router.snapshot(driver.now).blocked_reason == "prefill_busy"
    assert started(driver.submit(request("tiny", prompt=8))) == ["tiny"]  # the queue has changed
    asked.clear()
    driver.on(Finished(request="x", tokens=1), "D")
    assert asked == []
    assert started(driver.prefilled("a")) == ["c"]


def test_a_long_prompt_is_read_alone() -> None:
    driver = whole(prefill_batch_tokens=100)
    driver.submit(request("short"))
    assert started(driver.submit(request("long", prompt=200))) == []
    assert started(driver.prefilled("short")) == ["long"]


def test_small_requests_overtake_a_large_one_until_it_loses_patience() -> None:
    small, large = MODEL.estimate(50, 10).peak, MODEL.estimate(400, 10).peak
    driver = whole(capacity=large + small - 1, slots=9)
    driver.submit(request("first"))
    assert started(driver.submit(request("large", prompt=400))) == []
    assert started(driver.submit(request("small"))) == ["small"]
    driver.now = 5.1
    for worker in WORKERS:
        driver.report(worker)
    assert started(driver.submit(request("late"))) == []
    assert driver.router.snapshot(driver.now).blocked_reason == "no_bytes"
    driver.on(Finished(request="first", tokens=1), "P")
    assert started(driver.on(Finished(request="small", tokens=1), "P")) == ["large"]


def test_a_worker_without_a_fresh_report_counts_as_full() -> None:
    driver = Driver("C", "D")
    driver.on(Register(name="P#1", address="P", stages=("prefill",)), "P")
    assert driver.submit(request()) == []
    assert started(driver.report("P")) == ["r"]
    driver.now = 4.0
    assert driver.submit(request("next")) == []
    driver.report("D")
    assert started(driver.report("P")) == ["next"]


def test_a_report_of_somebody_else_refreshes_nobody() -> None:
    driver = Driver("C", "D")
    driver.on(Register(name="P#2", address="P", stages=("prefill",)), "P")
    driver.submit(request())
    assert driver.report("P", start=1) == []
    assert driver.count("stray_report") == 1


def test_without_any_worker_a_request_waits_the_grace_time_and_fails() -> None:
    driver = Driver("P", "C")
    driver.submit(request())
    assert driver.tick(29.9) == []
    [failure] = failures(driver.tick(0.1))
    assert (failure.status, failure.code) == (503, "overloaded")
    assert "no decode worker" in failure.message


def test_what_another_router_may_take_waits_less_for_a_worker_if_it_has_not_begun() -> None:
    driver = Driver("P", "C", "D", timeouts=replace(TIMEOUTS, refuse_s=3.0))
    driver.bring_to("encoding")
    driver.router.lost("P", driver.now)
    driver.router.lost("D", driver.now)
    driver.submit(request("new"))
    driver.compressed("r")
    driver.tick(2.9)
    [failure] = failures(driver.tick(0.1))
    assert (failure.request, failure.code) == ("new", "overloaded")
    driver.tick(26.9)
    assert [failure.request for failure in failures(driver.tick(0.1))] == ["r"]


def test_the_grace_time_starts_anew_when_the_last_worker_dies() -> None:
    driver = Driver("P", "C", "D", slots=0)
    driver.submit(request())
    driver.now = 100.0
    driver.router.lost("D", driver.now)
    assert driver.tick(29.0) == [Send(POOL, Expel(worker="D#1"))]
    assert len(failures(driver.tick(1.0))) == 1


def test_finished_pages_go_to_a_decode_worker_of_another_arena_if_theirs_has_none() -> None:
    driver = whole(arenas={"P": "gpu0", "C": "gpu0", "D": "gpu0", "E": "gpu1"})
    driver.bring_to("encoding")
    driver.router.lost("E", driver.now)
    [send] = driver.compressed("r")
    assert send.to == "D"
    assert set(driver.router.snapshot(0).booked_bytes) == {"gpu0"}


def test_finished_pages_wait_the_grace_time_for_a_decode_worker() -> None:
    driver = Driver("P", "C", "D")
    driver.bring_to("encoding")
    driver.router.lost("D", driver.now)
    assert driver.compressed("r") == []
    assert driver.tick(29.9) == [Send(POOL, Expel(worker="D#1"))]
    cancel, failure = driver.tick(0.1)
    assert cancel == Send("C", Cancel(requests=("r",)))
    assert "no decode worker" in failure.message.message


def test_requests_merely_waiting_for_a_lost_stage_stay() -> None:
    driver = Driver("P", "D")
    driver.bring_to("prefilled")
    driver.register("C")
    driver.router.lost("C", driver.now)
    assert driver.submit(request("next")) != []
    driver.router.lost("D", driver.now)
    assert driver.submit(request("waiting")) == []
    assert driver.state("waiting") == "waiting"


# ------------------------------------------------------------------ cancel


def test_a_waiting_request_is_forgotten_without_a_word() -> None:
    driver = Driver()
    driver.bring_to("waiting")
    assert driver.on(Cancel(requests=("r",)), "in") == []
    assert driver.state() is None


@pytest.mark.parametrize(
    ("step", "told"),
    [
        ("prefilling", ["P"]),
        ("compressing", ["C", "P"]),
        ("encoding", ["C"]),
        ("decoding", ["D", "C"]),
    ],
)
def test_cancel_goes_to_everybody_who_may_hold_pages(step: Step, told: list[str]) -> None:
    driver = whole()
    driver.bring_to(step)
    sends = driver.on(Cancel(requests=("r",)), "in")
    assert sends == [Send(address, Cancel(requests=("r",))) for address in told]


def test_a_worker_that_let_go_by_itself_is_not_bothered_again() -> None:
    driver = whole()
    driver.bring_to("decoding")
    assert driver.on(Finished(request="r", tokens=1), "C") == []
    assert driver.state() == "decoding"
    sends = driver.on(Cancel(requests=("r",)), "in")
    assert sends == [Send("D", Cancel(requests=("r",)))]


def test_cancelled_bytes_stay_booked_until_the_holders_let_go() -> None:
    driver = whole()
    driver.bring_to("compressing")
    driver.on(Cancel(requests=("r",)), "in")
    driver.on(Finished(request="r", tokens=0), "P")
    assert driver.booked > 0
    driver.on(Finished(request="r", tokens=0), "C")
    assert driver.booked == 0


def test_a_worker_that_does_not_answer_a_cancel_is_not_waited_for_long() -> None:
    driver = whole()
    driver.bring_to("decoding")
    driver.on(Cancel(requests=("r",)), "in")
    driver.tick(0.9)
    assert driver.booked > 0
    driver.tick(0.1)
    assert driver.booked == 0


@pytest.mark.parametrize(("step", "late"), [("prefilling", "P"), ("encoding", "C")])
def test_a_handle_that_comes_after_the_cancel_is_let_go(step: Step, late: str) -> None:
    driver = whole()
    driver.bring_to(step)
    driver.on(Cancel(requests=("r",)), "in")
    sends = driver.prefilled("r") if late == "P" else driver.compressed("r")
    assert sends == [Send(late, Cancel(requests=("r",)))]


def test_the_error_of_a_cancelled_request_is_not_forwarded() -> None:
    driver = whole()
    driver.bring_to("decoding")
    driver.on(Cancel(requests=("r",)), "in")
    error = failed("r", StageLost("decode"))
    assert driver.on(Finished(request="r", tokens=4, error=error), "D") == []


# ------------------------------------------------------------------ messages that make no sense


@pytest.mark.parametrize(
    "message",
    [
        Prefilled(request="?", first_token=1, handle=handle("?", "raw")),
        Planned(request="?", pages=3),
        Compressed(request="?", handle=handle("?", "final"), report=REPORT),
    ],
)
def test_a_worker_with_pages_of_an_unknown_request_is_told_to_let_go(message: Message) -> None:
    driver = whole()
    assert driver.on(message, "P") == [Send("P", Cancel(requests=("?",)))]


@pytest.mark.parametrize(
    ("message", "reason"),
    [
        (Finished(request="?", tokens=1), "stray_finished"),
        (Cancel(requests=("?",)), "stray_cancel"),
        (Tokens(request="?", index=0, tokens=(), text=""), "unknown_message"),
        ("nonsense", "unknown_message"),
    ],
)
def test_messages_without_a_meaning_are_counted(message: Message, reason: str) -> None:
    driver = whole()
    assert driver.on(message, "P") == []
    assert driver.count(reason) == 1


def test_a_message_that_comes_twice_takes_no_pages_from_its_rightful_holder() -> None:
    driver = whole()
    driver.bring_to("compressing")
    assert driver.prefilled("r") == []
    assert driver.count("stray_prefilled") == 1
    assert driver.state() == "compressing"


def test_a_second_submit_of_the_same_request_is_ignored() -> None:
    driver = whole()
    driver.bring_to("prefilling")
    assert driver.submit(request()) == []
    assert driver.count("duplicate_submit") == 1


def test_a_worker_that_lets_go_too_early_fails_the_request() -> None:
    driver = whole()
    driver.bring_to("encoding")
    [failure] = failures(driver.on(Finished(request="r", tokens=1), "C"))
    assert failure == failed("r", StageLost("compress"))


def test_an_error_is_told_to_the_client_under_the_requests_own_name() -> None:
    driver = whole()
    driver.bring_to("prefilling")
    error = failed("somebody else", StageLost("prefill"))
    [failure] = failures(driver.on(Finished(request="r", tokens=0, error=error), "P"))
    assert failure.request == "r"


# ------------------------------------------------------------------ what it knows


def test_the_snapshot_shows_states_bytes_and_workers() -> None:
    driver = whole()
    driver.bring_to("decoding")
    driver.submit(request("next"))
    snapshot = driver.router.snapshot(driver.now)
    assert snapshot.requests["decoding"] == snapshot.requests["prefilling"] == 1
    workers = {load.name: load for load in snapshot.workers}
    assert workers["P#1"].prefill_tokens == 50
    assert workers["D#1"].free_slots == 1
    assert snapshot.counters["admitted"] == 2
    assert snapshot.capacity_bytes == 10**9


def test_what_is_booked_on_all_nodes_is_told_beside_what_all_nodes_have() -> None:
    driver = Driver("P", "C", "D", "E", arenas={"E": "another"})
    assert driver.router.snapshot(driver.now).capacity_bytes == 2 * 10**9


def test_a_waiting_request_knows_what_it_waits_for() -> None:
    driver = Driver("C", "D")
    driver.bring_to("waiting")
    driver.now = 2.0
    explanation = driver.router.explain("r", driver.now)
    assert explanation is not None
    assert explanation.blocked_reason == "no_prefill_worker"
    assert explanation.in_state_s == driver.router.snapshot(2.0).oldest_waiting_s == 2.0


# ------------------------------------------------------------------ peers that were lost and return


def again(address: str, epoch: int, start: int = 1) -> Register:
    stages: tuple[Stage, ...] = WORKERS.get(address, ())
    slots = 2 if "decode" in stages else 0
    name = f"{address}#{start}"
    return Register(name=name, address=address, stages=stages, max_requests=slots, epoch=epoch)


@pytest.mark.parametrize("step", ["prefilling", "compressing", "encoding", "decoding"])
@pytest.mark.parametrize("address", ["P", "C", "D"])
def test_a_registration_of_a_higher_epoch_ends_the_requests_of_the_worker(
    address: str, step: Step
) -> None:
    """It has dropped them: without this they would stay booked for ever."""
    driver = Driver("P", "C", "D")
    driver.bring_to(step)
    held_by_it = {"prefilling": "P", "compressing": "C", "encoding": "C", "decoding": "D"}[step]
    sends = driver.on(again(address, epoch=0), address)
    assert not failures(sends)  # the same epoch: the message was sent again
    sends = driver.on(again(address, epoch=1), address)
    assert [failure.resumable for failure in failures(sends)] == [True] * (held_by_it == address)
    if held_by_it == address:
        driver.report(address)
        driver.tick(30.0)
        assert driver.booked == 0
        assert driver.router.census()[0]["leaving"] == 0


def test_a_registration_of_an_ingress_of_a_higher_epoch_cancels_its_requests() -> None:
    driver = whole()
    driver.bring_to("decoding")
    driver.on(Register(name="in#1", address="in", epoch=1), "in")
    assert driver.state() == "leaving"
    driver.tick(2.0)
    assert (driver.state(), driver.booked) == (None, 0)


def test_a_worker_that_was_lost_and_lives_is_not_ended_and_works_again() -> None:
    driver = Driver("P", "C", "D")
    driver.bring_to("decoding")
    driver.router.lost("D", driver.now)
    assert driver.state() == "orphaned"
    [told] = driver.report("D")
    assert told == Send("D", RegisterAgain())
    sends = driver.on(again("D", epoch=1), "D")
    assert [failure.resumable for failure in failures(sends)] == [True]
    driver.report("D")
    assert Send(POOL, Expel(worker="D#1")) not in driver.tick(1.0)
    driver.tick(30.0)
    assert driver.booked == 0
    driver.bring_to("decoding", request("next"))
    assert driver.state("next") == "decoding"


def test_an_ingress_that_is_not_registered_is_told() -> None:
    driver = whole()
    assert driver.on(Confirm(requests=()), "in") == []
    assert driver.on(Confirm(requests=()), "other") == [Send("other", RegisterAgain())]


def test_the_router_names_the_requests_that_it_does_not_have() -> None:
    driver = whole()
    driver.bring_to("decoding")
    driver.bring_to("prefilling", request("leaves"))
    driver.on(Cancel(requests=("leaves",)), "in")
    [answer] = driver.on(Confirm(requests=("r", "leaves", "never")), "in")
    assert answer == Send("in", Unknown(requests=("leaves", "never")))
    assert driver.on(Confirm(requests=("r",)), "in") == []


def test_a_worker_is_told_to_free_what_the_router_has_given_up() -> None:
    driver = whole()
    driver.bring_to("decoding")
    driver.bring_to("prefilling", request("read"))
    assert driver.on(Confirm(requests=("r",)), "D") == []
    assert driver.on(Confirm(requests=("read",)), "P") == []
    [told] = driver.on(Confirm(requests=("r", "given up")), "D")
    assert told == Send("D", Cancel(requests=("given up",)))
    [told] = driver.on(Confirm(requests=("r", "read")), "P")
    assert told == Send("P", Cancel(requests=("r",)))
    assert driver.state() == "decoding"


def test_the_requests_of_a_message_that_no_worker_can_take_fail() -> None:
    driver = whole()
    [send] = driver.bring_to("prefilling")
    driver.bring_to("decoding", request("other"))
    sends = driver.router.undeliverable(send.message, RequestTooLarge("too large"), driver.now)
    assert [(one.request, one.status) for one in failures(sends)] == [("r", 413)]
    assert driver.state("other") == "decoding"
