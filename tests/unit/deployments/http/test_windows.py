"""Prompts that are longer than the model's context, as clients meet them."""

import copy
from collections.abc import AsyncIterator

import httpx
import pytest
from transformers import PreTrainedTokenizerFast

from tests.unit.deployments.http.conftest import FakeEngine, make_engine
from triptych.core.config import IngressConfig
from triptych.deployments.http import ModelCard, OpenAIServing, create_app

LONGEST, WINDOW = 4096, 256


@pytest.fixture
def engine(tokenizer: PreTrainedTokenizerFast) -> FakeEngine:
    return make_engine(tokenizer)


@pytest.fixture
async def http(
    engine: FakeEngine, tokenizer: PreTrainedTokenizerFast
) -> AsyncIterator[httpx.AsyncClient]:
    card = ModelCard(name="tiny", context_tokens=LONGEST, window_tokens=WINDOW, created=0)
    serving = OpenAIServing(engine=engine, tokenizer=tokenizer, model=card, config=IngressConfig())
    transport = httpx.ASGITransport(app=create_app(serving))
    async with httpx.AsyncClient(transport=transport, base_url="http://here") as client:
        yield client


def body(tokens: int, **more: object) -> dict[str, object]:
    return {"prompt": [5] * tokens, "max_tokens": 2, **more}


async def test_what_is_longer_than_a_window_is_taken(
    http: httpx.AsyncClient, engine: FakeEngine
) -> None:
    models = (await http.get("/v1/models")).json()
    assert models["data"][0]["max_model_len"] == LONGEST
    answer = await http.post("/v1/completions", json=body(LONGEST - 2))
    assert answer.status_code == 200
    assert answer.json()["usage"]["prompt_tokens"] == LONGEST - 2
    too_long = await http.post("/v1/completions", json=body(LONGEST - 1))
    assert too_long.status_code == 400
    assert f"maximum context length is {LONGEST} tokens" in too_long.text


@pytest.mark.parametrize(
    ("asked", "name"),
    [({"prompt_logprobs": 1}, "prompt_logprobs"), ({"echo": True, "logprobs": 1}, "logprobs")],
)
async def test_a_prompt_is_rated_within_one_window(
    http: httpx.AsyncClient, asked: dict[str, object], name: str
) -> None:
    assert (await http.post("/v1/completions", json=body(WINDOW - 1, **asked))).status_code == 200
    refused = await http.post("/v1/completions", json=body(WINDOW, **asked))
    assert refused.status_code == 400
    error = refused.json()["error"]
    assert error["param"] == name
    assert f"a prompt of {WINDOW} tokens: this model reads less than {WINDOW}" in error["message"]


async def test_a_chat_without_max_tokens_is_bounded_by_what_is_served(
    engine: FakeEngine, tokenizer: PreTrainedTokenizerFast
) -> None:
    card = ModelCard(name="tiny", context_tokens=2048, served_tokens=500, created=0)
    serving = OpenAIServing(engine=engine, tokenizer=tokenizer, model=card, config=IngressConfig())
    transport = httpx.ASGITransport(app=create_app(serving))
    async with httpx.AsyncClient(transport=transport, base_url="http://here") as client:
        models = (await client.get("/v1/models")).json()
        assert models["data"][0]["max_model_len"] == 500
        chat = {"messages": [{"role": "user", "content": "a"}]}
        answer = await client.post("/v1/chat/completions", json=chat)
        assert answer.status_code == 200
        ((request,),) = engine.calls
        assert len(request.prompt) + request.sampling.max_tokens == 500
        longer = await client.post("/v1/chat/completions", json={**chat, "max_tokens": 1000})
        assert longer.status_code == 200  # a short prompt leaves room for a long answer
        cut = {"prompt": [5] * 900, "max_tokens": 2, "truncate_prompt_tokens": -1}
        assert (await client.post("/v1/completions", json=cut)).status_code == 200
        assert len(engine.calls[-1][0].prompt) == 498
        refused = await client.post("/v1/completions", json=body(500))
        assert refused.status_code == 400
        assert "maximum context length is 500 tokens" in refused.text


async def test_what_only_the_tokenizer_knows_is_refused(
    engine: FakeEngine, tokenizer: PreTrainedTokenizerFast
) -> None:
    """Models exist whose tokenizers have tokens beyond the embedding."""
    marked = copy.deepcopy(tokenizer)
    marked.add_tokens(["<later>"])
    last = len(marked) - 1
    card = ModelCard(name="tiny", context_tokens=2048, vocab_tokens=last, created=0)
    serving = OpenAIServing(engine=engine, tokenizer=marked, model=card, config=IngressConfig())
    transport = httpx.ASGITransport(app=create_app(serving))
    async with httpx.AsyncClient(transport=transport, base_url="http://here") as client:
        for route, asked, param in (
            ("completions", {"prompt": "the <later> weather"}, "prompt"),
            ("completions", {"prompt": [5, last]}, "prompt"),
            ("completions", {"prompt": [5, last], "echo": True}, "prompt"),
            ("completions", {"prompt": "a", "logit_bias": {str(last): 1}}, f"logit_bias.{last}"),
            ("completions", {"prompt": "a", "stop_token_ids": [last]}, "stop_token_ids"),
            (
                "chat/completions",
                {"messages": [{"role": "user", "content": "<later>"}]},
                "messages",
            ),
        ):
            answer = await client.post(f"/v1/{route}", json={"max_tokens": 1, **asked})
            assert answer.status_code == 400, (asked, answer.text)
            error = answer.json()["error"]
            assert error["param"] == param
            assert str(last) in error["message"]
        for fine in ({"prompt": "the weather"}, {"prompt": [5, last - 1]}):
            answer = await client.post("/v1/completions", json={"max_tokens": 1, **fine})
            assert answer.status_code == 200, answer.text
