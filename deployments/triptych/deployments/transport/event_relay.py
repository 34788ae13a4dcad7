# msgpack has no type hints; nothing untyped leaves this module.
# pyright: reportUnknownMemberType=false
"""Carries the events of streams from an ingress to Ray Serve's proxy on the same node.

Through Ray Serve each part of a response is a Ray object of its own, which costs both processes
several times what the part itself does. Here the parts of all streams that are due at one moment
are one write to a Unix socket, which the proxy's middleware reads (``proxy_relay``).

A part has its position in the body of its response. So a stream may begin on Ray Serve's path and
go on here: the proxy sends the parts in the order of their positions. The proxy reports how much
of a body its client has taken, so that a slow client holds at most ``WINDOW_BYTES`` here.
"""

import asyncio
import contextlib
import logging
from collections.abc import Generator, Iterator
from itertools import count
from pathlib import Path
from typing import cast

import msgpack

logger = logging.getLogger(__name__)

OFFER = "x-triptych-relay"
"""Header of a request: the proxy can read events here. Of its response: where, as ``Outlet.name``.
Neither reaches clients."""
RELAYED = "triptych.relayed"
"""Key of the last message of a response whose events were sent here: the bytes of its body."""
WINDOW_BYTES = 1 << 18
"""Bytes of one body that its client has not taken yet; with more, its tokens wait in the engine."""
MAX_MESSAGE_BYTES = 1 << 16
"""Longest message from a proxy: two integers."""


class Outlet:
    """The way of one stream's events to its proxy."""

    def __init__(self, name: str, stream: int) -> None:
        self.name, self._stream = name, stream
        self._proxy: ProxyConnection | None = None
        self._sent = self._taken = 0
        self._changed = asyncio.Event()

    @property
    def is_open(self) -> bool:
        """Whether a proxy reads this stream here."""
        return self._proxy is not None

    @property
    def has_room(self) -> bool:
        """Whether a part can be sent now."""
        return self.is_open and self._sent - self._taken < WINDOW_BYTES

    def put(self, position: int, data: bytes) -> None:
        """Send the part of the body that begins at ``position``.

        Raises: ConnectionResetError if the proxy is gone
        """
        if self._proxy is None or self._proxy.is_lost:
            raise ConnectionResetError("the proxy of this stream is gone")
        self._sent = position + len(data)
        self._proxy.put(self._stream, position, data)

    async def wait_for_room(self) -> None:
        """Return when the client has taken enough, or the proxy is gone."""
        while not self.has_room and self._proxy is not None and not self._proxy.is_lost:
            self._changed.clear()
            await self._changed.wait()

    def taken(self, proxy: "ProxyConnection", position: int) -> None:
        """The client of ``proxy`` has taken so many bytes of the body."""
        self._proxy, self._taken = proxy, max(self._taken, position)
        self._changed.set()

    def lost(self, proxy: "ProxyConnection") -> None:
        if self._proxy is proxy:
            self._changed.set()


class EventRelay:
    """The side of the ingress: listens for proxies on a Unix socket."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._outlets = dict[int, Outlet]()
        self._numbers = count(1)
        self._connections = set[ProxyConnection]()
        self._server: asyncio.Server | None = None

    async def start(self) -> None:
        loop = asyncio.get_running_loop()
        self._server = await loop.create_unix_server(lambda: ProxyConnection(self), str(self._path))

    async def stop(self) -> None:
        if self._server is not None:
            self._server.close()
        for connection in list(self._connections):
            connection.close()
        self._path.unlink(missing_ok=True)

    @contextlib.contextmanager
    def outlet(self) -> Generator[Outlet]:
        """An outlet for one stream, until the block ends."""
        number = next(self._numbers)
        outlet = self._outlets[number] = Outlet(f"{self._path}:{number}", number)
        try:
            yield outlet
        finally:
            del self._outlets[number]

    def opened(self, connection: "ProxyConnection") -> None:
        self._connections.add(connection)

    def closed(self, connection: "ProxyConnection") -> None:
        self._connections.discard(connection)
        for outlet in self._outlets.values():
            outlet.lost(connection)

    def taken(self, connection: "ProxyConnection", stream: int, position: int) -> None:
        if outlet := self._outlets.get(stream):
            outlet.taken(connection, position)


class ProxyConnection(asyncio.Protocol):
    """The connection of one proxy."""

    def __init__(self, relay: EventRelay) -> None:
        self._relay = relay
        self._parts = list[bytes]()
        self._messages = Messages(MAX_MESSAGE_BYTES)
        self._transport: asyncio.Transport | None = None
        self.is_lost = False

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.Transport", transport)
        self._relay.opened(self)

    def connection_lost(self, exc: Exception | None) -> None:
        del exc
        self.is_lost = True
        self._relay.closed(self)

    def data_received(self, data: bytes) -> None:
        try:
            for stream, position in self._messages.read(data):
                self._relay.taken(self, cast("int", stream), cast("int", position))
        except ValueError as error:
            logger.warning("a proxy sent what is no message: %s", error)
            self.close()

    def put(self, stream: int, position: int, data: bytes) -> None:
        """Send a part; all parts of one turn of the event loop are one write."""
        if not self._parts:
            asyncio.get_running_loop().call_soon(self._flush)
        self._parts.append(pack_part(stream, position, data))

    def close(self) -> None:
        if self._transport is not None:
            self._flush()
            self._transport.close()

    def _flush(self) -> None:
        parts, self._parts = self._parts, []
        if parts and self._transport is not None and not self.is_lost:
            self._transport.write(b"".join(parts))


class Messages:
    """Decodes a stream of msgpack arrays."""

    def __init__(self, max_bytes: int) -> None:
        self._unpacker = msgpack.Unpacker(raw=False, max_buffer_size=max_bytes, use_list=False)

    def read(self, data: bytes) -> Iterator[tuple[object, ...]]:
        """The messages that ``data`` completes.

        Raises: ValueError if it is not msgpack, or a message is too long
        """
        try:
            self._unpacker.feed(data)
            for message in cast("Iterator[object]", self._unpacker):
                if not isinstance(message, tuple):
                    raise ValueError(f"expected an array, not {type(message).__name__}")
                yield cast("tuple[object, ...]", message)
        except msgpack.UnpackException as error:
            raise ValueError(f"{type(error).__name__}: {error}") from error


def pack_part(stream: int, position: int, data: bytes) -> bytes:
    """A part of a stream's body, for the proxy."""
    return cast("bytes", msgpack.packb((stream, position, data)))


def pack_taken(stream: int, position: int) -> bytes:
    """How much of a stream's body its client has taken, for the ingress."""
    return cast("bytes", msgpack.packb((stream, position)))
