"""Formats whose pages are encoded whole: keys by channel, values by token, balanced or not."""

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from tests.moves import WHOLE, whole_moves
from triptych.core.errors import ConfigError
from triptych.core.layout import FORMATS, PageLayout, default_page_bytes
from triptych.kernels import append_tokens, load_tokens, move_tokens, store_tokens, transcode
from triptych.kernels.codec.page_codecs import balance, decode_pages, encode_pages

BACKENDS = [name for name in move_tokens.backends if name != "cuda"]


def test_keys_have_a_range_for_each_channel_and_values_one_for_each_token() -> None:
    """By hand: 15 steps of 1 from 0 to 15, of 2 from -10 to 20, of 0.5 from 1 to 8.5."""
    key = torch.tensor([[[0.0, 20.0], [7.4, -10.0], [15.0, 0.0]]])
    value = torch.tensor([[[1.0, 8.5], [0.0, 15.0], [-3.0, -3.0]]])
    made = encode_pages(key, value, FORMATS["kivi4"])
    assert made.key_metadata.tolist() == [[[1.0, 0.0], [2.0, -10.0]]]
    assert made.key_codes.tolist() == [[[0, 15], [7, 0], [15, 5]]]
    assert made.value_metadata.tolist() == [[[0.5, 1.0], [1.0, 0.0], [1.0, -3.0]]]
    assert made.value_codes.tolist() == [[[0, 15], [0, 15], [0, 0]]]
    keys, values = decode_pages(made)
    assert keys.tolist() == [[[0.0, 20.0], [7.0, -10.0], [15.0, 0.0]]]
    assert torch.equal(values, value)


def test_balancing_gives_both_axes_equal_deviation_and_scales_multiply_back() -> None:
    rows, columns = torch.logspace(-2, 2, 50), torch.logspace(1, -1, 64)
    vectors = torch.randn(3, 50, 64) * rows[:, None] * columns
    token, channel = balance(vectors)
    rest = vectors / (token[..., None] * channel[:, None])
    assert rest.std(1).sub(1).abs().max() < 0.05
    assert rest.std(2).sub(1).abs().max() < 0.05
    torch.testing.assert_close(token.log().mean(1), torch.zeros(3).double())


def test_balancing_leaves_constant_rows_as_they_are() -> None:
    vectors = torch.zeros(2, 42, 64)
    vectors[1, 7] = 3.0
    for scales in balance(vectors):
        assert scales.isfinite().all()
        assert (scales > 0).all()


def test_one_large_token_harms_the_others_unless_pages_are_balanced() -> None:
    """The error that KVarN is about: a page's channels take the range of its largest token."""
    key = torch.randn(1, 48, 64)
    key[:, 5] *= 50
    others = torch.arange(48) != 5
    errors = {
        name: float(
            (decode_pages(encode_pages(key, key, form))[0] - key)[:, others].square().mean()
        )
        for name, form in {
            "balanced": replace(FORMATS["kvarn"], value_bits=4),
            "plain": FORMATS["kivi4"],
        }.items()
    }
    assert errors["balanced"] < 0.02 < 0.5 < errors["plain"]


@pytest.mark.parametrize("name", WHOLE)
def test_no_number_is_off_by_more_than_half_a_step(name: str) -> None:
    form = FORMATS[name]
    key, value = torch.randn(2, 3, 48, 64) * torch.rand(2, 3, 48, 1) * 9
    made = encode_pages(key, value, form)
    keys, values = decode_pages(made)
    rounding = 2**-9
    steps = made.key_metadata[..., 0].float()[:, None] * made.token_scales.float()[..., None]
    assert ((keys - key).abs() <= steps / 2 + rounding * key.abs().amax()).all()
    steps = made.value_metadata[..., 0].float()[..., None] * made.channel_scales.float()[:, None]
    assert ((values - value).abs() <= steps / 2 + rounding * value.abs().amax()).all()


@pytest.mark.parametrize("head_dim", [64, 96])
@pytest.mark.parametrize("order", ["token", "channel"])
@pytest.mark.parametrize("source", ["fp16", "k8v8/8"])
@pytest.mark.parametrize("name", WHOLE)
@pytest.mark.parametrize("backend", BACKENDS)
def test_pages_hold_what_the_quantizer_makes_of_their_tokens(
    backend: str, name: str, source: str, order: str, head_dim: int
) -> None:
    moves = whole_moves(source, name, head_dim, order)
    arena = moves.arena.clone()
    given = moves.places, moves.target_places
    move_tokens.on(backend)(arena, moves.source, moves.target, moves.slots, *given)
    pages = moves.target.pages.flatten(0, 1)
    held = moves.target.tokens.flatten()
    got = load_tokens.on(backend)(arena, moves.target.layout, pages, held)
    plain = load_tokens.on("reference")(
        moves.arena, moves.source.layout, moves.source.pages.flatten(0, 1), held
    )
    form, room = moves.target.layout.format, moves.target.layout.tokens
    grouped = [vectors.view(-1, room, head_dim) for vectors in plain[:2]]
    want = decode_pages(encode_pages(*grouped, form))
    for mine, its in zip(got[:2], want, strict=True):
        torch.testing.assert_close(mine.view(-1, room, head_dim), its, rtol=1e-6, atol=1e-6)
    assert torch.equal(got[2], plain[2])


@pytest.mark.parametrize("apart", [0.0, 1e-3])
@pytest.mark.parametrize("name", WHOLE)
@pytest.mark.parametrize("backend", BACKENDS)
def test_pages_of_one_repeated_token_are_nearly_exact(
    backend: str, name: str, apart: float
) -> None:
    """As in an answer that repeats itself: scales of balanced pages were beyond float16."""
    moves = whole_moves("fp16", name, 64, "channel", apart=apart)
    arena = moves.arena.clone()
    given = moves.places, moves.target_places
    move_tokens.on(backend)(arena, moves.source, moves.target, moves.slots, *given)
    held = moves.target.tokens.flatten()
    found, exact = (
        load_tokens.on("reference")(memory, side.layout, side.pages.flatten(0, 1), held)
        for memory, side in ((arena, moves.target), (moves.arena, moves.source))
    )
    for numbers, wanted, most in zip(found[:2], exact[:2], (0.01, 0.6), strict=True):
        assert numbers.isfinite().all()
        assert (numbers - wanted).norm() < most * wanted.norm()


@pytest.mark.parametrize("head_dim", [64, 96])
@pytest.mark.parametrize("name", WHOLE)
def test_backends_encode_pages_to_the_same_bytes(name: str, head_dim: int) -> None:
    moves = whole_moves("fp16", name, head_dim, "channel")
    moves.target_places[1, 0] = -1
    results = [moves.arena.clone() for _ in BACKENDS]
    for backend, result in zip(BACKENDS, results, strict=True):
        move_tokens.on(backend)(
            result, moves.source, moves.target, moves.slots, moves.places, moves.target_places
        )
    assert torch.equal(results[0], results[1])
    stayed = moves.target.pages[int(moves.slots[1]), 0].long()
    assert torch.equal(results[0][stayed], moves.arena[stayed])


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_page_in_part_or_out_of_order_is_an_error(backend: str) -> None:
    moves = whole_moves("fp16", "kvarn", 64, "channel")
    move = move_tokens.on(backend)
    sections = moves.source, moves.target
    with pytest.raises(ConfigError, match="expected a multiple of 51"):
        move(
            moves.arena, *sections, moves.slots, moves.places[..., 1:], moves.target_places[..., 1:]
        )
    for wrong in (moves.target_places.flip(-1), moves.target_places + 1):
        with pytest.raises(ConfigError, match="move_tokens: "):
            move(moves.arena, *sections, moves.slots, moves.places, wrong)


@pytest.mark.parametrize("backend", BACKENDS)
def test_no_token_of_such_a_page_is_written_alone(backend: str) -> None:
    layout = PageLayout(FORMATS["kivi4"], 64, default_page_bytes(64))
    raw = replace(layout, format=FORMATS["fp16"])
    moves = whole_moves("fp16", "kivi4", 64, "channel")
    arena = torch.zeros(2, layout.page_bytes, dtype=torch.uint8)
    slot = torch.zeros(1, 1, dtype=torch.int32)
    vectors: Tensor = torch.randn(1, 1, 64)
    with pytest.raises(ConfigError, match="42 tokens at a time"):
        store_tokens.on(backend)(arena, layout, vectors, vectors, slot, slot, slot[0])
    with pytest.raises(ConfigError, match="42 tokens at a time"):
        transcode.on(backend)(arena, raw, layout, *[slot[0]] * 4)
    with pytest.raises(ConfigError, match="42 tokens at a time"):
        append_tokens.on(backend)(
            moves.arena, moves.target, torch.randn(1, 2, 64), torch.randn(1, 2, 64), *[slot[0]] * 3
        )
