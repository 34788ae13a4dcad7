"""Middleware for Ray Serve's HTTP proxy: it reads the events of streams from the ingress directly.

Ray Serve's path carries the start of a response, its first events and its end. The events between
come over a Unix socket of the ingress on the same node (``transport.event_relay``). Where no such
socket can be opened, as on another node, all events stay on Ray Serve's path.
"""

import asyncio
import contextlib
from collections import deque
from collections.abc import Awaitable, Callable
from typing import cast

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from triptych.deployments.transport.event_relay import (
    OFFER,
    RELAYED,
    WINDOW_BYTES,
    Messages,
    pack_taken,
)

REPORT_BYTES = WINDOW_BYTES // 4
"""Bytes that a client takes between two reports to the ingress."""
MAX_PART_BYTES = 64 << 20
_NAME = OFFER.encode()


class EventRelayMiddleware:
    """Offers each request's application to send events over a socket, and forwards them."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app
        self._ingresses = dict[str, asyncio.Task[IngressConnection]]()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        kept = [pair for pair in scope["headers"] if pair[0] != _NAME]
        offered: Scope = {**scope, "headers": [*kept, (_NAME, b"1")]}
        response = RelayedResponse(send, self._ingress)
        try:
            await self._app(offered, receive, response.send)
        finally:
            response.close()

    async def _ingress(self, path: str) -> "IngressConnection":
        """The connection to an ingress; all its streams share one.

        Raises: OSError if no ingress of this node listens there
        """
        if path not in self._ingresses or _has_ended(self._ingresses[path]):
            alive = {p: one for p, one in self._ingresses.items() if not _has_ended(one)}
            self._ingresses = {**alive, path: asyncio.create_task(IngressConnection.open(path))}
        return await asyncio.shield(self._ingresses[path])


def _has_ended(opening: "asyncio.Task[IngressConnection]") -> bool:
    if not opening.done():
        return False
    return opening.cancelled() or bool(opening.exception()) or opening.result().is_lost


class IngressConnection(asyncio.Protocol):
    """The connection to one ingress."""

    def __init__(self) -> None:
        self.streams = dict[int, RelayedResponse]()
        self._messages = Messages(MAX_PART_BYTES)
        self._transport: asyncio.Transport | None = None

    @classmethod
    async def open(cls, path: str) -> "IngressConnection":
        """Raises: OSError if no ingress of this node listens there"""
        loop = asyncio.get_running_loop()
        _, connection = await loop.create_unix_connection(cls, path)
        return connection

    @property
    def is_lost(self) -> bool:
        return self._transport is None or self._transport.is_closing()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.Transport", transport)

    def connection_lost(self, exc: Exception | None) -> None:
        del exc
        for response in self.streams.values():
            response.lost()
        self.streams.clear()

    def data_received(self, data: bytes) -> None:
        for stream, position, part in self._messages.read(data):
            response = self.streams.get(cast("int", stream))
            if response is not None:
                response.put(cast("int", position), cast("bytes", part))

    def report(self, stream: int, position: int) -> None:
        """A client has taken so much of a body; the first report asks for its events."""
        if self._transport is not None:
            self._transport.write(pack_taken(stream, position))


FindIngress = Callable[[str], Awaitable[IngressConnection]]
"""Connects to the ingress that listens at a path."""


class RelayedResponse:
    """One response: forwards what comes on both ways, in order."""

    def __init__(self, send: Send, find: FindIngress) -> None:
        self._send, self._find = send, find
        self._outlet = ""
        self._ingress: IngressConnection | None = None
        self._stream = 0
        self._sent = self._reported = self._received = 0
        self._waiting = deque[tuple[int, bytes]]()
        self._changed = asyncio.Event()
        self._is_lost = False
        self._pump: asyncio.Task[None] | None = None

    async def send(self, message: Message) -> None:
        """Forward a message of Ray Serve's path."""
        if message["type"] == "http.response.start":
            await self._send(self._without_outlet(message))
            return
        total = message.pop(RELAYED, None)
        if total is not None and not await self._all_sent(total):
            return  # the response is cut: the middleware outside ends it
        await self._send(message)
        self._sent += len(message.get("body", b""))
        self._changed.set()
        if self._outlet and message.get("more_body", False) and self._pump is None:
            self._pump = asyncio.create_task(self._relay())
            self._pump.add_done_callback(lambda _: self._changed.set())

    def put(self, position: int, part: bytes) -> None:
        """A part of the body came over the socket."""
        self._waiting.append((position, part))
        self._received = position + len(part)
        self._changed.set()

    def lost(self) -> None:
        """The ingress has closed its socket."""
        self._is_lost = True
        self._changed.set()

    def close(self) -> None:
        """The response is over."""
        if self._pump is not None:
            self._pump.cancel()
        if self._ingress is not None:
            self._ingress.streams.pop(self._stream, None)

    def _without_outlet(self, message: Message) -> Message:
        headers = list(message.get("headers", ()))
        self._outlet = next((value.decode() for name, value in headers if name == _NAME), "")
        if not self._outlet:
            return message
        return {**message, "headers": [pair for pair in headers if pair[0] != _NAME]}

    async def _all_sent(self, total: int) -> bool:
        """Wait until the client was sent so much of the body; False if the rest will not come."""
        while self._sent < total and self._may_reach(total):
            self._changed.clear()
            await self._changed.wait()
        return self._sent >= total

    def _may_reach(self, total: int) -> bool:
        is_forwarding = self._pump is not None and not self._pump.done()
        return is_forwarding and (self._received >= total or not self._is_lost)

    async def _relay(self) -> None:
        """Ask the ingress for the events of this response, and forward them."""
        path, _, stream = self._outlet.rpartition(":")
        with contextlib.suppress(OSError, ValueError):
            self._stream = int(stream)
            self._ingress = ingress = await self._find(path)
            ingress.streams[self._stream] = self
            ingress.report(self._stream, self._sent)
            await self._forward(ingress)

    async def _forward(self, ingress: IngressConnection) -> None:
        while True:
            while body := self._due():
                await self._send({"type": "http.response.body", "body": body, "more_body": True})
                self._sent += len(body)
                self._changed.set()
                if self._sent - self._reported >= REPORT_BYTES:
                    self._reported = self._sent
                    ingress.report(self._stream, self._sent)
            self._changed.clear()
            await self._changed.wait()

    def _due(self) -> bytes:
        """The parts that follow what was sent."""
        waiting, at, parts = self._waiting, self._sent, list[bytes]()
        while waiting and waiting[0][0] == at:
            _, part = waiting.popleft()
            parts.append(part)
            at += len(part)
        return b"".join(parts) if len(parts) != 1 else parts[0]
