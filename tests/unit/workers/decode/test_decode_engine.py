"""One decode step on pages, without a model."""

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from triptych.core.layout import FORMATS, Geometry, PageLayout
from triptych.kernels.pages import segments
from triptych.workers.decode.decode_attention import (
    NewTokens,
    PageAttention,
    Placed,
    PlainAttention,
    TokenScores,
)
from triptych.workers.device import CPU
from triptych.workers.kv.block_table import Sections, SectionTable
from triptych.workers.kv.device_pages import DevicePages
from triptych.workers.models.attention_interface import LayerTraits

RAW = PageLayout(FORMATS["fp16"], head_dim=32, page_bytes=1792)
GEOMETRY = Geometry(layers=1, kv_heads=2, head_dim=32)
Ids = NDArray[np.int32]


def three_requests() -> tuple[torch.Tensor, SectionTable, Ids, Ids, NDArray[np.int64]]:
    """An arena, empty pages of a layer, slots, positions, and progress of scores."""
    arena = torch.zeros(6, RAW.page_bytes, dtype=torch.uint8)
    pages = np.arange(6, dtype=np.int32).reshape(1, 3, 2, 1)
    table = SectionTable(RAW, pages, np.zeros((1, 3, 2), np.int32))
    slots, positions = np.arange(3, dtype=np.int32), np.array([7, 8, 12], np.int32)
    return arena, table, slots, positions, np.zeros(3, np.int64)


def test_scores_are_updated_by_position_whatever_else_is_in_the_batch() -> None:
    """Of requests at positions 7, 8 and 12, every fourth token looks at 8 and 12."""
    arena, table, slots, positions, progress = three_requests()
    memory, sections = DevicePages(CPU, arena, arena), Sections([table], CPU)
    token_scores = TokenScores(memory, sections, None, 4, progress)
    new = NewTokens.count(table, slots, positions, 4, progress)
    step = PageAttention(memory, sections, new, token_scores)
    query, key, value = torch.randn(3, 4, 32), torch.randn(3, 2, 32), torch.randn(3, 2, 32)
    mixed = step(0, query, key, value, LayerTraits(scale=0.2))
    assert torch.allclose(mixed, value.repeat_interleave(2, 1), atol=2e-3)
    scores = segments(arena, RAW).scores.view(3, 2, -1)
    assert torch.allclose(scores[:, :, 0], torch.tensor([[0.0], [4.0], [4.0]]).expand(3, 2))
    assert not scores[:, :, 1:].any()
    assert progress.tolist() == [0, 9, 13]
    table.tokens[:] = 0  # the step is done again, as it is when its worker died
    new = NewTokens.count(table, slots, positions, 4, progress)
    PageAttention(memory, sections, new, token_scores)(0, query, key, value, LayerTraits(scale=0.2))
    assert torch.allclose(scores[:, :, 0], torch.tensor([[0.0], [4.0], [4.0]]).expand(3, 2))


@pytest.mark.parametrize("kind", [PageAttention, "captured"])
def test_sinks_take_weight_from_values_and_from_scores(kind: object) -> None:
    arena, table, slots, positions, progress = three_requests()
    memory, sections = DevicePages(CPU, arena, arena), Sections([table], CPU)
    token_scores = TokenScores(memory, sections, None, 4, progress)
    new = NewTokens.count(table, slots, positions, 4, progress)
    step = PageAttention(memory, sections, new, token_scores)
    if kind == "captured":
        placed = Placed.put(new, CPU)
        step = PlainAttention(memory, sections, placed, token_scores, placed.slots)
    query, key, value = torch.randn(3, 4, 32), torch.randn(3, 2, 32), torch.randn(3, 2, 32)
    sinks = torch.tensor([-2.0, 0.0, 1.0, 50.0])
    mixed = step(0, query, key, value, LayerTraits(scale=0.2), sinks)
    logits = 0.2 * (query * key.repeat_interleave(2, 1)).sum(-1)
    share = logits.exp() / (logits.exp() + sinks.exp())
    expected = value.repeat_interleave(2, 1) * share[..., None]
    torch.testing.assert_close(mixed, expected, rtol=5e-3, atol=5e-3)
    scores = segments(arena, RAW).scores.view(3, 2, -1)[1:, :, 0]
    torch.testing.assert_close(scores, 4 * share.view(3, 2, 2).amax(2)[1:], rtol=5e-3, atol=5e-3)
