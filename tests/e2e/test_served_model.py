"""The served default model: the official client, disconnects, killed workers, wrong settings."""

import asyncio
import json
import os
import random
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any, Literal

import grpc
import httpx
import openai
import pydantic
import pytest
import yaml
from grpc_health.v1 import health_pb2, health_pb2_grpc

from tests.e2e.conftest import free_port
from triptych.core.config import AppConfig
from triptych.core.errors import ConfigError
from triptych.deployments.app import check_gpus
from triptych.deployments.grpc.triptych_pb2 import (
    ChatCompletionRequest,
    ChatMessage,
    CompletionRequest,
    ListModelsRequest,
)
from triptych.deployments.grpc.triptych_pb2_grpc import TriptychStub

pytestmark = pytest.mark.e2e

MODEL = "smollm2-135m-instruct"
METHODS = [
    *("uniform:k8v4", "uniform:k4v2", "uniform:fp16", "snapkv"),
    *("kvarn", "fp8", "saw_int4"),
]
"""Compression methods beside the default."""
UNMEASURED = ("snapkv", "kvarn", "fp8", "saw_int4")
"""Methods of which the profile has no error."""
QUESTION = [{"role": "user", "content": "What is the capital of Japan?"}]
ENTROPY_STOP = {
    "name": "entropy_stop",
    "enabled": False,
    "options": {"patience_tokens": 4},
    "request_bounds": {"threshold": [0.0, 20.0]},
}
"""Off, unless a request sets it a threshold."""


@pytest.fixture(scope="module")
def grpc_port() -> int:
    return free_port()


@pytest.fixture(scope="module")
def server(start: Callable[..., Any], grpc_port: int) -> Any:
    return start(
        model={"name": MODEL, "dtype": "float32"},
        ingress={"grpc_port": grpc_port, "open_admin": True},
        decode={"plugins": [ENTROPY_STOP]},
        compressor={"methods": METHODS},
    )


@pytest.fixture(scope="module")
def client(server: Any) -> Iterator[openai.OpenAI]:
    with server.client() as client:
        yield client


def test_nothing_is_copied_between_stages(server: Any, client: openai.OpenAI) -> None:
    client.completions.create(model=MODEL, prompt="word " * 200, max_tokens=40)
    assert set(server.metrics("triptych_workers_bytes_copied").values()) == {0.0}
    assert server.metric("triptych_kv_raw_bytes_total") > 0


def test_sixteen_requests_of_eight_methods_at_once_answer_as_each_does_alone(server: Any) -> None:
    """Each says its method and ratio, and the error where somebody measured it."""
    card = httpx.get(f"{server.url}/v1/models").json()["data"][0]
    assert card["compression_methods"] == ["diffkv", *METHODS]
    text = "Rivers carry sand to the sea, and the sea carries it along the coast. " * 6

    def body(method: str, number: int) -> dict[str, Any]:
        # Without a cached prefix, whose salts differ.
        asked = {"model": MODEL, "prompt": f"{number}. {text}", "max_tokens": 16}
        more = {"temperature": 0, "ignore_eos": True, "cache_salt": f"{method} {number}"}
        return {**asked, **more, "compression": {"method": method}}

    bodies = [body(method, n) for n in range(2) for method in card["compression_methods"]]

    async def ask(client: httpx.AsyncClient, one: dict[str, Any]) -> dict[str, Any]:
        one = {**one, "cache_salt": f"{one['cache_salt']} {random.random()}"}
        response = await client.post(f"{server.url}/v1/completions", json=one, timeout=200)
        assert response.status_code == 200, response.text
        return response.json()

    async def both() -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
        async with httpx.AsyncClient() as client:
            together = await asyncio.gather(*(ask(client, one) for one in bodies))
            return together, [await ask(client, one) for one in bodies]

    together, alone = asyncio.run(both())
    texts = [answer["choices"][0]["text"] for answer in together]
    assert texts == [answer["choices"][0]["text"] for answer in alone]
    told = [answer["usage"]["compression"] for answer in together]
    assert [one["method"] for one in told] == [one["compression"]["method"] for one in bodies]
    shares = {one["method"]: one["classes"] for one in told}
    assert all(sum(each.values()) == pytest.approx(1, abs=3e-4) for each in shares.values())
    assert shares["uniform:fp16"]["recent"] == 1
    assert shares["uniform:k8v4"]["high"] > 0.5 > shares["snapkv"]["high"] > 0
    assert shares["snapkv"]["pruned"] > 0 == shares["uniform:k8v4"]["pruned"]
    by_class = server.metrics("triptych_kv_raw_bytes_by_class_total")
    assert all(by_class[f'token_class="{name}"'] > 0 for name in ("recent", "high", "pruned"))
    ratios = {one["method"]: one["ratio"] for one in told}
    assert ratios["uniform:k4v2"] > ratios["uniform:k8v4"] > ratios["uniform:fp16"]
    assert ratios["snapkv"] >= ratios["uniform:k8v4"]
    assert ratios["kvarn"] > ratios["uniform:k8v4"] > ratios["fp8"]
    kl = {one["method"]: one["estimated_error"] for one in told}
    assert [kl.pop(method) for method in UNMEASURED] == [None] * len(UNMEASURED)
    kl = {method: found["kl"] for method, found in kl.items()}
    assert kl["uniform:k4v2"] > kl["diffkv"] > kl["uniform:k8v4"] > kl["uniform:fp16"]
    unknown = httpx.post(
        f"{server.url}/v1/completions",
        json={"model": MODEL, "prompt": "x", "max_tokens": 1},
        headers={"x-compression-method": "kivi"},
    )
    assert unknown.status_code == 400
    assert unknown.json()["error"]["code"] == "unknown_method"
    counts = server.metrics("triptych_compression_method_choices_total")
    assert len(counts) == 1 + len(METHODS)
    assert all(count >= 4 for count in counts.values())
    server.wait_until(lambda: server.pages_held() == 0, timeout_s=20)


def test_what_a_client_asked_before_is_not_computed_again(server: Any) -> None:
    text = "The harbour wall was built in 1903 and repaired twice since. " * 40
    with server.client() as one, server.client(api_key="other") as two:
        first, second, other = (
            client.completions.create(
                model=MODEL,
                prompt=text + question,
                max_tokens=4,
                extra_body={"ignore_eos": True},  # an answer of one token keeps nothing
            )
            for client, question in ((one, "When?"), (one, "How often?"), (two, "How often?"))
        )
    cached = [answer.usage.prompt_tokens_details.cached_tokens for answer in (first, second, other)]
    assert (cached[0], cached[2]) == (0, 0)
    assert cached[1] >= first.usage.prompt_tokens - 80
    assert server.metric("triptych_prefix_cache_hits") == cached[1]
    assert server.metric("triptych_prefix_blocks") > 0
    server.wait_until(lambda: server.pages_held() == 0, timeout_s=5)


def test_the_next_turn_of_a_conversation_computes_only_what_is_new(server: Any) -> None:
    turns = [{"role": "user", "content": "Tell me about the sea, and then about the mountains."}]
    asked = {"model": MODEL, "temperature": 0, "extra_body": {"session_id": "sea"}}
    with server.client(api_key="mine") as one, server.client(api_key="theirs") as two:
        first = one.chat.completions.create(messages=turns, max_tokens=96, **asked)
        server.wait_until(lambda: server.pages_held() == 0, timeout_s=20)
        turns += [
            {"role": "assistant", "content": first.choices[0].message.content},
            {"role": "user", "content": "And which of them is older?"},
        ]
        second, other, alone = (
            client.chat.completions.create(messages=turns, max_tokens=24, **{**asked, **more})
            for client, more in ((one, {}), (two, {}), (one, {"extra_body": {"cache_salt": "x"}}))
        )
    usages = [answer.usage for answer in (first, second, other, alone)]
    cached = [usage.prompt_tokens_details.cached_tokens for usage in usages]
    # All but the last token of the answer has keys and values; whole blocks of 64 are kept.
    kept = usages[0].prompt_tokens + usages[0].completion_tokens - 1
    assert cached == [0, kept // 64 * 64, 0, 0]
    assert cached[1] > usages[0].prompt_tokens + 64
    assert second.choices[0].message.content
    assert alone.choices[0].message.content
    assert server.metric("triptych_sessions") == 2
    server.wait_until(lambda: server.pages_held() == 0, timeout_s=20)


def test_a_request_sets_a_plugin_of_the_decode_step(
    server: Any, client: openai.OpenAI, grpc_port: int
) -> None:
    """Every token is sure enough for 20 nats: the prefill draws one, decode the next four."""
    prompt, wanted = "The sea is", {"entropy_stop": {"threshold": 20.0}}
    asked = {"model": MODEL, "prompt": prompt, "max_tokens": 12, "temperature": 0}
    plain, off, ended = (
        client.completions.create(**asked, extra_body={"ignore_eos": True, **more})
        for more in ({}, {"plugins": {"entropy_stop": False}}, {"plugins": wanted})
    )
    assert plain.usage.completion_tokens == 12
    assert off.choices[0].text == plain.choices[0].text
    choice = ended.choices[0]
    assert (choice.finish_reason, choice.model_extra["ended_by"]) == ("stop", "entropy_stop")
    assert ended.usage.completion_tokens == 5
    assert plain.choices[0].text.startswith(choice.text)
    with grpc.insecure_channel(f"127.0.0.1:{grpc_port}") as channel:
        request = CompletionRequest(prompt=[prompt], max_tokens=12, temperature=0, ignore_eos=True)
        request.extra.update({"plugins": wanted})
        (told,) = TriptychStub(channel).Completion(request, timeout=60).choices
    assert (told.text, told.extra["ended_by"]) == (choice.text, "entropy_stop")
    with pytest.raises(openai.BadRequestError, match=r"expected a number from 0 to 20"):
        client.completions.create(
            **asked, extra_body={"plugins": {"entropy_stop": {"threshold": 21}}}
        )


# ------------------------------------------------------------------ the client


def test_chat_answers_the_question(client: openai.OpenAI) -> None:
    answer = client.chat.completions.create(model=MODEL, messages=QUESTION, temperature=0)
    assert "Tokyo" in (answer.choices[0].message.content or "")
    assert answer.choices[0].finish_reason == "stop"
    assert answer.usage is not None
    assert answer.usage.completion_tokens > 3
    compression = answer.usage.model_dump()["compression"]
    assert compression["policy"] == "diffkv"
    assert 0 < compression["estimated_error"]["kl"] < 0.05


def test_grpc_says_what_http_says(server: Any, client: openai.OpenAI, grpc_port: int) -> None:
    asked = ChatCompletionRequest(
        messages=[ChatMessage(**turn) for turn in QUESTION], temperature=0, max_tokens=24
    )
    told = client.chat.completions.create(
        model=MODEL, messages=QUESTION, temperature=0, max_tokens=24
    )
    with grpc.insecure_channel(f"127.0.0.1:{grpc_port}") as channel:
        stub = TriptychStub(channel)
        whole = stub.ChatCompletion(asked, timeout=60)
        chunks = list(stub.StreamChatCompletion(asked, timeout=60))
        health = health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest())
        assert health.status == health_pb2.HealthCheckResponse.SERVING
        assert stub.ListModels(ListModelsRequest()).data[0].id == MODEL
        with pytest.raises(grpc.RpcError, match="maximum context length") as caught:
            stub.Completion(CompletionRequest(prompt=["word " * 20_000]))
        assert caught.value.code() == grpc.StatusCode.INVALID_ARGUMENT
        endless = CompletionRequest(prompt=["Tell me"], max_tokens=4000, ignore_eos=True)
        stream = stub.StreamCompletion(endless)
        next(stream)
        assert server.pages_held() > 0
        stream.cancel()
        server.wait_until(lambda: server.pages_held() == 0, timeout_s=20)
    text = "".join(choice.delta.content for chunk in chunks for choice in chunk.choices)
    assert text == whole.choices[0].message.content == told.choices[0].message.content
    assert whole.usage.compression.policy == "diffkv"
    assert chunks[-1].usage.completion_tokens == told.usage.completion_tokens


def test_a_prompt_alone_is_scored(client: openai.OpenAI) -> None:
    def likelihood(text: str) -> float:
        scored = client.completions.create(
            model=MODEL, prompt=text, max_tokens=0, echo=True, logprobs=1
        )
        (choice,) = scored.choices
        assert (choice.text, scored.usage.completion_tokens) == (text, 0)
        assert len(choice.logprobs.tokens) == scored.usage.prompt_tokens
        return sum(choice.logprobs.token_logprobs[1:])

    assert likelihood("The capital of Japan is Tokyo") > likelihood("The capital of Japan is Paris")


def test_the_example_of_the_features_names_the_capital(server: Any, root: Path) -> None:
    text = (root / "docs" / "features.md").read_text()
    (example,) = re.findall(r"```python\n(.*?)```", text, re.DOTALL)
    assert "http://127.0.0.1:8000" in example
    run = subprocess.run(
        [sys.executable, "-c", example.replace("http://127.0.0.1:8000", server.url)],
        capture_output=True,
        text=True,
        timeout=120,
        check=True,
    )
    assert "Tokyo" in run.stdout


def test_a_stream_says_the_same_as_a_whole_answer(client: openai.OpenAI) -> None:
    whole = client.chat.completions.create(model=MODEL, messages=QUESTION, temperature=0)
    chunks = list(
        client.chat.completions.create(
            model=MODEL,
            messages=QUESTION,
            temperature=0,
            stream=True,
            stream_options={"include_usage": True},
        )
    )
    text = "".join(c.choices[0].delta.content or "" for c in chunks if c.choices)
    assert text == whole.choices[0].message.content
    assert chunks[-1].usage == whole.usage
    classes = chunks[-1].usage.model_dump()["compression"]["classes"]
    assert classes["recent"] > 0
    assert sum(classes.values()) == pytest.approx(1, abs=3e-4)


def test_events_reach_the_proxy_over_a_socket(server: Any, client: openai.OpenAI) -> None:
    stream = client.completions.create(model=MODEL, prompt="One", max_tokens=4, stream=True)
    assert "".join(chunk.choices[0].text for chunk in stream)
    (ingress,) = server.replicas("Ingress")
    names = [Path(str(one.laddr)).name for one in ingress.net_connections("unix")]
    used = [name for name in names if name.startswith("events-")]
    assert len(used) >= 2, "one listens, and one is the proxy's"


def test_completions_take_text_and_token_ids(client: openai.OpenAI) -> None:
    text = client.completions.create(
        model=MODEL, prompt="The capital of France is", max_tokens=5, temperature=0
    )
    assert "Paris" in text.choices[0].text
    ids = client.completions.create(model=MODEL, prompt=[1, 2, 3], max_tokens=3, temperature=0)
    assert ids.usage is not None
    assert ids.usage.prompt_tokens == 3


def test_stop_strings_end_the_answer_and_are_not_part_of_it(client: openai.OpenAI) -> None:
    answer = client.completions.create(
        model=MODEL, prompt="One, two, three, four,", max_tokens=40, temperature=0, stop=[" seven"]
    )
    assert answer.choices[0].finish_reason == "stop"
    assert "seven" not in answer.choices[0].text
    assert "six" in answer.choices[0].text


class City(pydantic.BaseModel):
    """What the client wants to be told."""

    name: str = pydantic.Field(max_length=20)
    continent: Literal["Africa", "America", "Asia", "Europe", "Oceania"]
    inhabitants: int = pydantic.Field(ge=0, le=50_000_000)


def test_an_answer_keeps_to_the_clients_types(client: openai.OpenAI) -> None:
    answer = client.chat.completions.parse(
        model=MODEL, messages=QUESTION, response_format=City, temperature=0, max_tokens=100
    )
    city = answer.choices[0].message.parsed
    assert isinstance(city, City)
    assert city.continent == "Asia"


@pytest.mark.parametrize(
    ("wanted", "pattern"),
    [
        ({"choice": ["Kyoto", "Tokyo"]}, "Kyoto|Tokyo"),
        ({"regex": "[A-Z]{3}-[0-9]{2}"}, "[A-Z]{3}-[0-9]{2}"),
    ],
)
def test_an_answer_keeps_to_a_choice_or_a_pattern(
    client: openai.OpenAI, wanted: dict[str, object], pattern: str
) -> None:
    answer = client.chat.completions.create(
        model=MODEL, messages=QUESTION, temperature=0, extra_body={"structured_outputs": wanted}
    )
    assert re.fullmatch(pattern, answer.choices[0].message.content or "")


@pytest.mark.parametrize(
    ("param", "hostile", "limit"),
    [
        ("grammar", "start: r0\n" + "".join(f"r{i}: r{i + 1}\n" for i in range(4000)), "stack"),
        ("regex", "a?" * 20_000, "processor time|memory"),
    ],
)
def test_a_hostile_grammar_is_refused_while_others_are_answered(
    client: openai.OpenAI, param: str, hostile: str, limit: str
) -> None:
    hostile += 'r4000: "x"' if param == "grammar" else ""
    with client.chat.completions.create(
        model=MODEL, messages=QUESTION, max_tokens=40, stream=True
    ) as bystander:
        parts = iter(bystander)
        next(parts)
        with pytest.raises(openai.BadRequestError, match=limit) as caught:
            client.chat.completions.create(
                model=MODEL, messages=QUESTION, extra_body={"structured_outputs": {param: hostile}}
            )
        assert caught.value.param == f"structured_outputs.{param}"
        assert [part for part in parts if part.choices][-1].choices[0].finish_reason
    answer = client.chat.completions.create(
        model=MODEL, messages=QUESTION, extra_body={"structured_outputs": {"regex": "[a-c]{3}"}}
    )
    assert re.fullmatch("[a-c]{3}", answer.choices[0].message.content or "")


def test_a_tool_is_called_with_arguments_that_fit(client: openai.OpenAI) -> None:
    parameters = City.model_json_schema()
    tool = {"type": "function", "function": {"name": "remember", "parameters": parameters}}
    messages: list[Any] = [*QUESTION]
    for choice in ("required", "none"):
        answer = client.chat.completions.create(
            model=MODEL,
            messages=messages,
            tools=[tool],  # type: ignore[list-item]
            tool_choice=choice,  # type: ignore[arg-type]
            parallel_tool_calls=False,
            temperature=0,
            max_tokens=120,
        ).choices[0]
        if choice == "required":
            [call] = answer.message.tool_calls or []
            assert answer.finish_reason == "tool_calls"
            City.model_validate_json(call.function.arguments)  # type: ignore[union-attr]
            result = {"role": "tool", "tool_call_id": call.id, "content": "noted"}
            messages += [answer.message.model_dump(exclude_none=True), result]
    assert answer.message.content


class Capital(pydantic.BaseModel):
    """A short argument: a call of it has between 20 and 60 tokens."""

    name: Literal["Tokyo"]


REMEMBER = {
    "type": "function",
    "function": {"name": "remember", "parameters": Capital.model_json_schema()},
}


def ask_for_calls(client: openai.OpenAI, stream: bool, **more: Any) -> tuple[str, list[str], str]:
    """Content, the arguments of each call, and the finish reason."""
    answer = client.chat.completions.create(
        model=MODEL,
        messages=QUESTION,  # type: ignore[arg-type]
        tools=[REMEMBER],  # type: ignore[list-item]
        tool_choice="required",
        temperature=0,
        stream=stream,
        **more,
    )
    if not stream:
        (choice,) = answer.choices
        calls = [call.function.arguments for call in choice.message.tool_calls or []]
        return choice.message.content or "", calls, choice.finish_reason
    content, calls, finish = "", [], ""
    for chunk in answer:
        (choice,) = chunk.choices
        content += choice.delta.content or ""
        calls += [call.function.arguments for call in choice.delta.tool_calls or []]
        finish = choice.finish_reason or finish
    return content, calls, finish


@pytest.mark.parametrize("stream", [False, True])
def test_an_answer_that_ends_inside_a_call_shows_no_markup(
    client: openai.OpenAI, stream: bool
) -> None:
    one: dict[str, Any] = {"max_tokens": 60, "parallel_tool_calls": False}
    cut = [{"max_tokens": count} for count in (1, 10, 20)]
    stopped = [one | {"stop": [stop]} for stop in ("\n", "o", '"')]
    asked = [one, *cut, *stopped, {"max_tokens": 70}]
    with ThreadPoolExecutor(len(asked)) as clients:
        answers = clients.map(lambda more: ask_for_calls(client, stream, **more), asked)
    whole, *others, longest = answers
    assert (whole[0], len(whole[1]), whole[2]) == ("", 1, "tool_calls")
    assert others == [("", [], "length")] * len(cut) + [whole] * len(stopped)
    content, calls, finish = longest
    assert content == ""
    assert calls[:1] == whole[1]
    assert finish in ("length", "tool_calls")


@pytest.mark.parametrize("stream", [False, True])
def test_an_answer_never_ends_in_half_a_character(client: openai.OpenAI, stream: bool) -> None:
    for max_tokens in range(1, 6):
        answer = client.chat.completions.create(
            model=MODEL,
            messages=QUESTION,  # type: ignore[arg-type]
            max_tokens=max_tokens,
            logprobs=True,
            stream=stream,
            extra_body={"structured_outputs": {"regex": "🦊{8}"}},
        )
        parts = [part.choices[0] for part in (answer if stream else [answer])]
        content = "".join((part.delta if stream else part.message).content or "" for part in parts)
        entries = [one for part in parts if part.logprobs for one in part.logprobs.content or []]
        raw = b"".join(bytes(entry.bytes or ()) for entry in entries)
        assert len(entries) == max_tokens
        assert "🦊🦊🦊🦊🦊🦊🦊🦊".encode().startswith(raw)
        assert content == raw.decode(errors="ignore")


@pytest.mark.parametrize(
    ("stop", "keep", "stream"),
    [
        (None, False, False),
        (None, False, True),
        ("Tokyo", True, False),
        ("Tokyo", False, True),
        ("apan is", False, False),
        ("apan is", True, True),
        (" cap", True, False),
        (" cap", False, True),
    ],
)
def test_the_bytes_of_an_answer_that_ends_are_its_text(
    client: openai.OpenAI, stop: str | None, keep: bool, stream: bool
) -> None:
    answer = client.chat.completions.create(
        model=MODEL,
        messages=QUESTION,  # type: ignore[arg-type]
        temperature=0,
        max_tokens=60,
        logprobs=True,
        stop=stop,
        stream=stream,
        extra_body={"include_stop_str_in_output": keep},
    )
    parts = [part.choices[0] for part in (answer if stream else [answer])]
    content = "".join((part.delta if stream else part.message).content or "" for part in parts)
    entries = [one for part in parts if part.logprobs for one in part.logprobs.content or []]
    assert parts[-1].finish_reason == "stop"
    assert b"".join(bytes(entry.bytes or ()) for entry in entries).decode() == content


def test_requests_and_disconnects_leave_no_line_in_the_log(server: Any) -> None:
    body = {"model": MODEL, "messages": QUESTION, "max_tokens": 200, "stream": True}
    before = server.log.read_text()
    with server.client() as client:
        client.completions.create(model=MODEL, prompt="The sea", max_tokens=4)
    for read in (0, 1, 1):
        with httpx.stream("POST", f"{server.url}/v1/chat/completions", json=body) as response:
            for _ in zip(range(read), response.iter_lines(), strict=False):
                pass
    half = b"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
    with socket.create_connection(("127.0.0.1", httpx.URL(server.url).port or 0)) as connection:
        connection.sendall(half + b'Content-Length: 100\r\n\r\n{"mess')
    server.wait_until(lambda: server.pages_held() == 0, timeout_s=20)
    time.sleep(2)
    added = server.log.read_text()[len(before) :]
    assert "Traceback" not in added
    assert " 200 " not in added


def test_the_same_seed_draws_the_same_answer(client: openai.OpenAI) -> None:
    def draw(seed: int) -> str:
        answer = client.completions.create(
            model=MODEL, prompt="Once upon a time", max_tokens=24, temperature=1.0, seed=seed
        )
        return answer.choices[0].text

    assert draw(5) == draw(5)
    assert draw(5) != draw(6)


def test_n_choices_and_logprobs(client: openai.OpenAI) -> None:
    answer = client.chat.completions.create(
        model=MODEL, messages=QUESTION, n=2, max_tokens=8, logprobs=True, top_logprobs=3, seed=1
    )
    assert [choice.index for choice in answer.choices] == [0, 1]
    for choice in answer.choices:
        assert choice.logprobs is not None
        assert choice.logprobs.content is not None
        assert all(len(entry.top_logprobs) == 3 for entry in choice.logprobs.content)
        assert all(entry.logprob <= 0 for entry in choice.logprobs.content)


def test_the_choices_of_a_request_compute_their_prompt_once(
    server: Any, client: openai.OpenAI
) -> None:
    def counts() -> list[float]:
        with suppress(LookupError):  # before the first decision there are none
            found = server.metrics("triptych_router_decisions")
            reasons = ("placement:equal_prompt", "shared_prompt:tokens")
            return [found.get(f'reason="{reason}"', 0.0) for reason in reasons]
        return [0.0, 0.0]

    prompt, (joined, shared) = random.Random(46).choices(range(1000, 40_000), k=600), counts()
    asked: dict[str, Any] = {"model": MODEL, "prompt": prompt, "max_tokens": 6, "seed": 4}
    answer = client.completions.create(**asked, n=8)
    assert len({choice.text for choice in answer.choices}) > 1
    server.wait_until(lambda: counts() == [joined + 7, shared + 7 * len(prompt)], 10)
    alone = client.completions.create(**asked)
    assert alone.choices[0].text == answer.choices[0].text


async def test_sixteen_at_once(server: Any) -> None:
    async with openai.AsyncOpenAI(
        base_url=f"{server.url}/v1", api_key="none", max_retries=0
    ) as many:
        answers = await asyncio.gather(
            *(
                many.completions.create(
                    model=MODEL,
                    prompt=f"Number {i}:",
                    max_tokens=16,
                    temperature=0,
                    extra_body={"ignore_eos": True},
                )
                for i in range(16)
            )
        )
    assert [answer.usage.completion_tokens for answer in answers if answer.usage] == [16] * 16


def test_a_profile_of_the_server_at_work(server: Any, tmp_path: Path) -> None:
    """What the three workers tell is laid side by side."""
    files = ["--json", str(tmp_path / "p.json"), "--trace", str(tmp_path / "t.json")]
    command = [Path(sys.executable).with_name("triptych"), "profile", "--url", server.url]
    with subprocess.Popen([*command, *files, "--steps", "10", "--seconds", "3"]) as process:
        with server.client() as client:
            while process.poll() is None:
                client.completions.create(model=MODEL, prompt="Hello", max_tokens=16)
        assert process.returncode == 0
    figures, trace = (json.loads((tmp_path / name).read_text()) for name in ("p.json", "t.json"))
    decode = [row for row in figures["steps"] if row["stage"] == "decode"]
    assert len(figures["workers"]) == 3
    assert 0 < len(decode) <= 10
    assert [row["layer"] for row in figures["layers"]] == list(range(30))
    assert all(row["page_bytes"] > 0 for row in decode if row["tokens"])
    seconds = sum(row["seconds"] for row in figures["parts"] if row["stage"] == "decode")
    assert seconds == pytest.approx(sum(row["seconds"] for row in decode))
    assert min(event.get("ts", 0.0) for event in trace["traceEvents"]) == 0.0


def test_an_unknown_model_is_not_found(client: openai.OpenAI) -> None:
    with pytest.raises(openai.NotFoundError):
        client.completions.create(model="gpt-5", prompt="x")


def test_a_prompt_beyond_the_context_names_both_numbers(client: openai.OpenAI) -> None:
    with pytest.raises(openai.BadRequestError, match="8192"):
        client.completions.create(model=MODEL, prompt=[5] * 9000)


# ------------------------------------------------------------------ disconnect and death


def test_a_client_that_leaves_frees_its_pages_within_a_second(server: Any) -> None:
    body = {
        "model": MODEL,
        "prompt": "Tell me a story.",
        "max_tokens": 2000,
        "stream": True,
        "ignore_eos": True,
    }
    with httpx.stream("POST", f"{server.url}/v1/completions", json=body, timeout=60) as answer:
        lines = answer.iter_lines()
        for _ in range(5):
            next(lines)
        assert server.pages_held() > 0
    assert server.wait_until(lambda: server.pages_held() == 0, timeout_s=5) < 2


def test_the_only_decode_worker_is_killed_and_its_requests_wait_for_the_next(server: Any) -> None:
    prompts = [f"{index}: " + "word " * (25 * index) for index in range(16)]
    crowd = server.crowd(prompts, max_tokens=96)
    crowd.wait_for_chunks(4, clients=4)
    (replica,) = server.replicas("Decode")
    os.kill(replica.pid, signal.SIGKILL)
    assert crowd.join() == {"length": 16}
    server.wait_until(server.is_healthy, timeout_s=60)
    with server.client(timeout=60) as client:
        answer = client.completions.create(model=MODEL, prompt="Hello", max_tokens=3)
    assert answer.usage is not None
    assert answer.usage.completion_tokens == 3
    server.wait_until(lambda: server.pages_held() == 0, timeout_s=5)


# ------------------------------------------------------------------ wrong settings


def test_a_wrong_config_stops_before_any_actor(tmp_path: Path) -> None:
    """One that can be found wrong only with the geometry of the model."""
    args = {"pool": {"page_bytes": 256}}
    application = {
        "name": "triptych",
        "import_path": "triptych.deployments.app:build_app",
        "args": args,
    }
    path = tmp_path / "config.yaml"
    path.write_text(yaml.safe_dump({"applications": [application]}))
    run = subprocess.run(
        [Path(sys.executable).with_name("triptych"), "serve", str(path)],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert run.returncode in (1, 2)
    assert "too small for one fp16 token" in run.stdout + run.stderr


def test_more_gpus_than_the_cluster_has_are_refused() -> None:
    stage = {"actor": {"num_gpus": 2}}
    config = AppConfig.from_mapping({"prefill": stage, "decode": stage})
    with pytest.raises(ConfigError, match=r"4 GPUs \(prefill 2, decode 2\) and their nodes have 1"):
        check_gpus(config, available=1)
