"""Tests of ``mass_limits`` against LeanKV's rule, token by token in ascending order."""

import torch
from hypothesis import given
from hypothesis import strategies as st

from triptych.kernels import mass_limits


def kept(scores: list[float], total: float, mass: float) -> list[bool]:
    """Tokens that stay: the smallest are removed while the running sum is below the share."""
    stays, running = [True] * len(scores), 0.0
    for token in sorted(range(len(scores)), key=lambda token: scores[token]):
        running += scores[token]
        if running >= mass * total:
            break
        stays[token] = False
    return stays


@given(
    counts=st.lists(st.integers(0, 64), min_size=1, max_size=40, unique=True),
    rest=st.integers(0, 50),
    share=st.integers(0, 16),
)
def test_the_limit_keeps_the_same_tokens_as_the_rule(
    counts: list[int], rest: int, share: int
) -> None:
    """Sums of these numbers are exact, so that both sides have the same ties."""
    scores, mass = [count / 64 for count in counts], share / 16
    total = sum(scores) + rest / 64
    limit = mass_limits(torch.tensor([scores]), torch.tensor([total]), mass)
    assert [score >= limit.item() for score in scores] == kept(scores, total, mass)


def test_each_row_has_its_own_limit() -> None:
    scores = torch.tensor([[0.1, 0.2, 0.7], [0.5, 0.25, 0.25]])
    limits = mass_limits(scores, scores.sum(1), 0.2)
    assert limits.tolist() == [scores[0, 1].item(), 0.25]
    assert mass_limits(scores[:, :0], scores.sum(1), 0.2).tolist() == [0.0, 0.0]
