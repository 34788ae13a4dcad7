"""One ragged forward pass gives what transformers gives each sequence alone."""

from collections.abc import Callable
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel

from triptych.workers.models.attention_interface import LayerTraits
from triptych.workers.models.load import load
from triptych.workers.models.runner import ModelRunner
from triptych.workers.models.weights.linear import pack

SaveModel = Callable[[PreTrainedConfig], Path]
LENGTHS = (1, 23, 12)


class FakePages:
    """An ``Attend`` that keeps every sequence's keys and values in lists, in plain torch."""

    def __init__(self) -> None:
        self.keys: dict[tuple[int, int], Tensor] = {}
        self.values: dict[tuple[int, int], Tensor] = {}
        self.batch: list[tuple[int, int]] = []
        """Sequence and how many new tokens it brings, for each sequence of the batch."""

    def __call__(
        self,
        layer: int,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        traits: LayerTraits,
        sinks: Tensor | None = None,
    ) -> Tensor:
        assert sinks is None
        counts = [count for _, count in self.batch]
        parts = zip(query.split(counts), key.split(counts), value.split(counts), strict=True)
        outs = list[Tensor]()
        for (sequence, _), (q, k, v) in zip(self.batch, parts, strict=True):
            place = (layer, sequence)
            self.keys[place] = torch.cat([self.keys.get(place, k[:0]), k])
            self.values[place] = torch.cat([self.values.get(place, v[:0]), v])
            outs.append(attention(q, self.keys[place], self.values[place], traits))
        return torch.cat(outs)


def attention(query: Tensor, key: Tensor, value: Tensor, traits: LayerTraits) -> Tensor:
    """Causal attention of the last tokens of one sequence over all of them."""
    groups = query.shape[1] // key.shape[1]
    key, value = key.repeat_interleave(groups, 1), value.repeat_interleave(groups, 1)
    logits = torch.einsum("qhd,khd->hqk", query.float(), key.float()) * traits.scale
    if traits.softcap:
        logits = traits.softcap * torch.tanh(logits / traits.softcap)
    positions = torch.arange(key.shape[0])
    distance = positions[key.shape[0] - query.shape[0] :, None] - positions
    visible = (distance >= 0) & ((distance < traits.window) if traits.window else True)
    weights = logits.masked_fill(~visible, -torch.inf).softmax(-1)
    return torch.einsum("hqk,khd->qhd", weights, value.float()).to(query.dtype)


def forward(
    runner: ModelRunner, pages: FakePages, batch: list[tuple[int, int, Tensor]], every: bool
) -> Tensor:
    """Run (sequence, first position, tokens) triples; logits of all or of the last tokens."""
    pages.batch = [(sequence, len(tokens)) for sequence, _, tokens in batch]
    tokens = torch.cat([tokens for _, _, tokens in batch])
    positions = torch.cat([start + torch.arange(len(tokens)) for _, start, tokens in batch])
    ends = torch.tensor([len(tokens) for _, _, tokens in batch]).cumsum(0) - 1
    at = torch.arange(len(tokens)) if every else ends
    return runner.forward(tokens, positions, pages, at)


def stock(path: Path) -> PreTrainedModel:
    return AutoModelForCausalLM.from_pretrained(
        path, attn_implementation="eager", dtype=torch.float32
    ).eval()


def random_sequences() -> list[Tensor]:
    return [torch.randint(3, 320, (length,)) for length in LENGTHS]


@pytest.fixture(params=["stock layers", "fused if plain"])
def runner_of(request: pytest.FixtureRequest) -> Callable[[Path], ModelRunner]:
    is_fused = request.param == "fused if plain"
    return lambda path: ModelRunner(load(path, "float32", fused=is_fused))


def test_a_ragged_batch_gives_each_sequence_the_logits_it_has_alone(
    family: PreTrainedConfig, save_model: SaveModel, runner_of: Callable[[Path], ModelRunner]
) -> None:
    path = save_model(family)
    sequences = random_sequences()
    with torch.inference_mode():
        expected = torch.cat([stock(path)(tokens[None]).logits[0] for tokens in sequences])
    batch = [(i, 0, tokens) for i, tokens in enumerate(sequences)]
    logits = forward(runner_of(path), FakePages(), batch, every=True)
    assert logits.dtype == torch.float32
    torch.testing.assert_close(logits, expected, atol=1e-4, rtol=1e-4)


def test_chunks_and_single_tokens_give_the_logits_of_one_pass(
    family: PreTrainedConfig, save_model: SaveModel, runner_of: Callable[[Path], ModelRunner]
) -> None:
    path = save_model(family)
    tokens, other = torch.randint(3, 320, (16,)), torch.randint(3, 320, (9,))
    with torch.inference_mode():
        expected = stock(path)(tokens[None]).logits[0]
    runner, pages = runner_of(path), FakePages()
    borders = (0, 7, 11, 12, 13, 14, 15, 16)
    for i, (start, end) in enumerate(pairwise(borders)):
        batch = [(0, start, tokens[start:end]), (1, i, other[i : i + 1])]
        last = forward(runner, pages, batch, every=False)[0]
        torch.testing.assert_close(last, expected[end - 1], atol=1e-4, rtol=1e-4)


def test_logits_are_computed_only_where_they_are_asked_for(
    llama: PreTrainedConfig, save_model: SaveModel
) -> None:
    runner = ModelRunner(load(save_model(llama), "float32"))
    tokens = torch.randint(3, 320, (6,))
    everywhere = forward(runner, FakePages(), [(0, 0, tokens)], every=True)
    pages = FakePages()
    pages.batch = [(0, 6)]
    some = runner.forward(tokens, torch.arange(6), pages, torch.tensor([4, 1]))
    torch.testing.assert_close(some, everywhere[[4, 1]], atol=1e-5, rtol=1e-5)
    pages = FakePages()
    pages.batch = [(0, 6)]
    none = runner.forward(tokens, torch.arange(6), pages, torch.tensor([], dtype=torch.int64))
    assert none.shape == (0, 320)


def test_the_fused_pass_is_as_near_to_float32_as_the_stock_one_in_bfloat16(
    llama: PreTrainedConfig, save_model: SaveModel
) -> None:
    path = save_model(llama)
    batch = [(i, 0, tokens) for i, tokens in enumerate(random_sequences())]
    exact = forward(ModelRunner(load(path, "float32")), FakePages(), batch, every=True)
    low = [ModelRunner(load(path, "bfloat16", fused=fused)) for fused in (False, True)]
    errors = [
        float((forward(runner, FakePages(), batch, every=True) - exact).norm()) for runner in low
    ]
    assert errors[1] < 1.5 * errors[0]
    assert errors[1] < 0.05 * float(exact.norm())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("width", [64, 576, 1024, 1088, 1536, 2048])
def test_a_row_of_a_product_does_not_depend_on_the_number_of_rows(
    width: int, dtype: torch.dtype
) -> None:
    linear = pack([torch.randn(96, width).to(dtype)])
    rows = torch.randn(70, width).to(dtype)
    with torch.inference_mode():
        every = linear(rows)
        for count in (1, 2, 3, 7, 16, 33, 64):
            assert linear(rows[-count:].clone()).equal(every[-count:])
