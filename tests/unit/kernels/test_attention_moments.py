"""CAKE: moments of attention, preferences of layers and their budgets, by hand."""

from itertools import pairwise

import numpy as np
import pytest
import torch
from torch import Tensor

from triptych.kernels.retain import (
    BUDGETS,
    SCORES,
    AttentionMoments,
    ObservedPrompt,
    divided,
    layer_preferences,
)

CPU = torch.device("cpu")


def observed(attention: Tensor, kept: int) -> ObservedPrompt:
    layers, kv_heads, tokens = attention.shape
    return ObservedPrompt(
        tokens=tokens,
        kv_heads=kv_heads,
        layers=range(layers),
        model_layers=layers,
        attention=attention,
        of_keys=lambda score: torch.zeros(()),
        kept=kept,
    )


def test_moments_by_hand() -> None:
    """Two queries of one head pay (0.5, 0.5) and (0.5, 0) to two tokens before the window."""
    moments = AttentionMoments.empty(2, (1, 1, 4), CPU)
    moments.add(0, torch.tensor([[[0.5, 0.5, 0.0]]]))
    moments.add(0, torch.tensor([[[0.5, 0.0, 0.25, 0.25]]]))
    scores = moments.scores(1).flatten().tolist()
    variance = 0.125  # of 0.5 and 0, unbiased
    assert scores[:2] == pytest.approx([0.5, 0.25 + 200 * variance])
    assert scores[2] == pytest.approx(3 * 0.5 * np.log(2)), "entropy: three weights of a half"
    assert scores[3] == pytest.approx(variance)
    preference = layer_preferences(moments.scores(1)).tolist()
    assert preference == pytest.approx([3 * 0.5 * np.log(2) * variance])


@pytest.mark.parametrize("borders", [(0, 8), (0, 3, 8)])
def test_chunks_of_the_window_add_up_and_heads_of_a_group_are_averaged(
    borders: tuple[int, ...],
) -> None:
    torch.manual_seed(0)
    tokens, queries = 30, 8
    weights = torch.rand(4, queries, tokens).softmax(-1)
    moments = AttentionMoments.empty(tokens - queries, (1, 4, tokens), CPU)
    for start, end in pairwise(borders):
        moments.add(0, weights[:, start:end])
    scores = moments.scores(2)[0]
    expected = (weights.mean(1) + 200 * weights.var(1)).unflatten(0, (2, 2)).mean(1)
    torch.testing.assert_close(scores[:, :-2], expected[:, :-2])


def test_short_prompts_have_scores_and_budgets() -> None:
    for tokens in (1, 2, 3):
        moments = AttentionMoments.empty(0, (2, 2, tokens), CPU)
        moments.add(0, torch.full((2, tokens, tokens), 1 / tokens))
        prompt = observed(moments.scores(1), 1)
        mask = BUDGETS["by_preference"](SCORES["shifting_attention"](prompt), prompt)
        assert mask.isfinite().all()
        assert mask.sum(-1).flatten().tolist() == [1, 1]


@pytest.mark.parametrize(
    ("total", "weights", "most", "expected"),
    [
        (12, [1.0, 2.0, 1.0], 10, [3, 6, 3]),
        (12, [1.0, 8.0, 3.0], 6, [2, 6, 4]),  # 1, 8 and 3; of the two above six each other gets one
        (10, [1.0, 1.0, 1.0], 10, [4, 3, 3]),
        (10, [0.0, 0.0], 10, [5, 5]),
        (99, [1.0, 2.0], 10, [10, 10]),
    ],
)
def test_budgets_divide_by_preference(
    total: int, weights: list[float], most: int, expected: list[int]
) -> None:
    assert divided(total, weights, most) == expected


def test_layers_get_tokens_by_preference_behind_the_window() -> None:
    """Dispersions 1 and 3 with equal shifts: of 2 x (40 - 32) tokens the layers get 4 and 12."""
    attention = torch.rand(2, 1, 60)
    attention[:, 0, -2], attention[:, 0, -1] = torch.tensor([1.0, 3.0]), 1.0
    prompt = observed(attention, 40)
    mask = BUDGETS["by_preference"](SCORES["shifting_attention"](prompt), prompt)
    assert mask.sum(-1).flatten().tolist() == [36, 44]
    assert mask[..., 28:].all(), "the window of 32"
