"""Selection in the engines: it reads less, and knows of every page what is in it."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from triptych.core.config import AppConfig
from triptych.core.errors import ConfigError
from triptych.core.messages import Sampling
from triptych.kernels.select import summarize_pages
from triptych.workers.decode.decode_engine import DecodeEngine
from triptych.workers.decode.page_selection import StepChoice, TableSummaries
from triptych.workers.local import LocalServer

PROMPT = list(range(2, 250)) + list(range(40, 140))
POLICIES = {
    "uniform:fp16": {"policy": "uniform:fp16"},
    "uniform:k8v4": {"policy": "uniform:k8v4", "recent_window_tokens": 20},
    "diffkv": {
        "policy": "diffkv",
        "alpha_high": 1.0,
        "alpha_low": 0.1,
        "recent_window_tokens": 8,
        "high_window_tokens": 24,
        "score_every_tokens": 4,
    },
}


def config(model: Path, policy: str, **selection: object) -> AppConfig:
    return AppConfig.from_mapping(
        {
            "model": {"name": str(model), "dtype": "float32"},
            "compressor": {"profile": "none", **POLICIES[policy]},
            "pool": {"kv_cache_memory_bytes": 16 << 20, "extent_pages": 64, "prefix_bytes": 0},
            "decode": {"selection": {"budget_tokens": 0, "dense_layers": 0, **selection}},
        }
    )


def answers(settings: AppConfig, *, together: bool = True) -> list[list[float]]:
    """Tokens and their log probabilities; a batch of several may round in another way."""
    with LocalServer(settings) as server:
        sampling = Sampling(temperature=0.0, max_tokens=40, ignore_eos=True, logprobs=1)
        asked = [server.request(PROMPT[at:], sampling) for at in (0, 30, 200)]
        batches = [asked] if together else [[one] for one in asked]
        done = [answer for batch in batches for answer in server.complete(batch)]
        assert server.pool.stat().held_pages == 0
    assert all(one.error is None for one in done)
    return [[*one.tokens, *(entry.logprob for entry in one.logprobs)] for one in done]


@pytest.mark.parametrize("policy", POLICIES)
def test_with_all_pages_the_answers_are_the_same_to_the_last_bit(
    tiny_model: Path, policy: str
) -> None:
    whole = answers(config(tiny_model, policy), together=False)
    selected = config(tiny_model, policy, method="moments", keep_fraction=1.0)
    kept = answers(selected, together=False)
    assert kept == whole


def test_contexts_of_up_to_twice_the_budget_are_read_whole(
    tiny_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    chosen, original = list[int](), StepChoice.lists

    def lists(choice: StepChoice, layer: int, query: Any, **options: Any) -> Any:
        chosen.extend(choice.positions[choice.read >= 0].tolist())
        return original(choice, layer, query, **options)

    monkeypatch.setattr(StepChoice, "lists", lists)
    settings = config(
        tiny_model, "uniform:k8v4", method="moments", keep_fraction=0.0, budget_tokens=180
    )
    answers(settings)  # prompts of 348, 318 and 148 tokens, and 40 more
    assert min(chosen) == 2 * 180
    assert max(chosen) >= 380


@pytest.mark.parametrize("policy", POLICIES)
def test_what_is_known_of_each_page_is_what_the_page_holds(
    tiny_model: Path, policy: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After each step, all summaries are those that the reference makes of the pages anew."""
    checked = 0
    original = DecodeEngine._forward

    def forward(engine: DecodeEngine, batch: list[Any]) -> torch.Tensor:
        nonlocal checked
        selector = engine._selector
        assert selector is not None
        for one in batch:
            for part in filter(None, selector._summaries):
                checked += compare_with_pages(part, one.slot)
        return original(engine, batch)

    monkeypatch.setattr(DecodeEngine, "_forward", forward)
    answers(config(tiny_model, policy, method="box", keep_fraction=0.3))
    assert checked > 500


def compare_with_pages(part: TableSummaries, slot: int) -> int:
    """How many summaries of a slot were compared; they must all be up to date."""
    table, room = part.table, part.table.layout.tokens
    layers, _, kv_heads, _ = table.pages.shape
    compared = 0
    for layer in range(layers):
        known = part.of_layer[layer]
        for head in range(kv_heads):
            full = int(table.tokens[layer, slot, head]) // room
            if not full:
                continue
            new = replace(known, memory=torch.zeros_like(known.memory))
            columns = torch.arange(full, dtype=torch.int32)
            pages = torch.from_numpy(table.pages[layer, slot, head, :full].copy())
            rows = torch.full_like(columns, slot * kv_heads + head)
            summarize_pages(part._memory.near, table.layout, pages, new, rows, columns)
            tiles = -(-full // 16)
            for name in ("codes", "numbers", "positions"):
                want = getattr(new, name)[slot, head, :tiles]
                got = getattr(known, name)[slot, head, :tiles]
                is_full = torch.arange(tiles * 16).view(tiles, 16) < full
                mask = is_full.view(tiles, *[1] * (want.dim() - 2), 16).expand_as(want)
                assert torch.equal(got[mask], want[mask])
            compared += full
    return compared


@pytest.mark.parametrize("every", [1, 4])
@pytest.mark.parametrize("policy", POLICIES)
def test_lists_are_short_and_fit_the_pages_that_a_row_has(
    tiny_model: Path, policy: str, every: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where a choice is kept for some steps while pages come and tokens step down."""
    kept, shares = 0, list[float]()
    original = StepChoice.lists

    def lists(choice: StepChoice, layer: int, query: Any, **options: Any) -> Any:
        nonlocal kept
        found = original(choice, layer, query, **options)
        assert found is not None
        kept += int((choice.read >= 0).sum())
        kept -= sum(int((due >= 0).sum()) for due in choice.due.values())
        for slot in choice.read[choice.read >= 0].tolist():
            rows = [table.tokens[layer, slot] for table in choice.owner.tables]
            rooms = [table.layout.tokens for table in choice.owner.tables]
            held = [-(-row // room) for row, room in zip(rows, rooms, strict=True)]
            pages, parts = sum(held), choice.owner.tables[0].layout.parts
            small = held[0] - -(-held[0] // parts)
            for head, count in enumerate(found.counts[slot].tolist()):
                assert found.ordinals[slot, head, count - 1] == pages[head] - 1  # the last page
                shares.append((count - small[head]) / (pages[head] - small[head]))
        return found

    monkeypatch.setattr(StepChoice, "lists", lists)
    answers(config(tiny_model, policy, method="moments", reselect_every=every, window_tokens=16))
    assert (kept > 0) == (every > 1)
    assert min(shares) < 0.5


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("method", "luck"),
        ("keep_fraction", 1.5),
        ("keep_fraction", -0.1),
        ("budget_tokens", -1),
        ("reselect_every", 0),
        ("omitted_mass", 0.1),  # without a method
        ("omitted_mass", 1.0),
    ],
)
def test_a_wrong_setting_is_an_error_that_names_it(key: str, value: object) -> None:
    with pytest.raises(ConfigError, match=key):
        AppConfig.from_mapping({"decode": {"selection": {key: value}}})
