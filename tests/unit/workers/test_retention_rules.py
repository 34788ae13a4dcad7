"""Retention rules served: pages hold the tokens that rules keep by the model's own attention."""

import random
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

from tests.unit.conformance.rows import compress, profile_beside, stored
from tests.unit.workers.decode.test_resume import Stages
from tests.unit.workers.test_local_server import greedy
from triptych.core.config import AppConfig
from triptych.core.messages import Request
from triptych.core.policy import Retention
from triptych.evals.methods.masked_attention import (
    MaskedModel,
    RecordingAttention,
    by_kv_head,
    causal_weights,
)
from triptych.kernels.retain import BUDGETS, SCORES, ObservedPrompt
from triptych.workers.compress.learned.rope_frame import RopeFrame
from triptych.workers.local import LocalServer
from triptych.workers.models.attention_interface import LayerTraits
from triptych.workers.models.facts import describe

RETENTION = (
    *("streaming_llm", "knorm", "keydiff", "h2o"),
    *("snapkv", "pyramidkv", "adakv", "tova"),
    *("expected_attention", "cake", "kvcrush", "tangram", "compresskv"),
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
    return Stages.of(tiny_model, {**SETTINGS, "profile": profile_beside(tiny_model)})


class Observing(RecordingAttention):
    """Records queries too, and what each pays to each key: [KH, G, N, N] of each layer."""

    def __init__(self) -> None:
        super().__init__()
        self.queries = list[Tensor]()
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
        self.queries.append(query)
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


def measured(observing: Observing, rule: Retention, model: Path) -> Tensor:
    """What prefill has to measure for a rule, [L, KH, N]."""
    weights = torch.stack(observing.weights)  # [L, KH, G, N, N]
    counted = weights[..., -(rule.last_queries or TOKENS) :, :]
    if rule.measured == "attention":
        return counted.sum(3).mean(2)
    if rule.measured == "retrieval_attention":
        of_heads = counted.sum(3).flatten(1, 2)
        chosen = [
            layer[list(some)].mean(0) for layer, some in zip(of_heads, rule.heads, strict=True)
        ]
        return torch.stack(chosen)[:, None].expand(-1, weights.shape[1], -1)
    if rule.measured == "attention_moments":
        return moments(counted)
    return torch.stack([expected(observing, layer, model) for layer in range(len(weights))])


def moments(counted: Tensor) -> Tensor:
    """CAKE's numbers, transcribed: mean plus 200 times the variance over the window's queries; the
    last two tokens have the sums of entropies and of variances of the tokens before the window."""
    window = counted.shape[3]
    found = (counted.mean(3) + 200 * counted.var(3)).mean(2)
    before = counted[..., : TOKENS - window]
    found[..., -2] = -(before * (before + 1e-10).log()).sum((2, 3, 4))
    found[..., -1] = before.var(3).sum((2, 3))
    return found


def expected(observing: Observing, layer: int, model: Path) -> Tensor:
    """Expected attention, transcribed: each query is turned back by RoPE, the mean and the
    covariance are those of torch, and RoPE is averaged over the 512 positions that follow."""
    frame, traits = RopeFrame.of(describe(model)), describe(model).layers[layer]
    query = frame.to_local(observing.queries[layer].transpose(0, 1), torch.arange(TOKENS))[:, 4:]
    basis = torch.eye(query.shape[-1])
    ahead = [frame.rotate(basis, torch.tensor(TOKENS + step)).T for step in range(512)]
    rotation = torch.stack(ahead).mean(0)
    keys, values = observing.keys[layer], observing.values[layer]
    group = len(query) // len(keys)
    scores = torch.zeros(keys.shape[:2])
    for head, of_head in enumerate(query):
        mean = rotation @ of_head.mean(0)
        covariance = rotation @ of_head.T.cov(correction=0) @ rotation.T
        key = keys[head // group, 4:] * traits.scale
        logits = key @ mean + torch.einsum("ni,ij,nj->n", key, covariance, key) / 2
        scores[head // group, 4:] += logits.softmax(-1) / group
    return scores * values.norm(dim=-1)


@pytest.mark.parametrize("method", RETENTION)
def test_pages_hold_the_tokens_that_the_rule_keeps(
    stages: Stages, observing: Observing, tiny_model: Path, method: str
) -> None:
    """What transformers computes in float32 and what the stages do in 16 bits choose alike."""
    plan = stages.plan.of_method(method)
    rule = plan.policy.retention
    assert rule is not None
    layers, kv_heads = len(observing.weights), observing.keys[0].shape[0]
    prompt = ObservedPrompt(
        tokens=TOKENS,
        kv_heads=kv_heads,
        layers=range(layers),
        model_layers=layers,
        attention=measured(observing, rule, tiny_model),
        of_keys=lambda score: torch.stack([score(keys) for keys in observing.keys]),
        kept=TOKENS // 2,
        head_shares=rule.head_shares,
        layer_errors=rule.layer_errors,
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


@pytest.mark.parametrize("method", ["snapkv", "tova", "h2o", "expected_attention", "cake"])
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
                "compressor": {**SETTINGS, "profile": profile_beside(tiny_model)},
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


EARLY = ("pyramidkv", "compresskv", "expected_attention", "cake")


def test_layers_that_are_compressed_early_keep_what_all_together_would(tiny_model: Path) -> None:
    """A pyramid needs to know which layers it has, and CAKE waits for all of them."""
    found = list[object]()
    for layers in (0, 1):
        config = AppConfig.from_mapping(
            {
                "model": {"name": "tiny", "dtype": "float32"},
                "pool": {"kv_cache_memory_bytes": 32 << 20, "prefix_bytes": 0, "extent_pages": 64},
                "compressor": {**SETTINGS, "profile": profile_beside(tiny_model)},
                "prefill": {"max_num_batched_tokens": 128},
                "experimental": {"layers_at_once": layers},
            }
        )
        with LocalServer(config, tiny_model) as server:
            done = server.complete([request(method) for method in EARLY])
            found.append([(one.error, one.tokens, one.report) for one in done])
    assert found[0] == found[1]
