"""How pages are spread over heads: what each misses, who gets the next page, and who reads it."""

from dataclasses import replace
from itertools import accumulate
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from triptych.core.config import AppConfig, CompressorConfig
from triptych.core.errors import ConfigError
from triptych.core.head_budgets import BUDGET_STEPS, check_head_budgets
from triptych.core.messages import Sampling
from triptych.core.profile import Profile
from triptych.evals.methods.page_retrieval import LayerQueries, page_scores
from triptych.evals.studies.head_budgets import (
    PAGE_TOKENS,
    HeadBudgetStudy,
    MissedAttention,
    allocate_budgets,
    find_head_budgets,
    profile_to_extend,
)
from triptych.workers.decode.decode_engine import DecodeEngine
from triptych.workers.local import LocalServer
from triptych.workers.models.facts import describe

PARTS = BUDGET_STEPS


def curve(drops: list[float]) -> list[float]:
    """What is missed at each share; it falls steeply first."""
    falling = list(accumulate(sorted(drops, reverse=True)))
    return [falling[-1], *(falling[-1] - part for part in falling)]


CURVES = st.lists(
    st.lists(st.floats(0, 1, width=16), min_size=PARTS, max_size=PARTS).map(curve),
    min_size=1,
    max_size=6,
)


@given(curves=CURVES)
def test_as_much_is_read_as_was_asked_for_and_no_less_is_gained_than_evenly(
    curves: list[list[float]],
) -> None:
    shares = np.array(allocate_budgets(curves)).reshape(len(curves), PARTS + 1)
    assert (np.diff(shares, axis=1) >= 0).all()
    assert (shares[:, 0] == 0).all()
    assert (shares[:, -1] == 1).all()
    for mean in range(PARTS + 1):
        parts = np.rint(shares[:, mean] * PARTS).astype(int)
        assert mean * len(curves) <= parts.sum()
        missed = sum(row[part] for row, part in zip(curves, parts, strict=True))
        assert missed <= sum(row[mean] for row in curves) + 1e-6


def test_the_head_that_misses_more_gets_the_page() -> None:
    needy, content = [1 - part / PARTS for part in range(PARTS + 1)], [0.0] * (PARTS + 1)
    shares = np.array(allocate_budgets([needy, content])).reshape(2, -1)
    assert shares[:, PARTS // 2].tolist() == [1, 0]


def test_what_is_missed_is_the_square_of_the_attention_to_pages_that_are_not_read() -> None:
    torch.manual_seed(0)
    tokens, first = 9 * PAGE_TOKENS + 5, 9 * PAGE_TOKENS
    query, keys = torch.randn(1, 2, 5, 16), torch.randn(1, tokens, 16) * 2
    logits = query @ keys[:, None].mT
    ahead = torch.arange(tokens) > torch.arange(first, tokens)[:, None]
    weights = logits.masked_fill(ahead, -torch.inf).softmax(-1)
    step = LayerQueries(
        query=query, keys=keys, weights=weights, first=first, significance=torch.zeros(0)
    )
    missed = MissedAttention()
    missed(0, step)
    scores = page_scores("moments", step, PAGE_TOKENS)
    for part in (0, 11, PARTS):
        total = 0.0
        for at in range(5):
            # The first page, those of the newest 64 tokens and the one that is being filled.
            forced = [
                0,
                *(page for page in range(10) if (page + 1) * PAGE_TOKENS + 63 > first + at),
            ]
            count = max(len(forced), -(-10 * part // PARTS))
            others = [page for page in range(9) if page not in forced]
            others.sort(key=lambda page: -float(scores[0, at, page]))
            read = {*forced, *others[: count - len(forced)]}
            mask = torch.tensor([token // PAGE_TOKENS in read for token in range(tokens)])
            total += float((1 - weights[0, :, at, mask].sum(-1)).square().sum())
        assert float(missed.curves[0, 0, part]) == pytest.approx(total / 10, abs=1e-6)


# ---------------------------------------------------------------- with a model


@pytest.fixture(scope="module")
def spread(tiny_model: Path) -> bytes:
    return find_head_budgets(
        tiny_model, HeadBudgetStudy(context=300, documents=2, steps=8), lambda _name: None
    )


def test_a_profile_carries_it_to_the_selection(
    tiny_model: Path, spread: bytes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One head of two is to read everything from a mean share of 1/2 on, the other nothing."""
    facts = describe(tiny_model)
    check_head_budgets(spread, facts.geometry)
    settings = AppConfig(compressor=CompressorConfig(profile="none"))
    empty = profile_to_extend(settings, tiny_model)
    greedy, modest = [0] * 16 + [255] * 17, [0] * 32 + [255]
    path = tmp_path / "profile.json"
    empty.with_head_budgets(bytes([*greedy, *modest] * facts.geometry.layers)).write(path)
    counts = set[tuple[int, ...]]()
    original = DecodeEngine._forward

    def forward(engine: DecodeEngine, batch: list[object]) -> torch.Tensor:
        logits = original(engine, batch)  # type: ignore[arg-type]
        assert engine.selector is not None
        assert engine.selector.dense_layers == 0
        counts.update(tuple(row) for row in engine.selector.counts[:, 0].tolist())
        return logits

    monkeypatch.setattr(DecodeEngine, "_forward", forward)
    config = AppConfig.from_mapping(
        {
            "model": {"name": str(tiny_model), "dtype": "float32"},
            "compressor": {"profile": str(path), "policy": "uniform:fp16"},
            "pool": {"kv_cache_memory_bytes": 16 << 20, "prefix_bytes": 0},
            "decode": {
                "max_num_seqs": 1,
                "selection": {
                    "method": "moments",
                    "keep_fraction": 0.5,
                    "budget_tokens": 0,
                    "window_tokens": 16,
                },
            },
        }
    )
    with LocalServer(config) as server:
        sampling = Sampling(temperature=0.0, max_tokens=4, ignore_eos=True)
        (done,) = server.complete([server.request(list(range(2, 252)) + [40] * 100, sampling)])
        page_tokens = server.plan.raw.tokens
    assert done.error is None
    pages = -(-351 // page_tokens)
    assert {row[0] for row in counts} <= {pages, pages + 1}
    assert all(row[1] <= 4 for row in counts)


def test_a_context_longer_than_the_models_is_refused(tiny_model: Path) -> None:
    with pytest.raises(ConfigError, match="10000 tokens and 128 steps: the model's context is"):
        find_head_budgets(
            tiny_model, HeadBudgetStudy(context=10_000, documents=1), lambda _name: None
        )


@pytest.mark.parametrize(
    ("change", "says"), [(b"\x00", "bytes, expected"), (None, "shares of a head row must grow")]
)
def test_a_spread_that_does_not_fit_is_refused(
    tiny_model: Path, spread: bytes, tmp_path: Path, change: bytes | None, says: str
) -> None:
    settings = AppConfig(compressor=CompressorConfig(profile="none"))
    made = profile_to_extend(settings, tiny_model)
    wrong = spread + change if change else bytes([9]) + spread[1:-1] + bytes([3])
    path = tmp_path / "profile.json"
    replace(made, spread=Profile.pack(wrong)).write(path)
    with pytest.raises(ConfigError, match=says):
        Profile.read(path)
