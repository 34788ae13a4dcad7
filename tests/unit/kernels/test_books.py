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


@pytest.mark.parametrize("seed", range(20))
def test_a_token_goes_behind_the_last_one(seed: int) -> None:
    table = Table(seed, equal=True)
    tokens, slots = table.tokens.copy(), table.slots
    pages, rows = books.add_tokens(table.pages, table.tokens, slots, ROOM)
    column, row = np.divmod(tokens[:, slots], ROOM)
    assert np.array_equal(
        pages, np.take_along_axis(table.pages[:, slots], column[..., None], 3)[..., 0]
    )
    assert np.array_equal(rows, row)
    tokens[:, slots] += 1
    assert np.array_equal(table.tokens, tokens)


@pytest.mark.parametrize("backward", [False, True])
@pytest.mark.parametrize("seed", range(20))
def test_each_row_gets_the_pages_that_it_lacks(seed: int, backward: bool) -> None:
    table, slot = Table(seed, backward=backward), seed % SLOTS
    wanted = table.numbers(LAYERS, HEADS)
    have, want = pages_for(table.tokens[:, slot]), pages_for(wanted)
    count = books.lacking_pages(table.tokens, slot, wanted, ROOM)
    assert count == np.maximum(want - have, 0).sum()
    expected, ids = table.pages.copy(), np.arange(1000, 1000 + count, dtype=np.int32)
    column = np.arange(WIDTH)
    is_new = (have[..., None] <= column) & (column < want[..., None])
    expected[:, slot][is_new] = ids
    books.append_pages(table.pages, table.tokens, slot, wanted, ROOM, ids)
    assert np.array_equal(table.pages, expected)


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


@pytest.mark.parametrize("every", [0, 1, 4])
def test_scores_are_due_by_position(every: int) -> None:
    positions, slots = np.array([8, 3, 4, 12]), np.array([2, 0, 3, 1], np.int32)
    progress = np.array([0, 5 * 12, 5 * 8 + 2, 0])
    due, before, begun, is_begun = books.due_scores(positions, slots, progress, 5, every)
    assert due.tolist() == {0: [], 1: [0, 1, 2, 3], 4: [0, 2, 3]}[every]
    assert before.tolist() == [40, 15, 20, 60]
    assert begun.tolist() == [2, -15, -20, 0]
    assert is_begun
    assert not books.due_scores(positions, slots, np.zeros(4, np.int64), 5, every)[3]


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
    too_many = np.full((LAYERS, HEADS), WIDTH * ROOM + 1, np.int32)
    ids = np.arange(1000, dtype=np.int32)
    with pytest.raises(IndexError):
        books.append_pages(table.pages, table.tokens, 0, too_many, ROOM, ids)
    table.tokens[:] = 0
    with pytest.raises(IndexError):
        books.append_pages(table.pages, table.tokens, 0, too_many - 1, ROOM, ids[:3])
    table.tokens[:] = WIDTH * ROOM
    with pytest.raises(IndexError):
        books.add_tokens(table.pages, table.tokens, table.slots, ROOM)
    inside = np.zeros((LAYERS, 3, HEADS, 1), np.int32)
    for places, target_places in ((inside, inside + WIDTH * ROOM), (inside + WIDTH * ROOM, inside)):
        with pytest.raises(IndexError):
            books.moving_cells(
                table.pages, ROOM, places, table.pages, ROOM, target_places, table.slots
            )
