"""Tokens that leave before the last layer, next to the same written out over transformers."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor
from transformers import PreTrainedConfig

from tests.unit.workers.models.test_runner import FakePages, stock
from triptych.workers.decode.plugins.entropy import entropy
from triptych.workers.models.early_exit import Exits
from triptych.workers.models.load import LoadedModel, load
from triptych.workers.models.runner import ModelRunner

SaveModel = Callable[[PreTrainedConfig], Path]
STEPS, ROWS = 9, 4


@pytest.fixture
def model(llama: PreTrainedConfig, save_model: SaveModel) -> Path:
    return save_model(llama)


def decode(
    loaded: LoadedModel, tokens: Tensor, exits: Exits | None
) -> tuple[FakePages, list[Tensor]]:
    """One token of each sequence at a time: what is kept of them, and the logits of each step."""
    runner, pages, told = ModelRunner(loaded), FakePages(), list[Tensor]()
    pages.batch = [(row, 1) for row in range(len(tokens))]
    for step in range(tokens.shape[1]):
        positions = torch.full((len(tokens),), step)
        every = torch.arange(len(tokens))
        told.append(runner.forward(tokens[:, step], positions, pages, every, exits))
    return pages, told


def exits_of(nats: list[float], layers: list[int]) -> Exits:
    return Exits(torch.tensor(nats), torch.tensor(layers))


def test_with_a_neutral_threshold_every_bit_is_that_of_the_plain_step(model: Path) -> None:
    loaded, tokens = load(model, "float32"), torch.randint(3, 320, (ROWS, STEPS))
    plain, told = decode(loaded, tokens, None)
    pages, same = decode(loaded, tokens, exits_of([0.0] * ROWS, [1, 2, 1, 2]))
    assert all(torch.equal(one, other) for one, other in zip(told, same, strict=True))
    assert all(torch.equal(pages.keys[place], plain.keys[place]) for place in plain.keys)


def test_who_has_left_says_what_it_knew_and_leaves_keys_and_values_everywhere(model: Path) -> None:
    """Layers written out over transformers: behind the exit hidden states go through unchanged."""
    loaded, tokens = load(model, "float32"), torch.randint(3, 320, (1, STEPS))
    pages, told = decode(loaded, tokens, exits_of([99.0], [2]))
    inner = stock(model).model
    with torch.inference_mode():
        known = inner(tokens, output_hidden_states=True)
        left = known.hidden_states[2][0]  # of the two layers that all tokens went through
        expected = stock(model).lm_head(inner.norm(left))
        skipped = inner.layers[2]
        normed = skipped.input_layernorm(left)
        values = skipped.self_attn.v_proj(normed).view(STEPS, 2, -1)
    torch.testing.assert_close(torch.cat(told), expected, atol=1e-4, rtol=1e-4)
    torch.testing.assert_close(pages.values[2, 0], values, atol=1e-4, rtol=1e-4)
    assert pages.keys[2, 0].shape == values.shape


def test_each_token_leaves_by_itself_and_only_when_it_is_sure(model: Path) -> None:
    loaded, tokens = load(model, "float32"), torch.randint(3, 320, (ROWS, 1))
    _, (whole,) = decode(loaded, tokens, None)
    _, (early,) = decode(loaded, tokens, exits_of([99.0] * ROWS, [1] * ROWS))
    sure = entropy(early)
    between = float(sure.sort().values[1:3].mean())
    _, (mixed,) = decode(loaded, tokens, exits_of([between] * ROWS, [1] * ROWS))
    for row in range(ROWS):
        expected = early if sure[row] < between else whole
        torch.testing.assert_close(mixed[row], expected[row], atol=1e-5, rtol=1e-5)
    assert 0 < int((sure < between).sum()) < ROWS
    _, (other,) = decode(loaded, tokens, exits_of([99.0, 0.0, 0.0, 99.0], [1, 1, 2, 3]))
    torch.testing.assert_close(other[0], early[0], atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(other[1:], whole[1:], atol=1e-5, rtol=1e-5)


def test_layers_that_are_not_ours_cannot_be_left(model: Path) -> None:
    loaded = load(model, "float32")
    assert ModelRunner(loaded).can_exit
    assert not ModelRunner(load(model, "float32", fused=False)).can_exit
