"""Batch policies: fixed cases, and properties over random lines."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.effort import examples
from triptych.core.errors import ConfigError
from triptych.router import BATCH_POLICIES
from triptych.router.plugins import schedule_named
from triptych.router.policies.batching import fcfs, greedy_by_memory
from triptych.router.queue.waiting_queue import ListedQueue
from triptych.router.snapshot import Budget, Waiting

PATIENCE_S = 5.0


def budget(free_bytes: int, max_requests: int = 99) -> Budget:
    return Budget(free_bytes=free_bytes, max_requests=max_requests)


def queue(*sizes_and_waits: tuple[int, float]) -> ListedQueue:
    return ListedQueue(
        [
            Waiting(f"r{i}", size, waited, slack_s=PATIENCE_S - waited)
            for i, (size, waited) in enumerate(sizes_and_waits)
        ]
    )


def names(batch: list[Waiting]) -> list[str]:
    return [one.id for one in batch]


lines = st.lists(st.tuples(st.integers(1, 100), st.floats(0, 10)), max_size=30).map(
    lambda items: queue(*sorted(items, key=lambda item: -item[1]))
)
budgets = st.builds(budget, st.integers(0, 1000), st.integers(0, 20))


def test_greedy_takes_the_smallest_of_the_whole_line_first() -> None:
    waiting = queue((50, 3), (10, 2), (30, 1), (20, 0))
    assert names(greedy_by_memory(waiting, budget(60))) == ["r1", "r3", "r2"]


def test_nothing_overtakes_a_request_that_lost_patience() -> None:
    waiting = queue((80, 6), (10, 2))
    assert greedy_by_memory(waiting, budget(60)) == []


def test_late_requests_go_first_oldest_first() -> None:
    waiting = queue((30, 7), (20, 6), (10, 1))
    assert names(greedy_by_memory(waiting, budget(100))) == ["r0", "r1", "r2"]


def test_equal_sizes_keep_the_order_of_arrival() -> None:
    waiting = queue((10, 3), (10, 2), (10, 1))
    assert names(greedy_by_memory(waiting, budget(20))) == ["r0", "r1"]


def test_fcfs_stops_at_the_first_that_does_not_fit() -> None:
    waiting = queue((10, 3), (80, 2), (10, 1))
    assert names(fcfs(waiting, budget(60))) == ["r0"]


def test_no_more_requests_than_slots() -> None:
    waiting = queue((1, 3), (1, 2), (1, 1))
    assert len(greedy_by_memory(waiting, budget(60, max_requests=2))) == 2
    assert fcfs(waiting, budget(60, max_requests=0)) == []


@pytest.mark.parametrize("name", BATCH_POLICIES.names)
@given(waiting=lines, allowed=budgets)
def test_every_policy_keeps_the_budget_and_chooses_nobody_twice(
    name: str, waiting: ListedQueue, allowed: Budget
) -> None:
    choose = schedule_named(name).choose
    batch = choose(waiting, allowed)
    assert sum(one.bytes for one in batch) <= allowed.free_bytes
    assert len(batch) <= allowed.max_requests
    assert len(set(names(batch))) == len(batch)
    assert set(batch) <= set(waiting.waiting)
    assert batch == choose(waiting, allowed)


@pytest.mark.parametrize("name", BATCH_POLICIES.names)
@given(waiting=lines, allowed=budgets)
def test_a_policy_that_may_start_somebody_does(
    name: str, waiting: ListedQueue, allowed: Budget
) -> None:
    """Work conservation: nobody waits for a batch while the first of the line would fit."""
    batch = schedule_named(name).choose(waiting, allowed)
    first = next(waiting.in_order(), None)
    if first is not None and first.bytes <= allowed.free_bytes and allowed.max_requests:
        assert batch


@settings(max_examples=examples(1000))
@given(waiting=lines, free_bytes=st.integers(0, 1000))
def test_greedy_packs_at_least_as_many_bytes_as_fcfs(waiting: ListedQueue, free_bytes: int) -> None:
    allowed = budget(free_bytes, len(waiting) + 1)
    greedy, plain = greedy_by_memory(waiting, allowed), fcfs(waiting, allowed)
    assert sum(one.bytes for one in greedy) >= sum(one.bytes for one in plain)


def test_where_the_oldest_fill_more_bytes_they_go_first() -> None:
    waiting = queue((90, 3), (20, 2), (30, 1), (5, 0))
    assert names(greedy_by_memory(waiting, budget(100))) == ["r0", "r3"]


@given(waiting=lines, allowed=budgets)
def test_greedy_admits_at_least_as_many_as_fcfs_while_nobody_is_late(
    waiting: ListedQueue, allowed: Budget
) -> None:
    fresh = ListedQueue(
        [Waiting(one.id, one.bytes, min(one.waited_s, PATIENCE_S)) for one in waiting.waiting]
    )
    assert len(greedy_by_memory(fresh, allowed)) >= len(fcfs(fresh, allowed))


@given(waiting=lines, allowed=budgets)
def test_a_late_request_that_is_left_out_leaves_out_everybody_younger(
    waiting: ListedQueue, allowed: Budget
) -> None:
    batch = greedy_by_memory(waiting, allowed)
    left_out = [one for one in waiting.waiting if one not in batch and one.waited_s > PATIENCE_S]
    for late in left_out:
        assert all(chosen.waited_s >= late.waited_s for chosen in batch)


@given(waiting=lines, allowed=budgets)
def test_fcfs_takes_a_prefix_of_the_line(waiting: ListedQueue, allowed: Budget) -> None:
    batch = fcfs(waiting, allowed)
    assert batch == list(waiting.waiting[: len(batch)])


def test_a_misspelt_policy_is_told_the_nearest_name() -> None:
    with pytest.raises(ConfigError, match="did you mean 'greedy_by_memory'"):
        BATCH_POLICIES.load("greedy_by_memry")
