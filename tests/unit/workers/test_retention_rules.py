"""Retention rules served: pages hold the tokens that rules keep by the model's own attention."""

import random
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

from tests.unit.conformance.rows import compress, stored
from tests.unit.workers.decode.test_resume import Stages
from tests.unit.workers.test_local_server import greedy
from triptych.core.config import AppConfig
from triptych.core.messages import Request
from triptych.evals.methods.masked_attention import (
    MaskedModel,
    RecordingAttention,
    by_kv_head,
    causal_weights,
)
from triptych.kernels.retain import BUDGETS, SCORES, ObservedPrompt
from triptych.workers.local import LocalServer
from triptych.workers.models.attention_interface import LayerTraits

RETENTION = (
    *("streaming_llm", "knorm", "keydiff", "h2o"),
    *("snapkv", "pyramidkv", "adakv", "tova"),
)
TOKENS = 240
SETTINGS = {
    "policy": RETENTION[0],
    "methods": RETENTION[1:],
    "recent_window_tokens": 4,
    "keep_share": 0.5,
    "kv_rotation": "hadamard",
}
PROMPT = tuple(random.Random(5).choices(range(2, 250), k=TOKENS))


@pytest.fixture(scope="module")
def stages(tiny_model: Path) -> Stages:
    return Stages.of(tiny_model, SETTINGS)


class Observing(RecordingAttention):
    """Records what each query pays to each key, too: [KH, G, N, N] of each layer."""

    def __init__(self) -> None:
        super().__init__()
        self.weights = list[Tensor]()

    def __call__(
        self,
        layer: int,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        traits: LayerTraits,
        sinks: Tensor | None = None,
    ) -> Tensor:
        grouped = by_kv_head(query, key.shape[1]) * traits.scale
        self.weights.append(causal_weights(grouped, key.transpose(0, 1), 0))
        return super().__call__(layer, query, key, value, traits, sinks)


@pytest.fixture(scope="module")
def observing(tiny_model: Path) -> Observing:
    found, masked = Observing(), MaskedModel(tiny_model)
    with torch.inference_mode():
        masked.model(torch.tensor(PROMPT), torch.arange(TOKENS), found, torch.tensor([TOKENS - 1]))
    return found


def request(method: str, tokens: tuple[int, ...] = PROMPT) -> Request:
    name = f"{method}-{len(tokens)}"
    asked = Request(id=name, prompt=tokens, sampling=greedy(8), reply_to="client")
    return replace(asked, method=method)


@pytest.mark.parametrize("method", RETENTION)
def test_pages_hold_the_tokens_that_the_rule_keeps(
    stages: Stages, observing: Observing, method: str
) -> None:
    """What transformers computes in float32 and what the stages do in 16 bits choose alike."""
    plan = stages.plan.of_method(method)
    rule = plan.policy.retention
    assert rule is not None
    weights = torch.stack(observing.weights)  # [L, KH, G, N, N]
    counted = weights[..., -(rule.last_queries or TOKENS) :, :]
    layers, kv_heads = weights.shape[:2]
    prompt = ObservedPrompt(
        tokens=TOKENS,
        kv_heads=kv_heads,
        layers=range(layers),
        model_layers=layers,
        attention=counted.sum(3).mean(2),
        of_keys=lambda score: torch.stack([score(keys) for keys in observing.keys]),
        kept=TOKENS // 2,
    )
    sink, leaving = plan.sink_tokens, plan.leaving_tokens(TOKENS)
    always = torch.ones(TOKENS, dtype=torch.bool)
    always[sink : sink + leaving] = False
    scores = SCORES[rule.score](prompt).masked_fill(always, float("inf"))
    expected = BUDGETS[rule.budget](scores, prompt).flatten(0, 1) | always
    ((_, done),) = compress(stages, [request(method)])
    held = torch.zeros_like(expected)
    for _, _, _, positions in stored(stages, done):
        for row, named in enumerate(positions):
            held[row, named[named >= 0].long()] = True
    stages.engines["compress"].cancel([f"{method}-{TOKENS}"])
    assert int(held.sum()) == int(expected.sum()), "the budget is exact"
    assert (held & expected).sum() >= 0.99 * expected.sum()


@pytest.mark.parametrize("method", ["snapkv", "tova", "h2o"])
def test_what_is_kept_does_not_depend_on_chunks_or_on_neighbours(
    tiny_model: Path, method: str
) -> None:
    """The last queries are a sequence of their own, wherever the chunks end."""
    answers = list[list[int]]()
    for chunk in (512, 200, 37):
        config = AppConfig.from_mapping(
            {
                "model": {"name": "tiny", "dtype": "float32"},
                "pool": {"kv_cache_memory_bytes": 32 << 20, "extent_pages": 64},
                "compressor": {**SETTINGS, "profile": "none"},
                "prefill": {"max_num_batched_tokens": chunk},
            }
        )
        with LocalServer(config, tiny_model) as server:
            asked = [request(method), request(method, PROMPT[:90]), request("knorm", PROMPT[:50])]
            first, *_ = server.complete(asked)
            again = server.complete([replace(asked[0], id="again")])[0]
            assert (first.error, again.cached_tokens) == (None, 0)
            assert first.report is not None
            assert first.report.policy == method
            assert first.report == again.report
            answers += [first.tokens, again.tokens]
    assert all(one == answers[0] for one in answers)


def test_layers_that_are_compressed_early_keep_what_all_together_would(tiny_model: Path) -> None:
    """A pyramid needs to know which layers it has."""
    found = list[object]()
    for layers in (0, 1):
        config = AppConfig.from_mapping(
            {
                "model": {"name": "tiny", "dtype": "float32"},
                "pool": {"kv_cache_memory_bytes": 32 << 20, "prefix_bytes": 0, "extent_pages": 64},
                "compressor": {**SETTINGS, "profile": "none"},
                "prefill": {"max_num_batched_tokens": 128},
                "experimental": {"layers_at_once": layers},
            }
        )
        with LocalServer(config, tiny_model) as server:
            done = server.complete([request(method) for method in ("pyramidkv", "snapkv")])
            found.append([(one.error, one.tokens, one.report) for one in done])
    assert found[0] == found[1]
