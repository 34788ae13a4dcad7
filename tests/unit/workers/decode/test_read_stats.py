"""What a step read, counted page by page."""

from dataclasses import replace
from itertools import product

import numpy as np
import pytest

from triptych.core.layout import PageLayout, page_format
from triptych.workers.decode.read_stats import Lists, Part, Reading, reused

LAYERS, REQUESTS, HEADS, WIDTH = 2, 3, 2, 5
ROWS = list(product(range(LAYERS), range(REQUESTS), range(HEADS)))
NAMES = ("a", "b", "c")


def part(luck: np.random.Generator, name: str, first_page: int) -> Part:
    layout = PageLayout(page_format(name), 64, 3584)
    shape = (LAYERS, REQUESTS, HEADS)
    pages = luck.permutation(len(ROWS) * WIDTH).astype(np.int32) + np.int32(first_page)
    tokens = luck.integers(0, WIDTH * layout.tokens + 1, shape).astype(np.int32)
    return Part(layout, pages.reshape(*shape, WIDTH), tokens)


def reading(seed: int, *, with_lists: bool) -> Reading:
    luck = np.random.default_rng(seed)
    parts = (part(luck, "k8v4", 0), part(luck, "k4v2", 1000))
    if not with_lists:
        return Reading(NAMES, parts)
    counts = np.zeros((LAYERS, REQUESTS, HEADS), np.int32)
    ordinals = luck.integers(0, 99, (LAYERS, REQUESTS, HEADS, 2 * WIDTH)).astype(np.int32)
    for row in ROWS:
        have = sum(each.layout.pages(int(each.tokens[row])) for each in parts)
        counts[row] = luck.integers(0, have + 1)
        chosen = np.sort(luck.choice(have, counts[row], replace=False))
        ordinals[(*row, slice(0, counts[row]))] = chosen
    return Reading(NAMES, parts, Lists(ordinals, counts, luck.random((LAYERS, REQUESTS)) < 0.7))


def pages_of(one: Reading, row: tuple[int, int, int]) -> list[tuple[int, int]]:
    """What a row read, literally: page ids, and the bytes of each."""
    laid = [
        (
            int(each.pages[(*row, column)]),
            min(each.layout.tokens, left) * each.layout.format.read_bytes(64),
        )
        for each in one.parts
        for column in range(WIDTH)
        if (left := int(each.tokens[row]) - column * each.layout.tokens) > 0
    ]
    if one.lists is None or not one.lists.is_read[row[:2]]:
        return laid
    return [laid[at] for at in one.lists.ordinals[row][: one.lists.counts[row]]]


@pytest.mark.parametrize("with_lists", [False, True])
@pytest.mark.parametrize("seed", range(5))
def test_bytes_and_pages_are_those_of_the_rows_counted_one_by_one(
    seed: int, *, with_lists: bool
) -> None:
    one = reading(seed, with_lists=with_lists)
    each = {row: pages_of(one, row) for row in ROWS}
    by_layer = [
        sum(n for row in ROWS if row[0] == at for _, n in each[row]) for at in range(LAYERS)
    ]
    assert one.layer_bytes().tolist() == by_layer
    assert sum(int(read.sum()) for read in one.read()) == sum(map(len, each.values()))
    keys = one.keys()
    for index, name in enumerate(NAMES):
        own = {
            ((row[0] * HEADS + row[2]) << 32) | page
            for row in ROWS
            if row[1] == index
            for page, _ in each[row]
        }
        assert set(keys[name].tolist()) == own


def test_reuse_counts_the_pages_that_the_same_request_read_at_the_step_before() -> None:
    """Two rows of three pages: the first step reads 0, 1 and 1, 2; the next 1, 2 and 1, 2."""
    layout = PageLayout(page_format("k8v4"), 64, 3584)
    pages = np.arange(6, dtype=np.int32).reshape(1, 1, 2, 3)
    tokens = np.full((1, 1, 2), 3 * layout.tokens, np.int32)
    counts, is_read = np.full((1, 1, 2), 2, np.int32), np.ones((1, 1), np.bool_)

    def step(*chosen: list[int]) -> Reading:
        ordinals = np.array(chosen, np.int32).reshape(1, 1, 2, 2)
        return Reading(("a",), (Part(layout, pages, tokens),), Lists(ordinals, counts, is_read))

    first, second = step([0, 1], [1, 2]), step([1, 2], [1, 2])
    assert reused(first, second) == (3, 4)
    assert reused(second, second) == (4, 4)
    assert reused(replace(first, names=("z",)), second) == (0, 0)
    assert reused(first, Reading(("a",), first.parts)) == (4, 6)


def test_bytes_of_pages_that_are_encoded_whole_are_counted_in_whole_numbers() -> None:
    luck = np.random.default_rng(0)
    whole, other = part(luck, "kvarn", 0), part(luck, "k8v4", 1000)
    found = Reading(NAMES, (whole, other)).layer_bytes()
    rest = Reading(NAMES, (other,)).layer_bytes()
    tokens = whole.tokens.sum(axis=(1, 2))
    assert found.dtype == np.int64
    assert np.array_equal(found - rest, np.rint(tokens * whole.layout.read_bytes))
