"""What the coordinator does with prompts whose layers are encoded while others are read."""

from dataclasses import replace

import pytest

from tests.unit.router.driver import (
    MODEL,
    WORKERS,
    Driver,
    failures,
    handle,
    request,
    started,
    whole,
)
from triptych.core.errors import PoolExhausted, StageLost
from triptych.core.layout import Geometry
from triptych.core.messages import (
    Cancel,
    Compress,
    CompressItem,
    Expect,
    Finished,
    Prefill,
    Prefilled,
    Register,
    Report,
    Sampling,
    Send,
    failed,
)
from triptych.core.pages import PagePlan
from triptych.router import ByteModel

PLAN = PagePlan(
    Geometry(layers=8, kv_heads=1, head_dim=64),
    3584,
    MODEL.plan.policy,
    chunk_tokens=512,
    layers_at_once=1,
)
LONG = request(prompt=2048)
HERE = dict.fromkeys(WORKERS, "arena")


def parts(**more: object) -> Driver:
    return whole(**{"plan": PLAN, "arenas": HERE, **more})


def cancelled(sends: list[Send]) -> list[str]:
    return [send.to for send in sends if isinstance(send.message, Cancel)]


def test_the_compressor_that_gets_the_layers_gets_the_rest() -> None:
    driver = parts()
    driver.on(Register(name="F#1", address="F", stages=("compress",), arena="arena"), "F")
    driver.on(Report(name="F#1", running=0, waiting=0, pages_held=0, busy_s=0), "F")
    prefill = Prefill(requests=(LONG,), encoders=("C",), reader="P")
    assert driver.submit(LONG) == [Send("C", Expect(requests=("r",))), Send("P", prefill)]
    short = request("s")
    assert driver.submit(short) == [Send("P", Prefill(requests=(short,)))]
    [send] = driver.prefilled("r")
    assert send == Send(
        "C", Compress(items=(CompressItem(request="r", handle=handle("r", "raw")),))
    )
    [send] = driver.prefilled("s")
    assert send.to == "F"  # C has the long one


def test_two_parts_and_what_is_encoded_are_booked() -> None:
    driver, sizes = parts(), ByteModel(PLAN).estimate(2048, 10)
    driver.submit(LONG)
    in_parts = ByteModel(PLAN).estimate_in_parts(2048, 10)
    assert in_parts is not None
    assert in_parts.raw == sizes.raw // 4  # two of eight layers
    assert driver.booked == in_parts.peak < sizes.peak
    # Each group of layers has small pages of its own, and a page that is not full of them.
    assert in_parts.grown == sizes.grown + PLAN.geometry.layers * PLAN.page_bytes
    driver.prefilled("r")
    driver.planned("r")
    driver.compressed("r")
    assert driver.booked < sizes.grown


@pytest.mark.parametrize(
    "settings",
    [
        {"plan": replace(PLAN, layers_at_once=0)},
        {"plan": replace(PLAN, chunk_tokens=1100, layers_at_once=4)},  # two parts are all
        {"arenas": {**HERE, "C": "elsewhere"}},
        {"batch_policy": "static:p1c1d1"},
    ],
)
def test_else_prompts_are_handed_over_whole(settings: dict[str, object]) -> None:
    driver = parts(**settings)
    [send] = driver.submit(LONG)
    assert send.message == Prefill(requests=(LONG,))
    sizes = ByteModel(PLAN).estimate(2048, 10)
    assert driver.booked >= sizes.peak


def test_a_prompt_whose_tokens_are_scored_is_handed_over_whole() -> None:
    scored = replace(LONG, sampling=Sampling(max_tokens=10, prompt_logprobs=0))
    [send] = parts().submit(scored)
    assert send.message == Prefill(requests=(scored,))


def test_a_compressor_that_is_silent_is_waited_for() -> None:
    driver = parts()
    driver.now += 10.0
    for address in ("P", "D"):
        driver.report(address)
    assert driver.submit(LONG) == []
    assert driver.router.snapshot(driver.now).blocked_reason == "no_compressor"
    assert started(driver.report("C")) == ["r"]


def test_one_that_died_is_waited_for_and_then_prompts_are_handed_over_whole() -> None:
    driver = parts()
    driver.on(Register(name="F#1", address="F", stages=("compress",), arena="elsewhere"), "F")
    driver.router.lost("C", driver.now)
    assert driver.submit(LONG) == []
    for address in ("P", "D", "F"):
        driver.report(address)
    driver.now += 20.0
    for address in ("P", "D", "F"):
        assert (
            driver.on(
                Report(name=f"{address}#1", running=0, waiting=0, pages_held=0, busy_s=0), address
            )
            == []
        )
    driver.now += 11.0
    sends = [send for address in ("P", "D", "F") for send in driver.report(address)]
    [send] = [*sends, *driver.tick(0.1)]
    assert send.message == Prefill(requests=(LONG,))
    assert driver.booked >= ByteModel(PLAN).estimate(2048, 10).peak


def test_the_next_compressor_gets_what_waited() -> None:
    driver = parts()
    driver.router.lost("C", driver.now)
    assert driver.submit(LONG) == []
    assert driver.router.snapshot(driver.now).blocked_reason == "no_compressor"
    _, send = driver.register("C", start=2)
    assert send.message.encoders == ("C",)


@pytest.mark.parametrize(("dead", "stage", "told"), [("P", "prefill", "C"), ("C", "compress", "P")])
def test_a_death_ends_the_prompt_and_the_other_one_hears_of_it(
    dead: str, stage: str, told: str
) -> None:
    driver = parts()
    driver.submit(LONG)
    sends = driver.router.lost(dead, driver.now)
    assert failures(sends) == [failed("r", StageLost(stage))]
    assert cancelled(sends) == [told]
    assert driver.booked > 0
    driver.on(Finished(request="r", tokens=0), told)
    driver.tick(11.0)  # what the dead one held comes back with its lease
    assert driver.booked == 0


def test_a_compressor_that_gives_layers_up_ends_the_prompt() -> None:
    driver = parts()
    driver.submit(LONG)
    error = failed("r", PoolExhausted(9, 1))
    sends = driver.on(Finished(request="r", tokens=0, error=error), "C")
    assert failures(sends) == [error]
    assert cancelled(sends) == ["P"]
    driver.on(Finished(request="r", tokens=0), "P")
    assert driver.booked == 0


def test_a_prefill_worker_that_gives_up_ends_the_prompt() -> None:
    driver = parts()
    driver.submit(LONG)
    error = failed("r", PoolExhausted(9, 1))
    sends = driver.on(Finished(request="r", tokens=0, error=error), "P")
    assert failures(sends) == [error]
    assert cancelled(sends) == ["C"]
    driver.on(Finished(request="r", tokens=0), "C")
    assert driver.booked == 0


def test_who_goes_away_is_forgotten_by_both() -> None:
    driver = parts()
    driver.submit(LONG)
    sends = driver.on(Cancel(requests=("r",)), "in")
    assert sorted(cancelled(sends)) == ["C", "P"]
    for address in ("C", "P"):
        driver.on(Finished(request="r", tokens=0), address)
    assert driver.booked == 0


def test_an_answer_of_one_token_leaves_its_layers() -> None:
    driver = parts()
    driver.submit(LONG)
    sends = driver.on(Prefilled(request="r", first_token=2, handle=None), "P")
    assert failures(sends) == []
    assert cancelled(sends) == ["C"]
    assert driver.count("finished") == 1
    assert driver.booked > 0
    driver.on(Finished(request="r", tokens=0), "C")
    assert driver.booked == 0
    assert driver.state() is None


def test_a_prompt_that_fits_in_parts_only_is_served_and_fails_without_a_compressor() -> None:
    sizes, in_parts = (
        ByteModel(PLAN).estimate(2048, 10),
        ByteModel(PLAN).estimate_in_parts(2048, 10),
    )
    assert in_parts is not None
    driver = parts(capacity=(sizes.peak + in_parts.peak) // 2)
    assert started(driver.submit(LONG)) == ["r"]
    driver = parts(capacity=(sizes.peak + in_parts.peak) // 2)
    driver.submit(LONG)
    other = replace(LONG, id="other")
    assert started(driver.submit(other)) == []  # no room for both
    driver.on(Register(name="F#1", address="F", stages=("compress",), arena="elsewhere"), "F")
    driver.router.lost("C", driver.now)
    driver.tick(29.0)
    assert driver.state("other") == "waiting"
    assert [failure.status for failure in failures(driver.tick(5.0))] == [503]
