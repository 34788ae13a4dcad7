"""Answers longer than a model's context, against the model alone in each window."""

from pathlib import Path

import pytest
import torch
from transformers import LlamaForCausalLM

from tests.unit.workers.settled import booked_in_the_end
from tests.unit.workers.test_local_server import config, greedy, prompt
from triptych.core.config import AppConfig
from triptych.core.messages import Sampling
from triptych.router import Windows
from triptych.workers.local import LocalServer

SIZE, OVERLAP = 64, 24
"""Of a window, and of two together."""


def windowed(size: int = SIZE, **parts: dict[str, object]) -> AppConfig:
    model: dict[str, object] = {
        "name": "tiny",
        "dtype": "float32",
        "max_model_len": 1000,
    }
    window: dict[str, object] = {
        "context_window_tokens": size,
        "context_window_overlap_tokens": size // 2 - 8,
    }
    return config(model=model, experimental=window, **parts)


@pytest.fixture(scope="module")
def reference(tiny_model: Path) -> LlamaForCausalLM:
    return LlamaForCausalLM.from_pretrained(tiny_model, dtype=torch.float32).eval()


def own_logprobs(model: LlamaForCausalLM, tokens: list[int], first: int) -> torch.Tensor:
    """What the model says of each token from ``first`` on, read from where its window begins."""
    windows, found = Windows(SIZE, OVERLAP), list[torch.Tensor]()
    with torch.inference_mode():
        for place in range(first, len(tokens)):
            seen = torch.tensor([tokens[windows.begin(place) : place]])
            found.append(model(seen).logits[0, -1].log_softmax(-1)[tokens[place]])
    return torch.stack(found)


@pytest.mark.parametrize("count", [5, SIZE - 1, SIZE, 150])
def test_each_token_is_what_the_model_says_in_its_window(
    tiny_model: Path, reference: LlamaForCausalLM, count: int
) -> None:
    with LocalServer(windowed(), tiny_model) as server:
        (answer,) = server.complete([server.request(prompt(count), greedy(150))])
        assert server.pool.stat().request_pages == 0
        assert not booked_in_the_end(server)
    assert (answer.finish, len(answer.tokens)) == ("length", 150)
    ours = torch.tensor([entry.logprob for entry in answer.logprobs])
    own = own_logprobs(reference, [*prompt(count), *answer.tokens], count)
    assert (own - ours).abs().max() < 2e-2


def test_a_prefix_is_found_again_by_what_the_window_begins_with(tiny_model: Path) -> None:
    """Kept pages hold tokens from position 0 of a window on, not of the whole prompt."""
    settings = windowed(192, pool={"kv_cache_memory_bytes": 16 << 20, "extent_pages": 64})
    asked = prompt(300)
    with LocalServer(settings, tiny_model) as server:
        first, again = (server.complete([server.request(asked, greedy(100))])[0] for _ in range(2))
    assert 0 < again.cached_tokens < 192
    assert again.tokens == first.tokens


def test_seeds_texts_and_stop_texts_go_on_across_windows(tiny_model: Path) -> None:
    drawn = Sampling(temperature=0.9, seed=3, max_tokens=200, ignore_eos=True)
    with LocalServer(windowed(), tiny_model) as server:
        whole = server.complete([server.request(prompt(50), drawn)])[0]
        again = server.complete([server.request(prompt(50), drawn)])[0]
        assert whole.tokens == again.tokens
        border = SIZE - 50  # tokens of the answer in the first window
        pieces = list[str]()
        for item in server.stream([server.request(prompt(50), drawn)]):
            pieces.append(item.text)
        assert "".join(pieces) == whole.text
        stop = "".join(pieces[border - 2 : border + 2])
        assert stop
        found = Sampling(temperature=0.9, seed=3, max_tokens=200, ignore_eos=True, stop=(stop,))
        cut = server.complete([server.request(prompt(50), found)])[0]
    assert cut.finish == "stop"
    assert cut.text == whole.text[: whole.text.index(stop)]


def test_without_windows_an_answer_ends_with_the_context(tiny_model: Path) -> None:
    settings = config(model={"name": "tiny", "dtype": "float32", "max_model_len": SIZE})
    with LocalServer(settings, tiny_model) as server:
        (answer,) = server.complete([server.request(prompt(40), greedy(150))])
    assert (answer.finish, len(answer.tokens)) == ("length", SIZE - 40)
