"""Models with sliding windows, served: answers beyond the window, and the bytes of their pages."""

import random
from pathlib import Path

import pytest
import torch

from tests.sliding import WINDOW, WITH_WINDOWS, save_sliding
from tests.unit.workers.kv.test_prefix_cache import ask, check
from triptych.core.config import AppConfig
from triptych.workers.local import Completion, LocalServer

PROMPT_TOKENS, ANSWER_TOKENS = 130, 70
TIE = 2e-3
"""As in ``test_families``."""
DIFFKV = {"policy": "diffkv", "high_format": "k8v4", "low_format": "k4v2", "alpha_low": 0.3}


def prompt(count: int = PROMPT_TOKENS, seed: int = 0) -> list[int]:
    draw = random.Random(seed)
    return [draw.randrange(2, 258) for _ in range(count)]


def settings(compressor: dict[str, object], **pool: object) -> AppConfig:
    return AppConfig.from_mapping(
        {
            "model": {"name": "tiny", "dtype": "float32"},
            "pool": {"kv_cache_memory_bytes": 16 << 20, "extent_pages": 64, **pool},
            "compressor": {"profile": "none", "recent_window_tokens": 8, **compressor},
            "prefill": {"max_num_batched_tokens": 48},
        }
    )


@pytest.fixture(scope="module", params=list(WITH_WINDOWS))
def model(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> tuple[Path, torch.nn.Module]:
    path = tmp_path_factory.mktemp("sliding")
    return path, save_sliding(request.param, path)


def assert_as_transformers(
    model: torch.nn.Module, tokens: list[int], answer: Completion, count: int = ANSWER_TOKENS
) -> None:
    assert answer.error is None
    assert len(answer.tokens) == count
    ids = torch.tensor([[*tokens, *answer.tokens]])
    with torch.inference_mode():
        logits = model(input_ids=ids).logits[0, len(tokens) - 1 : -1]
    chosen = torch.tensor(answer.tokens)[:, None]
    own = logits.gather(1, chosen)[:, 0]
    assert ((logits.max(-1).values - own) / logits.std()).max() < TIE
    likely = logits.log_softmax(-1).gather(1, chosen)[:, 0]
    assert [one.logprob for one in answer.logprobs] == pytest.approx(likely.tolist(), abs=0.01)


@pytest.mark.parametrize("prefix_bytes", [0, 4 << 20])
def test_answers_beyond_the_window_are_those_of_transformers(
    model: tuple[Path, torch.nn.Module], prefix_bytes: int
) -> None:
    """With and without a cached prefix; prompts are longer than a prefill step and the window."""
    path, network = model
    exact = settings({"policy": "uniform:fp16"}, prefix_bytes=prefix_bytes)
    first, second = prompt(), prompt()[:90] + prompt(40, seed=1)
    with LocalServer(exact, path) as server:
        assert server.plan.windows.count(WINDOW) >= 1
        cached = list[int]()
        for tokens in (first, first, second):
            answer = ask(server, tokens, max_tokens=ANSWER_TOKENS)
            assert_as_transformers(network, tokens, answer)
            cached.append(answer.cached_tokens)
            check(server)
        size = server.plan.block_tokens
    assert cached == ([0, 129 // size * size, 90 // size * size] if prefix_bytes else [0, 0, 0])


@pytest.mark.parametrize("answer_tokens", [8, ANSWER_TOKENS])
def test_the_next_turn_reads_an_answer_however_long_it_is(
    model: tuple[Path, torch.nn.Module], answer_tokens: int
) -> None:
    """Sliding layers have lost its first tokens, and their window entries are not cached."""
    path, network = model
    keeps = settings({"policy": "uniform:fp16"}, prefix_bytes=4 << 20, keep_answers="always")
    with LocalServer(keeps, path) as server:
        size = server.plan.block_tokens
        first = prompt(size * 4 - 4)
        answer = ask(server, first, max_tokens=answer_tokens)
        check(server)
        turn = [*first, *answer.tokens, *prompt(20, seed=5)]
        again = ask(server, turn, max_tokens=40)
        assert_as_transformers(network, turn, again, 40)
        assert again.cached_tokens == (len(first) + answer_tokens - 1) // size * size
        check(server)


@pytest.mark.parametrize("name", ["Mistral", "Qwen2"])
def test_layers_are_compressed_as_they_are_prefilled(name: str, tmp_path: Path) -> None:
    """Two of six at a time, with windows in all of them or from the fourth on."""
    more = {"max_window_layers": 3} if name == "Qwen2" else {}
    network = save_sliding(name, tmp_path, num_hidden_layers=6, **more)
    with LocalServer(settings({"policy": "uniform:fp16"}, prefix_bytes=0), tmp_path) as server:
        assert server.plan.layers_of(PROMPT_TOKENS) == 2
        tokens = prompt()
        answer = ask(server, tokens, max_tokens=ANSWER_TOKENS)
        assert_as_transformers(network, tokens, answer)
        check(server)


METHODS = {
    "uniform": {"policy": "uniform:k8v4"},
    "diffkv": {**DIFFKV, "score_every_tokens": 4},
    "leankv": {"policy": "leankv", "high_format": "k8v4", "low_format": "k4v2"},
}


@pytest.mark.parametrize("method", METHODS)
def test_an_answer_does_not_depend_on_what_was_cached(
    model: tuple[Path, torch.nn.Module], method: str
) -> None:
    """With pages that are shared, the request's own, or, for the default method, copied."""
    path, _ = model
    answers, ways = list[Completion](), (True, False) if method == "diffkv" else (True,)
    for share in ways:
        pool = {"prefix_bytes": 4 << 20, "share_pages": share}
        with LocalServer(settings(METHODS[method], **pool), path) as server:
            size = server.plan.block_tokens
            tokens = prompt(2 * size + 33)
            answers.append(ask(server, tokens, max_tokens=ANSWER_TOKENS))
            ask(server, tokens[: size + 2], "part", max_tokens=2)
            answers += [ask(server, tokens, "part", max_tokens=ANSWER_TOKENS) for _ in range(2)]
            check(server)
    assert [answer.cached_tokens // size for answer in answers] == [0, 1, 2] * len(ways)
    first, *rest = ([one.logprob for one in answer.logprobs] for answer in answers)
    assert all(answer.tokens == answers[0].tokens for answer in answers)
    assert all(likely == pytest.approx(first, abs=1e-5) for likely in rest)
