"""Running requests make room for more urgent ones, keep their pages, and go on."""

import pytest

from tests.unit.router.driver import TIMEOUTS, Driver, expel, failures, started
from tests.unit.router.passes.test_migration import WORDS, messages, on_offer, suspended
from triptych.core.messages import (
    Cancel,
    Finished,
    Join,
    Preempt,
    Request,
    Resumed,
    Sampling,
    Send,
)


def request(name: str, priority: int, tenant: str = "", max_tokens: int = 10) -> Request:
    return Request(
        id=name,
        prompt=(1,) * 50,
        sampling=Sampling(max_tokens=max_tokens),
        reply_to="in",
        priority=priority,
        tenant=tenant,
    )


def full(*, slots: int = 1, **settings: object) -> Driver:
    """The only decode worker runs a request that can wait."""
    driver = Driver("P", "C", "D", slots=slots, **settings)  # pyright: ignore[reportArgumentType]
    driver.bring_to("decoding", request("slow", 5))
    return driver


def preempted(driver: Driver) -> list[Send]:
    """An urgent request comes, and the slow one is set aside."""
    assert driver.submit(request("quick", 0)) == [Send("D", Preempt(requests=("slow",)))]
    return driver.on(suspended("slow"), "D")


def test_an_urgent_request_takes_the_slot_of_one_that_can_wait() -> None:
    driver = full()
    booked = driver.booked
    assert started(preempted(driver)) == ["quick"]
    assert driver.state("slow") == "waiting"
    explanation = driver.router.explain("slow", driver.now)
    assert explanation is not None
    assert 0 < explanation.booked_bytes < booked  # its pages, and not what they would grow by
    for message in ("prefilled", "planned", "compressed"):
        getattr(driver, message)("quick")
    sends = driver.on(Finished(request="quick", tokens=10), "D")
    [join] = [send.message for send in messages(sends, Join)]
    assert isinstance(join, Join)
    assert (join.request.id, join.output_tokens, join.handle) == ("slow", WORDS, on_offer("slow"))
    assert driver.booked <= booked  # the plan of its prompt was above the bound
    driver.on(Resumed(request="slow"), "D")
    driver.on(Finished(request="slow", tokens=10), "D")
    assert driver.booked == 0


@pytest.mark.parametrize(("priority", "tenant"), [(5, ""), (9, ""), (0, "another")])
def test_nobody_makes_room_for_equals_or_for_another_tenant(priority: int, tenant: str) -> None:
    driver = full()
    assert driver.submit(request("other", priority, tenant)) == []
    assert driver.tick(0.5) == []


def test_one_that_has_lost_patience_is_let_be() -> None:
    """Else it could be set aside for ever, a few tokens at a time."""
    driver = full(max_overtake_s=1.0, ageing_s=1.0)
    driver.tick(6.5)
    driver.report("D")
    driver.report("P")
    assert messages(driver.submit(request("quick", 0)), Preempt) == []


def test_bytes_that_are_only_promised_are_given_to_the_urgent() -> None:
    probe = full(slots=8)
    one, driver = probe.booked, Driver("P", "C", "D", slots=8)
    assert one
    del driver
    long = request("slow", 5, max_tokens=400)
    driver = Driver("P", "C", "D", slots=8, booking="bounds")
    driver.bring_to("decoding", long)
    capacity = driver.booked + one // 4
    driver = Driver("P", "C", "D", slots=8, capacity=capacity, booking="bounds")
    driver.bring_to("decoding", long)
    assert driver.submit(request("quick", 0)) == [Send("D", Preempt(requests=("slow",)))]
    assert started(driver.on(suspended("slow"), "D")) == ["quick"]


def test_a_request_that_was_set_aside_can_be_cancelled() -> None:
    driver = full()
    preempted(driver)
    sends = driver.on(Cancel(requests=("slow",)), "in")
    assert sends == [Send("D", Cancel(requests=("slow",)))]
    driver.on(Finished(request="slow", tokens=0), "D")
    driver.on(Cancel(requests=("quick",)), "in")
    driver.on(Finished(request="quick", tokens=0), "P")
    assert driver.booked == 0


def test_a_request_that_was_set_aside_outlives_its_worker() -> None:
    driver = full()
    preempted(driver)
    driver.router.lost("D", driver.now)
    driver.on(Cancel(requests=("quick",)), "in")
    assert driver.state("slow") == "waiting"
    assert driver.tick(0.5) == []  # the pool keeps its pages
    [send] = messages(driver.register("E"), Join)
    assert isinstance(send.message, Join)
    assert (send.to, send.message.request.id, send.message.previous_worker) == ("E", "slow", "D#1")
    driver.on(Resumed(request="slow"), "E")
    assert driver.tick(0.5) == [expel()]
    assert failures(driver.tick(TIMEOUTS.reclaim_s)) == []
