"""How long requests waited and were in each stage."""

from tests.unit.router.driver import request, whole
from triptych.core.messages import Cancel
from triptych.router.state.stage_times import BOUNDS_S


def test_a_request_is_timed_in_each_part_once() -> None:
    driver = whole()
    driver.submit(request())
    for second, event in ((1.0, driver.prefilled), (3.0, driver.planned), (6.0, driver.compressed)):
        driver.now = second
        event("r")
    times = driver.router.snapshot(driver.now).stage_times
    assert {part: one.total_s for part, one in times.items()} == {
        "queue": 0.0,
        "prefill": 1.0,
        "compress": 5.0,
    }
    assert [sum(one.counts) for one in times.values()] == [1, 1, 1]
    assert times["compress"].counts[BOUNDS_S.index(5.0)] == 1  # bounds belong to their bucket


def test_the_part_in_which_a_request_is_cancelled_does_not_count() -> None:
    driver = whole()
    driver.submit(request())
    driver.now = 4.0
    driver.on(Cancel(requests=("r",)), "in")
    times = driver.router.snapshot(driver.now).stage_times
    assert [sum(one.counts) for one in times.values()] == [1, 0, 0]
