"""Every answer and every chunk fits the official client's own types, and adds what we document."""

import json
from collections.abc import Iterator

import httpx
import pytest
from openai.types import Completion, Model
from openai.types.chat import ChatCompletion, ChatCompletionChunk
from pydantic import BaseModel

CHAT, PLAIN = "/v1/chat/completions", "/v1/completions"
EXTENSIONS = {
    "choices.stop_reason",  # vLLM's, as are the next four
    "choices.token_ids",
    "choices.prompt_token_ids",
    "choices.prompt_logprobs",
    "prompt_logprobs",
    "usage.compression",  # ours
}
MODEL_EXTENSIONS = {"root", "parent", "max_model_len", "permission"}  # vLLM's
TOOL = {"type": "function", "function": {"name": "weather", "parameters": {"type": "object"}}}
CALL = '<tool_call>\n{"name": "weather", "arguments": {"city": "Ulm"}}\n</tool_call>'
FEATURES: dict[str, dict[str, object]] = {
    "plain": {},
    "stopped": {"stop": ["b"], "seed": 0},
    "several": {"n": 3},
    "ids": {"return_token_ids": True},
    "json": {"response_format": {"type": "json_object"}},
}
CHAT_FEATURES: dict[str, dict[str, object]] = {
    **FEATURES,
    "logprobs": {"logprobs": True, "top_logprobs": 2},
    "tools": {"tools": [TOOL]},
    "called": {"tools": [TOOL], "max_tokens": 200},
}
PLAIN_FEATURES: dict[str, dict[str, object]] = {
    **FEATURES,
    "logprobs": {"logprobs": 2},
    "echo": {"echo": True},
    "prompts": {"prompt": ["a", "b"], "echo": True},
}
CASES = [(CHAT, name, extra) for name, extra in CHAT_FEATURES.items()]
CASES += [(PLAIN, name, extra) for name, extra in PLAIN_FEATURES.items()]
STREAMS = [{}, {"include_usage": True}, {"include_usage": True, "continuous_usage_stats": True}]


def body(path: str, extra: dict[str, object]) -> dict[str, object]:
    asked = {"messages": [{"role": "user", "content": "hi"}]} if path == CHAT else {"prompt": "hi"}
    return {"model": "tiny", "max_tokens": 3, **asked, **extra}


def check(kind: type[BaseModel], data: dict[str, object], extensions: set[str]) -> None:
    """No field of another type, none that is neither OpenAI's nor ours, and none lost."""
    parsed = kind.model_validate(data, strict=True)
    assert set(unknown(parsed)) <= extensions
    assert json.loads(parsed.model_dump_json(exclude_unset=True)) == data


def unknown(value: object, path: str = "") -> Iterator[str]:
    if isinstance(value, list):
        for item in value:
            yield from unknown(item, path)
    elif isinstance(value, BaseModel):
        yield from (f"{path}{name}" for name in value.model_extra or {})
        for name in type(value).model_fields:
            yield from unknown(getattr(value, name), f"{path}{name}.")


def events(response: httpx.Response) -> list[dict[str, object]]:
    assert response.status_code == 200, response.text
    *told, done = [line[6:] for line in response.text.splitlines() if line.startswith("data: ")]
    assert done == "[DONE]"
    return [json.loads(line) for line in told]


@pytest.mark.parametrize(("path", "name", "extra"), CASES, ids=lambda value: str(value)[:24])
def test_answers_are_of_openais_types(http, engine, path, name, extra) -> None:
    engine.script = CALL if name == "called" else ""
    scored = {} if name == "prompts" else {"prompt_logprobs": 1}
    for more in ({}, scored):
        answer = http.post(path, json=body(path, extra) | more).json()
        check(ChatCompletion if path == CHAT else Completion, answer, EXTENSIONS)
    if name == "called":
        assert answer["choices"][0]["finish_reason"] == "tool_calls"


@pytest.mark.parametrize("options", STREAMS, ids=["plain", "usage", "continuous"])
@pytest.mark.parametrize(("path", "name", "extra"), CASES, ids=lambda value: str(value)[:24])
def test_chunks_are_of_openais_types(http, engine, path, name, extra, options) -> None:
    engine.script = CALL if name == "called" else ""
    more = {"stream": True} | ({"stream_options": options} if options else {})
    chunks = events(http.post(path, json=body(path, extra) | more))
    assert len(chunks) > 1
    finished = 0
    for chunk in chunks:
        for choice in chunk["choices"]:
            finished += choice["finish_reason"] is not None
            # OpenAI sends null until the end, but its type of plain completions has no null.
            choice["finish_reason"] = choice["finish_reason"] or (None if path == CHAT else "stop")
        check(ChatCompletionChunk if path == CHAT else Completion, chunk, EXTENSIONS)
    assert finished == (3 if name == "several" else 2 if name == "prompts" else 1)


def test_models_are_of_openais_type(http, engine) -> None:
    listed = http.get("/v1/models").json()
    assert set(listed) == {"object", "data"}
    for model in [*listed["data"], http.get("/v1/models/tiny").json()]:
        check(Model, model, MODEL_EXTENSIONS)


def test_the_openapi_document_names_every_route_and_every_field(http, engine) -> None:
    document = http.get("/openapi.json").json()
    assert document["openapi"].startswith("3.")
    for path, methods in document["paths"].items():
        ((method, told),) = methods.items()
        answer = http.request(method, path, json={} if method == "post" else None)
        assert answer.status_code in ({400} if method == "post" else {200}), path
        assert {"200", "default"} == set(told["responses"])
    chat = document["components"]["schemas"]["ChatBody"]["properties"]
    assert {"messages", "tools", "seed", "prompt_logprobs", "structured_outputs"} <= set(chat)
    refused = http.post("/v1/completions", json={}).json()["error"]
    shape = document["components"]["schemas"]["Error"]["properties"]["error"]
    assert set(refused) == set(shape["required"])
