"""Tenants at the coordinator: who starts next, and what each is charged in the end."""

from dataclasses import replace

from tests.unit.router.driver import MODEL, Driver, request, started
from triptych.core.messages import Cancel, Finished, Request, Send


def of(name: str, tenant: str, weight: float = 1.0, priority: int = 0) -> Request:
    return replace(request(name), tenant=tenant, weight=weight, priority=priority)


def with_one_slot() -> Driver:
    return Driver("P", "C", "D", slots=1)


def end(driver: Driver, name: str) -> list[Send]:
    """Let a request that was started take a second and finish with its first token."""
    driver.now += 1.0
    driver.report("P")
    driver.report("C")
    driver.report("D")
    return driver.on(Finished(request=name, tokens=1), "P")


def order_of(driver: Driver, first: list[Send], count: int) -> list[str]:
    order, sends = list[str](), first
    for _ in range(count):
        [name] = started(sends)
        order.append(name)
        sends = end(driver, name)
    return order


def test_a_tenant_with_one_request_does_not_wait_for_all_of_another() -> None:
    driver = with_one_slot()
    first = driver.submit(of("a0", "a"))
    for number in range(1, 4):
        driver.submit(of(f"a{number}", "a"))
    driver.submit(of("b0", "b"))
    assert order_of(driver, first, 5) == ["a0", "b0", "a1", "a2", "a3"]


def test_shares_follow_the_weights() -> None:
    driver = with_one_slot()
    first = driver.submit(of("b0", "b"))
    for number in range(12):
        driver.submit(of(f"a{number}", "a", weight=3.0))
        driver.submit(of(f"b{number + 1}", "b"))
    served = order_of(driver, first, 13)
    of_a = sum(name.startswith("a") for name in served)
    assert abs(of_a / 3.0 - (13 - of_a)) <= 1


def test_a_priority_counts_within_its_tenant_only() -> None:
    driver = with_one_slot()
    first = driver.submit(of("a0", "a"))
    driver.submit(of("a1", "a"))
    driver.submit(of("a2", "a", priority=-1))
    driver.submit(of("b0", "b", priority=5))
    assert order_of(driver, first, 4) == ["a0", "b0", "a2", "a1"]


def test_a_tenant_pays_for_what_its_requests_held_and_no_more() -> None:
    driver = with_one_slot()
    accounts = driver.router._cluster.requests.queue.accounts  # pyright: ignore[reportPrivateUsage]
    peak = MODEL.estimate(50, 10).peak
    driver.submit(of("r", "a", weight=2.0))
    driver.submit(of("waits", "a", weight=2.0))
    assert accounts.used("a") == peak * accounts.hold_s / 2
    driver.now = 10.0
    for worker in ("P", "C", "D"):
        driver.report(worker)
    driver.on(Cancel(requests=("waits",)), "in")
    driver.submit(of("waits too", "a", weight=2.0))
    driver.on(Finished(request="r", tokens=1), "P")
    prepaid = peak * accounts.hold_s / 2
    assert accounts.used("a") == peak * 10.0 / 2 + prepaid
