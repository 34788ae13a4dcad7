from typing import Any

import pytest
import torch

from triptych.core.errors import ConfigError
from triptych.kernels import plan_tokens


@pytest.mark.parametrize("first", [0, 4])
@pytest.mark.parametrize("window", [0, 1, 64])
@pytest.mark.parametrize("longest", [1, 37, 1024, 2500])
def test_classes_ranks_and_counts_are_those_of_the_reference(
    first: int, window: int, longest: int, device: Any
) -> None:
    scores = torch.rand(2 * longest, 5).T[:, ::2]
    tokens = torch.tensor([0, longest // 2, longest, max(0, longest - 3), 1], dtype=torch.int32)
    scores[torch.arange(longest) >= tokens[:, None]] = float("nan")
    scores[2, ::3] = 0.5
    high = torch.tensor([0.5, 0.7, 0.5, 2.0, -1.0])
    low = torch.tensor([0.1, 0.7, 0.5, 0.5, -2.0])
    want = plan_tokens.on("reference")(scores, tokens, high, low, first=first, window=window)
    moved = device.take(scores, tokens, high, low)
    got = plan_tokens.on("cuda")(*moved, first=first, window=window)
    for mine, its in zip(got, want, strict=True):
        assert mine.dtype == its.dtype
        assert torch.equal(mine.cpu(), its)


def test_rows_of_width_zero_have_no_tokens(device: Any) -> None:
    rows = device.take(torch.empty(2, 0), torch.zeros(2).int(), torch.zeros(2), torch.zeros(2))
    classes, ranks, counts = plan_tokens.on("cuda")(*rows)
    assert classes.shape == ranks.shape == (2, 0)
    assert counts.tolist() == [[0, 0], [0, 0]]


def test_scores_of_a_wrong_type_are_an_error(device: Any) -> None:
    rows = device.take(torch.rand(2, 9).half(), torch.ones(2).int(), torch.ones(2), torch.ones(2))
    with pytest.raises(ConfigError, match="float16"):
        plan_tokens.on("cuda")(*rows)
