from collections.abc import Callable
from dataclasses import replace
from hashlib import sha256
from itertools import product

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from tests.effort import examples
from tests.moves import ALONE, LATENTS, PAIRS, ROUNDED, UNTRACKED, USUAL, random_moves
from tests.moves import layout_named as layout_of
from triptych.core.errors import ConfigError
from triptych.core.layout import KeyOrder, PageLayout, stored_format
from triptych.kernels import (
    NUMERICS_VERSION,
    append_tokens,
    load_tokens,
    move_tokens,
    round_tokens,
    store_tokens,
    transcode,
)
from triptych.kernels.codec.quantizer import Encoded, decode, encode, encode_as, limit, narrow
from triptych.kernels.pages import segments

BACKENDS = [name for name in store_tokens.backends if name != "cuda"]
"""Backends on the CPU; tests of the GPU backend are in ``gpu/``."""
HEAD_DIMS = [16, 64, 96, 128, 256]
ORDERS: list[KeyOrder] = ["token", "channel"]
TOKENS, HEADS = 75, 2
SMALL = [("fp16", "k8v8/8"), ("k8v8/8", "k8v4"), ("k8v8/8", "k4v2/2"), ("k8v8/4", "fp16/2")]
"""Formats of moves from or to small pages."""


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
    return vectors.to(dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("head_dim", HEAD_DIMS)
@pytest.mark.parametrize("name", [*ALONE, *LATENTS])
@pytest.mark.parametrize("backend", BACKENDS)
def test_stored_tokens_load_as_the_quantizer_decodes_them(
    backend: str, name: str, head_dim: int, order: KeyOrder, dtype: torch.dtype
) -> None:
    layout = layout_of(name, head_dim, order)
    table, pages, rows = scattered(layout, 3)
    arena = torch.full((3 + table.numel(), layout.page_bytes), 0xFF, dtype=torch.uint8)
    key, value = awkward_vectors(head_dim, dtype), awkward_vectors(head_dim, dtype)
    value = key if layout.format.values_are_keys else value
    positions = torch.randint(0, 10**6, (TOKENS,), dtype=torch.int32)
    scores = torch.rand(TOKENS, HEADS)
    store_tokens.on(backend)(arena, layout, key, value, pages, rows, positions, scores)
    tokens = torch.tensor([TOKENS, TOKENS - 20], dtype=torch.int32)
    keys, values, known = load_tokens.on(backend)(arena, layout, table, tokens)
    form = layout.format
    for head, count in enumerate(tokens.tolist()):
        for loaded, vectors, of_keys in ((keys, key, True), (values, value, False)):
            want = decode(encode_as(form, vectors[:, head], of_keys=of_keys))[:count]
            assert torch.equal(loaded[head, :count], want)
        assert torch.equal(known[head, :count], positions[:count])
        assert (keys[head, count:] == 0).all()
        assert (values[head, count:] == 0).all()
        assert (known[head, count:] == -1).all()
    assert torch.equal(segments(arena, layout).scores[pages.long(), rows.long()], scores)


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("name", [*ALONE, *LATENTS])
@pytest.mark.parametrize("backend", BACKENDS)
def test_storing_changes_only_the_given_slots(backend: str, name: str, order: KeyOrder) -> None:
    layout = layout_of(name, 64, order)
    arena = torch.randint(0, 256, (4, layout.page_bytes), dtype=torch.uint8)
    before = arena.clone()
    pages = torch.tensor([[2, -1]], dtype=torch.int32)
    rows = torch.tensor([[1, 0]], dtype=torch.int32)
    vectors = torch.randn(1, 2, 64)
    store_tokens.on(backend)(arena, layout, vectors, vectors, pages, rows, rows[:, 0])
    changed = (arena != before).nonzero()
    assert set(changed[:, 0].tolist()) == {2}
    assert len(changed) <= layout.format.token_bytes(64)
    old, new = segments(before, layout), segments(arena, layout)
    assert torch.equal(old.keys[2, 0].view(torch.uint8), new.keys[2, 0].view(torch.uint8))
    assert new.scores[2, 1] == 0


@pytest.mark.parametrize("head_dim", [16, 64, 96])
@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize(("source", "target"), PAIRS)
def test_backends_transcode_to_the_same_bytes(
    source: str, target: str, order: KeyOrder, head_dim: int
) -> None:
    old, new = layout_of(source, head_dim, order), layout_of(target, head_dim, "channel")
    table, pages, rows = scattered(old, 0)
    target_table, target_pages, target_rows = scattered(new, table.numel())
    count = table.numel() + target_table.numel()
    arena = torch.randint(0, 256, (count, old.page_bytes), dtype=torch.uint8)
    vectors = awkward_vectors(head_dim, torch.float32)
    positions = torch.arange(TOKENS, dtype=torch.int32)
    scores = torch.rand(TOKENS, HEADS)
    store_tokens.on("reference")(arena, old, vectors, vectors, pages, rows, positions, scores)
    where = [index.flatten() for index in (pages, rows, target_pages, target_rows)]
    results = [arena.clone() for _ in BACKENDS]
    for backend, result in zip(BACKENDS, results, strict=True):
        transcode.on(backend)(result, old, new, *where)
    assert torch.equal(results[0], results[1])
    if new.is_tracked:
        written, at = segments(results[1], new), (target_pages.long(), target_rows.long())
        known = old.is_tracked
        assert torch.equal(written.scores[at], scores * known)
        assert torch.equal(written.positions[at], positions[:, None].expand(-1, HEADS) * known)


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("head_dim", HEAD_DIMS)
@pytest.mark.parametrize("backend", BACKENDS)
def test_tokens_without_scores_and_positions_fill_their_pages(
    backend: str, head_dim: int, order: KeyOrder
) -> None:
    """Keys and values are those of tracked tokens; positions are 0, and -1 behind the end."""
    found = list[tuple[Tensor, Tensor, Tensor]]()
    key, value = (awkward_vectors(head_dim, torch.float32) for _ in range(2))
    for name in ("k4v2", UNTRACKED):
        layout = layout_of(name, head_dim, order)
        table, pages, rows = scattered(layout, 0)
        arena = torch.randint(0, 256, (table.numel(), layout.page_bytes), dtype=torch.uint8)
        positions, scores = torch.arange(TOKENS).int() + 9, torch.rand(TOKENS, HEADS)
        store_tokens.on(backend)(arena, layout, key, value, pages, rows, positions, scores)
        tokens = torch.tensor([TOKENS, TOKENS - 20], dtype=torch.int32)
        found.append(load_tokens.on(backend)(arena, layout, table, tokens))
    (keys, values, known), (got_keys, got_values, none) = found
    assert torch.equal(got_keys, keys)
    assert torch.equal(got_values, values)
    assert torch.equal(none, known.clamp(max=0))


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_downgrade_drops_bits_without_a_second_quantization(backend: str) -> None:
    high, low = layout_of("k8v4", 64, "channel"), layout_of("k4v2", 64, "channel")
    table, pages, rows = scattered(high, 0)
    low_table, low_pages, low_rows = scattered(low, table.numel())
    count = table.numel() + low_table.numel()
    arena = torch.full((count, high.page_bytes), 0xFF, dtype=torch.uint8)
    vectors = torch.randn(TOKENS, HEADS, 64)
    positions = torch.arange(TOKENS, dtype=torch.int32)
    store_tokens.on(backend)(arena, high, vectors, vectors, pages, rows, positions)
    where = [index.flatten() for index in (pages, rows, low_pages, low_rows)]
    transcode.on(backend)(arena, high, low, *where)
    tokens = torch.full((HEADS,), TOKENS, dtype=torch.int32)
    keys, values, _ = load_tokens.on(backend)(arena, low, low_table, tokens)
    for head in range(HEADS):
        assert torch.equal(keys[head], decode(narrow(encode(vectors[:, head], 8, 1), 8, 4)))
        assert torch.equal(values[head], decode(narrow(encode(vectors[:, head], 4, 1), 4, 2)))


def test_a_downgrade_by_several_steps_equals_a_direct_one() -> None:
    codes = torch.randint(0, 256, (100, 64), dtype=torch.uint8)
    fine = Encoded(codes, torch.rand(100, 1, 2).half())
    stepwise = narrow(narrow(fine, 8, 4), 4, 2)
    assert (narrow(fine, 8, 2).codes.int() - stepwise.codes.int()).abs().max() <= 1


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", [*ALONE, "k8v8/8", UNTRACKED])
@pytest.mark.parametrize("backend", BACKENDS)
def test_an_appended_token_equals_one_stored_in_the_slot_of_its_place(
    backend: str, name: str, dtype: torch.dtype
) -> None:
    moves = random_moves("fp16", name, 64)
    section, slots = moves.target, moves.slots
    room = section.layout.tokens
    places = torch.randint(0, 3 * room, slots.shape, dtype=torch.int32)
    wide = torch.randn(len(slots), HEADS, 128).to(dtype)
    key, value = wide[..., :64], wide[..., 64:]
    positions = torch.randint(0, 10**6, slots.shape, dtype=torch.int32)
    pages = torch.stack(
        [
            section.pages[slot, :, -1 - place // room]
            for slot, place in zip(slots.tolist(), places.tolist(), strict=True)
        ]
    )
    want, got = moves.arena.clone(), moves.arena.clone()
    rows = (places % room)[:, None].repeat(1, HEADS)
    store_tokens.on("reference")(want, section.layout, key, value, pages, rows, positions)
    mirror = got.clone()
    append_tokens.on(backend)(got, section, key, value, slots, places, positions, mirror=mirror)
    assert torch.equal(got, want)
    assert torch.equal(mirror, want)


def test_appending_to_a_place_out_of_range_is_an_error() -> None:
    moves = random_moves("fp16", "k8v4", 64)
    vectors = torch.randn(len(moves.slots), HEADS, 64)
    fine = moves.slots * 0
    for slots, places in ((fine + 5, fine), (fine, fine + 3 * moves.target.layout.tokens)):
        with pytest.raises(ConfigError, match="does not have"):
            append_tokens(moves.arena, moves.target, vectors, vectors, slots, places, fine)
    with pytest.raises(ConfigError, match="expected"):
        append_tokens(moves.arena, moves.target, vectors, vectors, fine[:1], fine, fine)


@pytest.mark.parametrize("head_dim", [16, 64, 96])
@pytest.mark.parametrize(("source", "target"), [*PAIRS, *SMALL])
def test_backends_move_tokens_to_the_same_bytes(source: str, target: str, head_dim: int) -> None:
    moves = random_moves(source, target, head_dim)
    results = [moves.arena.clone() for _ in BACKENDS]
    for backend, result in zip(BACKENDS, results, strict=True):
        move_tokens.on(backend)(
            result, moves.source, moves.target, moves.slots, moves.places, moves.target_places
        )
    assert torch.equal(results[0], results[1])
    assert not torch.equal(results[0], moves.arena)


@pytest.mark.parametrize("backend", BACKENDS)
def test_tokens_move_to_their_target_places_or_stay(backend: str) -> None:
    moves = random_moves("fp16", "k8v4", 64)
    arena, target = moves.arena.clone(), moves.target
    known = segments(arena, moves.source.layout).positions.clone()
    move_tokens.on(backend)(
        arena, moves.source, target, moves.slots, moves.places, moves.target_places
    )
    stays, moved = 0, segments(arena, target.layout).positions
    written = torch.zeros(len(arena), dtype=torch.bool)
    for (row, head, token), to in np.ndenumerate(moves.target_places.numpy()):
        if to < 0:
            stays += 1
            continue
        slot, place = int(moves.slots[row]), int(moves.places[row, head, token])
        column, page_row = divmod(place, moves.source.layout.tokens)
        to_column, target_row = divmod(int(to), target.layout.tokens)
        page = int(target.pages[slot, head, -1 - to_column])
        position = known[int(moves.source.pages[slot, head, column]), page_row]
        assert moved[page, target_row] == position
        written[page] = True
    assert stays > 0
    assert torch.equal(arena[~written], moves.arena[~written])


@pytest.mark.parametrize("wrong", ["slot", "place", "target place", "page"])
def test_moves_out_of_range_are_an_error(wrong: str) -> None:
    moves = random_moves("k8v4", "k4v2", 64)
    match wrong:
        case "slot":
            moves.slots[1] = 5
        case "place":
            moves.places[1, 1] = 3 * moves.source.layout.tokens
        case "target place":
            moves.target_places[1, 1] = 3 * moves.target.layout.tokens
        case _:
            moves.target.pages[:] = len(moves.arena)
    with pytest.raises(ConfigError, match="does not have"):
        move_tokens(
            moves.arena, moves.source, moves.target, moves.slots, moves.places, moves.target_places
        )


def test_places_of_another_shape_are_an_error() -> None:
    moves = random_moves("k8v4", "k4v2", 64)
    with pytest.raises(ConfigError, match="expected"):
        move_tokens(
            moves.arena, moves.source, moves.target, moves.slots, moves.places[:, :1],
            moves.target_places,
        )  # fmt: skip


def _store_outside(arena: Tensor, layout: PageLayout) -> None:
    slot = torch.tensor([[9]], dtype=torch.int32)
    vectors = torch.randn(1, 1, 64)
    store_tokens(arena, layout, vectors, vectors, slot, slot * 0, slot[0])


def _transcode_outside(arena: Tensor, layout: PageLayout) -> None:
    zero, row = torch.zeros(1, dtype=torch.int32), torch.full((1,), 99, dtype=torch.int32)
    transcode(arena, layout, layout, zero, row, zero + 1, zero)


def _load_outside(arena: Tensor, layout: PageLayout) -> None:
    table, tokens = torch.tensor([[-3]], dtype=torch.int32), torch.ones(1, dtype=torch.int32)
    load_tokens(arena, layout, table, tokens)


@pytest.mark.parametrize("call", [_store_outside, _transcode_outside, _load_outside])
def test_slots_outside_of_the_arena_are_an_error(
    call: Callable[[Tensor, PageLayout], None],
) -> None:
    layout = layout_of("k8v4", 64, "channel")
    with pytest.raises(ConfigError, match="does not have"):
        call(torch.zeros(2, layout.page_bytes, dtype=torch.uint8), layout)


def test_an_arena_of_another_page_size_is_an_error() -> None:
    layout = layout_of("k8v4", 64, "channel")
    with pytest.raises(ConfigError, match="4096 bytes, those of the layout 3584"):
        _store_outside(torch.zeros(2, 4096, dtype=torch.uint8), layout)


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_change_of_the_encoded_bytes_raises_the_version(backend: str) -> None:
    """Pages outlive the program on disk: with other bytes here, raise NUMERICS_VERSION."""
    digest = sha256()
    for name, head_dim, order in product(sorted(USUAL), (64, 96), ORDERS):
        layout = layout_of(name, head_dim, order)
        tokens = torch.arange(TOKENS, dtype=torch.int32)
        count = TOKENS * HEADS * head_dim
        mixed = torch.arange(2 * count) * 40503 % 65521  # spread, and the same on every machine
        key, value = (mixed.float() / 8192 - 4).view(2, TOKENS, HEADS, head_dim)
        width = layout.pages(TOKENS)
        page = (
            torch.arange(HEADS, dtype=torch.int32)[None] * width + tokens[:, None] // layout.tokens
        )
        rows = (tokens % layout.tokens)[:, None].repeat(1, HEADS)
        arena = torch.zeros((HEADS * width, layout.page_bytes), dtype=torch.uint8)
        store_tokens.on(backend)(arena, layout, key, value, page, rows, tokens)
        digest.update(arena.numpy().tobytes())
    assert (NUMERICS_VERSION, digest.hexdigest()[:16]) == (1, "c8a3da0eafbae8c4")


def awkward_for_scales(head_dim: int) -> Tensor:
    """``awkward_vectors`` with tiny, shifted and one-sided ones: the scale hardly fits float16."""
    vectors = awkward_vectors(head_dim, torch.float32)
    vectors[11] *= 1e-7
    vectors[12] += 50.0
    vectors[13] = vectors[13].abs() + 3
    vectors[14] *= 2e4
    return vectors


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("head_dim", HEAD_DIMS)
@pytest.mark.parametrize("name", ROUNDED)
def test_backends_round_tokens_to_the_same_bits(
    name: str, head_dim: int, dtype: torch.dtype
) -> None:
    layout = layout_of(name, head_dim, "channel")
    wide = awkward_for_scales(2 * head_dim).to(dtype)
    key, value = wide[..., :head_dim], wide[..., head_dim:]
    quantized = torch.rand(TOKENS) < 0.6
    results = [round_tokens.on(backend)(layout, key, value, quantized) for backend in BACKENDS]
    for mine, its in zip(*results, strict=True):
        assert mine.dtype == torch.float32
        assert torch.equal(mine, its)
    exact = key[~quantized].float().clamp(-65504, 65504)
    assert torch.equal(results[0][0][~quantized].half(), exact.half())


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("head_dim", HEAD_DIMS)
@pytest.mark.parametrize("name", ROUNDED)
def test_pages_give_rounded_tokens_back_unchanged(
    name: str, head_dim: int, order: KeyOrder
) -> None:
    """From 16-bit pages to pages of the format and back: what the prefix cache does to a block."""
    layout, raw = layout_of(name, head_dim, order), layout_of("fp16", head_dim, "token")
    table, pages, rows = scattered(raw, 0)
    coded_table, coded_pages, coded_rows = scattered(layout, table.numel())
    arena = torch.full((table.numel() + coded_table.numel(), raw.page_bytes), 0xFF).byte()
    vectors = awkward_for_scales(head_dim)
    key, value = round_tokens(layout, vectors, vectors.flip(0), torch.ones(TOKENS).bool())
    store_tokens(arena, raw, key, value, pages, rows, torch.arange(TOKENS, dtype=torch.int32))
    there = [index.flatten() for index in (pages, rows, coded_pages, coded_rows)]
    transcode(arena, raw, layout, *there)
    arena[: table.numel()] = 0xFF
    transcode(arena, layout, raw, *there[2:], *there[:2])
    tokens = torch.full((HEADS,), TOKENS, dtype=torch.int32)
    got_key, got_value, _ = load_tokens(arena, raw, table, tokens)
    assert torch.equal(got_key.transpose(0, 1), key)
    assert torch.equal(got_value.transpose(0, 1), value)


@pytest.mark.hypothesis
@settings(max_examples=examples(200))
@given(
    vector=st.lists(st.floats(-65504, 65504, width=16), min_size=16, max_size=16),
    name=st.sampled_from([name for name in ROUNDED if name != "fp16"]),
)
def test_rounding_twice_is_rounding_once(vector: list[float], name: str) -> None:
    layout = layout_of(name, 16, "token")
    key, all_tokens = torch.tensor(vector).view(1, 1, 16), torch.ones(1).bool()
    once = round_tokens(layout, key, key, all_tokens)
    again = round_tokens(layout, *once, all_tokens)
    assert torch.equal(once[0], again[0])
    assert torch.equal(once[1], again[1])


@pytest.mark.parametrize("name", ["k2v2", "r3a5v4", "block_gtq"])
@pytest.mark.parametrize("backend", BACKENDS)
def test_numbers_that_encoding_again_may_change_are_not_rounded(backend: str, name: str) -> None:
    """So no prefix is stored in these formats."""
    vectors = torch.randn(1, 1, 64)
    with pytest.raises(ConfigError, match=f"vectors of {name} pages have other codes"):
        round_tokens.on(backend)(
            layout_of(name, 64, "token"), vectors, vectors, torch.ones(1).bool()
        )


def test_limited_vectors_by_hand() -> None:
    """Of 0.96 of 8 magnitudes the index is 7, the largest: nothing is limited. Of 0.6 it is 4."""
    vector = torch.tensor([[1.0, -8.0, 2.0, -3.0, 4.0, 7.0, -5.0, 6.0]])
    assert replace(stored_format("k2v2"), key_clip=0.6).limited_numbers(8) == (3, 0)
    want = torch.tensor([[1.0, -5.0, 2.0, -3.0, 4.0, 5.0, -5.0, 5.0]])
    assert torch.equal(limit(vector, 3), want)
    assert torch.equal(limit(vector, 0), vector)


@pytest.mark.parametrize("source", ["fp16", "k8v4"])
@pytest.mark.parametrize("name", ["k4v2c", "k2v2"])
@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize("backend", BACKENDS)
def test_equal_magnitudes_are_limited_one_by_one(
    backend: str, head_dim: int, name: str, source: str
) -> None:
    """Of integers many are as large as the one that limits them, with either sign."""
    torch.manual_seed(3)
    old, new = layout_of(source, head_dim, "token"), layout_of(name, head_dim, "token")
    _, pages, rows = scattered(old, 0)
    _, new_pages, new_rows = scattered(new, 40)
    arena = torch.zeros(80, old.page_bytes, dtype=torch.uint8)
    vectors = (2 * torch.randn(TOKENS, HEADS, head_dim)).round()
    positions = torch.arange(TOKENS).int()
    store_tokens.on("reference")(arena, old, vectors, vectors, pages, rows, positions)
    want = arena.clone()
    places = pages.flatten(), rows.flatten(), new_pages.flatten(), new_rows.flatten()
    transcode.on("reference")(want, old, new, *places)
    transcode.on(backend)(arena, old, new, *places)
    assert torch.equal(arena, want)


@pytest.mark.parametrize("head_dim", [64, 128])
def test_limited_values_of_two_bits_lose_a_quarter_less(head_dim: int) -> None:
    """Few numbers of a rotated vector are large, and they set the step of all others."""
    torch.manual_seed(5)
    value = torch.randn(2000, head_dim)
    _, limited = stored_format("k4v2c").limited_numbers(head_dim)
    plain, near = (decode(encode(limit(value, count), 2, 1)) for count in (0, limited))
    loss, less = ((decoded - value).square().mean() for decoded in (plain, near))
    assert less < 0.75 * loss
