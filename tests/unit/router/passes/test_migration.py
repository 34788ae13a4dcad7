"""Requests that run move from decode workers that have many to those that have few."""

from dataclasses import replace

import pytest

from tests.unit.router.driver import (
    TIMEOUTS,
    Driver,
    expel,
    failures,
    handle,
    request,
)
from triptych.core.config import RouterConfig
from triptych.core.errors import ConfigError, StageLost
from triptych.core.handles import KVHandle
from triptych.core.messages import (
    Cancel,
    Finished,
    Join,
    Message,
    Preempt,
    Preempted,
    Request,
    Resume,
    Resumed,
    Sampling,
    Send,
    TokenLogprob,
    failed,
)

WORDS, MEMORY = (7, 8, 9), (2.0, 0.5)


def imbalanced(*requests: Request, **config: object) -> Driver:
    """One decode worker has all requests, and another one comes."""
    driver = Driver("P", "C", "D", slots=4, **config)  # pyright: ignore[reportArgumentType]
    for one in requests or (request("one"), request("two")):
        driver.bring_to("decoding", one)
    driver.register("E")
    return driver


def suspended(name: str) -> Preempted:
    return Preempted(request=name, output_tokens=WORDS, handle=on_offer(name), memory=MEMORY)


def on_offer(name: str) -> KVHandle:
    return handle(name, "offer")


def messages(sends: list[Send], kind: type[Message]) -> list[Send]:
    return [send for send in sends if isinstance(send.message, kind)]


def test_the_newest_request_of_the_fullest_worker_goes_to_the_emptiest() -> None:
    driver = imbalanced()
    booked = driver.booked
    assert driver.tick(0.5) == [Send("D", Preempt(requests=("two",)))]
    assert driver.tick(0.5) == []  # one at a time
    [send] = driver.on(suspended("two"), "D")
    assert isinstance(send.message, Join)
    assert (send.to, send.message.output_tokens, send.message.handle) == (
        "E",
        WORDS,
        on_offer("two"),
    )
    assert send.message.memory == MEMORY
    assert (driver.state("two"), driver.booked) == ("decoding", booked)
    assert driver.on(Resumed(request="two"), "E") == []
    assert driver.count("moved") == 1
    assert driver.tick(0.5) == []  # one each
    assert driver.on(Finished(request="two", tokens=9), "E") == []
    assert driver.state("two") is None


@pytest.mark.parametrize("gap", [0, 3])
def test_a_smaller_difference_than_is_set_moves_nobody(gap: int) -> None:
    driver = imbalanced(rebalance_requests=gap)
    assert driver.tick(0.5) == []


def test_batches_of_fixed_size_stay_where_they_are() -> None:
    driver = imbalanced(batch_policy="static:p1c1d2")
    assert messages(driver.tick(0.5), Preempt) == []


def test_log_probabilities_that_may_not_be_delivered_go_along() -> None:
    wanted = Sampling(max_tokens=10, logprobs=0)
    scored = Request(id="scored", prompt=(1,) * 50, sampling=wanted, reply_to="in")
    driver = imbalanced(request("one"), scored)
    assert driver.tick(0.5) == [Send("D", Preempt(requests=("scored",)))]
    newest = tuple(TokenLogprob(token=token, logprob=-0.5) for token in WORDS)
    [send] = driver.on(replace(suspended("scored"), logprobs=newest), "D")
    assert isinstance(send.message, Join)
    assert (send.to, send.message.logprobs) == ("E", newest)


def test_an_answer_that_ends_before_it_is_suspended_just_ends() -> None:
    driver = imbalanced()
    driver.tick(0.5)
    assert driver.on(Finished(request="two", tokens=9), "D") == []
    assert driver.state("two") is None
    assert driver.on(suspended("two"), "D") == [Send("D", Cancel(requests=("two",)))]


def on_offer_at_a_silent_worker() -> Driver:
    """Nobody takes requests at present, so the one on offer waits."""
    driver = Driver("P", "C", "D")
    driver.bring_to("decoding", request("one"))
    driver.now += TIMEOUTS.report_bound_s + 1
    assert driver.on(suspended("one"), "D") == []
    assert driver.state("one") == "compressed"
    return driver


def test_a_request_on_offer_is_cancelled_where_its_pages_are() -> None:
    driver = on_offer_at_a_silent_worker()
    assert driver.on(Cancel(requests=("one",)), "in") == [Send("D", Cancel(requests=("one",)))]
    driver.on(Finished(request="one", tokens=0), "D")
    assert driver.booked == 0


def test_a_request_on_offer_outlives_its_worker() -> None:
    """The pool keeps what the dead one had until somebody has joined it."""
    driver = on_offer_at_a_silent_worker()
    assert driver.router.lost("D", driver.now) == []
    assert driver.tick(0.5) == []
    [send] = driver.register("E")
    assert isinstance(send.message, Join)
    assert (send.to, send.message.previous_worker, send.message.output_tokens) == (
        "E",
        "D#1",
        WORDS,
    )
    assert driver.tick(0.5) == []
    driver.on(Resumed(request="one"), "E")
    assert driver.tick(0.5) == [expel()]
    assert driver.on(Finished(request="one", tokens=9), "E") == []
    assert driver.booked == 0


def test_what_was_on_offer_and_is_not_found_begins_anew() -> None:
    driver = on_offer_at_a_silent_worker()
    driver.router.lost("D", driver.now)
    driver.register("E")
    gone = failed("one", StageLost("decode"))
    [failure] = failures(driver.on(Finished(request="one", tokens=0, error=gone), "E"))
    assert failure.resumable
    assert driver.tick(0.5) == [expel()]
    driver.tick(TIMEOUTS.reclaim_s)
    assert driver.booked == 0


def test_a_worker_that_dies_before_its_offer_is_heard_leaves_an_orphan() -> None:
    driver = imbalanced()
    driver.tick(0.5)
    sends = driver.router.lost("D", driver.now)
    resumes = [send.message for send in sends if isinstance(send.message, Resume)]
    assert [(resume.join.request.id, resume.previous_worker) for resume in resumes] == [
        ("one", "D#1"),
        ("two", "D#1"),
    ]
    assert failures(sends) == []
    assert driver.on(suspended("two"), "D") == [Send("D", Cancel(requests=("two",)))]


def test_the_pages_of_a_dead_worker_stay_while_what_it_offered_is_on_its_way() -> None:
    driver = imbalanced()
    driver.tick(0.5)
    driver.on(suspended("two"), "D")
    sends = driver.router.lost("D", driver.now)
    assert [send.message for send in sends if isinstance(send.message, Resume)]  # the other one
    driver.on(Resumed(request="one"), "E")
    assert driver.tick(0.5) == []
    driver.on(Resumed(request="two"), "E")
    assert driver.tick(0.5) == [expel()]


def test_an_heir_may_find_what_a_living_worker_offered() -> None:
    """The one that was to join it died before it had: nobody knows whether it did."""
    driver = imbalanced()
    driver.tick(0.5)
    driver.on(suspended("two"), "D")
    [send] = driver.router.lost("E", driver.now)
    assert isinstance(send.message, Resume)
    assert (send.to, send.message.previous_worker) == ("D", "E#1")
    assert (send.message.join.output_tokens, send.message.join.handle) == (WORDS, on_offer("two"))


def test_what_goes_back_to_its_worker_is_inherited_if_that_dies_at_once() -> None:
    driver = Driver("P", "C", "D")
    driver.bring_to("decoding", request("one"))
    driver.on(suspended("one"), "D")  # nobody asked; D is the only one who can join it
    assert driver.router.lost("D", driver.now) == []
    [send] = driver.register("E")
    assert isinstance(send.message, Resume)
    assert (send.message.previous_worker, send.message.join.output_tokens) == ("D#1", WORDS)


def test_a_difference_of_one_is_refused_since_it_would_never_end() -> None:
    with pytest.raises(ConfigError, match="rebalance_requests"):
        RouterConfig(rebalance_requests=1)
