"""A full waiting queue: the tenant with the most requests makes room for one with few."""

from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st

from tests.unit.router.driver import Driver, request
from triptych.core.messages import Failed, Send


def submit(driver: Driver, name: str, tenant: str, **fields: float | int) -> list[Send]:
    return driver.submit(replace(request(name), tenant=tenant, **fields))


def refused(sends: list[Send]) -> list[str]:
    """Requests that were answered with 429."""
    failures = [send.message for send in sends if isinstance(send.message, Failed)]
    assert all(one.status == 429 and one.retry_after_s for one in failures)
    return [one.request for one in failures]


def full(**fields: int) -> Driver:
    driver = Driver(max_queued_requests=4)
    for name in ("a1", "a2", "a3", "a4"):
        submit(driver, name, "A", **fields)
    return driver


def test_the_newest_request_of_the_largest_tenant_makes_room() -> None:
    driver = full()
    assert refused(submit(driver, "b1", "B")) == ["a4"]
    assert refused(submit(driver, "b2", "B")) == ["a3"]
    assert [driver.state(name) for name in ("a1", "a2", "b1", "b2")] == ["waiting"] * 4
    assert driver.count("displaced") == 2


def test_nobody_is_displaced_by_a_tenant_that_has_as_much() -> None:
    driver = full()
    submit(driver, "b1", "B")
    submit(driver, "b2", "B")
    assert refused(submit(driver, "b3", "B")) == ["b3"]
    assert refused(submit(driver, "a5", "A")) == ["a5"]


def test_a_tenant_displaces_nothing_of_its_own() -> None:
    assert refused(submit(full(), "a5", "A")) == ["a5"]


def test_the_least_urgent_of_a_tenant_goes_before_its_newest() -> None:
    driver = Driver(max_queued_requests=3)
    for name, priority in (("a1", 0), ("a2", 5), ("a3", 0)):
        submit(driver, name, "A", priority=priority)
    assert refused(submit(driver, "b1", "B")) == ["a2"]


def test_weights_are_shares_of_the_queue() -> None:
    driver = full(weight=4)
    submit(driver, "b1", "B")
    assert driver.state("b1") is None
    driver = Driver(max_queued_requests=4)
    for name in ("b1", "b2", "b3", "b4"):
        submit(driver, name, "B")
    for name in ("a1", "a2", "a3"):
        submit(driver, name, "A", weight=4)
    assert [driver.state(name) for name in ("b1", "a1", "a2", "a3")] == ["waiting"] * 4


def test_retries_are_neither_refused_nor_displaced() -> None:
    driver = Driver(max_queued_requests=2)
    submit(driver, "a1", "A")
    submit(driver, "a2", "A", attempt=1)
    submit(driver, "a3", "A", attempt=1)
    assert refused(submit(driver, "b1", "B")) == ["a1"]
    assert refused(submit(driver, "b2", "B")) == ["b2"]


@given(st.lists(st.sampled_from("ABC"), max_size=60))
def test_who_has_no_more_than_its_share_is_never_refused(tenants: list[str]) -> None:
    driver = Driver(max_queued_requests=6)
    waiting = dict.fromkeys("ABC", 0)
    for number, tenant in enumerate(tenants):
        gone = refused(submit(driver, f"{tenant}{number}", tenant))
        waiting[tenant] += 1
        for name in gone:
            waiting[name[0]] -= 1
            assert waiting[name[0]] >= 2, "a third of the queue is everybody's share"
    assert sum(waiting.values()) <= 6
