# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false
# pyright: reportUnknownArgumentType=false
# torch leaves Tensor.tolist untyped.
"""Each eviction policy against its paper's words, spelled out token by token."""

from collections.abc import Sequence

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.effort import examples
from triptych.evals.methods import eviction
from triptych.evals.methods.eviction import EVICTIONS, PromptAttention
from triptych.kernels.retain import pyramid_budgets

LAYERS, HEADS, KV_HEADS, TOKENS = 4, 4, 2, 90
GROUP = HEADS // KV_HEADS


def attention(seed: int = 0) -> torch.Tensor:
    """Causal weights [L, H, queries, keys]."""
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn(LAYERS, HEADS, TOKENS, TOKENS, generator=generator) * 2
    ahead = torch.ones(TOKENS, TOKENS, dtype=torch.bool).triu(1)
    return logits.masked_fill(ahead, float("-inf")).softmax(-1)


def attention_of(weights: torch.Tensor, seed: int = 0) -> PromptAttention:
    keys = torch.randn(
        LAYERS, KV_HEADS, TOKENS, 8, generator=torch.Generator().manual_seed(seed + 100)
    )
    return PromptAttention(
        keys=tuple(keys), sums=weights.sum(2), last=weights[:, :, -eviction.WINDOW_TOKENS :].mean(2)
    )


def best(scores: Sequence[float], count: int) -> set[int]:
    return set(sorted(range(len(scores)), key=lambda t: (-scores[t], t))[:count])


def kept(name: str, budget: int) -> list[list[set[int]]]:
    """Token numbers by layer and KV head."""
    found = EVICTIONS[name](attention_of(attention()), budget)
    assert found.shape == (LAYERS, KV_HEADS, TOKENS)
    return [[set(row.nonzero()[:, 0].tolist()) for row in layer] for layer in found]


def heads_of(kv_head: int) -> range:
    return range(kv_head * GROUP, (kv_head + 1) * GROUP)


def test_streaming_llm_keeps_the_first_four_and_the_newest() -> None:
    for layer in kept("streaming_llm", 30):
        assert layer == [{0, 1, 2, 3, *range(TOKENS - 26, TOKENS)}] * KV_HEADS


def test_knorm_keeps_the_shortest_keys() -> None:
    keys = attention_of(attention()).keys
    for layer, rows in enumerate(kept("knorm", 30)):
        for head, row in enumerate(rows):
            norms = [sum(x * x for x in key) for key in keys[layer][head].tolist()]
            assert row == best([-norm for norm in norms], 30)


def test_h2o_keeps_heavy_hitters_and_as_many_of_the_newest() -> None:
    weights = attention().tolist()
    for layer, rows in enumerate(kept("h2o", 30)):
        for head, row in enumerate(rows):
            newest = set(range(TOKENS - 15, TOKENS))
            received = [
                sum(weights[layer][h][i][t] for h in heads_of(head) for i in range(TOKENS))
                for t in range(TOKENS - 15)
            ]
            assert row == newest | best(received, 15)


def test_snapkv_keeps_what_the_last_queries_look_at_and_its_neighbours() -> None:
    weights = attention().tolist()
    window = eviction.WINDOW_TOKENS
    old = TOKENS - window
    for layer, rows in enumerate(kept("snapkv", window + 10)):
        for head, row in enumerate(rows):
            looked = [
                [
                    sum(weights[layer][h][i][t] for i in range(old, TOKENS)) / window
                    for t in range(old)
                ]
                for h in heads_of(head)
            ]
            pooled = [
                sum(sum(one[max(0, t - 2) : t + 3]) / 5 for one in looked) / GROUP
                for t in range(old)
            ]
            assert row == set(range(old, TOKENS)) | best(pooled, 10)


def test_mean_attention_divides_by_age_and_takes_the_largest_head() -> None:
    weights = attention().tolist()
    for layer, rows in enumerate(kept("mean_attention", 70)):
        for head, row in enumerate(rows):
            means = [
                max(
                    sum(weights[layer][h][i][t] for i in range(TOKENS)) / (TOKENS - t)
                    for h in heads_of(head)
                )
                for t in range(TOKENS - 64)
            ]
            assert row == set(range(TOKENS - 64, TOKENS)) | best(means, 6)


def test_soft_prune_has_one_threshold_for_all_rows() -> None:
    seen = attention_of(attention())
    found = eviction.soft_prune(seen, 72)
    old = slice(0, TOKENS - 64)
    inside, outside = seen.significance[..., old], ~found[..., old]
    assert inside[~outside].min() >= inside[outside].max()
    assert found[..., -64:].all()
    assert len({int(row.sum()) for row in found.flatten(0, 1)}) > 1


def test_pyramidkv_gives_early_layers_more() -> None:
    budgets = pyramid_budgets(30, 1024, 300)
    assert sum(budgets) == 30 * 300
    assert budgets == sorted(budgets, reverse=True)
    assert budgets[0] > 500
    assert budgets[-1] == 64
    rows = kept("pyramidkv", 70)
    assert [len(layer[0]) for layer in rows] == pyramid_budgets(LAYERS, TOKENS, 70)
    assert all(set(range(TOKENS - 64, TOKENS)) <= row for layer in rows for row in layer)


@settings(max_examples=examples(30), deadline=None)
@given(st.sampled_from(sorted(EVICTIONS)), st.integers(0, TOKENS), st.integers(0, 5))
def test_as_much_is_kept_as_the_budget_says(name: str, budget: int, seed: int) -> None:
    found = EVICTIONS[name](attention_of(attention(seed), seed), budget)
    assert int(found.sum()) == budget * LAYERS * KV_HEADS


@settings(max_examples=examples(50), deadline=None)
@given(st.integers(1, 40), st.integers(1, 5000), st.data())
def test_a_pyramid_has_the_bytes_of_a_column(layers: int, tokens: int, data: st.DataObject) -> None:
    budget = data.draw(st.integers(0, tokens))
    found = pyramid_budgets(layers, tokens, budget)
    assert sum(found) == layers * budget
    assert all(0 <= count <= tokens for count in found)


@pytest.mark.parametrize("name", sorted(EVICTIONS))
def test_sources_are_named(name: str) -> None:
    assert "Source:" in (EVICTIONS[name].__doc__ or "")
