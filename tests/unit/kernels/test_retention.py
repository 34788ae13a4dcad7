"""Retention rules: their formulas by hand, and agreement with the baselines of the evaluation."""

import pytest
import torch
from torch import Tensor

from triptych.evals.methods.eviction import EVICTIONS, PromptAttention
from triptych.kernels.retain import BUDGETS, SCORES, ObservedPrompt

RULES = {
    "streaming_llm": ("recency", "per_head"),
    "knorm": ("key_norm", "per_head"),
    "h2o": ("heavy_hitters", "per_head"),
    "snapkv": ("window_attention", "per_head"),
    "pyramidkv": ("window_attention", "per_layer"),
}


def keys_of(attention: Tensor, keys: Tensor | None) -> Tensor:
    """Keys [l, KH, N, d]; without any, those of one channel, with these norms."""
    return attention[..., None] if keys is None else keys


def observed(attention: Tensor, kept: int, keys: Tensor | None = None) -> ObservedPrompt:
    """A prompt of ``attention`` [l, KH, N], and of keys [l, KH, N, d]."""
    layers, kv_heads, tokens = attention.shape
    return ObservedPrompt(
        tokens=tokens,
        kv_heads=kv_heads,
        layers=range(layers),
        model_layers=layers,
        attention=attention,
        of_keys=lambda score: torch.stack([score(layer) for layer in keys_of(attention, keys)]),
        kept=kept,
    )


def kept(score: str, budget: str, prompt: ObservedPrompt) -> list[list[int]]:
    """Positions that each head row keeps."""
    mask = BUDGETS[budget](SCORES[score](prompt), prompt).flatten(0, 1)
    return [row.nonzero().flatten().tolist() for row in mask]


def row(*large: int, tokens: int = 16) -> Tensor:
    """Attention of one head row with its largest values at these tokens, in their order."""
    found = torch.linspace(0.01, 0.02, tokens)
    for rank, at in enumerate(large):
        found[at] = 10.0 - rank
    return found


@pytest.mark.parametrize(
    ("score", "attention", "count", "expected"),
    [
        ("recency", row(7), 6, [0, 1, 2, 3, 14, 15]),
        ("key_norm", 20 - row(7, 3), 2, [3, 7]),  # the shortest keys
        ("heavy_hitters", row(2, 9, 15), 4, [2, 9, 14, 15]),
        ("last_attention", row(2, 9, 4), 3, [2, 9, 15]),
    ],
)
def test_rules_keep_what_their_papers_say(
    score: str, attention: Tensor, count: int, expected: list[int]
) -> None:
    prompt = observed(attention[None, None], count)
    assert kept(score, "per_head", prompt) == [expected]


def test_snapkv_keeps_its_window_and_neighbours_of_what_the_window_attends_to() -> None:
    attention = torch.zeros(1, 1, 100)
    attention[..., 20] = 1.0
    (found,) = kept("window_attention", "per_head", observed(attention, 69))
    assert found == [*range(18, 23), *range(36, 100)]


def test_keydiff_keeps_the_keys_that_differ_most_from_the_mean_direction() -> None:
    """By hand: directions of 0, 0, 90 and 180 degrees have their mean at 45 degrees, whatever
    their lengths; the cosines with it are 0.71, 0.71, 0.71 and -0.71."""
    keys = torch.tensor([[9.0, 0.0], [1.0, 0.0], [0.0, 0.1], [-5.0, 0.0]])
    prompt = observed(torch.zeros(1, 1, 4), 1, keys[None, None])
    scores = SCORES["key_difference"](prompt).flatten()
    torch.testing.assert_close(scores, torch.tensor([-1.0, -1.0, -1.0, 1.0]) * 0.5**0.5)
    assert kept("key_difference", "per_head", prompt) == [[3]]


def test_tova_takes_the_mean_of_the_heads_of_a_layer() -> None:
    attention = torch.stack([row(2), row(3) * 2])[None]
    assert kept("last_attention", "per_head", observed(attention, 2)) == [[3, 15], [3, 15]]


def test_adakv_divides_by_need_and_leaves_each_head_its_safe_share() -> None:
    """Transcribed from algorithm 1: top ``int(0.2 * kept)`` of each head, then the best of all."""
    torch.manual_seed(0)
    attention = torch.rand(2, 3, 200)
    attention[:, 0] *= 20
    prompt = observed(attention, 80)
    scores = SCORES["window_attention"](prompt)
    mask = BUDGETS["across_heads"](scores, prompt)
    assert mask.flatten(1).sum(1).tolist() == [240, 240]
    for layer in range(2):
        safe = scores[layer].topk(16, dim=-1).indices
        assert mask[layer].gather(1, safe).all()
        left = scores[layer].scatter(1, safe, float("inf")).flatten()
        assert set(left.topk(240).indices.tolist()) == set(
            mask[layer].flatten().nonzero()[:, 0].tolist()
        )
    assert mask[:, 0].sum() > mask[:, 1].sum()


@pytest.mark.parametrize("name", RULES)
@pytest.mark.parametrize("share", [0.25, 0.5, 0.75])
def test_rules_agree_with_the_baselines(name: str, share: float) -> None:
    layers, heads, kv_heads, tokens = 6, 4, 2, 300
    torch.manual_seed(1)
    prompt = PromptAttention(
        keys=tuple(torch.randn(kv_heads, tokens, 8) for _ in range(layers)),
        sums=torch.rand(layers, heads, tokens),
        last=torch.rand(layers, heads, tokens),
    )
    count = round(share * tokens)
    raw = prompt.sums if name == "h2o" else prompt.last
    mean = raw.unflatten(1, (kv_heads, -1)).mean(2)
    seen = observed(mean, count, torch.stack(prompt.keys))
    score, budget = RULES[name]
    mask = BUDGETS[budget](SCORES[score](seen), seen)
    assert torch.equal(mask, EVICTIONS[name](prompt, count))
