"""A request whose activations turn non-finite ends alone; the others beside it do not change."""

from pathlib import Path

import pytest
import torch
from transformers import LlamaForCausalLM

from tests.tiny import DIFFKV, byte_tokenizer
from triptych.core.config import AppConfig
from triptych.core.messages import Sampling
from triptych.workers.local import LocalServer

BAD = 200
"""The token whose embedding is not finite, or too large for the formats of pages."""

HEALTHY = [[5 + (i * step) % 100 for i in range(length)] for step, length in ((3, 70), (7, 9))]
ENTROPY_STOP = {"name": "entropy_stop", "enabled": True, "options": {"threshold": 0.0}}
SETTINGS = {
    "fp16": {"compressor": {"policy": "uniform:fp16", "recent_window_tokens": 20}},
    "diffkv": {"compressor": DIFFKV},
    "selection": {"decode": {"selection": {"method": "box", "budget_tokens": 32}}},
    "plugins": {"decode": {"plugins": [ENTROPY_STOP]}},
}


@pytest.fixture(scope="module", params=[float("nan"), 1e30], ids=str)
def poisoned_model(
    request: pytest.FixtureRequest, tiny_model: Path, tmp_path_factory: pytest.TempPathFactory
) -> Path:
    path = tmp_path_factory.mktemp(f"poisoned-{request.param}-")
    model = LlamaForCausalLM.from_pretrained(tiny_model, dtype=torch.float32)
    with torch.no_grad():
        model.model.embed_tokens.weight[BAD] = request.param
    model.save_pretrained(path)
    byte_tokenizer().save_pretrained(path)
    return path


def greedy(**more: object) -> Sampling:
    return Sampling(temperature=0.0, max_tokens=24, ignore_eos=True, **more)


@pytest.mark.parametrize("name", SETTINGS)
def test_a_row_that_turns_non_finite_ends_its_own_request_only(
    poisoned_model: Path, name: str
) -> None:
    base: dict[str, object] = {
        "model": {"name": "tiny", "dtype": "float32"},
        "pool": {"kv_cache_memory_bytes": 16 << 20, "extent_pages": 64, "prefix_bytes": 0},
        "prefill": {"max_num_batched_tokens": 48},
    }
    settings = AppConfig.from_mapping(base | SETTINGS[name])
    in_prompt = [*range(5, 45), BAD, *range(5, 35)]
    with LocalServer(settings, poisoned_model) as server:
        expected = server.complete([server.request(p, greedy()) for p in HEALTHY])
        answers = server.complete(
            [
                server.request(HEALTHY[0], greedy()),
                server.request(in_prompt, greedy()),
                # The second token is the bad one, so the third step of decode fails.
                server.request([5, 6, 7], greedy(logit_bias=((BAD, 100.0),))),
                server.request(HEALTHY[1], greedy()),
            ]
        )
        again = server.complete([server.request(p, greedy()) for p in HEALTHY])
        assert server.pool.stat().request_pages == 0
    healthy = [answers[0], answers[3]]
    for own, calm, later in zip(healthy, expected, again, strict=True):
        assert own.error is None
        assert own.tokens == calm.tokens == later.tokens
    for bad in answers[1:3]:
        if bad.error is None:  # a large value may pass through the normalisation
            assert "nan" not in poisoned_model.name
        else:
            assert bad.error.message == "the model computed logits that are not finite numbers"
