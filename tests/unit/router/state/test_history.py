"""What the router remembers of its latest requests."""

from dataclasses import replace

import pytest

from tests.unit.router.driver import REPORT, Driver, request, whole
from triptych.core.errors import StaleHandle
from triptych.core.messages import Cancel, Finished, Prefilled, Resumed, failed
from triptych.router import RequestTrace
from triptych.router.state.history import MAX_STEPS, History


def traces(driver: Driver) -> dict[str, RequestTrace]:
    return {trace.request: trace for trace in driver.router.traces()}


def states(trace: RequestTrace) -> list[str]:
    return [state for state, _ in trace.steps]


def test_a_finished_request_tells_when_it_entered_which_state() -> None:
    driver = whole()
    driver.submit(request())
    for second, event in enumerate((driver.prefilled, driver.planned, driver.compressed), 1):
        driver.now = float(second)
        event("r")
    driver.now = 9.0
    driver.on(Finished(request="r", tokens=10), "D")
    [trace] = driver.router.traces()
    assert trace.steps == (
        ("waiting", 0.0),
        ("prefilling", 0.0),
        ("prefilled", 1.0),
        ("compressing", 1.0),
        ("planned", 2.0),
        ("encoding", 2.0),
        ("compressed", 3.0),
        ("decoding", 3.0),
    )
    assert (trace.end, trace.ended, trace.tokens, trace.report) == ("finished", 9.0, 10, REPORT)
    assert (trace.number, trace.prompt_tokens, trace.max_tokens) == (1, 50, 10)


def test_a_request_under_way_is_remembered_without_an_end() -> None:
    driver = whole()
    driver.bring_to("compressing")
    [trace] = driver.router.traces()
    assert states(trace)[-1] == "compressing"
    assert (trace.end, trace.report) == ("", None)


def test_an_answer_of_one_token_is_finished_behind_the_prefill() -> None:
    driver = whole()
    driver.bring_to("prefilling")
    driver.on(Prefilled(request="r", first_token=2, handle=None), "P")
    [trace] = driver.router.traces()
    assert (states(trace), trace.end, trace.tokens) == (["waiting", "prefilling"], "finished", 1)


def test_a_cancelled_request_ends_when_its_client_left() -> None:
    driver = whole()
    driver.bring_to("decoding")
    driver.now = 4.0
    driver.on(Cancel(requests=("r",)), "in")
    assert driver.state() == "leaving"
    driver.now = 5.0
    driver.on(Finished(request="r", tokens=2), "D")
    [trace] = driver.router.traces()
    assert (trace.end, trace.ended, states(trace)[-1]) == ("cancelled", 4.0, "decoding")


def test_a_failed_request_names_the_code() -> None:
    driver = whole()
    driver.bring_to("compressing")
    why = failed("r", StaleHandle(3, "gone"))
    driver.on(Finished(request="r", tokens=0, error=why), "C")
    [trace] = driver.router.traces()
    assert (trace.end, trace.code) == ("failed", why.code or "unknown")


def test_a_request_that_is_taken_over_decodes_twice() -> None:
    driver = whole()
    driver.bring_to("decoding")
    driver.router.lost("D", driver.now)
    driver.on(Resumed(request="r"), "E")
    [trace] = driver.router.traces()
    assert states(trace)[-3:] == ["decoding", "orphaned", "decoding"]


def test_only_the_newest_requests_are_remembered() -> None:
    history = History(limit=3)
    for name in "abcde":
        history.begin(request(name), "waiting", 0.0)
    assert [(trace.request, trace.number) for trace in history] == [("c", 3), ("d", 4), ("e", 5)]
    assert [history.number(name) for name in "ace"] == [0, 3, 5]
    history.note("a", "prefilling", None, 1.0)
    history.end("a", "finished", 1.0)
    assert [trace.request for trace in history] == ["c", "d", "e"]


def test_a_life_has_no_end_of_steps() -> None:
    history = History()
    history.begin(request(), "waiting", 0.0)
    for step in range(3 * MAX_STEPS):
        history.note("r", "orphaned", None, float(step))
    [trace] = history
    assert len(trace.steps) == MAX_STEPS


@pytest.mark.parametrize("text", ["prompt", "output_tokens"])
def test_nothing_of_what_was_said_is_remembered(text: str) -> None:
    driver = whole()
    driver.submit(replace(request(), **{text: (987_654_321,)}))
    [trace] = driver.router.traces()
    assert "987654321" not in repr(trace)


def test_handles_are_those_of_requests_under_way() -> None:
    driver = whole()
    driver.bring_to("prefilling", request("a"))
    driver.bring_to("compressing", request("b"))
    assert set(driver.router.handles()) == {"b"}
    driver.on(Cancel(requests=("b",)), "in")
    for sender in ("C", "P"):
        driver.on(Finished(request="b", tokens=0), sender)
    assert driver.router.handles() == {}
