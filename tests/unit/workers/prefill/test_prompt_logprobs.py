"""Log probabilities of prompts: those of the model alone, whatever else is in the chunk."""

import random
from pathlib import Path

import pytest
import torch
from transformers import LlamaForCausalLM

from triptych.core.config import AppConfig
from triptych.core.messages import Sampling
from triptych.workers.local import Completion, LocalServer
from triptych.workers.prefill.prompt_logprobs import PromptLogprobRows

VOCAB = 258


def prompt(tokens: int) -> list[int]:
    generator = random.Random(tokens)
    return [generator.randrange(2, VOCAB) for _ in range(tokens)]


@pytest.fixture(scope="module")
def server(tiny_model: Path):
    settings = {
        "model": {"name": "tiny", "dtype": "float32"},
        "pool": {"kv_cache_memory_bytes": 16 << 20},
        "compressor": {"policy": "uniform:fp16", "recent_window_tokens": 20},
        "prefill": {"max_num_batched_tokens": 192},
    }
    with LocalServer(AppConfig.from_mapping(settings), tiny_model) as server:
        yield server


@pytest.fixture(scope="module")
def reference(tiny_model: Path) -> LlamaForCausalLM:
    return LlamaForCausalLM.from_pretrained(tiny_model, dtype=torch.float32).eval()


def greedy(top: int) -> Sampling:
    return Sampling(temperature=0.0, max_tokens=4, ignore_eos=True, prompt_logprobs=top)


NEAR = 4e-2
"""Tolerance: keys and values are rounded to the 16 bits of pages."""


def check(model: LlamaForCausalLM, asked: list[int], top: int, answer: Completion) -> None:
    assert answer.prompt_logprobs is not None
    rows = list(answer.prompt_logprobs.rows())
    assert len(rows) == len(asked) - 1
    with torch.inference_mode():
        logprobs = model(torch.tensor([asked])).logits[0, :-1].log_softmax(-1)
    for row, own, line in zip(rows, asked[1:], logprobs, strict=True):
        assert abs(row.logprob - float(line[own])) < NEAR
        at_least, at_most = (int((line > line[own] + d).sum()) + 1 for d in (2 * NEAR, -2 * NEAR))
        assert at_least <= row.rank <= at_most
        assert len(row.top) == top
        assert all(abs(value - float(line[token])) < NEAR for token, value in row.top)
        assert [value for _, value in row.top] == sorted((v for _, v in row.top), reverse=True)
        if top:
            assert abs(row.top[0][1] - float(line.max())) < NEAR


def test_prompts_of_any_length_are_scored_next_to_others(server, reference) -> None:
    """Lengths around one step of scored tokens (128), of all tokens (192), and one token."""
    wanted = [(1, 2), (2, 0), (127, 1), (128, 3), (129, 20), (300, 2), (60, -1)]
    asked = [prompt(count) for count, _ in wanted]
    sampling = [greedy(top) for _, top in wanted]
    answers = server.complete([server.request(*pair) for pair in zip(asked, sampling, strict=True)])
    alone = server.complete([server.request(asked[-1], sampling[-1])])
    for (_, top), one, answer in zip(wanted, asked, answers, strict=True):
        assert len(answer.tokens) == 4
        if top < 0:
            assert answer.prompt_logprobs is None
            assert answer.tokens == alone[0].tokens
        else:
            check(reference, one, top, answer)


def test_a_prompt_that_is_cached_is_computed_again(server, reference) -> None:
    asked = prompt(250)
    first, second = (server.complete([server.request(asked, greedy(-1))])[0] for _ in range(2))
    assert first.tokens == second.tokens
    assert second.cached_tokens > 0
    (scored,) = server.complete([server.request(asked, greedy(1))])
    assert scored.cached_tokens == 0
    check(reference, asked, 1, scored)


def test_equal_and_infinite_logits_are_ranked() -> None:
    scores = PromptLogprobRows([9, 1, 2, 0], top=5)
    logits = torch.tensor([[0.0, 0.0, 0.0], [-torch.inf, 1.0, 0.0], [-torch.inf, 2.0, 2.0]])
    scores.add(0, logits)
    rows = list(scores.packed().rows())
    assert [row.rank for row in rows] == [1, 2, 3]
    assert rows[2].logprob == -torch.inf
    assert [len([v for _, v in row.top if v > -torch.inf]) for row in rows] == [3, 2, 2]
