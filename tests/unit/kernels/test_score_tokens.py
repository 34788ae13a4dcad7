"""Tests of token scores, of log-sum-exps, and of backward page tables."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.moves import ALONE, LATENTS, UNTRACKED
from triptych.core.errors import ConfigError
from triptych.core.layout import KeyOrder
from triptych.kernels import decode_attention, record_scores, score_tokens
from triptych.kernels.pages import segments

BACKENDS = [name for name in score_tokens.backends if name != "cuda"]
MORE_CASES = (64, "channel"), (96, "token"), (128, "channel")
NewCache = Callable[..., Any]
COUNTS = [
    ("k8v4", [[90, 0, 33], [0, 0, 1], [0, 64, 7]]),
    ("k4v2", [[0, 150, 57], [56, 0, 0], [0, 1, 9]]),
    ("fp16", [[13, 13, 13], [13, 1, 2], [1, 1, 13]]),
    ("k8v8/8", [[39, 0, 1], [3, 4, 2], [1, 0, 9]]),
]


def logits(query: Tensor, stored: Any, scale: float, softcap: float) -> Tensor:
    """float64 [R, KH, G, N] over one section; -inf beyond its end."""
    rows, _, dim = query.shape
    grouped = query.double().view(rows, stored.key.shape[1], -1, dim)
    product = grouped @ stored.key.transpose(2, 3) * scale
    if softcap > 0:
        product = softcap * (product / softcap).tanh()
    return product.masked_fill((stored.positions < 0)[:, :, None], float("-inf"))


def scores_of(arena: Tensor, stored: Any) -> Tensor:
    """Scores of a section's tokens [R, KH, N], 0 beyond the end."""
    section = stored.section
    token = torch.arange(stored.positions.shape[2])
    live = stored.positions >= 0
    pages = section.forward_pages.long()[..., token // section.layout.tokens].where(live, 0)
    rows = (token % section.layout.tokens).expand_as(live)
    return segments(arena, section.layout).scores[pages, rows].where(live, 0.0)


@pytest.mark.parametrize("backend", BACKENDS)
def test_biases_are_no_scores(backend: str, new_cache: NewCache) -> None:
    cache = new_cache(64)
    merged = cache.fill("k8v4", [[40, 7]], has_bias=True)
    plain = cache.fill("k8v4", [[9, 33]])
    sections, slots = [merged.section, plain.section], torch.zeros(1, dtype=torch.int32)
    query, lse = torch.randn(1, 4, 64), torch.empty(1, 4)
    decode_attention.on(backend)(query, cache.arena, sections, slots, scale=0.125, lse=lse)
    options = {"scale": 0.125, "weight": 1.0}
    for some in (sections, sections[:1]):
        score_tokens.on(backend)(query, cache.arena, some, slots, lse, **options)
    torch.testing.assert_close(scores_of(cache.arena, merged).double(), merged.bias)
    weights = (logits(query, plain, 0.125, 0.0) - lse.view(1, 2, 2, 1)).exp().amax(2)
    torch.testing.assert_close(
        scores_of(cache.arena, plain).double(), weights, rtol=1e-4, atol=1e-6
    )


@pytest.mark.parametrize("backend", BACKENDS)
def test_tokens_that_are_not_tracked_get_no_scores(backend: str, new_cache: NewCache) -> None:
    """Pages of both kinds are one softmax, and those without scores keep their bytes."""
    cache = new_cache(64)
    low = cache.fill(UNTRACKED, [[64, 7]])
    high = cache.fill("k8v4", [[9, 33]])
    sections, slots = [low.section, high.section], torch.zeros(1, dtype=torch.int32)
    query, lse = torch.randn(1, 4, 64), torch.empty(1, 4)
    decode_attention.on(backend)(query, cache.arena, sections, slots, scale=0.125, lse=lse)
    before = cache.arena.clone()
    score_tokens.on(backend)(query, cache.arena, sections, slots, lse, scale=0.125, weight=1.0)
    used = low.section.pages[low.section.pages < len(before)].long()
    assert torch.equal(cache.arena[used], before[used])
    weights = (logits(query, high, 0.125, 0.0) - lse.view(1, 2, 2, 1)).exp().amax(2)
    got = scores_of(cache.arena, high).double()
    torch.testing.assert_close(got, weights, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("backend", BACKENDS)
def test_requests_without_a_slot_are_skipped(backend: str, new_cache: NewCache) -> None:
    cache = new_cache(64)
    stored = cache.fill("k8v4", [[90, 0], [40, 7], [3, 64]])
    sections, query = [stored.section], torch.randn(3, 4, 64)
    slots, lse = torch.arange(3, dtype=torch.int32), torch.empty(3, 4)
    decode_attention.on(backend)(query, cache.arena, sections, slots, scale=0.125, lse=lse)
    before = scores_of(cache.arena, stored).clone()
    lse[1] = float("nan")
    some = torch.tensor([0, -1, 2], dtype=torch.int32)
    score_tokens.on(backend)(query, cache.arena, sections, some, lse, scale=0.125)
    changed = (scores_of(cache.arena, stored) != before).flatten(1).any(1)
    assert changed.tolist() == [True, False, True]


@pytest.mark.parametrize("backend", ["cpu"])
def test_attention_and_progress_need_slots_that_exist(backend: str, new_cache: NewCache) -> None:
    cache = new_cache(64)
    sections = [cache.fill("k8v4", [[90, 0]]).section]
    slots = torch.tensor([-1], dtype=torch.int32)
    query, progress = torch.randn(1, 4, 64), torch.zeros(8, dtype=torch.int64)
    with pytest.raises(ConfigError, match="a slot, a token count or a page id is out of range"):
        decode_attention.on(backend)(query, cache.arena, sections, slots, scale=0.125)
    with pytest.raises(ConfigError, match="a slot is out of range: there are 8"):
        record_scores.on(backend)(progress, slots + 9, slots, 16, 48)


@pytest.mark.parametrize("softcap", [0.0, 5.0])
@pytest.mark.parametrize("backend", BACKENDS)
def test_scores_grow_by_the_largest_weight_of_the_group(
    backend: str, softcap: float, new_cache: NewCache
) -> None:
    cache = new_cache(64)
    stored = [cache.fill(name, counts) for name, counts in COUNTS]
    sections = [part.section for part in stored]
    query, slots = torch.randn(3, 9, 64) * 2, torch.arange(3, dtype=torch.int32)
    options = {"scale": 0.125, "softcap": softcap}
    before = [scores_of(cache.arena, part) for part in stored]
    untouched = cache.arena.clone()
    lse = torch.full((3, 9), float("nan"))
    decode_attention.on(backend)(query, cache.arena, sections, slots, lse=lse, **options)
    torch.testing.assert_close(cache.arena, untouched)
    every = torch.cat([logits(query, part, **options) for part in stored], 3)
    want = every.logsumexp(3)
    torch.testing.assert_close(lse.double(), want.flatten(1), rtol=1e-5, atol=1e-5)
    score_tokens.on(backend)(query, cache.arena, sections, slots, lse, weight=16.0, **options)
    for part, old in zip(stored, before, strict=True):
        gained = (logits(query, part, **options) - want[..., None]).exp().amax(2) * 16
        got = scores_of(cache.arena, part)
        torch.testing.assert_close(got.double(), old + gained, rtol=1e-4, atol=1e-5)
    for part in stored:
        segments(cache.arena, part.section.layout).scores[:] = 0
        segments(untouched, part.section.layout).scores[:] = 0
    assert torch.equal(cache.arena, untouched), "score_tokens wrote beside the scores"


@pytest.mark.parametrize(
    ("head_dim", "order"),
    [
        *((64, "token"), (96, "channel"), (128, "token")),
        *(pytest.param(*case, marks=pytest.mark.conformance) for case in MORE_CASES),
    ],
)
@pytest.mark.parametrize("name", [*ALONE, *LATENTS])
@pytest.mark.parametrize("backend", BACKENDS)
def test_every_format_can_be_scored(
    backend: str, name: str, head_dim: int, order: KeyOrder, new_cache: NewCache
) -> None:
    cache = new_cache(head_dim, byte=0)
    stored = cache.fill(name, [[1, 40], [97, 32]], order=order)
    query, slots = torch.randn(2, 4, head_dim), torch.arange(2, dtype=torch.int32)
    lse = torch.empty(2, 4)
    attend = decode_attention.on(backend)
    attend(query, cache.arena, [stored.section], slots, scale=0.1, lse=lse)
    score_tokens.on(backend)(query, cache.arena, [stored.section], slots, lse, scale=0.1)
    want = logits(query, stored, 0.1, 0.0).softmax(3).amax(2)
    got = scores_of(cache.arena, stored).double()
    torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("backend", BACKENDS)
def test_two_sections_share_a_table_from_both_sides(backend: str, new_cache: NewCache) -> None:
    """One section is forward, one backward (DiffKV's bidirectional page table)."""
    cache = new_cache(64)
    high = cache.fill("k8v4", [[90, 33], [1, 64]])
    low = cache.fill("k4v2", [[150, 57], [56, 300]])
    width = 12
    table = torch.full((2, 2, width), 2**30, dtype=torch.int32)
    for slot in range(2):
        for head in range(2):
            for part, columns in ((high, table[slot, head]), (low, table[slot, head])):
                count = part.section.layout.pages(int(part.section.tokens[slot, head]))
                ids = part.section.pages[slot, head, :count]
                if part is high:
                    columns[:count] = ids
                else:
                    columns[width - count :] = ids.flip(0)
    shared = [
        replace(high.section, pages=table),
        replace(low.section, pages=table, backward=True),
    ]
    query, slots = torch.randn(2, 6, 64), torch.arange(2, dtype=torch.int32)
    apart = [high.section, low.section]
    want = decode_attention.on("reference")(query, cache.arena, apart, slots, scale=0.125)
    got = decode_attention.on(backend)(query, cache.arena, shared, slots, scale=0.125)
    torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-5)
