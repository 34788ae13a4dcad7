"""SLOs: who is refused at once, who is given up, and who goes first."""

from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st

from tests.unit.router.driver import Driver, failures, request, started
from triptych.core.messages import Cancel, Finished, Request, Slo
from triptych.router.models.latency_forecast import (
    BELIEVED_S,
    FEW,
    LATEST,
    SURE,
    TOKEN_MARGIN,
    Forecast,
    LatencyForecast,
    Lateness,
    Mean,
    Trend,
    latest_start_s,
    miss,
)
from triptych.simulator import Cluster, Costs, Job, Simulation, Trial

SLO = Slo(ttft_s=2.0, tpot_s=0.2)
times = st.floats(0, 100)
slos = st.builds(Slo, ttft_s=times, tpot_s=times, deadline_s=times)
forecasts = st.builds(Forecast, wait_s=times, prefill_s=times, token_s=times, decode_s=times)


@given(slo=slos, forecast=forecasts)
def test_whoever_is_refused_would_miss_a_limit_and_whoever_is_not_keeps_all(
    slo: Slo, forecast: Forecast
) -> None:
    missed = miss(slo, forecast)
    kept = (
        (not slo.ttft_s or forecast.ttft_s <= slo.ttft_s)
        and (not slo.tpot_s or TOKEN_MARGIN * forecast.token_s <= slo.tpot_s)
        and (not slo.deadline_s or forecast.total_s <= slo.deadline_s)
    )
    assert (missed is None) == kept
    if missed is not None:
        assert missed.over_s > 0


@given(slo=slos, forecast=forecasts)
def test_who_starts_at_the_latest_moment_just_keeps_its_limits(
    slo: Slo, forecast: Forecast
) -> None:
    wait_s = latest_start_s(replace(slo, tpot_s=0.0), forecast)
    assert wait_s >= 0
    if 0 < wait_s < 1000:
        assert miss(replace(slo, tpot_s=0.0), replace(forecast, wait_s=wait_s - 1e-6)) is None
        assert miss(replace(slo, tpot_s=0.0), replace(forecast, wait_s=wait_s + 1e-6)) is not None


@given(samples=st.lists(st.floats(0, 1e3), min_size=1, max_size=20), later=st.floats(0, 60))
def test_a_mean_lies_between_its_samples_and_is_not_believed_for_long(
    samples: list[float], later: float
) -> None:
    mean = Mean()
    for number, sample in enumerate(samples):
        mean.note(sample, float(number))
    at = len(samples) - 1 + later
    if at - (len(samples) - 1) <= BELIEVED_S:
        assert min(samples) - 1e-6 <= mean.at(at) <= max(samples) + 1e-6
    else:
        assert mean.at(at) == 0.0


@given(
    slope=st.floats(0, 5),
    base=st.floats(0, 5),
    seen=st.lists(st.integers(1, 30), min_size=2, max_size=60),
    asked=st.integers(1, 60),
)
def test_a_trend_lies_between_what_was_measured_and_what_grows_in_proportion(
    slope: float, base: float, seen: list[int], asked: int
) -> None:
    trend = Trend()
    for number, x in enumerate(seen):
        trend.note(x, base + slope * x, 0.1 * number)
    now = 0.1 * len(seen)
    found, mean_y = trend.at(asked, now), trend.mean(now)
    mean_x = (mean_y - base) / slope if slope > 1e-3 else asked
    if slope > 1e-3:
        low, high = sorted((base + slope * asked, mean_y * asked / mean_x))
        assert low - 1e-6 <= found <= high + 1e-6
    assert trend.at(asked + 1, now) >= found - 1e-9
    assert trend.at(asked, now + BELIEVED_S + 1) == 0.0


def test_a_trend_finds_the_fixed_part_once_it_has_seen_both_ends() -> None:
    trend = Trend()
    for number in range(60):
        x = (2, 20)[number % 2]
        trend.note(x, 0.05 + 0.005 * x, 0.1 * number)
    assert abs(trend.at(30, 6.0) - 0.2) < 0.01
    assert abs(trend.at(1, 6.0) - 0.055) < 0.01


@given(late=st.lists(st.floats(-5, 5), max_size=60))
def test_what_is_added_to_forecasts_would_have_made_most_of_them_true(late: list[float]) -> None:
    lateness = Lateness()
    for number, seconds in enumerate(late):
        lateness.note(seconds, 0.01 * number)
    found, kept = lateness.at(1.0), late[-LATEST:]
    assert found >= 0
    assert found == 0 or found in kept
    if len(kept) >= FEW:
        assert sum(one <= found for one in kept) >= SURE * len(kept)
    assert lateness.at(2.0 + BELIEVED_S) == 0.0


def test_requests_in_work_are_counted_for_each_decode_worker() -> None:
    driver = Driver("P", "C", "D", "D2")
    cluster = driver.router._cluster  # pyright: ignore[reportPrivateUsage]
    driver.submit(request("first"))
    assert cluster.concurrency_with(0) == 0.5
    assert cluster.concurrency_with(1) == 1.0
    driver.tick(2.0)
    driver.submit(request("second"))
    assert cluster.latency.concurrency_s == 1.0  # half of one for two seconds


def test_an_idle_server_refuses_nobody() -> None:
    driver = slow_reader()
    driver.on(Cancel(requests=("first",)), "in")
    latency = driver.router._cluster.latency  # pyright: ignore[reportPrivateUsage]
    latency.late_first.note(99.0, driver.now)
    assert not failures(driver.submit(asking("r", ttft_s=2.0)))


def test_a_line_that_was_empty_says_nothing_of_its_pace() -> None:
    latency = LatencyForecast()
    for now in (0.0, 1.0, 2.0):
        latency.record_start(3, now)
    latency.record_start(0, 3.0)
    latency.record_start(1, 9.0)
    latency.reset_start_gap()
    latency.record_start(1, 9.5)
    found = latency.forecast(ahead=4, concurrency=1.0, prefill_tokens=1, max_tokens=1, now=9.5)
    assert found.wait_s == 4.0


def asking(name: str, **seconds: float) -> Request:
    return replace(request(name), slo=Slo(**seconds))


def slow_reader() -> Driver:
    """One that was seen to read 50 tokens in 5 s, and has room for one request."""
    driver = Driver("P", "C", "D", slots=1)
    driver.submit(request("first"))
    driver.now = 5.0
    for worker in "PCD":
        driver.report(worker)
    driver.prefilled("first")
    return driver


def test_before_anything_was_measured_nobody_is_refused() -> None:
    driver = Driver("P", "C", "D")
    assert started(driver.submit(asking("r", ttft_s=0.001))) == ["r"]


def test_a_request_that_would_come_too_late_is_refused_with_the_time_it_lacks() -> None:
    driver = slow_reader()
    [refused] = failures(driver.submit(asking("r", ttft_s=2.0)))
    assert (refused.status, refused.code, refused.retry_after_s) == (503, "slo_unmeetable", 3.0)
    assert "ttft_slo_ms=2000" in refused.message
    assert driver.state() is None
    assert driver.count("refuse:slo_unmeetable") == 1
    assert not failures(driver.submit(asking("patient", ttft_s=6.0)))
    assert not failures(driver.submit(request("plain")))


def test_what_was_slow_long_ago_refuses_nobody() -> None:
    driver = slow_reader()
    driver.now += BELIEVED_S + 1
    assert not failures(driver.submit(asking("r", ttft_s=2.0)))


def test_a_request_that_waited_until_it_is_too_late_is_given_up() -> None:
    driver = slow_reader()
    driver.submit(asking("r", ttft_s=6.0))
    assert driver.state() == "waiting"
    assert not failures(driver.tick(0.9))
    [given_up] = failures(driver.tick(0.2))
    assert given_up.code == "slo_unmeetable"
    assert driver.state() is None


def test_a_deadline_ends_a_request_wherever_it_is() -> None:
    driver = Driver("P", "C", "D")
    driver.submit(asking("r", deadline_s=3.0))
    assert not failures(driver.tick(2.9))
    sends = driver.tick(0.2)
    [late] = failures(sends)
    assert (late.status, late.code) == (504, "timeout")
    assert Cancel(requests=("r",)) in [send.message for send in sends]
    driver.on(Finished(request="r", tokens=0), "P")
    assert driver.booked == 0


def test_who_has_less_slack_goes_first() -> None:
    driver = Driver("P", "C", "D", slots=1)
    driver.submit(request("runs"))
    driver.submit(request("plain"))
    driver.submit(asking("easy", ttft_s=20.0))
    driver.submit(asking("urgent", ttft_s=4.0))
    driver.now = 3.0
    for worker in "PCD":
        driver.report(worker)
    assert started(driver.on(Finished(request="runs", tokens=1), "P")) == ["urgent"]


def test_a_request_that_lost_its_worker_is_not_refused() -> None:
    driver = slow_reader()
    again = replace(asking("r~1", ttft_s=0.1), attempt=1)
    assert not failures(driver.submit(again))


# ---------------------------------------------------------------- in the simulator


def simulated(asked: Slo, count: int = 250, rate: float = 5.0) -> tuple[Trial, float]:
    """Requests of equal size at 1.5 times what the default cluster can serve; and goodput."""
    jobs = [(Job(f"r{n}", 200, 24, at_s=n / rate, slo=asked),) for n in range(count)]
    trial = Simulation(Cluster(), Costs(), keep_gaps=False).run(jobs)
    good = [
        one
        for one in trial.outcomes
        if one.is_done
        and one.first_s - one.due_s <= SLO.ttft_s
        and one.last_s - one.first_s <= SLO.tpot_s * (one.job.max_tokens - 1)
    ]
    return trial, len(good) / trial.duration_s


def test_goodput_at_overload_is_far_higher_if_requests_say_what_they_need() -> None:
    silent, without = simulated(Slo())
    asked, with_slo = simulated(SLO)
    assert all(one.is_done for one in silent.outcomes)
    assert {one.error for one in asked.outcomes if not one.is_done} == {"slo_unmeetable"}
    assert with_slo >= 3 * without


def test_at_a_low_load_nobody_is_refused() -> None:
    trial, _ = simulated(SLO, count=60, rate=1.0)
    assert all(one.is_done for one in trial.outcomes)
