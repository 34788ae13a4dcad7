"""Arenas of GPUs that do not access each other: who stores, compresses and decodes where."""

import pytest

from tests.unit.router.driver import MODEL, Driver, handle, request, started, whole
from triptych.core.handles import arena_ids
from triptych.core.messages import (
    Compress,
    Encode,
    Join,
    Planned,
    Prefill,
    Prefilled,
    Register,
    Report,
    Send,
)
from triptych.router.passes.dispatching.arena_choice import ENCODER_GRACE_S

ONE, TWO = arena_ids("pool", 3, are_apart=True)[1:]
"""Arenas of GPUs that do not access each other."""


def apart(**arenas: str) -> Driver:
    """Decode workers have their home in host memory."""
    return whole(arenas={"D": "pool", "E": "pool", **arenas})


def join_compressor(driver: Driver, address: str, arena: str) -> list[Send]:
    registration = Register(name=f"{address}#1", address=address, stages=("compress",), arena=arena)
    sends = driver.on(registration, address)
    report = Report(name=f"{address}#1", running=0, waiting=0, pages_held=0, busy_s=0)
    return [*sends, *driver.on(report, address)]


@pytest.mark.parametrize(("own", "other"), [(ONE, TWO), (TWO, ONE)])
def test_the_compressor_on_the_gpu_with_the_raw_pages_gets_them(own: str, other: str) -> None:
    """Although it has more to do, and writes into host memory."""
    driver = apart(P=own, C=own)
    for idle in "FG":
        join_compressor(driver, idle, other)
    for name in ("a", "b", "c"):
        [send] = driver.bring_to("compressing", request(name))
        assert send.to == "C"
    assert set(driver.router.snapshot(0).booked_bytes) == {own, "pool"}
    assert driver.planned("a") == [Send("C", Encode(requests=("a",), arena="pool"))]
    [send] = driver.compressed("a")
    assert (send.to, type(send.message)) == ("D", Join)
    assert driver.router.snapshot(0).booked_bytes[own] == 2 * MODEL.estimate(50, 10).raw


def test_raw_pages_are_in_host_memory_if_no_compressor_is_on_their_gpu() -> None:
    driver, one = apart(P=ONE, C=TWO), request()
    assert driver.submit(one) == [Send("P", Prefill(requests=(one,), arenas=("pool",)))]
    assert set(driver.router.snapshot(0).booked_bytes) == {"pool"}
    [send] = driver.prefilled("r")
    assert send.to == "C"
    assert driver.planned("r") == [Send("C", Encode(requests=("r",), arena="pool"))]
    join_compressor(driver, "F", ONE)
    assert driver.submit(request("s")) == [Send("P", Prefill(requests=(request("s"),)))]


def test_raw_pages_that_no_other_gpu_reads_wait_for_the_successor_of_their_compressor() -> None:
    """After some time another one gets them: it refuses, and the prompt is computed again."""
    driver = apart(P=ONE, C=ONE)
    join_compressor(driver, "F", TWO)
    driver.submit(request())
    assert not [send for send in driver.router.lost("C", driver.now) if send.to == "F"]
    assert driver.prefilled("r") == []
    assert not [send for send in driver.tick(ENCODER_GRACE_S - 1) if send.to == "F"]
    joined = join_compressor(driver, "G", ONE)
    assert [send.to for send in joined if isinstance(send.message, Compress)] == ["G"]

    driver = apart(P=ONE, C=ONE)
    join_compressor(driver, "F", TWO)
    driver.submit(request())
    driver.router.lost("C", driver.now)
    assert driver.prefilled("r") == []
    for _ in range(2):
        driver.report("F")
        driver.report("P")
        sends = driver.tick(ENCODER_GRACE_S / 2 + 1)
    sends += driver.report("F")
    assert "F" in [send.to for send in sends if isinstance(send.message, Compress)]


def test_pages_are_decoded_where_their_compressor_can_write() -> None:
    """Workers of all stages on GPUs that do not access each other: all of a request is on one."""
    driver = Driver("A", "B", arenas={"A": ONE, "B": TWO})
    first, second = driver.submit(request("a")), driver.submit(request("b"))
    assert {first[0].to, second[0].to} == {"A", "B"}
    for send in (*first, *second):
        (name,) = started([send])
        arena = driver.arenas[send.to]
        said = Prefilled(request=name, first_token=7, handle=handle(name, "raw"))
        [compress] = driver.on(said, send.to)
        assert compress.to == send.to
        [encode] = driver.on(Planned(request=name, pages=5), send.to)
        assert encode.message == Encode(requests=(name,), arena=arena)
