"""A greedy answer is the same, to the last bit of its log probabilities, whatever was cached."""

from pathlib import Path

import pytest

from tests.unit.workers.kv.test_prefix_cache import ask, check, prompt
from triptych.core.config import AppConfig
from triptych.core.messages import Sampling
from triptych.workers import core_scheduler
from triptych.workers.local import Completion, LocalServer

POLICIES = {
    "diffkv": {"policy": "diffkv", "high_format": "k8v4", "low_format": "k4v2", "alpha_low": 0.3},
    "leankv": {"policy": "leankv", "high_format": "k8v4", "low_format": "k4v2"},
    "uniform": {"policy": "uniform:k8v4"},
    "plain": {"policy": "uniform:k8v4", "kv_rotation": "none"},
    "fp16": {"policy": "uniform:fp16"},
}


def settings(policy: str, *, chunk: int = 96, dtype: str = "float32", **pool: object) -> AppConfig:
    return AppConfig.from_mapping(
        {
            "model": {"name": "tiny", "dtype": dtype},
            "pool": {"kv_cache_memory_bytes": 16 << 20, **pool},
            "compressor": {
                "profile": "none",
                "recent_window_tokens": 20,
                "score_every_tokens": 4,
                **POLICIES[policy],
            },
            "prefill": {"max_num_batched_tokens": chunk},
        }
    )


def three_times(server: LocalServer, tokens: list[int]) -> list[Completion]:
    """With nothing, a part and all of the prompt cached."""
    answers = [ask(server, tokens, "nothing", max_tokens=40)]
    ask(server, tokens[: len(tokens) // 2], "part", max_tokens=2)
    answers += [ask(server, tokens, "part", max_tokens=40) for _ in range(2)]
    return answers


def same(answers: list[Completion]) -> bool:
    first, *rest = answers
    return all((one.tokens, one.logprobs) == (first.tokens, first.logprobs) for one in rest)


@pytest.mark.parametrize(
    ("policy", "dtype"),
    [*((policy, "bfloat16") for policy in POLICIES), ("diffkv", "float32"), ("fp16", "float32")],
)
def test_the_answer_to_a_prompt_is_the_same_whatever_was_cached(
    tiny_model: Path, policy: str, dtype: str
) -> None:
    cached = list[int]()
    with LocalServer(settings(policy, dtype=dtype), tiny_model) as server:
        size = server.plan.block_tokens
        for count in (size - 1, size, size + 1, 5 * size + 33):
            answers = three_times(server, prompt(count))
            assert same(answers), count
            cached += [answer.cached_tokens for answer in answers]
            check(server)
    assert cached[-3:] == [0, (5 * size + 33) // 2 // size * size, (5 * size + 32) // size * size]


@pytest.mark.parametrize("policy", ["diffkv", "fp16"])
def test_an_answer_does_not_depend_on_its_neighbours(tiny_model: Path, policy: str) -> None:
    """Chunks of prefill and decode batches of other requests beside it, to the last bit."""
    asked = [prompt(count, seed=count) for count in (5, 40, 64, 131, 200, 333)]
    config = settings(policy, chunk=100, dtype="bfloat16", prefix_bytes=0)
    with LocalServer(config, tiny_model) as server:
        alone = [ask(server, tokens, max_tokens=40) for tokens in asked]
        sampling = Sampling(temperature=0.0, max_tokens=40, ignore_eos=True, logprobs=0)
        together = server.complete([server.request(tokens, sampling) for tokens in asked])
        check(server)
    assert [(one.tokens, one.logprobs) for one in together] == [
        (one.tokens, one.logprobs) for one in alone
    ]


@pytest.mark.parametrize("policy", ["diffkv", "fp16"])
def test_an_answer_does_not_depend_on_the_number_of_threads(
    tiny_model: Path, monkeypatch: pytest.MonkeyPatch, policy: str
) -> None:
    """A step has as many threads as there are cores that other programs leave."""
    asked = [prompt(count, seed=count) for count in (5, 64, 131, 333)]
    answers = list[list[Completion]]()
    for cores in (1, 2, 3):
        monkeypatch.setattr(core_scheduler, "usable_cores", lambda cores=cores: cores)
        with LocalServer(settings(policy, dtype="bfloat16"), tiny_model) as server:
            answers.append([ask(server, tokens, max_tokens=40) for tokens in asked])
    assert [same(list(of_one)) for of_one in zip(*answers, strict=True)] == [True] * len(asked)
