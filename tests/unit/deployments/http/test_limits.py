"""Sizes are bounded by what arrives, not by what is declared."""

import socket

import httpx
import pytest
from starlette.types import Message

from tests.unit.deployments.http.conftest import make_engine, make_serving
from triptych.core.config import IngressConfig
from triptych.deployments.http import create_app
from triptych.deployments.http.limits import MAX_HEADERS, LimitsMiddleware, RequestIdMiddleware

HEAD = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"


def exchange(port: int, *pieces: bytes) -> bytes:
    """Send pieces until the server hangs up, and return what it said."""
    with socket.create_connection(("127.0.0.1", port), timeout=5) as connection:
        try:
            for piece in pieces:
                connection.sendall(piece)
        except OSError:
            pass  # the server has hung up already
        answer = b""
        while part := connection.recv(65536):
            answer += part
        return answer


def test_a_body_that_is_declared_too_large_is_refused_unread(server, engine, http):
    answer = exchange(server.port, HEAD + b"Content-Length: 100000000\r\n\r\n")
    assert answer.startswith(b"HTTP/1.1 413 ")
    assert b'"code":"request_too_large"' in answer
    assert b"connection: close" in answer.lower()
    assert engine.calls == []


def test_a_client_that_sends_100_megabytes_reads_the_413(server, engine):
    body = b'{"prompt": "' + b"x" * 100_000_000 + b'"}'
    response = httpx.post(
        f"{server.url}/v1/completions", content=body, headers={"content-type": "application/json"}
    )
    assert response.status_code == 413
    assert response.json()["error"]["type"] == "invalid_request_error"


def test_a_chunked_body_is_counted_as_it_arrives(server, engine):
    chunk = b"10000\r\n" + b"x" * 65536 + b"\r\n"
    answer = exchange(server.port, HEAD + b"Transfer-Encoding: chunked\r\n\r\n", *[chunk] * 100)
    assert answer.startswith(b"HTTP/1.1 413 ")
    assert engine.calls == []


def test_a_body_just_within_the_limit_is_read(http, engine):
    filler = "x" * ((256 << 10) - 100)
    response = http.post("/v1/completions", json={"prompt": "x", "max_tokens": 1, "junk": filler})
    assert response.status_code == 200


@pytest.mark.parametrize("length", ["-1", "abc", "1e9", "9" * 400])
def test_odd_lengths_never_reach_the_app(server, engine, http, length):
    answer = exchange(server.port, HEAD + f"Content-Length: {length}\r\n\r\n".encode())
    assert answer[9:12] in (b"400", b"413")
    assert http.get("/health").status_code == 200
    assert engine.calls == []


def test_many_headers_long_headers_and_long_urls_are_refused(http, engine):
    many = {f"x-{i}": "y" for i in range(MAX_HEADERS)}
    assert http.get("/health", headers=many).status_code == 431
    assert http.get("/health", headers={"x": "y" * 40_000}).status_code == 431
    assert http.get("/health?" + "q" * 10_000).status_code in (400, 431)


@pytest.mark.parametrize(
    "request_line", [b"GET //v1/models HTTP/1.1", b"GET /v1/models/../x HTTP/1.1", b"GET / HTTP/9"]
)
@pytest.mark.parametrize("host", [b"a/?x=", b"a#", b"", b"[::1"])
def test_odd_hosts_and_paths_get_an_answer(server, engine, http, request_line, host):
    answer = exchange(
        server.port, request_line + b"\r\nHost: " + host + b"\r\nConnection: close\r\n\r\n"
    )
    assert answer[9:12] in (b"400", b"404", b"505")
    assert http.get("/health").status_code == 200


@pytest.mark.parametrize(
    ("given", "kept"),
    [("abc-1.2_X", True), ("a b", False), ("x" * 129, False), ("http://h/", False), ("", False)],
)
def test_a_harmless_request_id_is_kept(http, engine, given, kept):
    answer = http.get("/version", headers={"x-request-id": given})
    assert (answer.headers["x-request-id"] == given) is kept


async def test_a_proxy_that_names_answers_itself_can_do_so():
    async def empty(scope, receive, send):
        await send({"type": "http.response.start", "status": 200, "headers": []})

    sent: list[Message] = []

    async def send(message: Message) -> None:
        sent.append(message)

    await RequestIdMiddleware(empty, send_request_id=False)(
        {"type": "http", "headers": []}, None, send
    )
    assert sent == [{"type": "http.response.start", "status": 200, "headers": []}]


async def test_the_last_resort_logs_and_answers_500(caplog):
    async def broken(scope, receive, send):
        raise ZeroDivisionError("secret")

    sent: list[Message] = []

    async def send(message: Message) -> None:
        sent.append(message)

    scope = {"type": "http", "headers": [], "query_string": b"", "path": "/", "method": "GET"}
    await RequestIdMiddleware(LimitsMiddleware(broken, 1024, 9))(scope, None, send)
    assert sent[0]["status"] == 500
    assert b"internal_error" in sent[1]["body"]
    assert b"secret" not in sent[1]["body"]
    assert "secret" in caplog.text


@pytest.mark.parametrize("arrived", [0, 1])
@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
async def test_a_transport_that_fails_is_a_disconnect(caplog, tokenizer, path, arrived):
    """Ray Serve raises TaskCancelledError when a client leaves while its body is forwarded."""
    app = create_app(make_serving(make_engine(tokenizer), tokenizer, IngressConfig()))
    body = b'{"prompt": "x", "messages": [{"role": "user", "content": "x"}], "stream": true}'
    parts = [{"type": "http.request", "body": body[:9], "more_body": True}] * arrived
    sent: list[Message] = []

    async def receive() -> Message:
        if not parts:
            raise RuntimeError("TaskCancelledError")
        return parts.pop()

    async def send(message: Message) -> None:
        sent.append(message)

    headers = [(b"content-type", b"application/json")]
    scope = {"type": "http", "headers": headers, "query_string": b"", "path": path}
    with caplog.at_level("INFO"):
        await app({**scope, "method": "POST", "root_path": ""}, receive, send)
    assert sent[0]["status"] == 499
    assert all(record.levelname == "INFO" for record in caplog.records)
    assert "Traceback" not in caplog.text
