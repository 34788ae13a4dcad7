"""While memory is short, requests are lowered before any is preempted or evicted."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.unit.router.driver import MODEL, POLICY, Driver, request
from tests.unit.router.passes.test_growth import ask_and_pause, explained, found
from triptych.core.messages import (
    Evict,
    Floor,
    Lower,
    Lowered,
    PageLimit,
    PagesWanted,
    Resume,
    Send,
)
from triptych.core.pages import PagePlan
from triptych.router.models.booking import tokens_ahead
from triptych.router.passes.growth import MAX_PAUSE_S
from triptych.router.passes.lowering import requests_to_lower

PLAN: PagePlan = replace(MODEL.plan, policy=replace(POLICY, low_format="k4v2"))
PAGE = PLAN.page_bytes
PROMPT = 400


def short(floor: Floor = "low", plan: PagePlan = PLAN, **settings: object) -> Driver:
    """Two chats run and hold all that is booked for them, and a page is left."""

    def start(driver: Driver, name: str) -> None:
        one = replace(request(name, prompt=PROMPT, max_tokens=400), floor=floor)
        driver.submit(one)
        driver.prefilled(name)
        driver.planned(name, pages=17)
        driver.compressed(name)

    probe = Driver("P", "C", "D", slots=8, plan=plan, **settings)  # pyright: ignore
    start(probe, "old")
    peak = MODEL.estimate(PROMPT, 0).raw + MODEL.estimate(PROMPT, 0).encoded
    capacity = probe.booked + max(peak, probe.booked + PAGE) + PAGE
    driver = Driver("P", "C", "D", slots=8, plan=plan, capacity=capacity, **settings)  # pyright: ignore
    driver.router._growth.overcommit.fits = lambda *_: True  # type: ignore[method-assign]
    for name in ("old", "young"):
        start(driver, name)
        driver.now += 1.0
        driver.report("D")
    ledger = driver.router._cluster.ledger
    taken = ledger.free("")
    assert ledger.book("ballast", {"": max(0, taken - PAGE)})
    for name in ("old", "young"):
        ledger.hold(name, ledger.booked_by(name))
    return driver


def lowered(name: str, number: int = 1, freed: int = 4, pages: int = 13) -> Lowered:
    return Lowered(
        request=name,
        number=number,
        freed=freed,
        pages=pages,
        tokens=PROMPT + 10,
        lowered_tokens=96,
    )


@given(st.lists(st.integers(0, 100), max_size=8), st.integers(0, 300))
def test_few_requests_free_what_is_short(sizes: list[int], short: int) -> None:
    gains = [(size, str(index)) for index, size in enumerate(sizes)]
    chosen = requests_to_lower(gains, short)
    total = sum(size for _, size in chosen)
    assert total == min(short, sum(sizes))
    largest = sorted(sizes, reverse=True)[: len(chosen)]
    assert sorted((sizes[int(name)] for name, _ in chosen), reverse=True) == largest


def test_a_request_is_lowered_before_any_is_evicted_and_its_booking_shrinks() -> None:
    driver = short()
    assert (driver.state("old"), driver.state("young")) == ("decoding", "decoding")
    sends = ask_and_pause(driver, "old")
    [lower] = found(sends, Lower)
    assert sends == [Send("D", lower)]
    assert isinstance(lower, Lower)
    assert lower.pages >= 1
    assert not found(driver.tick(0.5), Evict)
    name = lower.request
    _, booked, bound = explained(driver, name)
    sends = driver.on(lowered(name, freed=9, pages=8), "D")
    held, now_booked, now_bound = explained(driver, name)
    assert held == 8 * PAGE
    assert now_booked == booked - 9 * PAGE or name == "old"  # that books what it asked for
    assert held <= now_booked <= now_bound <= bound
    limits = {limit.request: limit for limit in found(sends, PageLimit)}  # type: ignore
    assert limits[name].pages == now_booked // PAGE
    assert "old" in limits
    assert driver.count("growth:booked") == 1
    assert driver.count("growth:lowered") == driver.count("lower:memory_short") == 1
    assert driver.count("lowered_bytes") == 9 * PAGE
    assert not driver.count("growth:evicted")
    [trace] = driver.router.decisions(name)
    assert trace.decisions[-1].step == "lower"
    assert trace.report is not None
    assert trace.report.lowered_tokens == 96


@pytest.mark.parametrize("why", ["floor", "bounds", "uniform"])
def test_some_are_never_lowered(why: str) -> None:
    floor: Floor = "high" if why == "floor" else "low"
    plan = MODEL.plan if why == "uniform" else PLAN
    driver = short(floor, plan, booking="bounds" if why == "bounds" else "forecast")
    assert not found(ask_and_pause(driver, "old"), Lower)
    sends = driver.tick(MAX_PAUSE_S)
    assert not found(sends, Lower)
    assert bool(found(sends, Evict)) == (why != "bounds")


def test_the_youngest_is_evicted_once_nobody_can_be_lowered() -> None:
    driver = short()
    sends = ask_and_pause(driver, "old")
    for _ in range(9):
        lowers = found(sends, Lower)
        if not lowers:
            break
        [lower] = lowers
        assert isinstance(lower, Lower)
        driver.now += 0.1
        sends = driver.on(Lowered(request=lower.request, number=lower.number), "D")
    sends = driver.tick(MAX_PAUSE_S)
    assert found(sends, Evict) == [Evict(request="young", number=1)]
    assert driver.count("growth:lowered") == 0


def test_an_answer_counts_once_and_only_from_the_worker_that_was_told() -> None:
    driver = short()
    [lower] = found(ask_and_pause(driver, "old"), Lower)
    assert isinstance(lower, Lower)
    name = lower.request
    before = explained(driver, name)
    driver.on(lowered(name), "P")
    driver.on(lowered(name, number=2), "D")
    driver.on(lowered("nobody"), "D")
    assert driver.count("stray_lowered") == 3
    assert explained(driver, name) == before
    driver.on(lowered(name), "D")
    after = explained(driver, name)
    driver.on(lowered(name), "D")
    assert driver.count("stray_lowered") == 4
    assert explained(driver, name) == after


def test_nobody_waits_for_the_answer_of_a_worker_that_died() -> None:
    driver = short()
    [lower] = found(ask_and_pause(driver, "old"), Lower)
    assert isinstance(lower, Lower)
    driver.router.lost("D", driver.now)
    assert {driver.state("old"), driver.state("young")} == {"orphaned"}
    resumed = [one for one in driver.register("D", 2) if isinstance(one.message, Resume)]
    assert len(resumed) == 2
    for name in ("old", "young"):
        driver.on(lowered(name), "D")
    assert driver.count("stray_lowered") == 2
    assert not driver.router._growth.lowering._pending


def test_the_next_worker_learns_how_many_tokens_were_lowered() -> None:
    driver = short()
    [lower] = found(ask_and_pause(driver, "old"), Lower)
    assert isinstance(lower, Lower)
    driver.on(lowered(lower.request), "D")
    entry = driver.router._cluster.requests[lower.request]
    assert entry.transfer.report is not None
    assert entry.transfer.report.lowered_tokens == 96


def grown_to_its_bound(floor: Floor = "low") -> tuple[Driver, PageLimit, int]:
    """A chat that grows until it could not be computed again; its last limit, and its old bound."""
    most, tokens, pages = 4000, 50, 3
    driver = Driver("P", "C", "D", slots=8, plan=PLAN, capacity=400 * PAGE)
    driver.submit(replace(request("r", prompt=tokens, max_tokens=most), floor=floor))
    driver.prefilled("r")
    driver.planned("r", pages)
    driver.compressed("r")
    bound = explained(driver, "r")[2]
    while True:
        tokens, pages = tokens + tokens_ahead(tokens), pages + 2
        message = PagesWanted(request="r", tokens=tokens, pages=pages)
        [limit] = found(driver.on(message, "D"), PageLimit)
        assert isinstance(limit, PageLimit)
        if not limit.tokens:
            return driver, limit, bound


def test_the_bound_of_a_request_that_cannot_be_computed_again_is_that_of_low_pages() -> None:
    driver, limit, bound = grown_to_its_bound()
    _, booked, now_bound = explained(driver, "r")
    assert limit == PageLimit(request="r", pages=booked // PAGE, lowers=True)
    assert booked == now_bound < 0.8 * bound
    message = Lowered(request="r", freed=6, pages=40, tokens=3000, lowered_tokens=500)
    driver.on(message, "D")
    assert explained(driver, "r") == (40 * PAGE, booked, now_bound)
    assert driver.count("growth:lowered") == driver.count("lower:at_its_bound") == 1


def test_a_request_with_a_floor_gets_the_bound_of_high_pages() -> None:
    driver, limit, bound = grown_to_its_bound("high")
    assert limit == PageLimit(request="r", pages=0)
    assert explained(driver, "r")[1:] == (bound, bound)


def test_what_a_worker_cannot_keep_within_its_bound_gets_more() -> None:
    driver, limit, _ = grown_to_its_bound()
    message = PagesWanted(request="r", tokens=3500, pages=limit.pages, wanted=5)
    [again] = found(driver.on(message, "D"), PageLimit)
    assert again == PageLimit(request="r", pages=0)
    assert explained(driver, "r")[1] > limit.pages * PAGE
    assert driver.count("growth:not_lowered") == 1
