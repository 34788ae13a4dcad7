"""The compiled books of a step against plain numpy, on random tables."""

from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from triptych.kernels import books

Ids = NDArray[np.int32]
LAYERS, SLOTS, HEADS, WIDTH, ROOM = 3, 5, 2, 7, 4


class Table:
    """Page ids that differ everywhere, seen from either side, and tokens of each row."""

    def __init__(self, seed: int, *, backward: bool = False, equal: bool = False) -> None:
        self.random = np.random.default_rng(seed)
        shape = (LAYERS, SLOTS, HEADS, WIDTH)
        cells = self.random.permutation(LAYERS * SLOTS * HEADS * WIDTH).astype(np.int32)
        self.pages = cells.reshape(shape)[..., :: -1 if backward else 1]
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
def test_a_token_goes_behind_the_last_one_and_scores_are_due_by_position(
    seed: int, every: int
) -> None:
    table = Table(seed, equal=True)
    tokens, slots = table.tokens.copy(), table.slots
    positions, progress = table.numbers(3, end=9), table.random.integers(0, 27, SLOTS)
    pages, rows, due, before, is_begun = books.begin_step(
        table.pages, table.tokens, slots, ROOM, positions, progress, every
    )
    column, row = np.divmod(tokens[:, slots], ROOM)
    here = np.take_along_axis(table.pages[:, slots], column[..., None], 3)[..., 0]
    assert np.array_equal(pages, here)
    assert np.array_equal(rows, row)
    tokens[:, slots] += 1
    assert np.array_equal(table.tokens, tokens)
    is_due = positions % every == 0 if every else np.zeros(3, np.bool_)
    assert np.array_equal(due, np.flatnonzero(is_due))
    assert np.array_equal(before, LAYERS * positions)
    assert is_begun == bool((progress[slots] > before).any())


@pytest.mark.parametrize("backward", [False, True])
@pytest.mark.parametrize("seed", range(20))
def test_each_row_gets_the_pages_that_it_lacks(seed: int, backward: bool) -> None:
    table = Table(seed, backward=backward)
    slots, wanted = table.slots, table.numbers(LAYERS, 3, HEADS)
    have, want = pages_for(table.tokens[:, slots]), pages_for(wanted)
    counts = np.full(3, 7)
    books.count_lacking(table.tokens, slots, wanted, ROOM, counts)
    counts -= 7
    assert np.array_equal(counts, np.maximum(want - have, 0).sum((0, 2)))
    expected, column = table.pages.copy(), np.arange(WIDTH)
    ids = np.arange(1000, 1000 + counts.sum(), dtype=np.int32)
    first = np.cumsum(counts) - counts
    for at, slot in enumerate(slots.tolist()):
        is_new = (have[:, at, :, None] <= column) & (column < want[:, at, :, None])
        expected[:, slot][is_new] = ids[first[at] : first[at] + counts[at]]
    ends = first + counts
    books.append_pages(table.pages, table.tokens, slots, wanted, ROOM, ids, first)
    assert np.array_equal(table.pages, expected)
    assert np.array_equal(first, ends)


@pytest.mark.parametrize("seed", range(20))
def test_tokens_that_have_a_place_move_in_order(seed: int) -> None:
    source, target = Table(seed), Table(seed + 100, backward=True)
    slots, shape = source.slots, (LAYERS, len(source.slots), HEADS, 6)
    places, target_places = source.numbers(*shape), source.numbers(*shape, least=-9)
    cells = books.moving_cells(source.pages, ROOM, places, target.pages, ROOM, target_places, slots)
    layer, at, head, _ = chosen = np.nonzero(target_places >= 0)
    for table, wanted, found in (
        (source, places[chosen], cells[:2]),
        (target, target_places[chosen], cells[2:]),
    ):
        column, row = np.divmod(wanted, ROOM)
        assert np.array_equal(found, [table.pages[layer, slots[at], head, column], row])


@pytest.mark.parametrize("seed", range(20))
def test_a_page_that_is_dropped_leaves_no_gap_however_often_it_is_done(seed: int) -> None:
    table, column = Table(seed), seed % (WIDTH - 1)
    slots, before, tokens = table.slots, table.pages.copy(), table.tokens.copy()
    expected = before.copy()
    expected[:, slots, :, column:-1] = before[:, slots, :, column + 1 :]
    for _ in range(2):
        table.tokens[:] = tokens
        gone = books.drop_page(table.pages, table.tokens, before, slots, column, ROOM)
        assert np.array_equal(gone, before[:, slots][..., column].swapaxes(0, 1).reshape(3, -1))
        assert np.array_equal(table.pages, expected)
    tokens[:, slots] -= ROOM
    assert np.array_equal(table.tokens, tokens)


@pytest.mark.parametrize("seed", range(20))
def test_what_is_planned_is_written_beside_the_table_as_it_was(seed: int) -> None:
    table = Table(seed)
    slots, plan = table.slots, table.numbers(LAYERS, 3, HEADS, 9)
    kept, kept_plan = (
        np.full_like(table.pages, -1),
        np.full((LAYERS, SLOTS, HEADS, 9), -1, np.int32),
    )
    expected, expected_plan = kept.copy(), kept_plan.copy()
    expected[:, slots], expected_plan[:, slots] = table.pages[:, slots], plan
    books.write_down(table.pages, plan, slots, kept, kept_plan)
    assert np.array_equal(kept, expected)
    assert np.array_equal(kept_plan, expected_plan)


def test_a_retirement_is_planned_for_the_rows_of_every_layer() -> None:
    table = Table(3, equal=True)
    slots, seen = table.slots, table.numbers(3, least=500, end=900)
    rows, now, judged = books.leaving_rows(table.tokens, slots, seen, 13, 40)
    assert np.array_equal(rows.reshape(LAYERS, 3), np.arange(LAYERS)[:, None] * SLOTS + slots)
    assert np.array_equal(now.reshape(LAYERS, 3), [seen] * LAYERS)
    oldest = seen - (table.tokens[0, slots, 0] - 13) - 40
    assert np.array_equal(judged.reshape(LAYERS, 3), [oldest] * LAYERS)


def test_what_a_table_has_no_cell_for_is_refused() -> None:
    table = Table(0)
    slots, first = table.slots, np.zeros(3, np.int64)
    too_many = np.full((LAYERS, 3, HEADS), WIDTH * ROOM + 1, np.int32)
    ids = np.arange(1000, dtype=np.int32)
    with pytest.raises(IndexError):
        books.append_pages(table.pages, table.tokens, slots, too_many, ROOM, ids, first)
    table.tokens[:] = 0
    with pytest.raises(IndexError):
        books.append_pages(table.pages, table.tokens, slots, too_many - 1, ROOM, ids[:3], first)
    table.tokens[:] = WIDTH * ROOM
    none = np.zeros(SLOTS, np.int64)
    with pytest.raises(IndexError):
        books.begin_step(table.pages, table.tokens, slots, ROOM, slots, none, 0)
    inside = np.zeros((LAYERS, 3, HEADS, 1), np.int32)
    outside = inside + WIDTH * ROOM
    for places, target_places in ((inside, outside), (outside, inside)):
        with pytest.raises(IndexError):
            books.moving_cells(table.pages, ROOM, places, table.pages, ROOM, target_places, slots)
