"""Requests that outlive their workers: what the client hears, and in which order."""

from dataclasses import replace
from itertools import permutations
from random import Random

import pytest

from triptych.core.errors import StageLost
from triptych.core.messages import Failed, MethodChoice, Request, Sampling, Tokens, failed
from triptych.router import AttemptTable, RequestAttempts
from triptych.router.frontend.retries import GAP_S, MAX_ATTEMPTS, MOST_EARLY, QUIET_S

REQUEST = Request(id="r", prompt=(1, 2, 3), sampling=Sampling(max_tokens=9), reply_to="ingress")


def tokens(index: int, attempt: str = "r", *, last: bool = False) -> Tokens:
    return Tokens(
        request=attempt,
        index=index,
        tokens=(10 + index,),
        text=f"<{index}>",
        finish="length" if last else None,
    )


@pytest.fixture
def record_report() -> list[Tokens | Failed]:
    return []


@pytest.fixture
def journey(record_report: list[Tokens | Failed]) -> RequestAttempts:
    return RequestAttempts(REQUEST, record_report.append)


@pytest.mark.parametrize("order", list(permutations(range(4))))
def test_the_client_hears_each_token_once_and_in_order(
    journey: RequestAttempts, record_report: list[Tokens | Failed], order: tuple[int, ...]
) -> None:
    """Whichever worker speaks first, and however often each says the same."""
    for index in (*order, *order):
        journey.hear(tokens(index))
    assert record_report == [tokens(index) for index in range(4)]
    assert journey.output_tokens == [10, 11, 12, 13]


@pytest.fixture
def asking() -> RequestAttempts:
    """It wants log probabilities."""
    sampling = Sampling(max_tokens=9, logprobs=0)
    return RequestAttempts(replace(REQUEST, sampling=sampling), lambda _: None)


def test_a_token_that_will_not_come_any_more_tears_the_answer(asking: RequestAttempts) -> None:
    """One that is merely overtaken does not."""
    journey = asking
    for index in (0, 2, 3):
        journey.hear(tokens(index))
    assert not journey.is_torn
    journey.hear(tokens(1))
    assert journey.output_tokens == [10, 11, 12, 13]
    journey.hear(tokens(5, last=True))
    assert journey.is_torn
    assert journey.hear(tokens(4))  # it comes after all, and that is the end
    assert not journey.is_torn


def test_what_is_too_far_ahead_tears_the_answer(
    asking: RequestAttempts, journey: RequestAttempts
) -> None:
    """Not that of who hears all tokens again: there it was a worker that moved a request."""
    for index in range(1, MOST_EARLY + 1):
        asking.hear(tokens(index))
        assert not asking.is_torn
    for one in (asking, journey):
        for index in range(1, MOST_EARLY + 2):
            one.hear(tokens(index))
    assert asking.is_torn
    assert not journey.is_torn
    asking.begin_again()
    assert not asking.is_torn


def test_another_attempt_begins_behind_what_the_client_has() -> None:
    record_report, journeys = list[Tokens | Failed](), AttemptTable()
    journey = journeys.start(REQUEST, record_report.append)
    assert journey.present() == REQUEST
    journey.hear(tokens(0))
    journey.hear(tokens(1))
    journey.hear(replace(tokens(3), tokens=(99,)))  # the one before it never came
    assert journeys.again(journey)
    request = journey.present()
    assert (request.id, request.output_tokens, request.attempt) == ("r~1", (10, 11), 1)
    assert request.known == (1, 2, 3, 10, 11)
    assert journeys.get("r") is None
    assert journeys.get("r~1") is journey
    for index in range(2, 4):
        assert journey.hear(tokens(index, "r~1", last=index == 3)) == (index == 3)
    assert record_report == [tokens(index, last=index == 3) for index in range(4)]


def test_an_attempt_that_is_made_again_reads_no_more_from_the_cache_than_the_first_one() -> None:
    """By then its own prompt may be kept there, rounded."""
    journeys = AttemptTable()
    journey = journeys.start(REQUEST, lambda _: None)
    assert journey.present().cached_at_most is None
    journey.hear(replace(tokens(0), cached_tokens=2))
    for attempt in ("r~1", "r~2"):
        assert journeys.again(journey)
        assert journey.present().cached_at_most == 2
        journey.hear(replace(tokens(0, attempt), cached_tokens=3))
    journey.hear(tokens(1, "r~2"))
    assert journeys.again(journey)
    assert journey.present().cached_at_most is None


def test_all_attempts_have_the_method_that_the_router_chose_for_the_first_one() -> None:
    """Its tokens are of that method, and another router might choose another one."""
    journey = RequestAttempts(replace(REQUEST, adapts=True), lambda _: None)
    choice = MethodChoice(
        method="uniform:k4v2", reason="memory", kl=0.02, stored_bytes=1, free_bytes=2
    )
    journey.hear(replace(tokens(0), choice=choice))
    journey.hear(tokens(1))
    for _ in range(2):
        journey.begin_again()
        assert journey.present().choice == choice


def test_an_attempt_that_got_no_further_than_the_prefill_is_made_again_as_it_was() -> None:
    record_report, journeys = list[Tokens | Failed](), AttemptTable()
    journey = journeys.start(REQUEST, record_report.append)
    journey.hear(tokens(0))
    assert journeys.again(journey)
    assert journey.present().output_tokens == ()
    for index in range(3):
        journey.hear(tokens(index, "r~1"))
    assert record_report == [tokens(index) for index in range(3)]
    assert journeys.again(journey)
    assert journey.present().output_tokens == (10, 11, 12)
    journey.hear(tokens(3, "r~2"))
    assert journeys.again(journey)
    assert journey.present().output_tokens == (10, 11, 12)


def test_a_request_that_kills_its_workers_ends() -> None:
    record_report, journeys = list[Tokens | Failed](), AttemptTable()
    journey = journeys.start(REQUEST, record_report.append)
    delays = list[float]()
    while journeys.again(journey):
        delays.append(journey.delay_s)
    assert delays == [0.0, 0.5, 1.0, 2.0, 4.0]
    assert len(delays) == MAX_ATTEMPTS - 1
    journey.fail(failed(journey.id, StageLost("decode")))
    assert record_report == [failed("r", StageLost("decode"))]
    journeys.end(journey)
    assert list(journeys) == []


def test_any_stream_of_repeats_and_losses_reads_like_one_answer() -> None:
    """A worker dies at a random point and the next one says again what may be lost."""
    random = Random(4)
    for _ in range(300):
        record_report, journeys = list[Tokens | Failed](), AttemptTable()
        journey = journeys.start(REQUEST, record_report.append)
        length, done = random.randrange(1, 30), False
        while not done:
            start = random.randrange(len(journey.output_tokens) + 1)
            end = random.randrange(start, length + 1)
            if journey.attempt == MAX_ATTEMPTS - 1:
                start, end = len(journey.output_tokens), length
            for index in range(start, end):
                done |= journey.hear(tokens(index, journey.id, last=index == length - 1))
            if not done:
                assert journeys.again(journey)
        assert record_report == [tokens(index, last=index == length - 1) for index in range(length)]


def test_a_gap_that_does_not_close_loses_the_attempt_with_and_without_log_probabilities(
    asking: RequestAttempts, journey: RequestAttempts
) -> None:
    for one in (asking, journey):
        one.hear(tokens(0))
        assert one.progress(100.0) == "moves"
        one.hear(tokens(2))
        assert one.progress(101.0) == "moves"
        assert one.progress(101.0 + GAP_S) == "torn"
        one.begin_again()
        assert one.progress(102.0 + GAP_S) == "moves"


def test_a_gap_after_a_long_wait_has_its_whole_time_to_close(journey: RequestAttempts) -> None:
    """The first two tokens come from two workers, and the second one may arrive first."""
    journey.progress(0.0)
    assert journey.progress(60.0) == "quiet"
    journey.hear(tokens(1))
    assert journey.progress(60.1) == "quiet"
    assert journey.progress(60.1 + GAP_S) == "torn"


def test_a_gap_that_closes_does_not(journey: RequestAttempts) -> None:
    journey.hear(tokens(1))
    journey.progress(0.0)
    journey.hear(tokens(0))
    assert journey.progress(GAP_S) == "moves"
    assert journey.progress(GAP_S + QUIET_S) == "quiet"
    journey.hear(tokens(2))
    assert journey.progress(2 * GAP_S + QUIET_S) == "moves"


def test_an_attempt_is_lost_when_the_router_does_not_know_it_twice(
    journey: RequestAttempts,
) -> None:
    journey.progress(0.0)
    assert not journey.unknown()
    journey.hear(tokens(0))  # its output was under way
    journey.progress(1.0)
    assert not journey.unknown()
    assert journey.unknown()


def test_a_token_that_came_before_is_no_gap(journey: RequestAttempts) -> None:
    for index in (0, 1, 0, 1):
        journey.hear(tokens(index))
    journey.progress(0.0)
    assert journey.progress(GAP_S) == "moves"
