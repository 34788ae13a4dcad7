"""Tests of ``block_table_ops`` against plain numpy, on random tables."""

from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from triptych.kernels import block_table_ops as ops

Ids = NDArray[np.int32]
LAYERS, SLOTS, HEADS, WIDTH, ROOM = 3, 5, 2, 7, 4


class Table:
    """A table of distinct page ids, forward or backward, with random token counts."""

    def __init__(self, seed: int, *, backward: bool = False, equal: bool = False) -> None:
        self.random = np.random.default_rng(seed)
        shape = (LAYERS, SLOTS, HEADS, WIDTH)
        entries = self.random.permutation(LAYERS * SLOTS * HEADS * WIDTH).astype(np.int32)
        self.pages = entries.reshape(shape)[..., :: -1 if backward else 1]
        each = (1, SLOTS, 1) if equal else shape[:3]
        tokens = self.random.integers(0, WIDTH * ROOM, each, np.int32)
        self.tokens: Ids = np.broadcast_to(tokens, shape[:3]).copy()
        self.slots = self.random.permutation(SLOTS)[:3].astype(np.int32)

    def numbers(self, *shape: int, least: int = 0, end: int = WIDTH * ROOM) -> Ids:
        return self.random.integers(least, end, shape, np.int32)


def pages_for(tokens: Any) -> Any:
    return -(-tokens // ROOM)


@pytest.mark.parametrize("every", [0, 1, 4])
@pytest.mark.parametrize("seed", range(20))
def test_new_tokens_are_counted_and_scores_are_due_by_position(seed: int, every: int) -> None:
    table = Table(seed, equal=True)
    tokens, slots = table.tokens.copy(), table.slots
    positions, progress = table.numbers(3, end=9), table.random.integers(0, 27, SLOTS)
    places, due, before, is_begun = ops.count_new_tokens(
        table.tokens, slots, WIDTH * ROOM, positions, progress, every
    )
    assert np.array_equal(places, tokens[0, slots, 0])
    tokens[:, slots] += 1
    assert np.array_equal(table.tokens, tokens)
    is_due = positions % every == 0 if every else np.zeros(3, np.bool_)
    assert np.array_equal(due, np.flatnonzero(is_due))
    assert np.array_equal(before, LAYERS * positions)
    assert is_begun == bool((progress[slots] > before).any())


@pytest.mark.parametrize("backward", [False, True])
@pytest.mark.parametrize("seed", range(5))
def test_rows_are_set_to_pages_in_row_order(seed: int, backward: bool) -> None:
    table = Table(seed, backward=backward)
    expected, slot = table.pages.copy(), int(table.slots[0])
    given = table.numbers(LAYERS * HEADS)
    counts = pages_for(given)
    ids = np.arange(1000, 1000 + counts.sum(), dtype=np.int32)
    used = np.arange(WIDTH) < counts.reshape(LAYERS, HEADS, 1)
    expected[:, slot][used] = ids
    tokens = table.tokens.copy()
    tokens[:, slot] = given.reshape(LAYERS, HEADS)
    ops.fill_rows(table.pages, table.tokens, slot, given, ROOM, ids)
    assert np.array_equal(table.pages, expected)
    assert np.array_equal(table.tokens, tokens)
    for wrong in (ids[:-1], np.append(ids, ids[0])):
        with pytest.raises(IndexError):
            ops.fill_rows(table.pages, table.tokens, slot, given, ROOM, wrong)
    with pytest.raises(IndexError):
        ops.fill_rows(table.pages, table.tokens, slot, given * 0 + WIDTH * ROOM + 1, ROOM, ids)


@pytest.mark.parametrize("tables", [1, 2])
@pytest.mark.parametrize("seed", range(5))
def test_tokens_plus_one_for_each_row(seed: int, tables: int) -> None:
    table = Table(seed)
    tokens = table.numbers(tables, LAYERS, SLOTS, HEADS)
    more = ops.tokens_plus_one(tokens, table.slots)
    assert np.array_equal(more, np.moveaxis(tokens[:, :, table.slots] + 1, 0, -1))


@pytest.mark.parametrize("tables", [1, 2])
@pytest.mark.parametrize("seed", range(20))
def test_missing_pages_are_counted_and_appended(seed: int, tables: int) -> None:
    """Pages of the first table are appended from the left, those of the second from the right."""
    table = Table(seed)
    slots, rooms = table.slots, np.array([ROOM, ROOM + 3], np.int32)[:tables, None, None, None]
    most = WIDTH * ROOM // tables
    tokens = table.numbers(tables, LAYERS, SLOTS, HEADS, end=most)
    wanted = table.numbers(LAYERS, 3, HEADS, 2, end=most)
    have, want = -(-tokens[:, :, slots] // rooms), -(-np.moveaxis(wanted, -1, 0)[:tables] // rooms)
    counts = ops.count_lacking(tokens, slots, wanted, rooms.ravel())
    assert np.array_equal(counts, np.maximum(want - have, 0).sum((0, 1, 3)))
    first, expected, column = np.cumsum(counts) - counts, table.pages.copy(), np.arange(WIDTH)
    ends, ids = first + counts, np.arange(1000, 1000 + counts.sum(), dtype=np.int32)
    sides = np.stack([column, column[::-1]])[:tables, None, None, None]
    is_new = (have[..., None] <= sides) & (sides < want[..., None])
    for at, slot in enumerate(slots.tolist()):
        # Row after row: pages of the first table, then those of the second one.
        new = [
            (layer, slot, head, int(entry))
            for layer in range(LAYERS)
            for head in range(HEADS)
            for each in range(tables)
            for entry in np.flatnonzero(is_new[each, layer, at, head])[:: 1 if each == 0 else -1]
        ]
        for page, where in zip(ids[first[at] : ends[at]], new, strict=True):
            expected[where] = page
    ops.append_pages(table.pages, tokens, slots, wanted, rooms.ravel(), ids, first)
    assert np.array_equal(table.pages, expected)
    assert np.array_equal(first, ends)


@pytest.mark.parametrize("seed", range(20))
def test_emptied_pages_leave_the_table_and_the_call_is_repeatable(seed: int) -> None:
    table = Table(seed)
    column, end, used = sorted(table.random.choice(WIDTH + 1, 3, replace=False).tolist())
    count = end - column
    slots, before, tokens = table.slots, table.pages.copy(), table.tokens.copy()
    classes, counts = table.numbers(2, LAYERS, SLOTS, HEADS), table.numbers(LAYERS, 3, HEADS, 5)
    then = classes.copy()
    then[:, :, slots] = np.moveaxis(counts[..., :2], -1, 0)
    expected = before.copy()
    expected[:, slots, :, column : used - count] = before[:, slots, :, end:used]
    for _ in range(2):
        table.tokens[:] = tokens
        moved = ops.remove_pages(
            table.pages, table.tokens, before, slots, column, count, used, ROOM, classes, counts
        )
        emptied = before[:, slots][..., column:end].swapaxes(0, 1).reshape(3, -1)
        assert np.array_equal(moved, emptied)
        assert np.array_equal(table.pages, expected)
        assert np.array_equal(classes, then)
    tokens[:, slots] -= ROOM
    assert np.array_equal(table.tokens, tokens)


@pytest.mark.parametrize("seed", range(20))
def test_plan_and_table_are_saved_before_a_retirement(seed: int) -> None:
    table = Table(seed)
    slots, plan = table.slots, table.numbers(LAYERS, 3, HEADS, 9)
    kept, saved_plan = (
        np.full_like(table.pages, -1),
        np.full((LAYERS, SLOTS, HEADS, 9), -1, np.int32),
    )
    retired, retired_after = table.numbers(SLOTS), np.full(SLOTS, -1, np.int32)
    expected, expected_plan, then = kept.copy(), saved_plan.copy(), retired_after.copy()
    then[slots] = retired[slots] + ROOM
    expected[:, slots], expected_plan[:, slots] = table.pages[:, slots], plan
    ops.save_retirement(table.pages, plan, slots, ROOM, kept, saved_plan, retired, retired_after)
    assert np.array_equal(retired_after, then)
    assert np.array_equal(kept, expected)
    assert np.array_equal(saved_plan, expected_plan)


def test_retirement_inputs_have_a_row_for_each_slot_of_each_layer() -> None:
    table = Table(3, equal=True)
    slots, seen = table.slots, table.numbers(3, least=500, end=900)
    rows, now, judged = ops.retirement_inputs(table.tokens, slots, seen, 13, 40)
    assert np.array_equal(rows.reshape(LAYERS, 3), np.arange(LAYERS)[:, None] * SLOTS + slots)
    assert np.array_equal(now.reshape(LAYERS, 3), [seen] * LAYERS)
    oldest = seen - (table.tokens[0, slots, 0] - 13) - 40
    assert np.array_equal(judged.reshape(LAYERS, 3), [oldest] * LAYERS)


def test_tokens_and_pages_beyond_a_row_are_an_error() -> None:
    table = Table(0)
    slots, first, rooms = table.slots, np.zeros(3, np.int64), np.array([ROOM], np.int32)
    too_many = np.full((LAYERS, 3, HEADS, 1), WIDTH * ROOM + 1, np.int32)
    ids, tokens = np.arange(1000, dtype=np.int32), table.tokens[None]
    with pytest.raises(IndexError):
        ops.append_pages(table.pages, tokens, slots, too_many, rooms, ids, first)
    with pytest.raises(IndexError):
        ops.append_pages(table.pages, tokens * 0, slots, too_many - 1, rooms, ids[:3], first)
    table.tokens[:] = WIDTH * ROOM
    none = np.zeros(SLOTS, np.int64)
    with pytest.raises(IndexError):
        ops.count_new_tokens(table.tokens, slots, WIDTH * ROOM, slots, none, 0)
