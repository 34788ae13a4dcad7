"""Prompts that are read in blocks: bounded raw pages, and the tokens that stay in them."""

import random
from collections.abc import Mapping
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor
from transformers import LlamaForCausalLM

from tests.tiny import save_tiny_qwen3
from tests.unit.conformance.rows import compress, is_same, stored
from tests.unit.workers.decode.test_resume import Stages
from tests.unit.workers.settled import booked_in_the_end
from tests.unit.workers.test_local_server import differences, greedy
from triptych.core.config import AppConfig
from triptych.core.errors import ConfigError
from triptych.core.layout import Geometry
from triptych.core.messages import Prefill, Prefilled, Request
from triptych.core.pages import PagePlan
from triptych.evals.methods.masked_attention import MaskedModel, by_kv_head
from triptych.kernels.retain import (
    block_scores,
    episode_weights,
    kept_of_block,
    layer_budgets,
    lost_attention,
)
from triptych.kernels.retain.episodes import turn_embeddings, turns_of
from triptych.router import ByteModel
from triptych.workers.local import LocalServer
from triptych.workers.models.attention_interface import LayerTraits

BLOCK, TOKENS, QUERIES = 32, 236, 64
SETTINGS: Mapping[str, object] = {
    "policy": "epicache",
    "recent_window_tokens": 4,
    "keep_share": 0.3,
    "block_tokens": BLOCK,
    "kv_rotation": "hadamard",
}
ENDS = 40, 77, 120, 160, 200, 228
"""Where turns end."""
PROMPT = tuple(
    1 if at in ENDS else token
    for at, token in enumerate(random.Random(7).choices(range(4, 250), k=TOKENS))
)


def request(tokens: tuple[int, ...] = PROMPT, name: str = "r0") -> Request:
    return Request(id=name, prompt=tokens, sampling=greedy(8), reply_to="client")


def server_config(chunk: int = 512, pool: int = 32 << 20, **settings: object) -> AppConfig:
    return AppConfig.from_mapping(
        {
            "model": {"name": "tiny", "dtype": "float32"},
            "pool": {"kv_cache_memory_bytes": pool, "extent_pages": 16},
            "compressor": {**SETTINGS, **settings},
            "prefill": {"max_num_batched_tokens": chunk},
        }
    )


@pytest.fixture(scope="module")
def stages(tiny_model: Path) -> Stages:
    return Stages.of(tiny_model, SETTINGS)


@pytest.mark.parametrize(
    "settings", [{}, {"keep_tokens": 70}, {"keep_share": 1.0}, {"block_tokens": 7}]
)
def test_a_prompt_never_has_more_raw_pages_than_the_budget_and_a_block_take(
    tiny_model: Path, settings: Mapping[str, object]
) -> None:
    """The pages that the pool has given are looked at after each step."""
    stages = Stages.of(tiny_model, {**SETTINGS, **settings})
    plan, engine = stages.plan, stages.engines["prefill"]
    rule = plan.policy.retention
    assert rule is not None
    kept = plan.kept_tokens(TOKENS)
    most = min(plan.raw.pages(TOKENS), plan.raw.pages(kept + rule.block_tokens) + 1)
    engine.accept(Prefill(requests=(request(),)))
    sends, held = [], []
    while engine.has_work():
        sends += engine.step()
        held.append(stages.pool.stat().held_pages)
    assert len(held) >= TOKENS // rule.block_tokens
    assert max(held) <= most * plan.geometry.head_rows
    assert max(held) * plan.page_bytes <= ByteModel(plan).estimate(TOKENS, 0).raw
    if rule.keep_share < 1:
        assert max(held) < plan.raw.pages(TOKENS) * plan.geometry.head_rows
    (done,) = [one.message for one in sends if isinstance(one.message, Prefilled)]
    tokens = np.frombuffer(done.handle.runs[0].tokens, "<i4")
    assert tokens.sum() <= kept * plan.geometry.head_rows
    engine.abandon()
    assert stages.pool.stat().held_pages == 0
    assert stages.pool.check() == []


def test_the_bytes_that_are_booked_do_not_grow_with_the_prompt(tiny_model: Path) -> None:
    plan = Stages.of(tiny_model, {**SETTINGS, "keep_tokens": 100}).plan
    model = ByteModel(plan)
    short, long = model.estimate(2_000, 20), model.estimate(2_000_000, 20)
    assert short == long
    assert model.of_floor("high").estimate(2_000, 20).raw > 10 * short.raw
    assert model.of_floor("low") is model


class InBlocks:
    """The method transcribed for one pass of the model: blocks one after another in each layer."""

    def __init__(self, weights: Tensor, plan: PagePlan, budgets: list[int] | None = None) -> None:
        self.weights, self.plan, self.budgets = weights, plan, budgets
        self.errors = list[float]()
        self.kept = list[Tensor]()
        """Positions that each layer keeps, [KH, m]."""

    def __call__(
        self,
        layer: int,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        traits: LayerTraits,
        sinks: Tensor | None = None,
    ) -> Tensor:
        heads, plan = key.shape[1], self.plan
        queries = by_kv_head(query, heads) * traits.scale  # [KH, G, N, D]
        held = torch.empty(heads, 0, dtype=torch.long)
        out, kept, error = torch.zeros_like(queries), plan.kept_tokens(TOKENS), None
        first = TOKENS % BLOCK or BLOCK
        edges = [0, *range(first, TOKENS + 1, BLOCK)]
        for start, end in pairwise(edges):
            new = torch.arange(start, end)
            at = torch.cat((held, new.expand(heads, -1)), 1)
            rows = torch.arange(heads)[:, None]
            keys, values = key.transpose(0, 1)[rows, at], value.transpose(0, 1)[rows, at]
            logits = queries[:, :, start:end] @ keys[:, None].mT
            hidden = at[:, None, None] > new[:, None]
            paid = logits.masked_fill(hidden, float("-inf")).softmax(-1)
            out[:, :, start:end] = paid @ values[:, None]
            held = at
            if at.shape[1] <= kept:
                continue
            sums = paid[:, :, -QUERIES:].sum(2).flatten(0, 1)
            sink = plan.sink_tokens
            newest = plan.full_recent_tokens - sink
            scores = block_scores(sums, heads, self.weights[at], sink, newest)
            if error is None:
                error = lost_attention(scores, kept)
            budget = kept if self.budgets is None else self.budgets[layer]
            held = at.gather(1, kept_of_block(scores, budget))
        self.errors.append(error or 0.0)
        self.kept.append(held)
        return out.flatten(0, 1).transpose(0, 1)


def test_pages_hold_the_tokens_that_block_after_block_leaves(
    stages: Stages, tiny_model: Path
) -> None:
    """What one pass of the model in float32 chooses; budgets depend on all layers at once."""
    plan, masked = stages.plan, MaskedModel(tiny_model)
    turns = turns_of(PROMPT, {1})
    weights = episode_weights(turn_embeddings(PROMPT, turns), turns)
    assert len(turns) == 4
    assert len(weights.unique()) == 2
    budgets: list[int] | None = None
    for _ in range(2):
        found = InBlocks(weights, plan, budgets)
        with torch.inference_mode():
            masked.model(
                torch.tensor(PROMPT), torch.arange(TOKENS), found, torch.tensor([TOKENS - 1])
            )
        kept = plan.kept_tokens(TOKENS)
        first = next(n for n in range(TOKENS % BLOCK, TOKENS, BLOCK) if n > kept)
        budgets = layer_budgets(found.errors, kept, plan.full_recent_tokens, first)
    expected = [set(row.tolist()) for layer in found.kept for row in layer]
    ((_, done),) = compress(stages, [request()])
    held = [set[int]() for _ in expected]
    for _, _, _, positions in stored(stages, done):
        for row, named in zip(held, positions.tolist(), strict=True):
            row.update(at for at in named if at >= 0)
    stages.engines["compress"].cancel(["r0"])
    assert [len(row) for row in held] == [len(row) for row in expected]
    alike = sum(len(one & other) for one, other in zip(held, expected, strict=True))
    assert alike >= 0.98 * sum(map(len, expected))


def test_with_a_budget_of_the_whole_prompt_answers_are_those_of_the_model(
    tiny_model: Path,
) -> None:
    model = LlamaForCausalLM.from_pretrained(tiny_model, dtype=torch.float32).eval()
    config = server_config(keep_share=1.0, high_format="fp16", kv_rotation="none")
    with LocalServer(config, tiny_model) as server:
        (done,) = server.complete([server.request(PROMPT, greedy(12))])
    assert done.error is None
    assert differences(model, list(PROMPT), done).max() < 0.02


def test_answers_do_not_depend_on_chunks_or_neighbours(tiny_model: Path) -> None:
    """Blocks have fixed ends, wherever the chunks end."""
    answers = list[list[int]]()
    for chunk in (512, 40, 17):
        with LocalServer(server_config(chunk, methods=["knorm"]), tiny_model) as server:
            asked = [request(), request(PROMPT[:90], "r1"), request(PROMPT[:50], "r2")]
            asked[2] = replace(asked[2], method="knorm")
            first, *_ = server.complete(asked)
            again, twin = server.complete([request(name="r3"), request(name="r4")])
            assert (first.error, again.error, twin.error) == (None, None, None)
            assert first.report is not None
            assert first.report.policy == "epicache"
            assert first.report == again.report == twin.report
            assert again.cached_tokens == 0
            answers += [first.tokens, again.tokens, twin.tokens]
            assert booked_in_the_end(server) == {}
    assert all(one == answers[0] for one in answers)


def test_a_prompt_fits_whose_raw_pages_would_not(tmp_path: Path) -> None:
    """``snapkv`` keeps as few tokens, but has all of them in raw pages before."""
    model = save_tiny_qwen3(tmp_path, context_tokens=2_048)
    long = tuple(random.Random(1).choices(range(4, 250), k=1_500))
    config = server_config(pool=1 << 20, keep_tokens=100, methods=["snapkv"])
    with LocalServer(config, model) as server:
        (served,) = server.complete([request(long)])
        (refused,) = server.complete([replace(request(long, "r1"), method="snapkv")])
    assert served.error is None
    assert len(served.tokens) == 8
    assert refused.error is not None
    assert refused.error.code == "context_length_exceeded"


def test_no_token_is_dropped_if_the_floor_is_high(stages: Stages) -> None:
    ((_, done),) = compress(stages, [replace(request(), floor="high")])
    stages.engines["compress"].cancel(["r0"])
    assert done.report.classes is not None
    assert done.report.classes.pruned == 0


def test_a_worker_that_dies_between_blocks_leaves_nothing_and_the_next_computes_the_same(
    stages: Stages,
) -> None:
    engine, pool = stages.engines["prefill"], stages.pool
    ((_, whole),) = compress(stages, [request()])
    held = stored(stages, whole)
    stages.engines["compress"].cancel(["r0"])
    engine.accept(Prefill(requests=(request(name="r1"),)))
    for _ in range(4):
        engine.step()
    assert pool.stat().held_pages > 0
    engine.abandon()
    assert pool.stat().held_pages == 0
    assert not engine.has_work()
    ((_, again),) = compress(stages, [request(name="r1")])
    assert is_same(held, stored(stages, again))
    stages.engines["compress"].cancel(["r1"])
    assert pool.check() == []


@pytest.mark.parametrize(
    ("settings", "windows", "text"),
    [
        ({}, (0, 8), "sliding window"),
        ({"policy": "uniform:k8v4/epicache"}, (), "name it alone"),
        ({"policy": "epicache/uniform:k8v4"}, (), "name it alone"),
    ],
)
def test_what_cannot_be_read_in_blocks_is_refused(
    settings: Mapping[str, object], windows: tuple[int, ...], text: str
) -> None:
    geometry = Geometry(layers=2, kv_heads=2, head_dim=64, windows=windows)
    with pytest.raises(ConfigError, match=text):
        PagePlan.of(server_config(**settings), geometry)
