"""Connections of a hostile client: cut, slow, many, and not of the protocol."""

import json
import random
import socket
import time
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any
from urllib.parse import urlsplit

import grpc

from tests.e2e.abuse.hostile import CHAT, QUESTION
from tests.e2e.conftest import MODEL

ANSWER_S = 60.0
"""Time after which there is no answer. What an answer took is measured, and is no test."""

Connection = Callable[[str, random.Random], None]
"""Given the address of the server; returns when the client has gone."""


def _connect(url: str) -> socket.socket:
    parts = urlsplit(url)
    return socket.create_connection((parts.hostname, parts.port), timeout=ANSWER_S)


def _request(stream: bool, tokens: int = 400) -> bytes:
    body = json.dumps(
        {
            "model": MODEL,
            "messages": QUESTION,
            "max_tokens": tokens,
            "stream": stream,
            "ignore_eos": True,
        }
    ).encode()
    head = f"POST {CHAT} HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
    return head.encode() + f"Content-Length: {len(body)}\r\n\r\n".encode() + body


def cut_streams(url: str, luck: random.Random) -> None:
    """Twenty streams that are left after some tokens."""
    for _ in range(20):
        with _connect(url) as client:
            client.sendall(_request(stream=True))
            client.recv(luck.randint(1, 4000))


def cut_before_the_first_token(url: str, luck: random.Random) -> None:
    """Twenty requests that are left at once, or soon."""
    for _ in range(20):
        with _connect(url) as client:
            client.sendall(_request(stream=luck.random() < 0.5))
            time.sleep(luck.uniform(0, 0.05))


def cut_within_the_body(url: str, luck: random.Random) -> None:
    """Twenty requests whose body never comes to its end."""
    for _ in range(20):
        whole = _request(stream=False)
        with _connect(url) as client:
            client.sendall(whole[: luck.randrange(len(whole))])


def read_slowly(url: str, luck: random.Random) -> None:
    """Eight streams that are read at 100 bytes per second."""
    with ExitStack() as stack:
        clients = [stack.enter_context(_connect(url)) for _ in range(8)]
        for client in clients:
            client.sendall(_request(stream=True))
        for _ in range(4):
            for client in clients:
                client.recv(100)
            time.sleep(1)


def write_slowly(url: str, luck: random.Random) -> None:
    """Forty requests whose headers come byte by byte."""
    with ExitStack() as stack:
        clients = [stack.enter_context(_connect(url)) for _ in range(40)]
        for byte in _request(stream=False)[:40]:
            for client in clients:
                client.sendall(bytes([byte]))
            time.sleep(0.05)


def speak_no_http(url: str, luck: random.Random) -> None:
    """Random bytes, a TLS greeting, HTTP/2 without an upgrade."""
    for first in (luck.randbytes(5000), b"\x16\x03\x01\x02\x00\x01\x00", b"PRI * HTTP/2.0\r\n\r\n"):
        with _connect(url) as client:
            client.sendall(first)


def idle(url: str, luck: random.Random) -> None:
    """Two hundred connections that say nothing."""
    with ExitStack() as stack:
        for _ in range(200):
            stack.enter_context(_connect(url))
        time.sleep(1)


def probe(url: str, luck: random.Random) -> None:
    """Four hundred probes on one connection, without waiting for the answers."""
    probe = b"".join(
        f"GET {path} HTTP/1.1\r\nHost: x\r\n\r\n".encode()
        for path in luck.choices(("/health", "/metrics", "/v1/models", "/dashboard/state"), k=400)
    )
    with _connect(url) as client:
        client.sendall(probe)
        deadline = time.monotonic() + 3
        while time.monotonic() < deadline and client.recv(1 << 16):
            pass


HTTP: tuple[Connection, ...] = (
    cut_streams,
    cut_before_the_first_token,
    cut_within_the_body,
    read_slowly,
    write_slowly,
    speak_no_http,
    idle,
    probe,
)


def grpc_garbage(address: str, luck: random.Random) -> None:
    """Frames that are no messages, for each method and an unknown one."""
    with grpc.insecure_channel(address) as channel:
        for name in ("ChatCompletion", "Completion", "ListModels", "Nonsense"):
            call: Any = channel.unary_unary(f"/triptych.v1.Triptych/{name}")
            try:
                call(luck.randbytes(luck.randint(1, 50_000)), timeout=ANSWER_S)
            except grpc.RpcError as error:
                code = error.code()  # type: ignore[attr-defined]
                assert code not in (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.UNKNOWN), code


def grpc_too_large(address: str, luck: random.Random) -> None:
    """A message of 20 MB."""
    with grpc.insecure_channel(address) as channel:
        call: Any = channel.unary_unary("/triptych.v1.Triptych/ChatCompletion")
        try:
            call(bytes(20 << 20), timeout=ANSWER_S)
        except grpc.RpcError as error:
            code = error.code()  # type: ignore[attr-defined]
            assert code == grpc.StatusCode.RESOURCE_EXHAUSTED, code


GRPC: tuple[Connection, ...] = (grpc_garbage, grpc_too_large)
