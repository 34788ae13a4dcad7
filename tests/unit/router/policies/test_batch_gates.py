"""Batches: when they go, how large they are, and that sizes settle."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from triptych.core.errors import ConfigError
from triptych.router.plugins import schedule_named
from triptych.router.policies.batch_gates import LARGEST_BATCH, Gate, adjust

COUNTS = st.integers(0, 100)


@given(least=st.integers(1, 50), wait_s=st.floats(0, 9), count=COUNTS, waited_s=st.floats(0, 20))
def test_a_batch_goes_if_and_only_if_it_is_large_enough_or_has_waited(
    least: int, wait_s: float, count: int, waited_s: float
) -> None:
    opens = Gate(least=least, wait_s=wait_s).opens(count, waited_s)
    assert opens == (count >= least or (count >= 1 and waited_s >= wait_s))


@given(start=st.integers(1, LARGEST_BATCH), queue=st.integers(0, 500), free=st.floats(0.1, 1.0))
def test_sizes_meet_a_step_in_the_load_within_ten_rounds_and_then_stand_still(
    start: int, queue: int, free: float
) -> None:
    sizes = [start]
    for _ in range(20):
        sizes.append(adjust(sizes[-1], queue, free))
    assert len(set(sizes[10:])) == 1
    assert sizes == sorted(sizes) or sizes == sorted(sizes, reverse=True)  # it never swings
    last = sizes[-1]
    assert last == 1 or 2 * queue >= last
    assert last == LARGEST_BATCH or queue < 2 * last


@given(start=st.integers(1, LARGEST_BATCH), queue=COUNTS)
def test_sizes_shrink_while_memory_is_short(start: int, queue: int) -> None:
    assert adjust(start, queue, 0.05) == max(1, start // 2)


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


def test_only_an_adaptive_schedule_changes() -> None:
    fixed, dynamic = schedule_named("static:p1c1d8"), schedule_named("dynamic")
    assert fixed.adjusted(99, 99, 1.0) is fixed
    grown = dynamic.adjusted(99, 0, 1.0)
    assert (grown.prefill.most, grown.compress.most) == (2, 1)
    assert grown.adjusted(3, 1, 1.0) is grown
