"""The free list against a stack."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from triptych.core.errors import PoolExhausted
from triptych.kvpool.pool.free_list import FreeList, count_outside, count_repeated


@given(capacity=st.integers(1, 12), steps=st.lists(st.tuples(st.booleans(), st.integers(0, 13))))
def test_pages_that_were_freed_last_are_allocated_first(
    capacity: int, steps: list[tuple[bool, int]]
) -> None:
    free, stack, held = FreeList(capacity), list(range(capacity)), list[int]()
    for takes, count in steps:
        if takes and count <= len(stack):
            expected, stack = stack[:count], stack[count:]
            assert free.allocate(count).tolist() == expected
            held += expected
        elif takes:
            with pytest.raises(PoolExhausted):
                free.allocate(count)
        else:
            given_back, held = held[:count], held[count:]
            free.free(np.array(given_back, np.int32))
            stack = given_back + stack
        assert free.peek().tolist() == stack
        assert len(free) == len(stack)


def test_an_empty_list_and_a_full_list_are_not_confused() -> None:
    free = FreeList(4)
    everything = free.allocate(4)
    assert len(free) == 0
    free.free(everything)
    assert len(free) == 4


def test_more_ids_than_pages_are_refused() -> None:
    free = FreeList(4)
    with pytest.raises(OverflowError):
        free.free(np.array([0], np.int32))
    assert free.peek().tolist() == [0, 1, 2, 3]


def test_taken_ids_are_a_copy() -> None:
    free = FreeList(4)
    ids = free.allocate(2)
    ids[:] = 3
    assert free.peek().tolist() == [2, 3]


@given(st.lists(st.integers(-2, 9), max_size=20))
def test_counts_of_repeated_and_foreign_ids(ids: list[int]) -> None:
    outside = [i for i in ids if not 0 <= i < 8]
    inside = [i for i in ids if 0 <= i < 8]
    scratch = np.random.default_rng().integers(-9, 9, 8, dtype=np.int32)
    assert count_outside(np.array(ids, np.int32), 8) == len(outside)
    assert count_repeated(np.array(inside, np.int32), scratch) == len(inside) - len(set(inside))
