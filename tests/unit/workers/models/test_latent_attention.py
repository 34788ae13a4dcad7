"""Models with multi-head latent attention: one latent for all heads is all that pages hold."""

import random
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.families import FAMILIES
from tests.tiny import DIFFKV
from tests.unit.conformance.rows import FILES
from tests.unit.workers.models.test_families import TIE, save
from triptych.core.config import AppConfig
from triptych.core.errors import ConfigError
from triptych.core.layout import Geometry
from triptych.core.messages import Request, Sampling
from triptych.core.pages import PagePlan
from triptych.evals.methods.full_cache import TransformersRunner
from triptych.evals.methods.mean_keys import mean_keys
from triptych.kernels import prefill_attention
from triptych.workers.local import Completion, LocalServer
from triptych.workers.models.facts import describe, shape_of
from triptych.workers.models.load import load

NAMES = ("DeepSeek-V2-Lite", "DeepSeek-V3")
LENGTHS = (1, 5, 47, 48, 49, 130, 200)
ANSWER_TOKENS = 24
METHODS = ("uniform:k4v2", "leankv", "snapkv", "saw_int4", "uniform:fp16")
"""Beside the default, which is diffkv."""
LITE = Geometry(layers=27, kv_heads=1, head_dim=512 + 64, has_latents=True)
"""DeepSeek-V2-Lite."""


@pytest.fixture(scope="module", params=NAMES)
def name(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture(scope="module")
def folder(name: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("latents")


@pytest.fixture(scope="module")
def model(name: str, folder: Path) -> nn.Module:
    return save(FAMILIES[name](), folder)


def settings(**parts: Mapping[str, object]) -> AppConfig:
    base: dict[str, object] = {
        "model": {"name": "tiny", "dtype": "float32"},
        "pool": {"kv_cache_memory_bytes": 16 << 20, "extent_pages": 64},
        "compressor": {"policy": "uniform:fp16", "recent_window_tokens": 20},
        "prefill": {"max_num_batched_tokens": 48},
    }
    return AppConfig.from_mapping(base | parts)


def asked(server: LocalServer, lengths: tuple[int, ...] = LENGTHS) -> list[Request]:
    greedy = Sampling(temperature=0.0, max_tokens=ANSWER_TOKENS, ignore_eos=True)
    draw = random.Random(3)
    prompts = [[draw.randrange(2, 258) for _ in range(count)] for count in lengths]
    return [server.request(prompt, greedy) for prompt in prompts]


def again(server: LocalServer, one: Request) -> Request:
    return replace(one, id=server.request(one.prompt, one.sampling).id)


def tokens_of(answers: list[Completion]) -> list[list[int]]:
    assert [answer.error for answer in answers] == [None] * len(answers)
    return [answer.tokens for answer in answers]


def test_pages_hold_one_latent_of_a_token(folder: Path, model: nn.Module) -> None:
    facts = describe(folder)
    assert facts.geometry == shape_of(folder).geometry
    assert facts.geometry == Geometry(layers=2, kv_heads=1, head_dim=48 + 16, has_latents=True)
    assert facts.num_heads == 4
    plan = PagePlan.of(settings(), facts.geometry)
    assert plan.raw.format.name == "latent16"
    assert plan.raw_bytes(1) == 2 * 2 * (48 + 16)


def test_cached_and_computed_prompts_are_answered_as_by_transformers(
    folder: Path, model: nn.Module
) -> None:
    with LocalServer(settings(), folder) as server:
        requests = asked(server)
        first = tokens_of(server.complete(requests))
        second = server.complete([again(server, one) for one in requests])
    assert tokens_of(second) == first
    assert max(answer.cached_tokens for answer in second) > 0
    for one, tokens in zip(requests, first, strict=True):
        ids = torch.tensor([[*one.prompt, *tokens]])
        with torch.inference_mode():
            logits = model(input_ids=ids).logits[0, len(one.prompt) - 1 : -1]
        own = logits.gather(1, torch.tensor(tokens)[:, None])[:, 0]
        assert ((logits.max(-1).values - own) / logits.std()).max() < TIE


def test_requests_of_several_methods_answer_together_as_alone(
    folder: Path, model: nn.Module
) -> None:
    compressor = {**DIFFKV, "methods": METHODS, "mass_high": 0.3, "mass_low": 0.05}
    with LocalServer(settings(compressor=compressor), folder) as server:
        lengths = (20, 43, 66, 130) * 3
        requests = [
            replace(one, method=("", *METHODS)[number % 6])
            for number, one in enumerate(asked(server, lengths))
        ]
        together = server.complete(requests)
        alone = [server.complete([again(server, one)])[0] for one in requests]
    assert tokens_of(together) == tokens_of(alone)
    ratios = {
        one.method: answer.report.raw_bytes / answer.report.stored_bytes
        for one, answer in zip(requests, together, strict=True)
        if answer.report and len(one.prompt) == 130
    }
    assert ratios["uniform:k4v2"] > 1.5


def test_the_settings_of_a_new_server_serve_a_model_with_latents(
    folder: Path, model: nn.Module
) -> None:
    config = settings(compressor={})
    with LocalServer(config, folder) as server:
        requests = asked(server)
        together = tokens_of(server.complete(requests))
        alone = [server.complete([again(server, one)])[0] for one in requests]
    assert together == tokens_of(alone)


def test_layers_of_transformers_are_as_before_under_another_attention(
    folder: Path, model: nn.Module
) -> None:
    loaded = load(folder, "float32").network.model
    ids = torch.arange(9)[None] + 5
    with torch.inference_mode():
        loaded.set_attn_implementation("eager")
        assert torch.equal(loaded(ids).logits, model(ids).logits)


def test_the_centre_of_a_profile_is_the_mean_of_what_pages_store(
    folder: Path, model: nn.Module
) -> None:
    ids, seen = torch.arange(2, 40), list[Tensor]()

    def attend(layer: int, query: Tensor, key: Tensor, value: Tensor, *rest: Any) -> Tensor:
        assert key is value
        seen.append(key[1:].mean(0))
        scale = rest[0].scale
        return prefill_attention(query, key, value, (0, len(ids)), scale=scale)

    with torch.inference_mode():
        load(folder, "float32").network(ids, ids - 2, attend, ids[:1])
    found = mean_keys(TransformersRunner(folder), [ids.tolist()])
    torch.testing.assert_close(found, torch.stack(seen), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    ("compressor", "reason"),
    [
        ({"policy": "kivi"}, "stores latents"),
        ({"policy": "spherical"}, "stores latents"),
        ({"policy": "kvarn"}, "stores latents"),
        ({"policy": "uniform:fp16", "methods": ["kivi:2"]}, "stores latents"),
        ({**DIFFKV, "low_format": "k8v2"}, "compressor.low_format=k8v2"),
        ({**DIFFKV, "policy": "learned:score"}, "learned"),
    ],
)
def test_methods_that_treat_keys_and_values_apart_are_refused_in_one_line(
    compressor: Mapping[str, object], reason: str
) -> None:
    with pytest.raises(ConfigError, match=reason) as error:
        PagePlan.of(settings(compressor=compressor), LITE)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("policy", ["learned:score", "learned:merge"])
def test_learned_networks_are_refused_in_one_line(policy: str) -> None:
    config = settings(compressor={**DIFFKV, "policy": policy})
    with pytest.raises(ConfigError, match="learned networks read and merge these apart") as error:
        PagePlan.of(config, LITE, learned=FILES)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(("heads", "is_served"), [(16, True), (128, False)])
def test_more_heads_than_gpu_kernels_take_are_refused_in_one_line(
    folder: Path, model: nn.Module, heads: int, is_served: bool
) -> None:
    facts = replace(describe(folder), geometry=LITE, num_heads=heads)
    facts.check_heads(settings())
    on_gpu = settings(decode={"actor": {"num_gpus": 1}})
    if is_served:
        facts.check_heads(on_gpu)
        return
    with pytest.raises(ConfigError, match="num_gpus: this model has 128") as error:
        facts.check_heads(on_gpu)
    assert "\n" not in str(error.value)


def test_deepseek_v2_lite_takes_less_than_a_tenth_of_the_bytes_of_expanded_heads() -> None:
    config = settings(pool={"kv_cache_memory_bytes": 1 << 30, "extent_pages": 64})
    plan = PagePlan.of(config, LITE)
    expanded = PagePlan.of(config, Geometry(layers=27, kv_heads=16, head_dim=192))
    assert plan.raw_bytes(1) == 27 * 576 * 2
    assert expanded.raw_bytes(1) > 10 * plan.raw_bytes(1)
