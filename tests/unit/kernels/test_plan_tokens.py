"""Tests of ``plan_tokens`` against its definition, token by token."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from triptych.core.layout import FORMATS
from triptych.kernels import plan_tokens

BACKENDS = [name for name in plan_tokens.backends if name != "cuda"]


def plan_one(
    scores: list[float], high: float, low: float, first: int, window: int
) -> list[tuple[int, int]]:
    """Expected class and rank of each token of one row."""
    placed, counts = list[tuple[int, int]](), [0, 0, 0]
    for position, score in enumerate(scores):
        kept = position < first or position >= len(scores) - window
        name = 2 if kept or score >= high else 1 if score >= low else 0
        placed.append((name, counts[name] if name else 0))
        counts[name] += 1
    return placed


@pytest.mark.parametrize("backend", BACKENDS)
@given(data=st.data(), first=st.integers(0, 5), window=st.integers(0, 9))
def test_classes_ranks_and_counts(
    backend: str, data: st.DataObject, first: int, window: int
) -> None:
    number = st.floats(0, 1, width=32)
    rows = data.draw(st.lists(st.lists(number, max_size=40), min_size=1, max_size=4))
    high = data.draw(st.lists(number, min_size=len(rows), max_size=len(rows)))
    low = [data.draw(st.floats(0, limit, width=32)) for limit in high]
    longest = max(len(row) for row in rows)
    padded = torch.full((len(rows), longest), float("nan"))
    for line, row in zip(padded, rows, strict=True):
        line[: len(row)] = torch.tensor(row)
    tokens = torch.tensor([len(row) for row in rows], dtype=torch.int32)
    classes, ranks, counts = plan_tokens.on(backend)(
        padded, tokens, torch.tensor(high), torch.tensor(low), first=first, window=window
    )
    for i, row in enumerate(rows):
        want = plan_one(row, high[i], low[i], first, window)
        got = list(zip(classes[i].tolist(), ranks[i].tolist(), strict=True))
        assert got[: len(row)] == want
        assert got[len(row) :] == [(255, 0)] * (longest - len(row))
        names = [name for name, _ in want]
        assert counts[i].tolist() == [names.count(2), names.count(1)]


@pytest.mark.parametrize("backend", BACKENDS)
def test_the_example_of_the_paper_uses_20_6_percent_of_fp16(backend: str) -> None:
    """DiffKV, figure 1: two requests, two heads, five tokens; data bits without metadata."""
    high, low = FORMATS["k8v4"], FORMATS["k4v2"]
    scores = torch.tensor(
        [
            [0.9, 0.2, 0.0, 0.3, 0.1],  # request 1, head A: one high, three low, one dropped
            [0.9, 0.8, 0.2, 0.1, 0.0],  # head B: two high, two low, one dropped
            [0.9, 0.2, 0.3, 0.3, 0.1],  # request 2, head A: one high, four low
            [0.9, 0.8, 0.2, 0.0, 0.0],  # head B: two high, one low, two dropped
        ]
    )
    limits = torch.full((4,), 0.5), torch.full((4,), 0.05)
    _, _, counts = plan_tokens.on(backend)(scores, torch.full((4,), 5, dtype=torch.int32), *limits)
    keys = counts @ torch.tensor([high.key_bits, low.key_bits], dtype=torch.int32) / (5 * 16)
    values = counts @ torch.tensor([high.value_bits, low.value_bits], dtype=torch.int32) / (5 * 16)
    assert keys.tolist() == pytest.approx([0.25, 0.3, 0.3, 0.25])
    assert values.tolist() == pytest.approx([0.125, 0.15, 0.15, 0.125])
    both = torch.stack((keys, values)).view(2, 2, 2).mean((0, 2))
    assert both.tolist() == pytest.approx([0.20625, 0.20625])
