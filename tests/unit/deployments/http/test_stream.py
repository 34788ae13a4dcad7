"""Bytes on the wire, slow engines, and clients that go away."""

import json
import socket
import time
from contextlib import ExitStack

import httpx
import pytest

from triptych.core.errors import QueueFull
from triptych.core.messages import Failed

CHAT = "/v1/chat/completions"
HELLO = [{"role": "user", "content": "hello"}]


def events(response: httpx.Response) -> list[str]:
    assert response.text.endswith("\n\n")
    return response.text.removesuffix("\n\n").split("\n\n")


def wait_until(condition, seconds: float = 10.0) -> bool:
    end = time.monotonic() + seconds
    while not condition() and time.monotonic() < end:
        time.sleep(0.005)
    return condition()


def test_a_chat_stream_byte_for_byte(http, engine):
    body = {"messages": HELLO, "seed": 0, "max_tokens": 2, "stream": True}
    response = http.post(CHAT, json=body)
    assert response.headers["content-type"].startswith("text/event-stream")
    assert response.headers["cache-control"] == "no-cache"
    assert response.headers["x-accel-buffering"] == "no"
    assert response.headers["x-request-id"].startswith("req-")
    assert "content-length" not in response.headers
    assert response.text.isascii()
    lines = events(response)
    assert all(line.startswith("data: ") for line in lines)
    assert lines[-1] == "data: [DONE]"
    first = json.loads(lines[0].removeprefix("data: "))
    head = {key: first[key] for key in ("id", "object", "created", "model")}
    assert first == head | {
        "choices": [
            {
                "index": 0,
                "delta": {"role": "assistant", "content": ""},
                "logprobs": None,
                "finish_reason": None,
            }
        ]
    }
    last = json.loads(lines[-2].removeprefix("data: "))["choices"][0]
    assert last["delta"] == {}
    assert last["finish_reason"] == "length"


def test_usage_is_null_until_the_last_chunk(http, engine):
    body = {"prompt": "x", "max_tokens": 2, "stream": True}
    body["stream_options"] = {"include_usage": True}
    lines = events(http.post("/v1/completions", json=body))
    chunks = [json.loads(line.removeprefix("data: ")) for line in lines[:-1]]
    assert [chunk["usage"] for chunk in chunks[:-1]] == [None] * (len(chunks) - 1)
    assert chunks[-1]["choices"] == []
    assert chunks[-1]["usage"]["completion_tokens"] == 2
    assert chunks[-1]["usage"]["compression"]["ratio"] == 3.0


def test_continuous_usage_counts_up(http, engine):
    body = {"prompt": "x", "max_tokens": 3, "stream": True}
    body["stream_options"] = {"include_usage": True, "continuous_usage_stats": True}
    lines = events(http.post("/v1/completions", json=body))
    chunks = [json.loads(line.removeprefix("data: ")) for line in lines[:-1]]
    assert [chunk["usage"]["completion_tokens"] for chunk in chunks] == [1, 2, 3, 3]


def test_without_include_usage_no_chunk_mentions_it(http, engine):
    body = {"prompt": "x", "max_tokens": 2, "stream": True}
    assert "usage" not in http.post("/v1/completions", json=body).text


def as_vllm_bench_reads(text: str) -> tuple[str, int, int]:
    """Text, chunks with text, and tokens, by the rules of ``vllm bench serve``.

    Comments are skipped; the usage counts where there are no choices.
    """
    output_tokens, chunks, tokens = "", 0, 0
    for message in text.strip().split("\n\n"):
        if message.startswith(":") or message == "data: [DONE]":
            continue
        told = json.loads(message.removeprefix("data: "))
        if choices := told.get("choices"):
            piece = choices[0].get("text") or choices[0].get("delta", {}).get("content")
            output_tokens, chunks = output_tokens + (piece or ""), chunks + bool(piece)
        elif usage := told.get("usage"):
            tokens = usage["completion_tokens"]
    return output_tokens, chunks, tokens


@pytest.mark.parametrize("route", ["/v1/completions", CHAT])
def test_vllm_bench_counts_what_was_answered(http, engine, route):
    shared = {"model": "tiny", "temperature": 0.0, "repetition_penalty": 1.0, "stream": True}
    shared |= {"stream_options": {"include_usage": True}, "ignore_eos": True, "seed": 0}
    parts = [{"type": "text", "text": "hello"}]
    bodies = {
        "/v1/completions": {"prompt": "hello", "max_tokens": 5, "logprobs": None},
        CHAT: {"messages": [{"role": "user", "content": parts}], "max_completion_tokens": 5},
    }
    engine.first_delay_s = 0.4  # long enough for a comment
    response = http.post(route, json=shared | bodies[route])
    assert ": keep-alive" in response.text
    assert as_vllm_bench_reads(response.text) == ("abcde", 5, 5)


def test_separators_at_which_clients_split_lines_are_escaped(http, engine):
    body = {"prompt": "a\u2028b\u2029c\x85d", "max_tokens": 1, "stream": True, "echo": True}
    response = http.post("/v1/completions", json=body)
    assert "\\u2028" in response.text
    assert len(response.text.splitlines()) == response.text.count("\n")


def test_an_error_before_the_first_token_is_a_status(http, engine):
    engine.refusal = QueueFull(waiting=3, limit=2, retry_after_s=4)
    response = http.post(CHAT, json={"messages": HELLO, "stream": True})
    assert response.status_code == 429
    assert response.headers["retry-after"] == "4"
    assert response.headers["content-type"] == "application/json"


@pytest.mark.parametrize("stream", [False, True])
def test_a_failed_choice_before_the_first_token_is_a_status(http, engine, stream):
    engine.failure = failure(503)
    response = http.post(CHAT, json={"messages": HELLO, "stream": stream, "n": 2})
    assert response.status_code == 503
    assert response.json()["error"]["message"] == "the decode worker died"
    assert response.headers["retry-after"] == "1"
    assert wait_until(lambda: engine.running == 0)


def test_a_failed_choice_in_mid_stream_is_an_event_and_then_done(http, engine):
    engine.failure, engine.fail_after = failure(503), 2
    response = http.post(CHAT, json={"messages": HELLO, "stream": True, "seed": 0})
    assert response.status_code == 200
    lines = events(response)
    assert json.loads(lines[-2].removeprefix("data: ")) == {
        "error": {
            "message": "the decode worker died",
            "type": "service_unavailable",
            "param": None,
            "code": "worker_lost",
        }
    }
    assert lines[-1] == "data: [DONE]"


def failure(status: int) -> Failed:
    return Failed(
        request="any",
        message="the decode worker died",
        kind="service_unavailable",
        code="worker_lost",
        status=status,
    )


@pytest.mark.parametrize("stream", [False, True])
def test_our_own_faults_show_nothing_but_the_request_id(http, engine, stream):
    engine.crash = RuntimeError("/root/secret at 0x7f00")
    response = http.post(CHAT, json={"messages": HELLO, "stream": stream})
    assert response.status_code == 500
    error = response.json()["error"]
    assert error["code"] == "internal_error"
    assert response.headers["x-request-id"] in error["message"]
    assert "secret" not in response.text


def test_an_engine_that_stops_early_is_an_error(http, engine):
    engine.failure = None

    async def nothing(requests, images=()):
        for _ in ():
            yield

    engine.generate = nothing
    assert http.post(CHAT, json={"messages": HELLO}).status_code == 503


def test_silence_is_filled_with_comments(http, engine):
    engine.first_delay_s = 0.75
    body = {"messages": HELLO, "stream": True, "max_tokens": 1}
    lines = events(http.post(CHAT, json=body))
    assert lines[:2] == [": keep-alive"] * 2
    assert lines[2].startswith("data: {")
    assert lines[-1] == "data: [DONE]"


def test_tokens_arrive_while_the_engine_still_works(http, engine):
    engine.delay_s = 0.1
    body = {"messages": HELLO, "stream": True, "max_tokens": 8}
    with http.stream("POST", CHAT, json=body) as response:
        lines = response.iter_lines()
        arrivals = [time.monotonic() for line in lines if line.startswith("data: {")]
    assert arrivals[-1] - arrivals[0] > 0.5


@pytest.mark.parametrize("stream", [False, True])
def test_a_request_that_takes_too_long_is_given_up(server, engine, stream):
    engine.first_delay_s = 60
    with httpx.Client(base_url=server.url, timeout=20) as http:
        response = http.post(CHAT, json={"messages": HELLO, "stream": stream})
    if stream:  # the comments have started the response
        assert '"code":"timeout"' in response.text
    else:
        assert response.status_code == 504
        assert response.json()["error"]["type"] == "timeout_error"
    assert engine.running == 0


# ------------------------------------------------------------------ disconnects


def raw_request(body: dict[str, object]) -> bytes:
    payload = json.dumps(body).encode()
    head = "POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
    return f"{head}Content-Length: {len(payload)}\r\n\r\n".encode() + payload


@pytest.mark.parametrize(
    ("stream", "read_until", "first_delay_s"),
    [
        pytest.param(True, b'"content":"b"', 0.0, id="streaming"),
        pytest.param(True, b"", 30.0, id="before the first token"),
        pytest.param(True, b": keep-alive", 30.0, id="between comments"),
        pytest.param(False, b"", 30.0, id="not streaming"),
    ],
)
def test_when_the_client_leaves_the_work_stops(server, engine, stream, read_until, first_delay_s):
    engine.delay_s, engine.first_delay_s = 0.05, first_delay_s  # it would take 20 s or more
    body = {"messages": HELLO, "seed": 0, "stream": stream, "max_tokens": 400, "n": 2}
    with socket.create_connection(("127.0.0.1", server.port), timeout=5) as connection:
        connection.sendall(raw_request(body))
        assert wait_until(lambda: engine.running == 1)
        seen = b""
        while read_until not in seen:
            seen += connection.recv(4096)
    left_at = time.monotonic()
    assert wait_until(lambda: engine.running == 0)
    assert engine.closed_at - left_at < 5


def test_two_hundred_clients_leave_at_once_and_nothing_runs_on(server, engine, http):
    """Each would go on for minutes."""
    engine.delay_s = 2.0  # 200 streams at twice a second would be work of their own
    request = raw_request({"messages": HELLO, "stream": True, "max_tokens": 400})
    with ExitStack() as clients:
        for _ in range(200):
            address = ("127.0.0.1", server.port)
            clients.enter_context(socket.create_connection(address)).sendall(request)
        assert wait_until(lambda: len(engine.calls) == 200, 60)
    assert wait_until(lambda: engine.running == 0, 30)
    assert http.get("/health").status_code == 200


def test_a_client_that_leaves_while_it_sends_does_no_harm(server, engine, http):
    request = raw_request({"messages": HELLO})
    for cut in range(1, len(request), 20):
        with socket.create_connection(("127.0.0.1", server.port)) as connection:
            connection.sendall(request[:cut])
    assert http.get("/health").status_code == 200
    assert engine.calls == []
