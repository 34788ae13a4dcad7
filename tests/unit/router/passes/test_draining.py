"""The end of an application: what runs finishes, what is new is refused."""

from dataclasses import replace

from tests.unit.router.driver import Driver, request
from triptych.core.messages import ROUTER, Drain, Drained, Failed, Finished, Prefill, Send


def drain(driver: Driver, timeout_s: float = 20.0) -> list[Send]:
    return driver.on(Drain(timeout_s=timeout_s), ROUTER)


def told(sends: list[Send], kind: type) -> set[str]:
    return {send.to for send in sends if isinstance(send.message, kind)}


def failures(sends: list[Send]) -> list[Failed]:
    return [send.message for send in sends if isinstance(send.message, Failed)]


def test_an_idle_application_has_drained_at_once() -> None:
    driver = Driver("P", "C", "D")
    sends = drain(driver)
    assert told(sends, Drain) == told(sends, Drained) == {"P", "C", "D", "in"}
    assert driver.router.is_drained


def test_new_requests_are_refused_with_503_and_a_time() -> None:
    driver = Driver("P", "C", "D")
    driver.bring_to("decoding")
    drain(driver)
    (failure,) = failures(driver.submit(request("new")))
    assert (failure.status, failure.code, failure.resumable) == (503, "shutting_down", False)
    assert failure.retry_after_s


def test_a_retry_of_a_request_that_runs_is_not_refused() -> None:
    driver = Driver("P", "C", "D")
    driver.bring_to("decoding")
    drain(driver)
    sends = driver.submit(replace(request("again"), attempt=1))
    assert told(sends, Prefill) == {"P"}


def test_a_request_passes_its_stages_and_the_peers_are_told_after_the_last_one() -> None:
    driver = Driver("P", "C", "D")
    driver.bring_to("prefilling")
    assert not told(drain(driver), Drained)
    driver.prefilled("r")
    driver.planned("r")
    driver.compressed("r")
    sends = driver.on(Finished(request="r", tokens=10), "D")
    assert not failures(sends)
    assert told(sends, Drained) == {"P", "C", "D", "in"}


def test_what_runs_after_the_grace_period_fails() -> None:
    driver = Driver("P", "C", "D")
    driver.bring_to("decoding")
    drain(driver, 20.0)
    assert not failures(driver.tick(19.9))
    (failure,) = failures(driver.tick(0.2))
    assert (failure.request, failure.code) == ("r", "shutting_down")
    assert not driver.router.is_drained  # the worker may still hold pages
    driver.on(Finished(request="r", tokens=0), "D")
    driver.on(Finished(request="r", tokens=0), "C")
    assert driver.router.is_drained


def test_a_second_drain_does_not_lengthen_the_first() -> None:
    driver = Driver("P", "C", "D")
    driver.bring_to("decoding")
    drain(driver, 5.0)
    drain(driver, 50.0)
    assert failures(driver.tick(5.1))


def test_a_peer_that_registers_later_is_told() -> None:
    driver = Driver("P", "C", "D")
    drain(driver)
    sends = driver.register("E")
    assert told(sends, Drain) == told(sends, Drained) == {"E"}
