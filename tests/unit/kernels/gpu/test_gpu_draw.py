"""Tests of the sampling kernel, against the reference."""

import math
from typing import Any

import numpy as np
import pytest
import torch

from triptych.core.errors import ConfigError
from triptych.kernels import draw_tokens


def check(device: Any, logits: torch.Tensor, settings: torch.Tensor | None) -> None:
    want = draw_tokens.on("reference")(logits, settings)
    taken = device.take(logits, *(() if settings is None else (settings,)))
    got = draw_tokens.on("cuda")(taken[0], taken[1] if settings is not None else None)
    assert got.dtype == torch.int64
    assert got.tolist() == want.tolist(), settings


def rows_of(random: np.random.Generator, count: int) -> torch.Tensor:
    rows = (
        random.choice([0.0, 0.3, 1.0, 1.7], count),
        random.choice([0, 1, 5, 40, 4000], count),
        random.choice([0.05, 0.5, 0.9, 1.0], count),
        np.log(random.choice([1e-30, 0.01, 0.5, 1.0], count)),
        random.random(count),
    )
    return torch.tensor(np.stack(rows))


@pytest.mark.parametrize("vocab", [5, 300, 4096, 9001])
@pytest.mark.parametrize("spread", [0.3, 4.0])
def test_rows_draw_what_the_reference_draws(vocab: int, spread: float, device: Any) -> None:
    random = np.random.default_rng(vocab)
    for _ in range(3):
        logits = torch.randn(6, vocab) * spread
        logits[:, random.integers(vocab)] = -math.inf
        check(device, logits, rows_of(random, 6))
    check(device, torch.randn(3, 2 * vocab)[:, ::2] * spread, None)


def test_ties_at_a_border_stay_and_the_first_of_several_is_the_greedy_one(device: Any) -> None:
    logits = torch.randn(8, 700).mul(2).round()
    random = np.random.default_rng(2)
    check(device, logits, None)
    for _ in range(3):
        check(device, logits, rows_of(random, 8))


def test_rows_that_are_not_finite_have_no_token(device: Any) -> None:
    logits = torch.randn(4, 5000)
    logits[0], logits[1, 4500], logits[2, 7] = -math.inf, math.nan, math.inf
    check(device, logits, None)
    check(device, logits, torch.tensor([[0.8, 10, 0.9, -math.inf, 0.3]] * 4).double().T)


def test_settings_of_another_shape_are_an_error(device: Any) -> None:
    logits, settings = device.take(torch.zeros(2, 9), torch.zeros(4, 2).double())
    with pytest.raises(ConfigError, match="settings"):
        draw_tokens.on("cuda")(logits, settings)
