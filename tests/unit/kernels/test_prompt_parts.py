# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false
# pyright: reportUnknownArgumentType=false
# torch.from_numpy has no types.
"""Jobs over parts of prompts: the bits of the ops that they stand for, in poisoned memory."""

from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest
import torch
from torch import Tensor

from triptych.core.errors import ConfigError
from triptych.core.layout import FORMATS, PageLayout
from triptych.kernels import (
    Past,
    load_tokens,
    multiplies_words,
    prefill_attention,
    round_tokens,
    store_tokens,
)
from triptych.kernels.cpu_jobs import PartTable, PromptPart, attend_parts_job, store_prompts_job

LAYERS, HEADS, KV_HEADS = 2, 6, 2
COUNTS = [(0, 40), (70, 33), (15, 1), (0, 150)]
"""Earlier and new tokens of each part."""


class Step:
    """Parts of a step in an arena of garbage; earlier tokens are in their pages."""

    def __init__(self, dim: int) -> None:
        self.raw = PageLayout(FORMATS["fp16"], dim, 4096)
        self.arena = torch.randint(0, 256, (900, 4096), dtype=torch.uint8)
        self.offsets = [0, *np.cumsum([count for _, count in COUNTS]).tolist()]
        tokens = self.offsets[-1]
        turned = torch.randn(tokens, HEADS + 2 * KV_HEADS, dim) * 3
        self.query, self.key = turned[:, :HEADS], turned[:, HEADS : HEADS + KV_HEADS]
        self.value = turned[:, HEADS + KV_HEADS :]
        ids, self.parts = iter(np.random.permutation(900)), list[PromptPart]()
        for (first, count), start in zip(COUNTS, self.offsets, strict=False):
            per_row = self.raw.pages(first + count)
            pages = np.array(
                [next(ids) for _ in range(LAYERS * KV_HEADS * per_row)], np.int32
            ).reshape(LAYERS, KV_HEADS, per_row)
            rounded = range(16, 16 + (first + count) // 32 * 16)
            sums = torch.rand(LAYERS, HEADS, first + count - min(first + count, rounded.stop))
            self.parts.append(PromptPart(start, count, first, pages, rounded, sums))
            for layer in range(LAYERS):
                self.store(layer, pages, 0, torch.randn(2, first, KV_HEADS, dim))

    def store(self, layer: int, pages: np.ndarray, first: int, vectors: Tensor) -> None:
        positions = torch.arange(first, first + vectors.shape[1], dtype=torch.int32)
        ids = torch.from_numpy(pages[layer].T)[(positions // self.raw.tokens).long()]
        rows = (positions % self.raw.tokens)[:, None].expand(-1, KV_HEADS)
        store_tokens(self.arena, self.raw, vectors[0], vectors[1], ids, rows, positions)

    def table(self) -> PartTable:
        table = PartTable(8)
        table.write(self.parts)
        return table

    def rounded(self, layout: PageLayout) -> tuple[Tensor, Tensor]:
        masks = list[Tensor]()
        for one in self.parts:
            at = torch.arange(one.first, one.first + one.count)
            masks.append((at >= one.rounded.start) & (at < one.rounded.stop))
        return round_tokens(layout, self.key, self.value, torch.cat(masks))


@pytest.mark.parametrize("name", ["k8v4", "k4v2", "fp16"])
@pytest.mark.parametrize("dim", [32, 64, 96, 128])
def test_prompts_are_rounded_and_stored_as_by_the_ops(dim: int, name: str) -> None:
    step, layer = Step(dim), 1
    rounding = PageLayout(FORMATS[name], dim, 4096)
    expected = step.arena.clone()
    store_prompts_job(
        step.arena, step.raw, rounding, layer, step.key, step.value, step.table()
    ).run()
    found, step.arena = step.arena, expected
    pair = step.rounded(rounding)
    for one, (start, end) in zip(step.parts, pairwise(step.offsets), strict=True):
        new = torch.stack([vectors[start:end] for vectors in pair])
        step.store(layer, one.pages, one.first, new)
    assert torch.equal(found, step.arena)


@pytest.mark.skipif(not multiplies_words(), reason="not a processor of x86")
@pytest.mark.parametrize("window", [0, 20])
@pytest.mark.parametrize("dim", [32, 64, 96, 128])
def test_attention_over_pages_has_the_bits_of_the_op(dim: int, window: int) -> None:
    step, layer, scale = Step(dim), 1, dim**-0.5
    raw, table = step.raw, step.table()
    store_prompts_job(step.arena, raw, raw, layer, step.key, step.value, table).run()
    out = torch.full((len(step.query), HEADS, dim), float("nan"), dtype=torch.bfloat16)
    before = [one.sums[layer].clone() for one in step.parts if one.sums is not None]
    attend_parts_job(step.query, KV_HEADS, step.arena, raw, layer, scale, window, out, table).run()
    longest = max(one.pages.shape[2] for one in step.parts)
    tables = torch.zeros(len(step.parts), KV_HEADS, longest, dtype=torch.int32)
    for row, one in zip(tables, step.parts, strict=True):
        row[:, : one.pages.shape[2]] = torch.from_numpy(one.pages[layer])
    firsts = torch.tensor([[one.first] * KV_HEADS for one in step.parts], dtype=torch.int32)
    sums = torch.zeros(len(step.parts), HEADS, 200)
    key, value = (each.half().float() for each in (step.key, step.value))
    expected = prefill_attention(
        step.query.bfloat16(),
        key.bfloat16(),
        value.bfloat16(),
        step.offsets,
        scale=scale,
        window=window,
        past=Past(step.arena, raw, tables, firsts),
        significance=sums,
    )
    assert torch.equal(out, expected)
    for one, had, received in zip(step.parts, before, sums, strict=True):
        assert one.sums is not None
        span = received[:, min(one.rounded.stop, one.first + one.count) : one.first + one.count]
        torch.testing.assert_close(one.sums[layer], had + span, rtol=0, atol=0)


@pytest.mark.skipif(not multiplies_words(), reason="not a processor of x86")
@pytest.mark.parametrize("bad", [-1, 900])
def test_a_page_that_the_arena_does_not_have_is_refused(bad: int) -> None:
    step = Step(64)
    pages = step.parts[1].pages.copy()
    pages[1, 1, 0] = bad
    step.parts[1] = replace(step.parts[1], pages=pages)
    out = torch.empty(len(step.query), HEADS, 64, dtype=torch.bfloat16)
    table = step.table()
    attend = attend_parts_job(step.query, KV_HEADS, step.arena, step.raw, 1, 0.125, 0, out, table)
    with pytest.raises(ConfigError, match="attend_parts: an index is of a page"):
        attend.run()
    pages[1, 1, 0], pages[1, 1, -1] = 3, bad
    step.parts[1] = replace(step.parts[1], pages=pages)
    table.write(step.parts)
    store = store_prompts_job(step.arena, step.raw, step.raw, 1, step.key, step.value, table)
    with pytest.raises(ConfigError, match="store_prompts: an index is of a page"):
        store.run()


@pytest.mark.parametrize("name", ["k8v4", "k4v2"])
def test_loaded_tokens_are_those_that_were_rounded(name: str) -> None:
    """The reference of rounding is ``load_tokens`` of pages of codes that were stored twice."""
    step, rounding = Step(64), PageLayout(FORMATS[name], 64, 4096)
    store_prompts_job(step.arena, step.raw, rounding, 0, step.key, step.value, step.table()).run()
    whole = step.parts[-1]
    ids = torch.from_numpy(whole.pages[0])
    counts = torch.full((KV_HEADS,), whole.count, dtype=torch.int32)
    key, value, positions = load_tokens(step.arena, step.raw, ids, counts)
    assert torch.equal(positions, torch.arange(whole.count).int().expand(KV_HEADS, -1))
    expected = step.rounded(rounding)
    for found, rounded in zip((key, value), expected, strict=True):
        assert torch.equal(found, rounded[whole.start :].transpose(0, 1))
