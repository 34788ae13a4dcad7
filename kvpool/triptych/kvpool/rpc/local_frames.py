"""Calls between processes of one node: a frame and its answer over a Unix socket, in threads.

A call takes a fifth of the CPU time of one over gRPC. A frame is 4 bytes of length and its content;
an answer begins with a byte more, which says whether the server failed.
"""

import logging
import select
import socket
import threading
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from struct import Struct

from triptych.core.errors import MessageError, PoolError, PoolUnavailable
from triptych.kvpool.pool.listener import connections

logger = logging.getLogger(__name__)

_LENGTH = Struct("!I")
_ANSWER = Struct("!I?")
_BACKLOG = 128
MAX_CONNECTIONS = 256
"""Connections, and threads, of a server; others wait until one of them closes."""
_STOP_S = 0.5
"""How long ``stop`` waits for the answers that are under way."""
SUFFIX = ".calls"

Answer = Callable[[bytes], bytes]


def call_socket(address: str) -> Path | None:
    """The socket for calls beside that of a gRPC address; None if it is no ``unix:PATH``."""
    if not address.startswith("unix:"):
        return None
    return Path(address.removeprefix("unix:")).with_suffix(SUFFIX)


class CallServer:
    """Answers frames, with a thread for each connection."""

    def __init__(
        self, answer: Answer, path: Path, max_bytes: int, most: int = MAX_CONNECTIONS
    ) -> None:
        """Listen; the socket file of a dead process is replaced. ``most``: connections at a time.

        Raises: OSError
        """
        self._answer, self._path, self._max_bytes = answer, path, max_bytes
        self._connections = dict[socket.socket, threading.Thread]()
        self._free = threading.BoundedSemaphore(most)
        path.unlink(missing_ok=True)
        self._listener = socket.socket(socket.AF_UNIX)
        self._listener.bind(str(path))
        self._listener.listen(_BACKLOG)
        threading.Thread(target=self._accept, name="pool-accept", daemon=True).start()

    def stop(self) -> None:
        """Refuse new frames, finish those that are being answered."""
        self._path.unlink(missing_ok=True)
        with suppress(OSError):  # wakes the thread that accepts
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        threads = list(self._connections.items())
        for connection, _ in threads:
            with suppress(OSError):
                connection.shutdown(socket.SHUT_RD)
        for _, thread in threads:
            thread.join(_STOP_S)

    def _accept(self) -> None:
        self._free.acquire()
        for connection in connections(self._listener):
            thread = threading.Thread(
                target=self._serve, args=[connection], name="pool-call", daemon=True
            )
            self._connections[connection] = thread
            thread.start()
            self._free.acquire()

    def _serve(self, connection: socket.socket) -> None:
        with suppress(OSError), connection:
            while header := receive(connection, _LENGTH.size):
                (length,) = _LENGTH.unpack(header)
                if length > self._max_bytes:
                    break
                frame = receive(connection, length)
                if len(frame) < length:
                    break
                connection.sendall(self._reply(frame))
        self._connections.pop(connection, None)
        self._free.release()

    def _reply(self, frame: bytes) -> bytes:
        try:
            content, has_failed = self._answer(frame), False
        except Exception as error:  # it must not end the thread
            logger.exception("a call caused an error")
            content, has_failed = f"{type(error).__name__}: {error}".encode(), True
        return _ANSWER.pack(len(content), has_failed) + content


class CallChannel:
    """Connections to a ``CallServer``; safe to use from several threads."""

    def __init__(self, path: Path, address: str, max_bytes: int) -> None:
        """``address``: name of the server in errors."""
        self._path, self._address, self._max_bytes = path, address, max_bytes
        self._idle = deque[socket.socket]()
        self._is_closed = False

    def ask(self, frame: bytes, timeout_s: float) -> bytes | None:
        """Send one frame and return the answer; None if nothing listens there.

        Raises: PoolUnavailable if there is no answer in time: whether the frame was heard is then
            unknown; MessageError for an answer that is too large; PoolError if the server failed
        """
        connection = self._connection(timeout_s)
        if connection is None:
            return None
        try:
            connection.sendall(_LENGTH.pack(len(frame)) + frame)
            content, has_failed = self._answer(connection)
        except OSError as error:
            connection.close()
            raise PoolUnavailable(f"{self._address} does not answer: {error}") from error
        except MessageError:
            connection.close()
            raise
        self._idle.append(connection)
        if self._is_closed:
            self.close()
        if has_failed:
            raise PoolError(f"{self._address} failed: {content.decode(errors='replace')}")
        return content

    def close(self) -> None:
        self._is_closed = True
        with suppress(IndexError):
            while True:
                self._idle.pop().close()

    def _connection(self, timeout_s: float) -> socket.socket | None:
        """Raises: PoolUnavailable after ``close``"""
        if self._is_closed:
            raise PoolUnavailable(f"the channel to {self._address} is closed")
        with suppress(IndexError):
            while True:
                connection = self._idle.pop()
                connection.settimeout(timeout_s)
                if not _is_readable(connection):
                    return connection
                connection.close()  # the server has closed it
        connection = socket.socket(socket.AF_UNIX)
        connection.settimeout(timeout_s)
        try:
            connection.connect(str(self._path))
        except OSError:
            connection.close()
            return None
        return connection

    def _answer(self, connection: socket.socket) -> tuple[bytes, bool]:
        """Raises: OSError; MessageError"""
        header = receive(connection, _ANSWER.size)
        if len(header) < _ANSWER.size:
            raise ConnectionResetError("it closed the connection")
        length, has_failed = _ANSWER.unpack(header)
        if length > self._max_bytes:
            raise MessageError(
                f"{self._address}: answer of {length} bytes: the limit is {self._max_bytes}"
            )
        content = receive(connection, length)
        if len(content) < length:
            raise ConnectionResetError("it closed the connection")
        return content, has_failed


def _is_readable(connection: socket.socket) -> bool:
    poll = select.poll()  # not select, which takes no descriptor above 1023
    poll.register(connection, select.POLLIN)
    return bool(poll.poll(0))


def receive(connection: socket.socket, size: int) -> bytes:
    """So many bytes, or fewer if the connection ends.

    Raises: OSError
    """
    first = connection.recv(size) if size else b""
    if len(first) == size or not first:
        return first
    received = bytearray(first)
    while len(received) < size and (part := connection.recv(size - len(received))):
        received += part
    return bytes(received)
