"""Batches of the dynamic schedule: as many prompts as memory has room for, for idle workers."""

from tests.unit.router.driver import Driver, request, started
from triptych.core.messages import Submit
from triptych.router.passes.dispatching.stage_batches import AdaptiveBatchDispatch


def drive(*workers: str, **settings: object) -> Driver:
    return Driver(*workers, slots=32, batch_policy="dynamic", **settings)  # type: ignore[arg-type]


def submitted(driver: Driver, count: int) -> list[str]:
    """All come in one frame, and one worker after another gets a batch."""
    messages = [Submit(request=request(f"r{number}", max_tokens=100)) for number in range(count)]
    return started(driver.router.receive(messages, "in", driver.now))


def test_prompts_are_divided_among_the_prefill_workers() -> None:
    workers = ("P", "C", "D", "W")  # W has all stages
    driver = drive(*workers, arenas=dict.fromkeys(workers, "node"))
    assert len(submitted(driver, 8)) == 8
    counts = [load.prefill_tokens for load in driver.router.snapshot(driver.now).workers]
    assert sorted(counts) == [0, 0, 200, 200]


def test_no_more_start_than_memory_has_room_for_by_forecast() -> None:
    probe = drive("P", "C", "D")
    submitted(probe, 1)
    driver = drive("P", "C", "D", capacity=8 * probe.booked, overcommit_risk=0.01)
    names = submitted(driver, 30)
    dispatch = driver.router._dispatch
    assert isinstance(dispatch, AdaptiveBatchDispatch)
    assert 1 < len(names) < 30
    assert len(names) <= dispatch.sizes.decode < 30
    assert driver.router.snapshot(driver.now).blocked_reason in ("prefill_busy", "no_bytes")
