# msgpack has no type hints; nothing untyped leaves this module.
# pyright: reportUnknownMemberType=false
"""Frames between two processes of one node, over a Unix socket.

A frame and its acknowledgement cost a fifth of the CPU time of a gRPC call. The sender begins a
connection with a greeting: its address, its session and its credentials. Then it sends frames, each
with its number, one at a time; the receiver answers each with that number, and with a reason if it
refuses the frame. In both directions a part is 8 bytes of number, 4 bytes of length, and content.
"""

import asyncio
import contextlib
from collections.abc import Callable, Iterator
from pathlib import Path
from struct import Struct
from typing import cast

import msgpack

from triptych.core.messages import MAX_FRAME_BYTES
from triptych.kvpool.rpc.auth import Metadata

_HEADER = Struct("!QI")
_GREETING = 0
"""The number of a greeting; frames have numbers from 1."""
_OUT_OF_ORDER = 0
"""The number of the last answer of a connection."""
SUFFIX = ".frames"

Take = Callable[[bytes, str, str, int], str]
"""Takes a frame, its sender's address, session and the frame's number; returns why it is refused,
or "". Raises: OutOfOrder."""
Admit = Callable[[Metadata], str]
"""Why a sender with these credentials is not listened to; "" if it is."""


class OutOfOrder(Exception):
    """A frame's number does not follow that of the last one, or its sender is not admitted."""


def frame_socket(address: str) -> Path:
    """The socket for frames, beside that of a gRPC address ``unix:PATH``."""
    return Path(address.removeprefix("unix:")).with_suffix(SUFFIX)


class FrameListener:
    """The receiver: listens on a socket, and hands frames to ``take``."""

    def __init__(self, take: Take, admit: Admit) -> None:
        self.take, self.admit = take, admit
        self._server: asyncio.Server | None = None
        self._connections = set["_Incoming"]()

    async def start(self, path: Path) -> None:
        """Listen; the socket file of a dead process is replaced."""
        loop = asyncio.get_running_loop()
        self._server = await loop.create_unix_server(lambda: _Incoming(self), str(path))

    def stop(self) -> None:
        """Stop to listen. The file stays: it may be that of the next process by now."""
        if self._server is not None:
            self._server.close()
        for connection in list(self._connections):
            connection.close()

    def opened(self, connection: "_Incoming") -> None:
        self._connections.add(connection)

    def closed(self, connection: "_Incoming") -> None:
        self._connections.discard(connection)


class FrameSender:
    """The sender of one session's frames."""

    def __init__(self, path: Path, sender: str, session: str, shown: Metadata) -> None:
        """``shown``: credentials."""
        self._path = path
        self._greeting = cast("bytes", msgpack.packb((sender, session, shown)))
        self._connection: _Outgoing | None = None

    async def deliver(self, frame: bytes, number: int) -> str:
        """Send a frame and wait for the answer: why it is refused, or "".

        Raises: OutOfOrder with the receiver's reason; OSError if there is no connection
        """
        if self._connection is None or self._connection.is_lost:
            loop = asyncio.get_running_loop()
            _, self._connection = await loop.create_unix_connection(_Outgoing, str(self._path))
            self._connection.send(_GREETING, self._greeting)
        return await self._connection.deliver(frame, number)

    def close(self) -> None:
        if self._connection is not None:
            self._connection.close()


class _Connection(asyncio.Protocol):
    """One end of a connection: splits what it receives into numbered parts."""

    def __init__(self) -> None:
        self._received = bytearray()
        self._transport: asyncio.Transport | None = None
        self.is_lost = False

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.Transport", transport)

    def connection_lost(self, exc: Exception | None) -> None:
        del exc
        self.is_lost = True

    def send(self, number: int, content: bytes) -> None:
        if self._transport is not None and not self.is_lost:
            self._transport.write(_HEADER.pack(number, len(content)) + content)

    def close(self) -> None:
        if self._transport is not None:
            self._transport.close()

    def parts(self, data: bytes) -> Iterator[tuple[int, bytes]]:
        """The numbered parts that ``data`` completes.

        Raises: ValueError if one is longer than a frame may be
        """
        received = self._received
        received += data
        start, size = 0, _HEADER.size
        try:
            while len(received) - start >= size:
                number, length = _HEADER.unpack_from(received, start)
                if length > MAX_FRAME_BYTES:
                    raise ValueError(f"a frame of {length} bytes: the limit is {MAX_FRAME_BYTES}")
                end = start + size + length
                if len(received) < end:
                    break
                content = bytes(received[start + size : end])
                start = end
                yield number, content
        finally:
            del received[:start]


class _Incoming(_Connection):
    """A connection at the receiver."""

    def __init__(self, listener: FrameListener) -> None:
        super().__init__()
        self._listener = listener
        self._sender: tuple[str, str] | None = None
        """Address and session; None before the greeting."""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        super().connection_made(transport)
        self._listener.opened(self)

    def connection_lost(self, exc: Exception | None) -> None:
        super().connection_lost(exc)
        self._listener.closed(self)

    def data_received(self, data: bytes) -> None:
        try:
            for number, content in self.parts(data):
                if self._sender is None:
                    self._sender = self._greeted(number, content)
                else:
                    refusal = self._listener.take(content, *self._sender, number)
                    self.send(number, refusal.encode())
        except OutOfOrder as error:
            self.send(_OUT_OF_ORDER, str(error).encode())
            self.close()
        except ValueError:  # nothing of ours sends that
            self.close()

    def _greeted(self, number: int, content: bytes) -> tuple[str, str]:
        """The sender's address and session.

        Raises: ValueError if this is no greeting; OutOfOrder if it shows wrong credentials
        """
        try:
            sender, session, shown = cast("tuple[object, ...]", msgpack.unpackb(content))
            shown = tuple(
                (str(key), str(value)) for key, value in cast("list[list[object]]", shown)
            )
        except Exception as error:  # msgpack raises several unrelated types
            raise ValueError("not a greeting") from error
        if number != _GREETING:
            raise ValueError("not a greeting")
        if refusal := self._listener.admit(shown):
            raise OutOfOrder(refusal)
        return str(sender), str(session)[:64]


class _Outgoing(_Connection):
    """A connection at the sender; one frame at a time waits for its answer."""

    def __init__(self) -> None:
        super().__init__()
        self._answer: asyncio.Future[str] | None = None
        self._number = _GREETING

    async def deliver(self, frame: bytes, number: int) -> str:
        """Raises: OutOfOrder; ConnectionResetError"""
        self._answer = asyncio.get_running_loop().create_future()
        self._number = number
        self.send(number, frame)
        if self.is_lost:
            raise ConnectionResetError("the connection is closed")
        try:
            return await self._answer
        finally:
            self._answer = None

    def data_received(self, data: bytes) -> None:
        with contextlib.suppress(ValueError):
            for number, content in self.parts(data):
                self._answered(number, content.decode(errors="replace"))

    def _answered(self, number: int, reason: str) -> None:
        answer = self._answer
        if answer is None or answer.done():
            return
        if number == _OUT_OF_ORDER:
            answer.set_exception(OutOfOrder(reason))
        elif number == self._number:
            answer.set_result(reason)

    def connection_lost(self, exc: Exception | None) -> None:
        super().connection_lost(exc)
        if self._answer is not None and not self._answer.done():
            self._answer.set_exception(ConnectionResetError("the peer closed the connection"))
