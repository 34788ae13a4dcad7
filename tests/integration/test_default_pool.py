"""A model with a long context and tiny random weights, on a pool of default size."""

import random
from pathlib import Path

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from tests.tiny import byte_tokenizer
from triptych.core.config import AppConfig
from triptych.core.messages import Failed, Sampling
from triptych.router import ByteModel
from triptych.workers.local import LocalServer

CONTEXT_TOKENS = 40_960
CHATS, ANSWER = 12, 12


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Pages as those of a model of 0.6 billion parameters: 28 layers of 8 KV heads."""
    path, tokenizer = tmp_path_factory.mktemp("long"), byte_tokenizer()
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=64,
        intermediate_size=64,
        num_hidden_layers=28,
        num_attention_heads=8,
        num_key_value_heads=8,
        head_dim=64,
        max_position_embeddings=CONTEXT_TOKENS,
        bos_token_id=0,
        eos_token_id=1,
    )
    torch.manual_seed(11)
    LlamaForCausalLM(config).save_pretrained(path)
    tokenizer.save_pretrained(path)
    return path


def test_chats_without_max_tokens_run_together_although_each_could_fill_the_pool(
    model: Path,
) -> None:
    """Each may write until the end of what the pool holds, as the ingress lets it."""
    with LocalServer(AppConfig.from_mapping({}), model) as server:
        pages = server.pool.capacity_pages * server.plan.page_bytes - server.plan.prefix_bytes
        limits = ByteModel(server.plan).limits(pages, CONTEXT_TOKENS, is_layerwise=True)
        most = limits.total_tokens
        assert 20_000 < most <= CONTEXT_TOKENS
        assert ByteModel(server.plan).estimate(most, 0).grown > pages // 2
        prompts = [random.Random(n).choices(range(2, 250), k=30 + n) for n in range(CHATS)]
        requests = [
            server.request(prompt, Sampling(max_tokens=most - len(prompt), ignore_eos=True))
            for prompt in prompts
        ]
        written = dict.fromkeys((one.id for one in requests), 0)
        for event in server.stream(requests):
            assert not isinstance(event, Failed)
            written[event.request] += len(event.tokens)
            if min(written.values()) >= ANSWER:
                break
        assert min(written.values()) >= ANSWER
        assert server.counters["admitted"] == CHATS
        assert sum(server.booked_bytes.values()) < pages
