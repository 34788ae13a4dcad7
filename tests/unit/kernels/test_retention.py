"""Retention rules: their formulas by hand, and agreement with the baselines of the evaluation."""

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from triptych.evals.methods.eviction import EVICTIONS, PromptAttention
from triptych.kernels import sums_of_heads
from triptych.kernels.retain import (
    BUDGETS,
    SCORES,
    ObservedPrompt,
    Tiers,
    choose_tiers,
    error_budgets,
    value_distortions,
)

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


def test_kvcrush_keeps_the_best_and_representatives_of_the_others_by_hand() -> None:
    """Eight tokens, six to keep: the best five of each head, and of the three others one. The
    better halves are 0 to 3 and 2 to 5, so with the anchor (0, 1) tokens have these distances:
    0 and 1: 2, 2 and 3: 1, 4 and 5: 0, 6 and 7: 1."""
    scores = torch.tensor(
        [[9.0, 8.0, 7.0, 6.0, 5.0, 1.0, 2.0, 3.0], [4.0, 3.0, 9.0, 8.0, 7.0, 6.0, 2.0, 1.0]]
    )[None]
    prompt = observed(scores, 6)
    mask = BUDGETS["with_representatives"](scores, prompt)[0]
    first, second = (row.nonzero().flatten().tolist() for row in mask)
    assert first == [0, 1, 2, 3, 4, 5], "of 5, 6 and 7 the nearest to the anchor"
    assert second == [0, 2, 3, 4, 5, 6], "of 6, 7 and 1"


@pytest.mark.parametrize("kept_tokens", [1, 64, 70, 100, 199, 200])
def test_kvcrush_keeps_exactly_its_budget_and_spreads_representatives(kept_tokens: int) -> None:
    torch.manual_seed(2)
    prompt = observed(torch.rand(2, 3, 200), kept_tokens)
    scores = SCORES["window_attention"](prompt)
    mask = BUDGETS["with_representatives"](scores, prompt)
    assert (mask.sum(-1) == kept_tokens).all()
    important = kept_tokens - int(max(0, kept_tokens - min(64, kept_tokens)) * 0.25)
    best = torch.zeros_like(mask).scatter_(-1, scores.topk(important).indices, value=True)
    assert mask[best].all() or kept_tokens < 64, "the best tokens by SnapKV are among them"


def test_tangram_keeps_of_each_head_what_calibration_found_whatever_the_layers_are() -> None:
    """Shares 1, 3, 2, 2 of two layers: of 4 x (40 - 32) tokens the rows get 4, 12, 8 and 8."""
    scores = torch.rand(2, 2, 60)
    scores[..., 28:] = float("inf")
    whole = replace(observed(scores, 40), head_shares=(0.25, 0.75, 0.5, 0.5))
    mask = BUDGETS["by_calibration"](scores, whole)
    assert mask.sum(-1).tolist() == [[36, 44], [40, 40]]
    last = replace(whole, layers=range(1, 2))
    assert torch.equal(BUDGETS["by_calibration"](scores[1:], last), mask[1:])


def test_compresskv_takes_the_heads_that_retrieve_for_all_heads_of_a_layer() -> None:
    """By hand: of four query heads, 2 and 0 in the first layer and 3 alone in the second."""
    sums = torch.stack([torch.stack([row(head + 1, tokens=40) for head in range(4)])] * 2)
    found = sums_of_heads(sums, [(2, 0), (3,)], 2)
    torch.testing.assert_close(found[0, 0], (sums[0, 2] + sums[0, 0]) / 2)
    assert torch.equal(found[0, 0], found[0, 1])
    assert torch.equal(found[1, 1], sums[1, 3])
    chosen, other = kept("retrieval_attention", "per_head", observed(found[1:], 13))
    assert chosen == other == [*range(2, 7), *range(32, 40)], "token 4, its neighbours, the window"


def test_compresskv_gives_layers_budgets_by_their_errors_within_limits() -> None:
    """The authors' rule by hand: 40 of 100 tokens on average, 32 at least, 120 at most, so 24 of
    three layers are left. They divide as 6, 3 and 1 tenths: 14, 7 and 2, and one for the first."""
    errors = (0.6, 0.3, 0.1)
    assert error_budgets(errors, 120, 32, 120) == [32 + 15, 32 + 7, 32 + 2]
    assert error_budgets((1.0, 0.0, 0.0), 600, 32, 300) == [300, 150, 150]
    scores = torch.rand(3, 2, 100)
    scores[..., 92:] = float("inf")
    whole = replace(observed(scores, 40), layer_errors=errors)
    mask = BUDGETS["by_layer_error"](scores, whole)
    assert mask.sum(-1).tolist() == [[47, 47], [39, 39], [34, 34]]
    last = replace(whole, layers=range(2, 3))
    assert torch.equal(BUDGETS["by_layer_error"](scores[2:], last), mask[2:])


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


def test_tiers_stay_in_the_budget_and_prefer_heavy_tokens() -> None:
    weight = torch.tensor([8.0, 1.0, 0.0, 2.0])
    distortion = torch.tensor([[1.0, 0.25, 0.0]]).repeat(4, 1)
    tiers = choose_tiers(weight, distortion, (0.0, 2.0, 4.0), 2.0)
    assert tiers.tolist() in ([2, 0, 0, 1], [2, 1, 0, 1])
    weight, distortion = torch.rand(200), torch.rand(200, 3).sort(-1, descending=True).values
    for mean in (0.0, 0.7, 2.5, 4.0):
        tiers = choose_tiers(weight, distortion, (0.0, 2.0, 4.0), mean)
        assert float(torch.tensor([0.0, 2.0, 4.0])[tiers].mean()) <= mean
    assert tiers.min() == 2
    assert not choose_tiers(weight, distortion, (0.0, 2.0, 4.0), -1.0).any()


def test_distortions_of_values_by_hand() -> None:
    """A range of 3 has steps of 1 in two bits: an error of 1/12 in each of two channels."""
    found = value_distortions(torch.tensor([[0.0, 3.0]]), (2, 4))
    assert torch.allclose(found, torch.tensor([[9.0, 1 / 6, 1 / 6 / 25]]))


def test_heads_of_a_layer_share_the_bytes_of_their_tiers() -> None:
    """Six tokens of two heads, of which the last two always stay, at 30 or 40 bytes.

    What is left of the bytes of three high tokens of each head is 80: the two that weigh most are
    low, as a third low one would take 90. Of four it is 160: three are high, the next one is low.
    """
    attention = torch.tensor([[[9.0, 0.1, 0.2, 0.1, 1, 1], [0.3, 8.0, 0.1, 5.0, 1, 1]]])
    scores = attention.masked_fill(torch.arange(6) >= 4, float("inf"))
    tiers = Tiers((0, 30, 40), torch.tensor([1.0, 0.1, 0.0]).expand(1, 2, 6, 3))
    for count, expected in (
        (2, [[0, 0, 0, 0, 2, 2], [0, 0, 0, 0, 2, 2]]),
        (3, [[1, 0, 0, 0, 2, 2], [0, 1, 0, 0, 2, 2]]),
        (4, [[2, 0, 0, 0, 2, 2], [1, 2, 0, 2, 2, 2]]),
        (6, [[2, 2, 2, 2, 2, 2], [2, 2, 2, 2, 2, 2]]),
    ):
        prompt = replace(observed(attention, count), tiers=lambda: tiers)
        found = BUDGETS["rate_and_distortion"](scores, prompt)
        assert found.dtype == torch.uint8
        assert found.tolist() == [expected]
