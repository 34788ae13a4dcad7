"""Bookings that follow what requests take, and what happens when memory runs short."""

from dataclasses import replace

import pytest

from tests.unit.router.driver import MODEL, Driver, failures, handle, request, started
from triptych.core.messages import (
    Evict,
    Evicted,
    Finished,
    Join,
    Message,
    PageLimit,
    PagesWanted,
    Preempt,
    Preempted,
    Request,
    Resume,
    Sampling,
    Send,
    Slo,
)
from triptych.router.models.booking import LEAST_TOKENS, ROOMY_TOKENS, tokens_ahead
from triptych.router.models.overcommit import Overcommit
from triptych.router.passes.growth import MAX_PAUSE_S

PAGE = MODEL.plan.page_bytes
PROMPT, MOST, LONG = 50, 4000, 150
SMALL = 15 * 10**5
"""Memory in which ``ROOMY_TOKENS`` are booked ahead; there is enough of it."""


def chat(name: str = "r", **more: object) -> Request:
    """A request that may write far more than it probably will."""
    return replace(request(name, prompt=PROMPT, max_tokens=MOST), **more)


def drive(**settings: object) -> Driver:
    given = {"capacity": SMALL} | settings
    return Driver("P", "C", "D", slots=8, **given)  # pyright: ignore[reportArgumentType]


def found(sends: list[Send], kind: type[Message]) -> list[Message]:
    return [send.message for send in sends if isinstance(send.message, kind)]


def decode(driver: Driver, name: str, pages: int = 5, **more: object) -> list[Send]:
    driver.submit(chat(name, **more))
    driver.prefilled(name)
    driver.planned(name, pages)
    return driver.compressed(name)


def ask(driver: Driver, name: str, tokens: int, pages: int, wanted: int = 0) -> list[Send]:
    message = PagesWanted(request=name, tokens=tokens, pages=pages, wanted=wanted)
    return driver.on(message, "D")


def ask_in_vain(driver: Driver, name: str) -> list[Send]:
    """Its pages are full, it needs more than are left, and it has paused for long enough."""
    assert not found(ask_and_pause(driver, name), PageLimit)
    return driver.tick(MAX_PAUSE_S)


def ask_and_pause(driver: Driver, name: str) -> list[Send]:
    return ask(driver, name, 60, explained(driver, name)[1] // PAGE, wanted=6)


def explained(driver: Driver, name: str) -> tuple[int, int, int]:
    one = driver.router.explain(name, driver.now)
    assert one is not None
    return one.held_bytes, one.booked_bytes, one.bound_bytes


def test_a_chat_without_max_tokens_books_what_it_takes_soon() -> None:
    bounds, forecast = drive(booking="bounds"), drive()
    for driver in (bounds, forecast):
        decode(driver, "r")
    assert forecast.booked * 10 < bounds.booked
    held, booked, bound = explained(forecast, "r")
    assert held == 5 * PAGE < booked < bound == bounds.booked
    assert explained(bounds, "r") == (5 * PAGE, bounds.booked, bounds.booked)


def test_the_worker_knows_the_limit_before_it_has_the_request() -> None:
    driver = drive()
    limit, join = decode(driver, "r")
    assert limit.message == PageLimit(request="r", pages=driver.booked // PAGE, tokens=114)
    assert isinstance(join.message, Join)
    assert not found(decode(drive(booking="bounds"), "r"), PageLimit)


def test_less_is_booked_ahead_once_half_of_the_memory_is_taken() -> None:
    driver, pages = drive(), 3
    decode(driver, "r", pages)
    ledger = driver.router._cluster.ledger
    [limit] = found(ask(driver, "r", 60, pages), PageLimit)
    assert isinstance(limit, PageLimit)
    assert limit.tokens == 60 + ROOMY_TOKENS
    ledger.book("other", {"": ledger.capacity_bytes // 2})
    [limit] = found(ask(driver, "r", limit.tokens - 1, limit.pages - 1), PageLimit)
    assert isinstance(limit, PageLimit)
    assert limit.tokens == 60 + ROOMY_TOKENS - 1 + LEAST_TOKENS


def test_more_is_booked_as_it_grows_until_all_is() -> None:
    driver, tokens, pages, asked = drive(), PROMPT, 3, 0
    decode(driver, "r", pages)
    while True:
        tokens, pages = tokens + tokens_ahead(tokens), pages + 2
        [limit] = found(ask(driver, "r", tokens, pages), PageLimit)
        asked += 1
        assert isinstance(limit, PageLimit)
        if not limit.pages:
            break
        assert limit.pages > pages
        assert limit.tokens > tokens
    assert asked < 40
    held, booked, bound = explained(driver, "r")
    assert held <= booked == bound
    driver.on(Finished(request="r", tokens=MOST), "D")
    assert driver.booked == driver.router.snapshot(driver.now).bound_bytes == 0


def test_needs_are_summed_when_somebody_wants_to_start() -> None:
    """Then they are those that a router would know that had computed each at once."""
    driver = drive()
    growth = driver.router._growth
    for name in "ab":
        decode(driver, name)
    for name, tokens in (("a", 300), ("b", 90), ("a", 500)):
        ask(driver, name, tokens, 40)
    decode(driver, "c")
    driver.on(Finished(request="b", tokens=50), "D")
    growth.overcommit._summed("")
    at_once = Overcommit(0.1, growth.overcommit.capacity_bytes)
    for name in "ac":
        entry = driver.router._cluster.requests[name]
        assert entry.booking is not None
        entry.booking.latest = None
        at_once.put(name, "", growth._need(entry))
    assert growth.overcommit._arenas == at_once._arenas
    assert growth.overcommit._counted == at_once._counted
    assert not growth.overcommit._arenas[""].changed


def test_a_request_that_grows_costs_no_forecast_until_somebody_wants_to_start() -> None:
    driver = drive()
    decode(driver, "a")
    growth = driver.router._growth
    growth.overcommit._summed("")
    before = growth.overcommit._counted["a"].need
    for tokens in (200, 300, 400):
        ask(driver, "a", tokens, 40)
    assert growth.overcommit._counted["a"].need is before
    growth.overcommit._summed("")
    assert growth.overcommit._counted["a"].need is not before


def test_a_paused_request_gets_what_its_next_token_needs() -> None:
    driver = drive()
    decode(driver, "r")
    [limit] = found(ask(driver, "r", 51, 40, wanted=7), PageLimit)
    assert isinstance(limit, PageLimit)
    assert limit.pages >= 47


def short(**settings: object) -> Driver:
    """Two chats run, and there is a page left; the older one is ``old``."""
    probe = drive()
    decode(probe, "old")
    one = probe.booked
    driver = drive(capacity=2 * one + 4 * PAGE, overcommit_risk=0.5, **settings)
    driver.router._growth.overcommit.fits = lambda *_: True  # type: ignore[method-assign]
    for name in ("old", "young"):
        driver.submit(replace(request(name, prompt=PROMPT, max_tokens=LONG)))
        driver.now += 1.0
        driver.report("D")
    for name in ("old", "young"):
        if driver.state(name) == "prefilling":
            driver.prefilled(name)
            driver.planned(name)
            driver.compressed(name)
        ledger = driver.router._cluster.ledger
        ledger.hold(name, ledger.booked_by(name))
    return driver


def test_the_youngest_is_evicted_for_the_oldest_and_computed_again() -> None:
    driver = short()
    assert (driver.state("old"), driver.state("young")) == ("decoding", "decoding")
    sends = ask_in_vain(driver, "old")
    assert sends == [Send("D", Evict(request="young", number=1))]
    assert driver.state("young") == "evicting"
    sends = driver.on(Evicted(request="young", number=1, output_tokens=(7, 8, 9)), "D")
    [limit] = found(sends, PageLimit)
    assert isinstance(limit, PageLimit)
    assert limit.request == "old"
    assert driver.state("young") == "waiting"
    sends = driver.on(Finished(request="old", tokens=LONG), "D")
    assert started(sends) == ["young"]
    [prefill] = [one for send in sends for one in getattr(send.message, "requests", ())]
    assert prefill.output_tokens == (7, 8, 9)
    assert driver.count("recomputed") == driver.count("growth:evicted") == 1
    assert not driver.count("failed")


def test_nobody_is_preempted_for_a_request_that_can_still_run_or_has_just_paused() -> None:
    driver = short()
    driver.router._cluster.ledger.capacity_bytes = driver.booked
    pages = explained(driver, "old")[1] // PAGE
    assert ask(driver, "old", 60, pages) == []
    assert driver.tick(2 * MAX_PAUSE_S) == []
    assert ask(driver, "old", 62, pages, wanted=6) == []
    assert driver.tick(MAX_PAUSE_S / 2) == []
    sends = driver.on(Finished(request="young", tokens=LONG), "D")
    [limit] = found(sends, PageLimit)
    assert isinstance(limit, PageLimit)
    assert limit.request == "old"
    assert driver.count("growth:evicted") == driver.count("growth:preempted") == 0


def test_the_youngest_waits_for_older_ones_and_goes_on() -> None:
    driver = short()
    assert ask_in_vain(driver, "young") == []
    assert driver.state("young") == "decoding"
    sends = driver.on(Finished(request="old", tokens=LONG), "D")
    [limit] = found(sends, PageLimit)
    assert isinstance(limit, PageLimit)
    assert limit.request == "young"


def test_nothing_starts_while_a_request_asks_in_vain() -> None:
    driver = short()
    ask_in_vain(driver, "young")
    assert not started(driver.submit(request("tiny", prompt=1, max_tokens=1)))


def test_a_request_keeps_its_pages_if_what_it_does_not_hold_is_enough() -> None:
    driver = short()
    young = driver.router._cluster.requests["young"]
    ledger = driver.router._cluster.ledger
    ledger.capacity_bytes += 40 * PAGE
    ledger.book("young", {"": ledger.booked_by("young") + 40 * PAGE})
    young.sizes = replace(young.sizes, grown=ledger.booked_by("young"))
    ledger.hold("young", 5 * PAGE)
    assert ask_in_vain(driver, "old") == [Send("D", Preempt(requests=("young",)))]
    handed = Preempted(request="young", output_tokens=(7,), handle=handle("young", "kept"))
    limits = found(driver.on(handed, "D"), PageLimit)
    assert [limit.request for limit in limits] == ["old", "young"]
    assert driver.count("recomputed") == 0


def test_an_answer_of_a_worker_that_comes_twice_is_ignored() -> None:
    driver = short()
    ask_in_vain(driver, "old")
    for _ in range(2):
        driver.on(Evicted(request="young", number=1, output_tokens=(7,)), "D")
    assert driver.count("recomputed") == 1
    assert driver.count("stray_evicted") == 1


def test_who_finished_before_it_could_be_evicted_has_finished() -> None:
    driver = short()
    ask_in_vain(driver, "old")
    sends = driver.on(Finished(request="young", tokens=LONG), "D")
    assert not failures(sends)
    assert driver.state("young") is None
    driver.on(Evicted(request="young", number=1), "D")
    assert driver.count("stray_evicted") == 1


def test_a_deadline_to_start_is_not_missed_by_who_started_before() -> None:
    driver = short()
    entry = driver.router._cluster.requests["young"]
    entry.request = replace(entry.request, slo=Slo(ttft_s=1.0))
    entry.slo.latest = driver.now + 2.0
    driver.router._slo_admission.watch(entry)
    ask_in_vain(driver, "old")
    driver.on(Evicted(request="young", number=1, output_tokens=(7,)), "D")
    assert not failures(driver.tick(10.0))


def test_a_pool_without_pages_has_the_youngest_evicted_and_the_worker_try_again() -> None:
    driver = short()
    message = PagesWanted(request="old", tokens=60, pages=5, wanted=2, is_exhausted=True)
    assert driver.on(message, "D") == [Send("D", Evict(request="young", number=1))]
    driver.on(Evicted(request="young", number=1, output_tokens=(7,)), "D")
    [limit] = found(driver.tick(0.5), PageLimit)
    assert isinstance(limit, PageLimit)
    assert limit.request == "old"


@pytest.mark.parametrize("sampling", [Sampling(max_tokens=MOST, prompt_logprobs=0)])
def test_what_cannot_be_computed_again_gets_its_bound(sampling: Sampling) -> None:
    driver, bounds = drive(), drive(booking="bounds")
    for one in (driver, bounds):
        decode(one, "r", sampling=sampling)
    assert driver.booked == bounds.booked


def test_beyond_the_length_that_could_be_computed_again_the_bound_is_booked() -> None:
    sizes = MODEL.estimate(PROMPT, MOST)
    driver = drive(capacity=sizes.grown + 4 * PAGE)
    decode(driver, "r")
    limit = driver.router._growth.bookings._longest_prompt("")
    assert PROMPT < limit < PROMPT + MOST
    held, booked, bound = explained(driver, "r")
    assert booked < bound
    tokens = limit - tokens_ahead(limit)
    [answer] = found(ask(driver, "r", tokens, booked // PAGE), PageLimit)
    assert answer == PageLimit(request="r", pages=0)
    assert explained(driver, "r")[1] == explained(driver, "r")[2] >= held


def test_a_takeover_worker_gets_the_limit_first() -> None:
    driver = Driver("P", "C", "D", "E", slots=8)
    decode(driver, "r")
    entry = driver.router._cluster.requests["r"]
    entry.is_preempt_sent = entry.is_preempted = True
    limit, resume = driver.router.lost(entry.worker, driver.now)
    assert isinstance(limit.message, PageLimit)
    assert isinstance(resume.message, Resume)
    assert (entry.is_preempt_sent, entry.is_preempted) == (False, False)


def test_requests_that_only_wait_with_pages_make_room_for_each_other() -> None:
    """All memory is in pages of preempted requests: the youngest of them is evicted."""
    driver = short()
    requests = driver.router._cluster.requests
    for name in ("old", "young"):
        requests[name].is_preempt_sent = requests[name].is_preempted = True
    ledger = driver.router._cluster.ledger
    ledger.capacity_bytes = ledger.booked("") + PAGE
    for name in ("old", "young"):
        kept = replace(handle(name, "kept"), tokens=60)
        sends = driver.on(Preempted(request=name, output_tokens=(7,), handle=kept), "D")
    driver.now += 1.0
    driver.report("D")
    sends = [*sends, *driver.tick(0.5)]
    moved = found(sends, Evict) or found(sends, Join)
    assert moved


def test_a_request_that_waits_with_its_pages_does_not_block_a_younger_one_for_ever() -> None:
    """The younger one started meanwhile, and each waits for the memory of the other."""
    driver = short()
    old = driver.router._cluster.requests["old"]
    old.is_preempt_sent = old.is_preempted = True
    driver.router._growth.overcommit.fits = lambda *_: False  # type: ignore[method-assign]
    kept = replace(handle("old", "kept"), tokens=60)
    driver.on(Preempted(request="old", output_tokens=(7,), handle=kept), "D")
    assert (driver.state("old"), driver.state("young")) == ("waiting", "decoding")
    driver.router._cluster.ledger.capacity_bytes = driver.booked
    assert ask_in_vain(driver, "young") == [Send("D", Evict(request="old", number=1))]


def test_if_none_can_be_evicted_and_all_wait_the_youngest_fails() -> None:
    """Two that are too long to be computed again, and whose workers could not lower them."""
    driver = short()
    for name in ("old", "young"):
        booking = driver.router._cluster.requests[name].booking
        assert booking is not None
        booking.may_evict = False
    assert not failures(ask_in_vain(driver, "old"))  # the young one runs, and may end
    ask_and_pause(driver, "young")
    [failure] = failures(driver.tick(MAX_PAUSE_S))
    assert (failure.request, failure.status) == ("young", 503)
    assert "pool.kv_cache_memory_bytes" in failure.message
    assert driver.count("growth:gave_up") == 1
    assert driver.state("old") == "decoding"
