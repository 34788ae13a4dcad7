"""One decode step on pages, without a model."""

import numpy as np
import pytest
import torch

from triptych.core.layout import Geometry
from triptych.core.pages import PagePlan
from triptych.core.policy import Policy
from triptych.kernels.pages import segments
from triptych.workers.decode.checkpoint import Checkpoint
from triptych.workers.decode.decode_attention import (
    PageAttention,
    Placed,
    PlainAttention,
    TokenScores,
)
from triptych.workers.device import CPU
from triptych.workers.kv.block_table import Sections
from triptych.workers.kv.device_pages import DevicePages
from triptych.workers.kv.new_tokens import NewTokens
from triptych.workers.models.attention_interface import LayerTraits

SCORING = Policy(name="diffkv", high_format="k8v4", low_format="k4v2", alpha_high=1, score_every=4)
RAW = Policy(name="uniform:fp16", high_format="fp16")
PLAN = PagePlan(Geometry(layers=1, kv_heads=2, head_dim=32), 1792, SCORING, others=(RAW,))
PAGES = 6


@pytest.mark.parametrize("raw", [(), (2,), (0, 1), (0, 1, 2)])
def test_scores_are_updated_by_position_whatever_else_is_in_the_batch(raw: tuple[int, ...]) -> None:
    """Of requests at positions 7, 8 and 12, every fourth token looks at 8 and 12, unless the
    request's method (``raw``: 16 bits) scores no tokens."""
    arena = torch.zeros(PAGES, PLAN.page_bytes, dtype=torch.uint8)
    checkpoint = Checkpoint.create(PLAN, None, 3, 64)
    scoring, sixteen = checkpoint.tables.methods
    tables = [sixteen if slot in raw else scoring for slot in range(3)]
    for slot, each in enumerate(tables):
        checkpoint.assign(slot, each)
        recent, parts = each.tables[0], each.tables[0].layout.parts
        recent.pages[0, slot, :, 0] = parts * (2 * slot + np.arange(2))
    slots, positions = np.arange(3, dtype=np.int32), np.array([7, 8, 12], np.int32)
    memory = DevicePages(CPU, arena, arena)
    sections = Sections(checkpoint.sections, CPU)
    scores = TokenScores(
        memory, sections, checkpoint.tables.num_fixed, 4, torch.from_numpy(checkpoint.scored)
    )
    query, key, value = torch.randn(3, 4, 32), torch.randn(3, 2, 32), torch.randn(3, 2, 32)
    expected = [0.0 if slot in raw else due for slot, due in enumerate((0.0, 4.0, 4.0))]
    for _ in range(2):  # the second time as when the worker died
        new = NewTokens.count(tables, slots, positions, checkpoint.scored)
        step = PageAttention(memory, sections, new, scores)
        mixed = step(0, query, key, value, LayerTraits(scale=0.2))
        assert torch.allclose(mixed, value.repeat_interleave(2, 1), atol=2e-2)
        for slot, each in enumerate(tables):
            recent = each.tables[0]
            assert recent.length(slot) == 1
            at = torch.from_numpy(recent.pages[0, slot, :, 0].copy()).long()
            kept = segments(arena, recent.layout)
            assert torch.allclose(kept.scores[at, 0], torch.tensor(expected[slot]).expand(2))
            assert not kept.scores[at, 1:].any()
            assert kept.positions[at, 0].tolist() == [positions[slot]] * 2
            recent.tokens[:, slot] = 0
        due = [position + 1 for position in positions.tolist()]
        done = [0 if not one else at for one, at in zip(expected, due, strict=True)]
        assert checkpoint.scored.tolist() == done


@pytest.mark.parametrize("kind", ["pages", "captured"])
def test_sinks_take_weight_from_values_and_from_scores(kind: str) -> None:
    arena = torch.zeros(PAGES, PLAN.page_bytes, dtype=torch.uint8)
    checkpoint = Checkpoint.create(PLAN, None, 3, 64)
    scoring = checkpoint.tables.methods[0]
    recent = scoring.tables[0]
    for slot in range(3):
        checkpoint.assign(slot, scoring)
        recent.pages[0, slot, :, 0] = recent.layout.parts * (2 * slot + np.arange(2))
    slots, positions = np.arange(3, dtype=np.int32), np.array([7, 8, 12], np.int32)
    memory, sections = DevicePages(CPU, arena, arena), Sections(checkpoint.sections, CPU)
    scores = TokenScores(
        memory, sections, checkpoint.tables.num_fixed, 4, torch.from_numpy(checkpoint.scored)
    )
    new = NewTokens.count([scoring] * 3, slots, positions, checkpoint.scored)
    step = PageAttention(memory, sections, new, scores)
    if kind == "captured":
        placed = Placed.put(new, CPU)
        step = PlainAttention(memory, sections, placed, [placed.slots], scores, placed.slots)
    query, key, value = torch.randn(3, 4, 32), torch.randn(3, 2, 32), torch.randn(3, 2, 32)
    sinks = torch.tensor([-2.0, 0.0, 1.0, 50.0])
    mixed = step(0, query, key, value, LayerTraits(scale=0.2), sinks)
    logits = 0.2 * (query * key.repeat_interleave(2, 1)).sum(-1)
    share = logits.exp() / (logits.exp() + sinks.exp())
    expected = value.repeat_interleave(2, 1) * share[..., None]
    torch.testing.assert_close(mixed, expected, rtol=0.03, atol=0.03)
    at = torch.from_numpy(recent.pages[0, 1:3, :, 0].copy()).long()
    found = segments(arena, recent.layout).scores[at, 0]
    torch.testing.assert_close(found, 4 * share.view(3, 2, 2).amax(2)[1:], rtol=0.03, atol=0.03)
