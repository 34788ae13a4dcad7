"""The coordinator's rules one by one: each message in, the messages that must come out."""

from dataclasses import replace
from math import inf
from typing import Literal

import numpy as np
import pytest

from triptych.core.config import RouterConfig
from triptych.core.errors import StageLost, StaleHandle
from triptych.core.handles import Claim, KVHandle, LeaseId
from triptych.core.layout import Geometry
from triptych.core.messages import (
    POOL,
    Cancel,
    Compress,
    Compressed,
    CompressionReport,
    CompressItem,
    Encode,
    Expel,
    Failed,
    Fetched,
    Finished,
    Hello,
    Join,
    Message,
    Planned,
    Prefill,
    Prefilled,
    Prefix,
    Report,
    Request,
    Resume,
    Resumed,
    Sampling,
    Send,
    Stage,
    Submit,
    Tokens,
    failed,
)
from triptych.core.pages import PagePlan
from triptych.core.policy import Policy
from triptych.router import ByteModel, Coordinator, Patience

POLICY = Policy(name="uniform:k8v4", high_format="k8v4")
MODEL = ByteModel(PagePlan(Geometry(layers=1, kv_heads=1, head_dim=64), 3584, POLICY))
PATIENCE = Patience(
    report_bound_s=3.0, grace_s=30.0, cancel_timeout_s=1.0, reclaim_s=10.0, silent_s=inf
)
REPORT = CompressionReport(policy="uniform:k8v4", raw_bytes=10, stored_bytes=4)
WORKERS: dict[str, tuple[Stage, ...]] = {
    "P": ("prefill",),
    "C": ("compress",),
    "D": ("decode",),
    "E": ("decode",),
}
Step = Literal[
    "waiting", "prefilling", "prefilled", "compressing", "planned", "encoding", "decoding"
]


def request(name: str = "r", prompt: int = 50, max_tokens: int = 10, to: str = "in") -> Request:
    return Request(
        id=name, prompt=(1,) * prompt, sampling=Sampling(max_tokens=max_tokens), reply_to=to
    )


def handle(name: str, kind: str) -> KVHandle:
    return KVHandle(Claim("arena", LeaseId(hash((name, kind))), 0), (), 50)


class Driver:
    """A coordinator and a clock. Workers are spoken for by the test."""

    def __init__(
        self,
        *workers: str,
        slots: int = 2,
        capacity: int = 10**9,
        arenas: dict[str, str] | None = None,
        patience: Patience = PATIENCE,
        **config: object,
    ) -> None:
        self.now = 0.0
        self.slots, self.arenas = slots, arenas or {}
        settings = {"patience_s": 5.0, **config}
        self.router = Coordinator(
            RouterConfig(**settings),  # pyright: ignore[reportArgumentType]
            MODEL.plan,
            capacity,
            patience,
        )
        for worker in workers:
            self.hello(worker)
        self.on(Hello(name="in#1", address="in"), "in")

    def on(self, message: Message, sender: str) -> list[Send]:
        return self.router.on(message, sender, self.now)

    def hello(self, address: str, start: int = 1) -> list[Send]:
        stages = WORKERS[address]
        hello = Hello(
            name=f"{address}#{start}",
            address=address,
            stages=stages,
            max_requests=self.slots if "decode" in stages else 0,
            arena=self.arenas.get(address, ""),
        )
        return [*self.on(hello, address), *self.report(address, start)]

    def report(self, address: str, start: int = 1) -> list[Send]:
        name = f"{address}#{start}"
        return self.on(Report(name=name, running=0, waiting=0, pages_held=0, busy_s=0), address)

    def submit(self, one: Request) -> list[Send]:
        return self.on(Submit(request=one), one.reply_to)

    def prefilled(self, name: str) -> list[Send]:
        raw = handle(name, "raw")
        return self.on(Prefilled(request=name, first_token=7, handle=raw), "P")

    def planned(self, name: str, pages: int = 5) -> list[Send]:
        return self.on(Planned(request=name, pages=pages), "C")

    def compressed(self, name: str) -> list[Send]:
        final = handle(name, "final")
        return self.on(Compressed(request=name, handle=final, report=REPORT), "C")

    def bring_to(self, step: Step, one: Request | None = None) -> list[Send]:
        """Take a request to a step of its life; what the last event caused."""
        one = one or request()
        events = {
            "waiting": lambda: self.submit(one),
            "prefilling": lambda: self.submit(one),
            "prefilled": lambda: self.prefilled(one.id),
            "compressing": lambda: self.prefilled(one.id),
            "planned": lambda: self.planned(one.id),
            "encoding": lambda: self.planned(one.id),
            "decoding": lambda: self.compressed(one.id),
        }
        chain: list[Step] = ["prefilling", "compressing", "encoding", "decoding"]
        before = {"waiting": 0, "prefilled": 1, "planned": 2}.get(step)
        for passed in chain[: chain.index(step) if before is None else before]:
            events[passed]()
        return events[step]()

    def state(self, name: str = "r") -> str | None:
        explanation = self.router.explain(name, self.now)
        return explanation and explanation.state

    def tick(self, seconds: float) -> list[Send]:
        """Let time pass, with fresh reports all along."""
        self.now += seconds
        return self.router.tick(self.now)

    @property
    def booked(self) -> int:
        return sum(self.router.snapshot(self.now).booked_bytes.values())

    def count(self, reason: str) -> int:
        return self.router.snapshot(self.now).counters.get(reason, 0)


def whole(**settings: object) -> Driver:
    return Driver(*WORKERS, **settings)  # pyright: ignore[reportArgumentType]


def failures(sends: list[Send]) -> list[Failed]:
    return [send.message for send in sends if isinstance(send.message, Failed)]


def started(sends: list[Send]) -> list[str]:
    return [
        one.id
        for send in sends
        if isinstance(send.message, Prefill)
        for one in send.message.requests
    ]


# ------------------------------------------------------------------ the way of one request


def test_a_request_passes_the_three_stages() -> None:
    driver, one = whole(), request()
    assert driver.submit(one) == [Send("P", Prefill(requests=(one,)))]
    raw = handle("r", "raw")
    assert driver.prefilled("r") == [
        Send("C", Compress(items=(CompressItem(request="r", handle=raw),)))
    ]
    assert driver.planned("r") == [Send("C", Encode(requests=("r",), arena="arena"))]
    join = Join(request=one, words=(7,), handle=handle("r", "final"), report=REPORT)
    assert driver.compressed("r") == [Send("D", join)]
    assert driver.on(Finished(request="r", tokens=10), "D") == []
    assert driver.state() is None
    assert driver.booked == 0
    assert driver.count("finished") == 1


def test_the_compressor_hears_what_may_be_kept_of_a_prompt() -> None:
    plan = replace(MODEL.plan, prefix_bytes=1 << 20)
    router = Coordinator(RouterConfig(), plan, 10**9, PATIENCE)
    driver = whole()
    driver.router = router
    for worker in WORKERS:
        driver.hello(worker)
    one = replace(request(), said=(5, 6), cache_salt="salt", tenant="me")
    driver.submit(one)
    done = Prefilled(request="r", first_token=7, handle=handle("r", "raw"), token_s=0.25)
    (send,) = driver.on(done, "P")
    assert send.message.items[0].prefix == Prefix(
        tokens=np.array([1] * 50 + [5, 6], "<i4").tobytes(),
        cache_salt="salt",
        tenant="me",
        token_s=0.25,
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
    hello = Hello(name="F#1", address="F", stages=("compress",), arena="gpu0")
    near.on(hello, "F")
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
    assert driver.router.snapshot(0).held_by == "no_decode_slot"
    for name in "ab":
        driver.prefilled(name)
        driver.planned(name)
        driver.compressed(name)
    assert driver.state("c") == "waiting"
    assert started(driver.on(Finished(request="a", tokens=3), "D")) == ["c"]


def test_prefill_gets_no_more_tokens_than_its_limit() -> None:
    driver = whole(prefill_batch_tokens=100)
    assert [bool(driver.submit(request(name))) for name in "abc"] == [True, True, False]
    assert driver.router.snapshot(0).held_by == "prefill_busy"
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
    assert driver.router.snapshot(driver.now).held_by == "no_bytes"
    driver.on(Finished(request="first", tokens=1), "P")
    assert started(driver.on(Finished(request="small", tokens=1), "P")) == ["large"]


def test_a_worker_without_a_fresh_report_counts_as_full() -> None:
    driver = Driver("C", "D")
    driver.on(Hello(name="P#1", address="P", stages=("prefill",)), "P")
    assert driver.submit(request()) == []
    assert started(driver.report("P")) == ["r"]
    driver.now = 4.0
    assert driver.submit(request("next")) == []
    driver.report("D")
    assert started(driver.report("P")) == ["next"]


def test_a_report_of_somebody_else_refreshes_nobody() -> None:
    driver = Driver("C", "D")
    driver.on(Hello(name="P#2", address="P", stages=("prefill",)), "P")
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
    driver.hello("C")
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


# ------------------------------------------------------------------ death


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
    driver.hello("D", start=2)
    assert failures(driver.router.lost("D", driver.now)) == []


def resume(former: str = "D#1") -> Resume:
    join = Join(request=request(), words=(7,), handle=handle("r", "final"), report=REPORT)
    return Resume(former=former, join=join)


def expel(worker: str = "D#1") -> Send:
    return Send(POOL, Expel(worker=worker))


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
    assert driver.hello("D", start=2) == [Send("D", resume())]


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
    driver.hello("E")
    assert failures(driver.tick(0.5)) == [failed("r", StageLost("decode"))]


def test_orphans_that_nobody_takes_fail_after_the_grace_time() -> None:
    driver = Driver("P", "C", "D")
    driver.bring_to("decoding")
    driver.router.lost("D", driver.now)
    sends = driver.tick(PATIENCE.grace_s)
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
    driver.tick(PATIENCE.reclaim_s)
    assert driver.booked == 0


def test_log_probabilities_cannot_be_told_again_so_the_request_begins_anew() -> None:
    driver = whole()
    asked = replace(request(), sampling=Sampling(max_tokens=50, logprobs=2))
    driver.bring_to("decoding", asked)
    [failure] = failures(driver.router.lost("D", driver.now))
    assert failure == failed("r", StageLost("decode"))
    assert failure.resumable


def stall_driver() -> Driver:
    driver = whole(patience=replace(PATIENCE, silent_s=5.0))
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
    assert pass_time(driver, 0.5, silent="D") == [Send("E", resume())]
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
    assert pass_time(driver, 0.5, silent="D") == [Send("E", resume())]


def test_a_silent_prefill_worker_is_ended_too() -> None:
    driver = whole(patience=replace(PATIENCE, silent_s=5.0))
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


def test_who_comes_to_a_dead_worker_s_address_cannot_free_what_it_held() -> None:
    driver = whole()
    driver.bring_to("encoding")
    driver.router.lost("C", driver.now)
    driver.hello("C", start=2)
    assert driver.planned("r") == [Send("C", Cancel(requests=("r",)))]  # late news of the dead one
    driver.on(Finished(request="r", tokens=0), "C")
    assert driver.booked > 0
    driver.tick(PATIENCE.reclaim_s)
    assert driver.booked == 0


def test_a_living_worker_is_waited_for_longer_than_the_dead_one_beside_it() -> None:
    driver = whole(patience=replace(PATIENCE, cancel_timeout_s=60.0))
    driver.bring_to("compressing")
    driver.router.lost("C", driver.now)
    driver.tick(PATIENCE.reclaim_s)
    assert driver.booked > 0
    driver.on(Finished(request="r", tokens=0), "P")
    assert driver.booked == 0


def test_a_request_that_lost_its_worker_goes_to_the_front_and_finds_the_line_never_full() -> None:
    driver = Driver("C", "D", max_queued_requests=1)
    assert failures(driver.submit(request("first"))) == []
    assert len(failures(driver.submit(request("late")))) == 1
    again = replace(request("again~1"), said=(5, 6), attempt=1)
    assert failures(driver.submit(again)) == []
    [send] = driver.hello("P")
    assert isinstance(send.message, Prefill)
    assert send.message.requests[0] == again


@pytest.mark.parametrize(("step", "giver"), [("compressing", "P"), ("decoding", "C")])
def test_the_death_of_the_stage_before_costs_nothing(step: Step, giver: str) -> None:
    driver = whole()
    driver.bring_to(step)
    assert driver.router.lost(giver, driver.now) == []
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
        [send] = driver.hello("E", start=2)
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
    [send] = driver.hello("D", start=2)
    assert send.message == Encode(requests=("b",), arena="arena")


def test_a_new_process_at_a_known_address_means_that_the_old_one_died() -> None:
    driver = whole()
    driver.bring_to("decoding")
    [send] = driver.hello("D", start=2)
    assert isinstance(send.message, Resume)
    assert send.message.former == "D#1"


def test_the_same_process_saying_hello_again_changes_nothing() -> None:
    driver = whole()
    driver.bring_to("decoding")
    assert driver.hello("D") == []
    assert driver.state() == "decoding"


def test_requests_of_a_lost_ingress_are_cancelled_everywhere() -> None:
    driver = whole()
    driver.bring_to("decoding")
    driver.submit(request("other", to="in2"))
    sends = driver.router.lost("in", driver.now)
    assert sends == [Send(address, Cancel(requests=("r",))) for address in ("D", "C")]
    assert driver.state("other") == "prefilling"


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


def test_a_waiting_request_knows_what_it_waits_for() -> None:
    driver = Driver("C", "D")
    driver.bring_to("waiting")
    driver.now = 2.0
    explanation = driver.router.explain("r", driver.now)
    assert explanation is not None
    assert explanation.held_by == "no_prefill_worker"
    assert explanation.in_state_s == driver.router.snapshot(2.0).oldest_waiting_s == 2.0
