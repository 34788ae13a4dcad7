"""The router chooses the method of requests that leave it to the server, and keeps to floors."""

from dataclasses import replace

from tests.unit.router.driver import MODEL, Driver, request
from triptych.core.messages import Prefill, Report, Request
from triptych.core.methods.frontier import MeasuredMethod
from triptych.core.policy import Policy
from triptych.core.profile import Fidelity

FORMATS = ("k4v2", "k8v4", "k8v8")
KLS = (0.02, 0.001, 0.0001)
RATIOS = (0.26, 0.44, 0.58)


def measured(name: str, ratio: float, kl: float) -> MeasuredMethod:
    found = Fidelity(
        context=1024, bytes_ratio=ratio, kl=kl, top1_agreement=1.0, perplexity_ratio=1.0
    )
    return MeasuredMethod(name=name, fidelity=(found,), compress_us=20.0)


METHODS = tuple(
    measured(f"uniform:{form}", ratio, kl)
    for form, ratio, kl in zip(FORMATS, RATIOS, KLS, strict=True)
)
PLAN = replace(
    MODEL.plan,
    others=tuple(Policy(name=f"uniform:{form}", high_format=form) for form in FORMATS),
    measured=METHODS,
    adaptive=tuple(one.name for one in METHODS),
)
ROUGH, FINE, FINEST = PLAN.adaptive
SCARCE = 400_000
"""Bytes in which a few requests have room with the roughest method only."""


def adapting(name: str = "a", **changes: object) -> Request:
    return replace(request(name, prompt=900, max_tokens=100), adapts=True, **changes)


def chosen(driver: Driver, one: Request) -> Request:
    """The request as it goes to prefill."""
    (sent,) = [send.message for send in driver.submit(one) if isinstance(send.message, Prefill)]
    return sent.requests[0]


def test_a_request_gets_the_nearest_method_that_fits_and_keeps_its_own_if_it_has_one() -> None:
    for capacity, method in ((1 << 30, FINEST), (SCARCE, ROUGH)):
        driver = Driver("P", "C", "D", plan=PLAN, capacity=capacity)
        found = chosen(driver, adapting())
        assert found.choice is not None
        assert (found.method, found.choice.method) == (method, method)
        (trace,) = driver.router.decisions("a")
        assert (trace.decisions[0].step, trace.decisions[0].chosen) == ("method", method)
        assert driver.router.snapshot(0.0).counters[f"method_chosen:{method}"] == 1
    named = replace(adapting(), adapts=False, method=ROUGH)
    assert chosen(Driver("P", "C", "D", plan=PLAN), named) == named


def test_floors_of_kl_and_of_classes_hold_when_nothing_is_free() -> None:
    for one, method in (
        (adapting(), ROUGH),
        (adapting(max_kl=0.005), FINE),
        (adapting(max_kl=0.0001), FINEST),
        (adapting(floor="high"), FINE),
    ):
        choice = chosen(Driver("P", "C", "D", plan=PLAN, capacity=SCARCE), one).choice
        assert choice is not None
        assert (choice.method, choice.kl) == (method, KLS[PLAN.adaptive.index(method)])


def test_a_slow_link_takes_few_bytes_and_a_fast_one_many() -> None:
    """The speed is what decode workers report, once pages have crossed it."""
    for speed, method, reason in ((1e6, ROUGH, "link"), (1e10, FINEST, "quality")):
        driver = Driver("P", "C", "D", plan=PLAN, capacity=1 << 30)
        told = Report(name="D#1", running=0, waiting=0, pages_held=0, busy_s=0, link_bytes_s=speed)
        driver.on(told, "D")
        found = chosen(driver, adapting())
        assert found.choice is not None
        assert (found.method, found.choice.reason) == (method, reason)


def test_pages_that_stay_on_their_node_need_no_link() -> None:
    driver = Driver("P", "C", "D", plan=PLAN, capacity=1 << 30)
    driver.on(
        Report(name="D#1", running=0, waiting=0, pages_held=0, busy_s=0, link_bytes_s=1e6), "D"
    )
    driver.router._cluster.method_costs.travel_share = 0.0
    assert chosen(driver, adapting()).method == FINEST


def test_all_choices_of_a_request_and_all_attempts_have_one_method() -> None:
    driver = Driver("P", "C", "D", plan=PLAN, capacity=1 << 30)
    first = adapting("a")
    kept = chosen(Driver("P", "C", "D", plan=PLAN, capacity=SCARCE), first).choice
    assert kept is not None
    again = replace(first, id="a~1", attempt=1, output_tokens=(7, 7), choice=kept)
    assert chosen(driver, again).method == kept.method == ROUGH
    driver = Driver("P", "C", "D", plan=PLAN, capacity=700_000)
    driver.router._submission.submit([adapting(f"b-{n}") for n in range(40)], 0.0)
    names = {driver.router._cluster.requests[f"b-{n}"].request.method for n in range(40)}
    assert len(names) == 1


def test_a_request_is_not_lowered_below_its_floor() -> None:
    """Its low class is what ``uniform`` stores in that format."""
    mixed = Policy(name="diffkv", high_format="k8v4", low_format="k4v2", alpha_high=1.0)
    plan = replace(PLAN, policy=mixed)
    for limit, may_lower in ((0.0, True), (0.02, True), (0.019, False)):
        driver = Driver("P", "C", "D", plan=plan, booking="forecast", capacity=1 << 30)
        driver.bring_to("decoding", replace(request("a", prompt=900), max_kl=limit))
        booking = driver.router._cluster.requests["a"].booking
        assert booking is not None
        assert booking.may_lower == may_lower
    assert not replace(plan, measured=()).may_lower("", 0.5, 900), "nobody measured it"
