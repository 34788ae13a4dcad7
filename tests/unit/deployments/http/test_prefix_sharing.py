"""Who shares cached prefixes with whom, and what clients are told of it."""

import asyncio
import json

import pytest

from triptych.core.config import IngressConfig
from triptych.core.messages import Request, Slo
from triptych.deployments.http import ModelCard
from triptych.deployments.http.keys import Client
from triptych.deployments.http.openai.protocol import ChatBody, CompletionBody, validate
from triptych.deployments.http.openai.request_builder import RequestBuilder
from triptych.deployments.http.openai.responses import Choice, usage
from triptych.deployments.http.tokenizer import TextCodec

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
HELLO = [{"role": "user", "content": "hello"}]


def sent(http, engine, path: str, key: str | None, **body: object) -> Request:
    asked = {"messages": HELLO} if path == CHAT else {"prompt": "hello"}
    headers = {} if key is None else {"authorization": key}
    response = http.post(path, json={**asked, "max_tokens": 1, **body}, headers=headers)
    assert response.status_code == 200
    (request,) = engine.calls[-1]
    return request


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
def test_clients_with_different_keys_or_salts_never_share(http, engine, path):
    keys = (None, "Bearer one", "Bearer two", "Basic one")
    salts = ({}, {"cache_salt": "x"}, {"cache_salt": ":x"})
    made = [sent(http, engine, path, key, **salt).cache_salt for key in keys for salt in salts]
    assert len(set(made)) == len(made)
    again = sent(http, engine, path, "bearer two", cache_salt="x")
    assert again.cache_salt == made[7]


def test_no_key_is_passed_on(http, engine):
    request = sent(http, engine, CHAT, "Bearer secret-key", cache_salt="x")
    assert "secret-key" not in repr(request)
    assert len(request.cache_salt) == 64 + len(":x")


def test_credentials_that_nobody_checks_make_no_tenants(http, engine):
    for key in (None, "Bearer one", "Bearer two", "Basic one"):
        assert sent(http, engine, CHAT, key).tenant == ""


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
def test_a_priority_reaches_the_engine(http, engine, path):
    assert sent(http, engine, path, None).priority == 0
    assert sent(http, engine, path, None, priority=-7).priority == -7


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
def test_limits_reach_the_engine_in_seconds(http, engine, path):
    assert sent(http, engine, path, None).slo == Slo()
    limits = {"ttft_slo_ms": 500, "tpot_slo_ms": 50.0, "deadline_ms": 4000}
    wanted = Slo(ttft_s=0.5, tpot_s=0.05, deadline_s=4.0)
    assert sent(http, engine, path, None, **limits).slo == wanted


@pytest.mark.parametrize("salt", ["", "x" * 257, 5, ["x"], "\ud800"])
def test_a_salt_that_is_none_is_refused(http, engine, salt):
    content = '{"prompt": "x", "cache_salt": "\\ud800"}' if salt == "\ud800" else None
    body = None if content else {"prompt": "x", "cache_salt": salt}
    headers = {"content-type": "application/json"}
    response = http.post(COMPLETIONS, json=body, content=content, headers=headers)
    assert response.status_code == 400
    assert response.json()["error"]["param"] == "cache_salt"
    assert not engine.calls


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
def test_a_conversation_is_named_in_the_body_or_in_a_header(http, engine, path):
    assert sent(http, engine, path, None).session == ""
    assert sent(http, engine, path, None, session_id="x" * 256).session == "x" * 256
    body = {"messages": HELLO, "prompt": "x", "max_tokens": 1}
    body.pop("prompt" if path == CHAT else "messages")
    for more, name in (({}, "from the header"), ({"session_id": "own"}, "own")):
        headers = {"X-Session-Id": "from the header"}
        assert http.post(path, json={**body, **more}, headers=headers).status_code == 200
        assert engine.calls[-1][0].session == name
    response = http.post(path, json=body, headers={"X-Session-Id": "x" * 257})
    assert response.status_code == 400
    assert response.json()["error"]["param"] == "session_id"


@pytest.mark.parametrize("name", ["", "x" * 257, 5, ["x"]])
def test_a_name_of_a_conversation_that_is_none_is_refused(http, engine, name):
    response = http.post(COMPLETIONS, json={"prompt": "x", "session_id": name})
    assert response.status_code == 400
    assert response.json()["error"]["param"] == "session_id"
    assert not engine.calls


@pytest.mark.parametrize("shares", [False, True])
def test_a_server_for_friends_shares_among_keys(tokenizer, engine, shares):
    request_builder = RequestBuilder(
        engine=engine,
        codec=TextCodec(tokenizer, 2048),
        model=ModelCard(name="tiny", context_tokens=2048, created=0),
        config=IngressConfig(share_prefixes=shares),
    )
    chat = validate(ChatBody, {"messages": HELLO, "cache_salt": "x"})
    plain = validate(CompletionBody, {"prompt": ["a", "b"], "cache_salt": "x"})
    one = asyncio.run(request_builder.chat(chat, Client("1" * 64, "1" * 64))).requests
    two = asyncio.run(request_builder.completion(plain, Client("2" * 64, "2" * 64))).requests
    assert {request.tenant for request in two} == {"2" * 64}
    salts = {request.cache_salt for request in (*one, *two)}
    assert len(salts) == (1 if shares else 2)


def test_a_prompt_counts_once_however_many_choices_it_has():
    choices = [Choice(index=i, cached_tokens=n) for i, n in enumerate([0, 64, 64, 32, 0, 0])]
    assert usage(7, choices, 3)["prompt_tokens_details"] == {"cached_tokens": 96}
    assert usage(7, choices)["prompt_tokens_details"] == {"cached_tokens": 160}


@pytest.mark.parametrize("stream", [False, True])
def test_the_client_is_told_how_much_was_cached(http, engine, stream):
    engine.cached_tokens = 3
    body = {"prompt": ["hello", "world"], "n": 2, "max_tokens": 3, "stream": stream}
    if not stream:
        told = http.post(COMPLETIONS, json=body).json()["usage"]
    else:
        body["stream_options"] = {"include_usage": True}
        lines = http.post(COMPLETIONS, json=body).text.strip().split("\n\n")
        assert lines[-1] == "data: [DONE]"
        told = json.loads(lines[-2].removeprefix("data: "))["usage"]
    assert told["prompt_tokens_details"] == {"cached_tokens": 6}
