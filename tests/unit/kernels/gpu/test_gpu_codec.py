from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.moves import ALONE, LATENTS, PAIRS, UNTRACKED, WHOLE, random_moves, whole_moves
from tests.moves import layout_named as layout_of
from triptych.core.errors import ConfigError
from triptych.core.layout import KeyOrder, PageLayout
from triptych.kernels import (
    append_tokens,
    load_tokens,
    move_tokens,
    round_tokens,
    store_tokens,
    transcode,
)

TOKENS, HEADS = 37, 2
WAYS = [(64, "token", name) for name in (*ALONE, *LATENTS, UNTRACKED)] + [
    *product((64,), ("channel",), ("k8v4", "k4v2")),
    *product((16, 96, 128, 256), ("token",), ("fp16", "k8v8", "k4v2")),
]


def scattered(layout: PageLayout, first_page: int) -> tuple[Tensor, Tensor, Tensor]:
    """A page table [HEADS, M] in random order, and page ids and rows [TOKENS, HEADS]."""
    width = layout.pages(TOKENS)
    table = (torch.randperm(HEADS * width).int() + first_page).view(HEADS, width)
    token = torch.arange(TOKENS)
    rows = (token % layout.tokens).int()[:, None].repeat(1, HEADS)
    return table, table[:, token // layout.tokens].T.contiguous(), rows


def awkward_vectors(head_dim: int, dtype: torch.dtype) -> Tensor:
    """Random vectors, some of them constant, some outside of the float16 range."""
    vectors = torch.randn(TOKENS, HEADS, head_dim) * 3
    vectors[5], vectors[7], vectors[9] = 1.25, 0.0, vectors[9] * 1e9
    vectors[11] *= 1e-7
    return vectors.to(dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("head_dim", "order", "name"), WAYS)
def test_storing_writes_the_bytes_of_the_reference_and_loading_reads_them(
    head_dim: int, order: KeyOrder, name: str, dtype: torch.dtype, device: Any
) -> None:
    layout = layout_of(name, head_dim, order)
    table, pages, rows = scattered(layout, 3)
    pages[13, 1] = -1
    want = torch.randint(0, 256, (3 + table.numel(), layout.page_bytes), dtype=torch.uint8)
    (got,) = device.take(want.clone())
    wide = awkward_vectors(2 * head_dim, dtype)
    key, value = wide[..., :head_dim], wide[..., head_dim:]
    value = key if layout.format.values_are_keys else value
    positions = torch.randint(0, 10**6, (TOKENS,), dtype=torch.int32)
    scores = torch.rand(TOKENS, HEADS) if order == "token" else None
    store_tokens.on("reference")(want, layout, key, value, pages, rows, positions, scores)
    inputs = device.take(key, value, pages, rows, positions)
    moved = None if scores is None else scores.to(device.name)
    store_tokens.on("cuda")(got, layout, *inputs, moved)
    assert torch.equal(got.cpu(), want)

    tokens = torch.tensor([TOKENS - 1, 13], dtype=torch.int32)
    want_loaded = load_tokens.on("reference")(want, layout, table, tokens)
    got_loaded = load_tokens.on("cuda")(got, layout, *device.take(table, tokens))
    for mine, its in zip(got_loaded, want_loaded, strict=True):
        assert torch.equal(mine.cpu(), its)


@pytest.mark.parametrize(("source", "target"), PAIRS)
def test_transcoding_writes_the_bytes_of_the_reference(
    source: str, target: str, device: Any
) -> None:
    head_dim = 96 if source == "k8v4" else 64
    old, new = layout_of(source, head_dim, "token"), layout_of(target, head_dim, "channel")
    table, pages, rows = scattered(old, 0)
    target_table, target_pages, target_rows = scattered(new, table.numel())
    count = table.numel() + target_table.numel()
    want = torch.randint(0, 256, (count, old.page_bytes), dtype=torch.uint8)
    vectors = awkward_vectors(head_dim, torch.float32)
    positions = torch.arange(TOKENS, dtype=torch.int32)
    scores = torch.rand(TOKENS, HEADS)
    store_tokens.on("reference")(want, old, vectors, vectors, pages, rows, positions, scores)
    where = [index.flatten() for index in (pages, rows, target_pages, target_rows)]
    (got,) = device.take(want.clone())
    transcode.on("reference")(want, old, new, *where)
    transcode.on("cuda")(got, old, new, *device.take(*where))
    assert torch.equal(got.cpu(), want)


@pytest.mark.parametrize(("source", "target"), [*PAIRS, ("fp16", "k8v8/8"), ("k8v8/8", "k8v4")])
def test_moving_tokens_writes_the_bytes_of_the_reference(
    source: str, target: str, device: Any
) -> None:
    moves = random_moves(source, target, 96 if source == "k8v4" else 64)
    want = moves.arena.clone()
    (got,) = device.take(want.clone())
    where = moves.slots, moves.places, moves.target_places
    move_tokens.on("reference")(want, moves.source, moves.target, *where)
    sections = device.section(moves.source), device.section(moves.target)
    move_tokens.on("cuda")(got, *sections, *device.take(*where))
    assert torch.equal(got.cpu(), want)


@pytest.mark.parametrize("head_dim", [64, 96])
@pytest.mark.parametrize("source", ["fp16", "k8v8/8"])
@pytest.mark.parametrize("name", WHOLE)
def test_whole_pages_are_encoded_as_by_the_reference(
    name: str, source: str, head_dim: int, device: Any
) -> None:
    """To the same bytes; where pages are balanced, sums in float32 may round a code otherwise."""
    moves = whole_moves(source, name, head_dim, "token")
    moves.target_places[0, 1] = -1
    want = moves.arena.clone()
    (got,) = device.take(want.clone())
    where = moves.slots, moves.places, moves.target_places
    move_tokens.on("reference")(want, moves.source, moves.target, *where)
    sections = device.section(moves.source), device.section(moves.target)
    move_tokens.on("cuda")(got, *sections, *device.take(*where))
    layout = moves.target.layout
    if not layout.format.is_balanced:
        assert torch.equal(got.cpu(), want)
    pages, held = moves.target.pages.flatten(0, 1), moves.target.tokens.flatten()
    moved = torch.ones(moves.target.tokens.shape, dtype=torch.bool)
    moved[int(moves.slots[0]), 1] = False
    expected = load_tokens.on("reference")(want, layout, pages, held)
    loaded = load_tokens.on("cuda")(got, layout, *device.take(pages, held))
    for mine, its in zip(loaded, expected, strict=True):
        mine, its = mine.cpu()[moved.flatten()], its[moved.flatten()]
        off = (mine - its).abs() > 1e-4 * its.abs().amax()
        assert off.float().mean() < 1e-3
    assert torch.equal(loaded[2].cpu()[moved.flatten()], expected[2][moved.flatten()])


def test_a_page_out_of_order_is_not_written(device: Any) -> None:
    moves = whole_moves("fp16", "kvarn", 64, "token")
    (arena,) = device.take(moves.arena.clone())
    sections = device.section(moves.source), device.section(moves.target)
    wrong = moves.target_places.flip(-1)
    move_tokens.on("cuda")(arena, *sections, *device.take(moves.slots, moves.places, wrong))
    assert torch.equal(arena.cpu(), moves.arena)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", [*ALONE, "k8v8/8", UNTRACKED])
def test_appending_writes_the_bytes_of_the_reference(
    name: str, dtype: torch.dtype, device: Any
) -> None:
    moves = random_moves("fp16", name, 64)
    slots, want = moves.slots, moves.arena.clone()
    (got,) = device.take(want.clone())
    places = torch.randint(0, 3 * moves.target.layout.tokens, slots.shape, dtype=torch.int32)
    places[1] = -1
    wide = torch.randn(len(slots), HEADS, 128).to(dtype)
    given = (wide[..., :64], wide[..., 64:], slots, places, places + 7)
    some = torch.tensor([0, 2])
    append_tokens.on("reference")(want, moves.target, *(each[some] for each in given))
    section, inputs = device.section(moves.target), device.take(*given)
    append_tokens.on("cuda")(got, section, *inputs)
    assert torch.equal(got.cpu(), want)
    both = device.take(moves.arena.clone(), moves.arena.clone())
    append_tokens.on("cuda")(both[0], section, *inputs, mirror=both[1])
    assert all(torch.equal(arena.cpu(), want) for arena in both)


def test_tokens_at_places_out_of_range_are_not_moved(device: Any) -> None:
    moves = random_moves("k8v4", "k4v2", 64)
    moves.slots[:2] = torch.tensor([5, -1])
    moves.places[2, 0], moves.target_places[2, 1] = 999, 999
    (arena,) = device.take(moves.arena.clone())
    sections = device.section(moves.source), device.section(moves.target)
    move_tokens.on("cuda")(
        arena, *sections, *device.take(moves.slots, moves.places, moves.target_places)
    )
    assert torch.equal(arena.cpu(), moves.arena)


def test_slots_outside_of_the_arena_are_skipped(device: Any) -> None:
    layout = layout_of("k8v4", 64, "token")
    before = torch.randint(0, 256, (3, layout.page_bytes), dtype=torch.uint8)
    (arena,) = device.take(before.clone())
    pages = torch.tensor([[9, -3, 0, 1]], dtype=torch.int32)
    rows = torch.tensor([[0, 0, 99, -1]], dtype=torch.int32)
    vectors = torch.randn(1, 4, 64)
    inputs = device.take(vectors, vectors, pages, rows, rows[:, 0])
    store_tokens.on("cuda")(arena, layout, *inputs)
    good = torch.tensor([2, 2, 2, 2], dtype=torch.int32)
    zero = good * 0
    transcode.on("cuda")(arena, layout, layout, *device.take(pages[0], rows[0], good, zero))
    transcode.on("cuda")(arena, layout, layout, *device.take(good, zero, pages[0], rows[0]))
    assert torch.equal(arena.cpu(), before)
    table, tokens = torch.tensor([[-3], [7]]).int(), torch.ones(2, dtype=torch.int32)
    key, value, positions = load_tokens.on("cuda")(arena, layout, *device.take(table, tokens))
    assert key.isnan().all()
    assert value.isnan().all()
    assert (positions == -1).all()


def test_keys_of_a_wrong_type_are_an_error(device: Any) -> None:
    layout = layout_of("k8v4", 64, "token")
    slot = torch.zeros(1, 1, dtype=torch.int32)
    vectors = torch.randn(1, 1, 64).double()
    arena = torch.zeros(1, layout.page_bytes, dtype=torch.uint8)
    inputs = device.take(arena, vectors, vectors, slot, slot, slot[0])
    with pytest.raises(ConfigError, match="unsupported"):
        store_tokens.on("cuda")(inputs[0], layout, *inputs[1:])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("head_dim", "order", "name"), WAYS[1:8:2])
def test_rounding_gives_the_bits_of_the_reference(
    head_dim: int, order: KeyOrder, name: str, dtype: torch.dtype, device: Any
) -> None:
    layout = layout_of(name, head_dim, order)
    key, value = awkward_vectors(head_dim, dtype), awkward_vectors(head_dim, dtype)
    quantized = torch.rand(TOKENS) < 0.6
    want = round_tokens.on("reference")(layout, key, value, quantized)
    got = round_tokens.on("cuda")(layout, *device.take(key, value, quantized))
    for mine, its in zip(got, want, strict=True):
        assert torch.equal(mine.cpu(), its)
