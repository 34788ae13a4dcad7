"""Ranks that stay right as time passes, and a heap that forgets what left it."""

import random
from dataclasses import dataclass

import pytest
from hypothesis import given
from hypothesis import strategies as st

from triptych.kvpool.plugins import EVICTION_POLICIES
from triptych.kvpool.prefix.eviction import CostPolicy, LeafHeap, LruPolicy

HALF_LIFE = 10.0


@dataclass(eq=False)
class Item:
    rank: tuple[bool, float]
    stamp: int = 0


def rank_of(policy: CostPolicy | LruPolicy, seconds: float, nbytes: int, uses: list[int]) -> float:
    rank = None
    for tick in uses:
        rank = policy.rank(rank, seconds, nbytes, tick)
    assert rank is not None
    return rank


def worth(seconds: float, nbytes: int, uses: list[int], now: int) -> float:
    """The formula of the docstring, word for word."""
    return seconds / nbytes * sum(2.0 ** ((at - now) / HALF_LIFE) for at in uses)


use_ticks = st.lists(st.integers(0, 200), min_size=1, max_size=8).map(sorted)
Costs = tuple[float, int, list[int]]
"""Seconds, bytes and the ticks of the uses of a block."""

blocks = st.tuples(st.floats(1e-6, 100), st.integers(1, 1 << 40), use_ticks)


@given(blocks, blocks, st.integers(200, 400))
def test_the_order_of_ranks_is_the_order_of_worths_at_any_later_time(
    first: Costs, second: Costs, now: int
) -> None:
    policy = CostPolicy(half_life=HALF_LIFE)
    worths = worth(*first, now), worth(*second, now)
    if abs(worths[0] - worths[1]) > 1e-9 * max(worths):
        higher = rank_of(policy, *first) > rank_of(policy, *second)
        assert higher == (worths[0] > worths[1])


def test_ranks_stay_finite_after_more_lookups_than_a_server_ever_sees() -> None:
    policy = CostPolicy(half_life=1.0)
    old, new = rank_of(policy, 0.0, 1, [0, 10**12]), rank_of(policy, 0.0, 1, [10**12 + 1])
    assert old < new < float("inf")


def test_what_took_longer_to_compute_stays_longer() -> None:
    policy = CostPolicy()
    assert rank_of(policy, 2.0, 100, [1]) > rank_of(policy, 1.0, 100, [1])
    assert rank_of(policy, 1.0, 50, [1]) > rank_of(policy, 1.0, 100, [1])
    assert rank_of(policy, 1.0, 100, [1, 2]) > rank_of(policy, 1.0, 100, [2])


def test_lru_looks_at_the_last_use_alone() -> None:
    policy = LruPolicy()
    assert rank_of(policy, 100.0, 1, [1, 2, 3]) < rank_of(policy, 0.0, 100, [4])


def test_both_policies_have_a_name() -> None:
    assert EVICTION_POLICIES.names == ["cost", "lru"]
    assert EVICTION_POLICIES.load("cost")() == CostPolicy()


@pytest.mark.parametrize("seed", range(5))
def test_the_heap_gives_the_lowest_of_what_is_still_there(seed: int) -> None:
    chance, heap, there = random.Random(seed), LeafHeap[Item](), list[Item]()
    for stamp in range(1, 3000):
        action = chance.random()
        if action < 0.5 or not there:
            there.append(Item((chance.random() < 0.5, float(chance.randrange(20))), stamp))
            heap.push(there[-1])
        elif action < 0.8:
            there.pop(chance.randrange(len(there))).stamp = 0
        else:
            lowest = heap.pop()
            assert lowest is not None
            assert lowest is min(there, key=lambda item: (item.rank, item.stamp))
            there.remove(lowest)
        assert len(heap) <= max(64, 2 * len(there) + 64 + stamp // 2)
    assert sorted(map(id, heap.live())) == sorted(map(id, there))


def test_an_item_that_comes_and_goes_does_not_grow_the_heap() -> None:
    heap, item = LeafHeap[Item](), Item((False, 1.0))
    for stamp in range(1, 10_000):
        item.stamp = stamp
        heap.push(item)
    assert len(heap) <= 64
    assert heap.pop() is item
    item.stamp = 0
    assert heap.pop() is None
