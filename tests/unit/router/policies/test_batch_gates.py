"""Batches: when they go, and how large they are."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from triptych.core.errors import ConfigError
from triptych.router.plugins import schedule_named
from triptych.router.policies.batch_gates import LARGEST_BATCH, Gate, StageLoad, batch_sizes

COUNTS = st.integers(0, 100)


@given(least=st.integers(1, 50), wait_s=st.floats(0, 9), count=COUNTS, waited_s=st.floats(0, 20))
def test_a_batch_goes_if_and_only_if_it_is_large_enough_or_has_waited(
    least: int, wait_s: float, count: int, waited_s: float
) -> None:
    opens = Gate(least=least, wait_s=wait_s).opens(count, waited_s)
    assert opens == (count >= least or (count >= 1 and waited_s >= wait_s))


LOADS = st.builds(
    StageLoad,
    waiting=COUNTS,
    startable=COUNTS,
    prefilled=COUNTS,
    started=COUNTS,
    prefill_workers=st.integers(0, 9),
    compressors=st.integers(0, 9),
)


@given(LOADS)
def test_sizes_are_what_memory_and_queues_allow(load: StageLoad) -> None:
    sizes = batch_sizes(load)
    assert 1 <= sizes.prefill <= LARGEST_BATCH
    assert 1 <= sizes.compress <= LARGEST_BATCH
    assert sizes.prefill == 1 or sizes.prefill <= min(load.waiting, load.startable)
    all_workers = sizes.prefill * max(1, load.prefill_workers)
    assert sizes.prefill == LARGEST_BATCH or all_workers >= min(load.waiting, load.startable)
    assert sizes.decode >= max(1, load.started)


@given(LOADS, st.integers(0, 50))
def test_more_memory_makes_no_batch_smaller(load: StageLoad, more: int) -> None:
    before, after = batch_sizes(load), batch_sizes(replace(load, startable=load.startable + more))
    assert before.prefill <= after.prefill
    assert before.decode <= after.decode


def test_a_static_schedule_has_the_sizes_of_its_name() -> None:
    schedule = schedule_named("static:p3c4d6", decode_slots=6)
    sizes = [schedule.prefill, schedule.compress, schedule.decode]
    assert [(gate.least, gate.most) for gate in sizes] == [(3, 3), (4, 4), (6, 6)]


@pytest.mark.parametrize("name", ["static:", "static:p0c1d8", "static:p1d8c1", "static:p1c1d8x"])
def test_a_static_schedule_that_is_none_is_an_error(name: str) -> None:
    with pytest.raises(ConfigError, match="static:p2c2d8"):
        schedule_named(name)


def test_a_batch_that_no_decode_worker_holds_is_an_error() -> None:
    with pytest.raises(ConfigError, match=r"batches of 8 .*max_num_seqs=4"):
        schedule_named("static:p1c1d8", decode_slots=4)
    assert schedule_named("static:p1c1d8", decode_slots=8)
