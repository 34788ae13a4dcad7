"""Tests of sampling: the fast implementation on the CPU draws what the definition draws."""

import math

import numpy as np
import pytest
import torch

from triptych.kernels import draw_tokens

BACKENDS = [name for name in draw_tokens.backends if name != "cuda"]


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_row_draws_by_its_own_settings(backend: str) -> None:
    logits = torch.tensor([0.5, 0.25, 0.125, 0.125]).log().expand(7, 4).contiguous()
    rows = [
        (0.0, 0, 1.0, -math.inf, 0.99),
        (1.0, 0, 1.0, -math.inf, 0.51),
        (1.0, 1, 1.0, -math.inf, 0.99),
        (1.0, 3, 1.0, -math.inf, 0.99),  # the third and the fourth are as likely
        (1.0, 0, 0.6, -math.inf, 0.99),
        (1.0, 0, 1.0, math.log(0.4), 0.99),
        (1.0, 0, 1.0, -math.inf, 0.0),
    ]
    settings = torch.tensor(rows, dtype=torch.float64).T.contiguous()
    assert draw_tokens.on(backend)(logits, settings).tolist() == [0, 1, 0, 3, 1, 1, 0]
    assert draw_tokens.on(backend)(logits, None).tolist() == [0] * 7


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_row_that_is_not_finite_has_no_token(backend: str) -> None:
    logits = torch.zeros(4, 9)
    logits[0], logits[1, 3], logits[2, 7], logits[3, 5] = -math.inf, math.nan, math.inf, -math.inf
    settings = torch.tensor([[1.0, 0, 1.0, -math.inf, 0.5]] * 4, dtype=torch.float64).T
    for asked in (settings, None):
        tokens = draw_tokens.on(backend)(logits, asked).tolist()
        assert tokens[:3] == [-1] * 3
        assert tokens[3] in range(9)


def test_random_rows_draw_what_the_definition_draws() -> None:
    random = np.random.default_rng(11)
    for _ in range(20):
        logits = torch.randn(6, 500) * float(random.uniform(0.5, 6))
        settings = torch.tensor(
            np.stack(
                [
                    random.choice([0.0, 0.3, 1.0, 1.7], 6),
                    random.choice([0, 1, 5, 40, 499, 500, 900], 6),
                    random.choice([0.05, 0.5, 0.9, 1.0], 6),
                    np.log(random.choice([1e-9, 0.01, 0.5], 6)),
                    random.random(6),
                ]
            )
        )
        want = draw_tokens.on("reference")(logits, settings)
        assert torch.equal(draw_tokens.on("cpu")(logits, settings), want)
