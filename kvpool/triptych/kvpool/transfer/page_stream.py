# isal's hints leave out what a buffer is.
# pyright: reportUnknownVariableType=false
"""Pages on a TCP connection of their own: from one arena into another, without a copy in between.

Calls between nodes go over gRPC. The bytes of pages do not: gRPC copies them four times on their
way, and gave a third to a half of what the same line carries. Here the kernel takes them from
the pages where they lie and puts them into the pages where they go.

Who may read was settled by the call that made the *ticket*: 32 random bytes, for certain pages of
one lease, good once and for some seconds. The reader shows it, and nothing else is ever read
from it. A chunk is a header, the bytes, and a trailer with their checksum; TCP holds the sender
back when the reader is slow. A connection that breaks is simply gone: the reader asks for a
ticket for the pages that it lacks.
"""

import hmac
import logging
import secrets
import socket
import ssl
import struct
import threading
import time
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass

import numpy as np
from isal.isal_zlib import crc32
from numpy.typing import NDArray

from triptych.core.errors import AccessRefused, MessageError, PoolUnavailable, TriptychError
from triptych.core.handles import LeaseId
from triptych.core.messages import pack, unpack
from triptych.kvpool.pool.free_list import PageIds
from triptych.kvpool.pool.listener import connections
from triptych.kvpool.rpc import messages
from triptych.kvpool.rpc.auth import Access

logger = logging.getLogger(__name__)

TICKET_BYTES = 32
TICKET_LIFE_S = 10.0
MAX_TICKETS = 256
MAX_STREAMS = 8
"""Connections that one pool serves at once; each takes a thread while its reader is slow."""
CHUNK_BYTES = 1 << 20
QUIET_S = 10.0
"""Time without a byte after which the other side counts as gone."""

_HEADER = struct.Struct("<4sII")
"""What follows; for pages: which of those asked for is the first, and how many there are; for a
refusal: 0, and its length in bytes."""
_PAGES, _REFUSAL = b"TPp1", b"TPr1"
_TRAILER = struct.Struct("<4sI")
"""Sent when it is certain that the bytes before it were those of the lease, with their checksum."""
_GOOD = b"good"
_BAD_TRAILER = _TRAILER.pack(b"bad!", 0)
_MAX_REFUSAL_BYTES = 1 << 16
_BUFFERS = 512
"""Pieces of memory that one system call takes; the limit is 1024."""

Data = NDArray[np.uint8]
Chunk = tuple[bytes, bytes, list[memoryview]]
"""A trailer of the chunk before, a header, and pages."""
Still = Callable[[PageIds], None]
"""Raises unless these pages are still those of the lease."""


def checksum(lease: LeaseId, first: int, parts: Sequence[memoryview]) -> int:
    """CRC-32 of page bytes, seeded with their lease and position.

    So a chunk in the wrong place, or of another request, does not pass for the right one.
    """
    crc = crc32(f"{lease}:{first}".encode())
    for part in parts:
        crc = crc32(part, crc)
    return crc


def views(data: Data, ids: PageIds) -> list[memoryview]:
    """The bytes of pages where they lie, one view for each run of consecutive ids."""
    breaks = (np.flatnonzero(np.diff(ids) != 1) + 1).tolist()
    edges = zip([0, *breaks], [*breaks, ids.size], strict=True)
    runs = ((int(ids[first]), int(ids[end - 1]) + 1) for first, end in edges)
    return [data[first:end].reshape(-1).data for first, end in runs]


# ------------------------------------------------------------------ the side that has them


@dataclass(frozen=True, slots=True)
class Offer:
    """The pages that a ticket stands for."""

    lease: LeaseId
    ids: PageIds
    still: Still
    until: float


class PageSender:
    """Sends pages to a client that presents a ticket for them."""

    def __init__(
        self,
        data: Data,
        host: str,
        access: Access,
        *,
        sent: Callable[[int], None],
        refused: Callable[[str], None],
    ) -> None:
        """Listen on a free port of ``host``. ``sent`` and ``refused`` are called to count.

        Raises: OSError if the address cannot be had
        """
        self._data, self._sent, self._refused = data, sent, refused
        self._context = access.server_context
        self._offers = dict[bytes, Offer]()
        self._lock = threading.Lock()
        self._slots = threading.BoundedSemaphore(MAX_STREAMS)
        self._open = set[socket.socket]()
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        self._listener = socket.create_server((host, 0), family=family, backlog=64)
        self.port = int(self._listener.getsockname()[1])
        self._acceptor = threading.Thread(target=self._accept, name="page-sender", daemon=True)
        self._acceptor.start()

    def offer(self, lease: LeaseId, ids: PageIds, still: Still) -> bytes:
        """A ticket for these pages."""
        ticket, now = secrets.token_bytes(TICKET_BYTES), time.monotonic()
        with self._lock:
            for old in [key for key, offer in self._offers.items() if offer.until < now]:
                del self._offers[old]
            while len(self._offers) >= MAX_TICKETS:
                del self._offers[next(iter(self._offers))]
            self._offers[ticket] = Offer(lease, ids, still, now + TICKET_LIFE_S)
        return ticket

    def close(self) -> None:
        """Refuse new connections, and close open ones."""
        with suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)  # wakes who waits for a connection
        self._acceptor.join()
        self._listener.close()
        with self._lock:
            connections = list(self._open)
        for connection in connections:
            with suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)

    def _accept(self) -> None:
        for connection in connections(self._listener):
            if not self._slots.acquire(blocking=False):
                connection.close()
                continue
            serve = threading.Thread(target=self._serve, args=(connection,), daemon=True)
            serve.start()

    def _serve(self, connection: socket.socket) -> None:
        with self._lock:
            self._open.add(connection)
        try:
            connection.settimeout(QUIET_S)
            with _wrapped(connection, self._context) as line:
                self._send(line)
        except OSError as error:  # the reader went away, or its certificate does not fit
            if isinstance(error, ssl.SSLError):
                self._refused(str(error))
            logger.info("a reader of another node is gone: %s", error)
        finally:
            with self._lock:
                self._open.discard(connection)
            connection.close()
            self._slots.release()

    def _send(self, line: socket.socket) -> None:
        offer = self._take(_received(line, TICKET_BYTES))
        if offer is None:
            self._refused("no such ticket")
            return
        owed = b""
        try:
            for trailer, header, parts in self._chunks(offer):
                send_all(line, [trailer + header, *parts])
                owed = _BAD_TRAILER
        except TriptychError as error:
            told = pack([messages.refusal(error)])
            send_all(line, [owed, _HEADER.pack(_REFUSAL, 0, len(told)), told])

    def _chunks(self, offer: Offer) -> Generator[Chunk]:
        """Chunks to send: each begins with the confirmation of the one before.

        It is confirmed only if the pages were the lease's all the time. A lease id is never
        used twice, so a lease that is held afterwards was held before. What comes without that
        word, the reader does not take.
        """
        step, trailer = max(1, CHUNK_BYTES // self._data.shape[1]), b""
        for first in range(0, offer.ids.size, step):
            ids = offer.ids[first : first + step]
            offer.still(ids)
            parts = views(self._data, ids)
            crc = checksum(offer.lease, first, parts)
            yield trailer, _HEADER.pack(_PAGES, first, ids.size), parts
            offer.still(ids)
            trailer = _TRAILER.pack(_GOOD, crc)
            self._sent(ids.size * self._data.shape[1])
        yield trailer, b"", []

    def _take(self, shown: bytes) -> Offer | None:
        """The offer of a ticket, which is valid once."""
        now = time.monotonic()
        with self._lock:
            for ticket, offer in self._offers.items():
                if hmac.compare_digest(ticket, shown):
                    del self._offers[ticket]
                    return offer if now < offer.until else None
        return None


# ------------------------------------------------------------------ the side that wants them


def bracketed(host: str) -> str:
    """A host as it is written before a port: IPv6 addresses in brackets."""
    return f"[{host}]" if ":" in host else host


def receive(
    address: tuple[str, int],
    access: Access,
    ticket: bytes,
    lease: LeaseId,
    data: Data,
    ids: PageIds,
) -> Generator[int]:
    """Put the pages of a ticket into rows of ``data``, in the order of ``ids``.

    Yields: how many pages are there and good, after each chunk; what lies in later ones is nothing
    Raises: MessageError for a chunk that is damaged; PoolUnavailable when the connection breaks;
        AccessRefused; whatever the other side says that went wrong
    """
    host, port = address
    with _translated(f"{bracketed(host)}:{port}"):
        connection = socket.create_connection(address, timeout=QUIET_S)
        with _wrapped(connection, access.client_context, access.server_name or host) as line:
            send_all(line, [ticket])
            done, header = 0, _received(line, _HEADER.size) if ids.size else b""
            while done < ids.size:
                count, header = _receive_chunk(line, header, lease, done, data, ids[done:])
                done += count
                yield done


def _receive_chunk(
    line: socket.socket, header: bytes, lease: LeaseId, first: int, data: Data, ids: PageIds
) -> tuple[int, bytes]:
    """How many pages came, and the header of what comes next, read with the same calls."""
    kind, begin, count = _HEADER.unpack(header)
    if kind == _REFUSAL:
        raise _refused(line, count)
    if kind != _PAGES or begin != first or not 1 <= count <= ids.size:
        raise MessageError(f"{count} pages from {begin}: expected up to {ids.size} from {first}")
    parts = views(data, ids[:count])
    tail = bytearray(_TRAILER.size + (_HEADER.size if count < ids.size else 0))
    receive_all(line, [*parts, memoryview(tail)])
    word, crc = _TRAILER.unpack_from(tail)
    if word != _GOOD:
        raise MessageError(f"pages from {first} of lease {lease}: nobody says that they are good")
    if crc != checksum(lease, first, parts):
        raise MessageError(f"pages from {first} of lease {lease}: the checksum does not fit")
    return count, bytes(tail[_TRAILER.size :])


def _refused(line: socket.socket, length: int) -> TriptychError:
    if length > _MAX_REFUSAL_BYTES:
        return MessageError(f"a refusal of {length} bytes: the limit is {_MAX_REFUSAL_BYTES}")
    match unpack(_received(line, length)):
        case [messages.PoolRefused() as no]:
            return messages.refused(no)
        case _:
            return MessageError("expected one refusal")


# ------------------------------------------------------------------ sockets


def send_all(line: socket.socket, parts: Sequence[bytes | memoryview]) -> None:
    """Send pieces of memory one after another, in few calls."""
    if isinstance(line, ssl.SSLSocket):  # it encrypts into memory of its own anyway
        line.sendall(b"".join(parts))
        return
    left = [memoryview(part) for part in parts]
    while left:
        left = _behind(left, line.sendmsg(left[:_BUFFERS]))


def receive_all(line: socket.socket, parts: Sequence[memoryview]) -> None:
    """Fill pieces of memory one after another, in few calls.

    Raises: ConnectionError if the other side ends before
    """
    left = list(parts)
    while left:
        if isinstance(line, ssl.SSLSocket):
            count = line.recv_into(left[0])
        else:
            count = line.recvmsg_into(left[:_BUFFERS])[0]
        if count == 0:
            raise ConnectionError("the connection ended in the middle of a chunk")
        left = _behind(left, count)


def _behind(parts: list[memoryview], count: int) -> list[memoryview]:
    """Pieces of memory without their first ``count`` bytes."""
    for index, part in enumerate(parts):
        if count < len(part):
            return [part[count:], *parts[index + 1 :]]
        count -= len(part)
    return []


def _received(line: socket.socket, count: int) -> bytes:
    content = bytearray(count)
    receive_all(line, [memoryview(content)])
    return bytes(content)


@contextmanager
def _wrapped(
    connection: socket.socket, context: ssl.SSLContext | None, server_name: str | None = None
) -> Generator[socket.socket]:
    """The connection through TLS, if there is TLS; closed afterwards."""
    with connection:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        if context is None:
            yield connection
            return
        is_server = server_name is None
        with context.wrap_socket(
            connection, server_side=is_server, server_hostname=server_name
        ) as line:
            yield line


@contextmanager
def _translated(address: str) -> Generator[None]:
    try:
        yield
    except ssl.SSLCertVerificationError as error:
        raise AccessRefused(address, f"the certificates do not fit: {error}") from error
    except OSError as error:
        raise PoolUnavailable(f"{address} sends no more pages: {error}") from error
