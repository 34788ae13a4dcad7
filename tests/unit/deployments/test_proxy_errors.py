"""What Ray Serve's proxy ends by itself has OpenAI's error shape all the same."""

import asyncio
import json
from collections.abc import Sequence
from importlib import import_module
from typing import Any

import pytest

from triptych.cli.serving.serve import RAY_ENVIRONMENT
from triptych.deployments.proxy_errors import EmptyEndMiddleware, ProxyErrorMiddleware
from triptych.deployments.proxy_relay import EventRelayMiddleware

DONE = b"data: [DONE]\n\n"


def start(status: int, kind: str) -> dict[str, Any]:
    headers = [(b"content-type", kind.encode())]
    return {"type": "http.response.start", "status": status, "headers": headers}


def body(data: bytes, *, more: bool = False) -> dict[str, Any]:
    return {"type": "http.response.body", "body": data, "more_body": more}


def answer(messages: Sequence[dict[str, Any]]) -> tuple[int, dict[str, str], bytes]:
    """Status, headers and body that a client gets if the proxy sends ``messages``."""
    sent = list[Any]()

    async def proxy(_scope: Any, _receive: Any, send: Any) -> None:
        for message in messages:
            await send(message)

    async def send(message: Any) -> None:
        sent.append(message)

    async def receive() -> Any:
        raise AssertionError

    scope: dict[str, Any] = {"type": "http", "method": "POST", "path": "/", "headers": []}
    asyncio.run(ProxyErrorMiddleware(proxy)(scope, receive, send))
    begun, *rest = sent
    assert not rest[-1].get("more_body", False)
    headers = {name.decode(): value.decode() for name, value in begun["headers"]}
    return begun["status"], headers, b"".join(message["body"] for message in rest)


@pytest.mark.parametrize(
    "messages",
    [
        [],
        [start(500, "text/plain"), body(b"Internal Server Error")],
        [start(503, "text/plain"), body(b"Deployment "), body(b"unavailable")],
        [start(408, "text/plain"), body(b"Request timed out")],
    ],
)
def test_plain_errors_become_a_503_of_openais_shape(messages: list[dict[str, Any]]) -> None:
    status, headers, data = answer(messages)
    assert (status, headers["content-type"], headers["retry-after"]) == (
        503,
        "application/json",
        "1",
    )
    assert set(json.loads(data)["error"]) == {"message", "type", "param", "code"}


@pytest.mark.parametrize(
    "messages",
    [
        [start(500, "application/json"), body(b'{"error":1}')],
        [start(200, "text/plain; version=1"), body(b"metric 1")],
        [start(404, "text/plain"), body(b"Path not found")],
        [start(200, "text/event-stream"), body(b"data: 1\n\n", more=True), body(DONE)],
    ],
)
def test_whole_responses_are_not_changed(messages: list[dict[str, Any]]) -> None:
    status, _, data = answer(messages)
    assert status == messages[0]["status"]
    assert data == b"".join(message["body"] for message in messages[1:])


def test_a_stream_that_is_cut_ends_with_an_error_event() -> None:
    status, _, data = answer([start(200, "text/event-stream"), body(b"data: 1\n\n", more=True)])
    first, error, done = data.removesuffix(b"\n\n").split(b"\n\n")
    assert (status, first, done) == (200, b"data: 1", DONE.strip())
    assert json.loads(error.removeprefix(b"data: "))["error"]["code"] == "worker_lost"


def test_the_name_that_serve_gives_to_ray_is_right() -> None:
    variable = "RAY_SERVE_HTTP_PROXY_CALLBACK_IMPORT_PATH"
    module, _, name = RAY_ENVIRONMENT[variable].partition(":")
    found = [middleware.cls for middleware in getattr(import_module(module), name)()]
    assert found == [EventRelayMiddleware, ProxyErrorMiddleware, EmptyEndMiddleware]


def bodies(messages: Sequence[dict[str, Any]]) -> list[tuple[bytes, bool]]:
    """The messages of a request as the proxy gets them, up to the one that ends the body."""
    waiting, seen = list(messages), list[tuple[bytes, bool]]()

    async def proxy(_scope: Any, receive: Any, _send: Any) -> None:
        more = True
        while more:
            message = await receive()
            more = message.get("more_body", False)
            seen.append((message["body"], more))
        assert (await receive())["type"] == "http.disconnect"

    async def receive() -> Any:
        return waiting.pop(0) if waiting else {"type": "http.disconnect"}

    async def send(message: Any) -> None:
        raise AssertionError(message)

    asyncio.run(EmptyEndMiddleware(proxy)({"type": "http"}, receive, send))
    return seen


@pytest.mark.parametrize(
    ("parts", "expected"),
    [
        ([b"abc"], [(b"abc", True), (b"", False)]),
        ([b"ab", b"c"], [(b"ab", True), (b"c", True), (b"", False)]),
        ([b"ab", b""], [(b"ab", True), (b"", False)]),
        ([b""], [(b"", False)]),
    ],
)
def test_the_last_message_of_a_body_is_empty(
    parts: list[bytes], expected: list[tuple[bytes, bool]]
) -> None:
    last = len(parts) - 1
    messages = [
        {"type": "http.request", "body": part, "more_body": i < last}
        for i, part in enumerate(parts)
    ]
    assert bodies(messages) == expected
