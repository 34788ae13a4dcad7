# grpcio has no type hints; nothing untyped leaves this module.
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false
# pyright: reportUnknownArgumentType=false
"""Messages between the processes of one application: msgpack frames, no pickle.

Every process has one channel. Messages to a peer are queued in its outbox, and all that are queued
are sent in one frame, in order: the tokens of a whole decode step are one frame. Frames go over a
socket (``frame_socket``) to peers of the same node, and over gRPC to others. A watched peer is lost
when its gRPC connection breaks, which is noticed long before a health check would fail.

Each message is delivered once and in order, or the peer is reported as lost: a frame has a number,
is sent again until it is acknowledged, and the receiver ignores a frame that it already has. So a
receiver that stalls for some seconds loses nothing. A peer is lost when it does not acknowledge a
frame for ``GIVE_UP_S``, when too much waits for it, or when another process has its address.
"""

import asyncio
import contextlib
import logging
import time
import uuid
from collections import OrderedDict, deque
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from dataclasses import dataclass, field

import grpc
import grpc.aio

from triptych.core.errors import MessageError, RequestTooLarge, TriptychError
from triptych.core.messages import MAX_FRAME_BYTES, Message, pack, unpack
from triptych.deployments.transport.addressing import LOCAL, Route, Routes, TokenInterceptor
from triptych.deployments.transport.frame_socket import (
    FrameListener,
    FrameSender,
    OutOfOrder,
)
from triptych.kvpool.rpc.auth import Metadata, failure

logger = logging.getLogger(__name__)

SERVICE = "triptych.Mailbox"
"""Unchanged between releases, so that a process of another release gets a readable error."""
DELIVER, WATCH = f"/{SERVICE}/Deliver", f"/{SERVICE}/Watch"
SENDER, SESSION, NUMBER = "triptych-sender", "triptych-session", "triptych-number"
DELIVER_TIMEOUT_S = 5.0
"""Time for one attempt to deliver a frame; another attempt follows."""
GIVE_UP_S = 60.0
"""Time after which a peer that acknowledges nothing is lost."""
CONNECT_S = 5.0
"""The same for a peer to which no connection was possible yet: it may have another kind of
credentials."""
RETRY_S, MAX_RETRY_S = 0.05, 1.0
"""Delay before a frame is sent again; it doubles with each attempt."""
MAX_WAITING = 100_000
"""Messages that wait for a peer at most: more, and it is lost. A worker sends some thousand a
second."""
MAX_FRAME_MESSAGES = 1024
SPLIT_BYTES = MAX_FRAME_BYTES // 4
"""Frames above this size are split, if they have more than one message."""
MAX_SESSIONS = 4096
"""Senders whose last frame number a receiver remembers."""
OPTIONS = [
    ("grpc.max_receive_message_length", MAX_FRAME_BYTES),
    ("grpc.max_send_message_length", MAX_FRAME_BYTES),
    # A process that is stopped, not dead, keeps its connection; unanswered pings break it.
    ("grpc.keepalive_time_ms", 5_000),
    ("grpc.keepalive_timeout_ms", 5_000),
    ("grpc.keepalive_permit_without_calls", 1),
    ("grpc.http2.max_pings_without_data", 0),
    ("grpc.http2.min_ping_interval_without_data_ms", 4_000),
    ("grpc.max_reconnect_backoff_ms", 1_000),
]

Receive = Callable[[Sequence[Message], str], None]
"""Called in the event loop with the messages of a frame and their sender's address."""
Lost = Callable[[str], None]
"""Called in the event loop, once per lost peer, with its address."""
Undeliverable = Callable[[Message, TriptychError], None]
"""Called in the event loop with a message that a peer cannot take: ``RequestTooLarge``, or
``MessageError`` if the peer refused it. All others are delivered."""
Call = Callable[..., Awaitable[bytes]]
Deliver = Callable[[bytes, int, float], Awaitable[str]]
"""Sends the frame of a number until it is acknowledged; returns why the peer refused it, or "". The
last argument: how long to try while there is no connection, s. Raises: PeerLost."""


class PeerLost(Exception):
    """A peer cannot be reached any more, or another process has its address."""


class Outbox:
    """Messages for one peer in order; the ones that are due come out as frames."""

    def __init__(self) -> None:
        self._waiting = deque[Message]()
        self._parts = deque[list[Message]]()
        """Parts of a frame that was too large, or refused; they are before all others."""
        self._filled = asyncio.Event()

    def __len__(self) -> int:
        return len(self._waiting) + sum(map(len, self._parts))

    def put(self, message: Message) -> None:
        self._waiting.append(message)
        self._filled.set()

    def put_back(self, *parts: list[Message]) -> None:
        """Messages to send before all others, one frame for each part."""
        self._parts.extendleft(reversed(parts))

    async def take(self) -> list[Message]:
        """The messages of the next frame, at least one."""
        if self._parts:
            return self._parts.popleft()
        while not self._waiting:
            self._filled.clear()
            await self._filled.wait()
        count = min(MAX_FRAME_MESSAGES, len(self._waiting))
        return [self._waiting.popleft() for _ in range(count)]


@dataclass(eq=False)
class Peer:
    """The sending side of the connection to one peer."""

    connecting: asyncio.Task[tuple[grpc.aio.Channel, Route]]
    outbox: Outbox = field(default_factory=Outbox)
    tasks: list[asyncio.Task[None]] = field(default_factory=list["asyncio.Task[None]"])
    session: str = field(default_factory=lambda: uuid.uuid4().hex)
    """The frames of a session are numbered from 1."""


class PeerChannel:
    """A process's gRPC server at its address, and its connections to peers."""

    def __init__(
        self,
        address: str,
        receive: Receive,
        lost: Lost,
        routes: Routes = LOCAL,
        undeliverable: Undeliverable | None = None,
    ) -> None:
        self.address = address
        self._receive, self._lost, self._routes = receive, lost, routes
        self._undeliverable = undeliverable
        self._received = OrderedDict[str, int]()
        """Number of the last frame, by the sender's session."""
        self._peers = dict[str, Peer]()
        self.refused = 0
        """Number of frames that could not be decoded, and of calls without the right token."""
        interceptors = [TokenInterceptor(routes.access, self._refuse)] if routes.access else []
        self._server = grpc.aio.server(options=OPTIONS, interceptors=interceptors)
        self._server.add_generic_rpc_handlers((self._handlers(),))
        self._listener = FrameListener(self._take, self._admit)
        self._open = asyncio.Event()

    async def start(self) -> None:
        """Start to listen; a socket file that a dead process left is replaced."""
        await self._routes.open(self.address, self._server)
        await self._listener.start(self._routes.frame_socket(self.address))
        await self._server.start()

    async def stop(self) -> None:
        self._open.set()
        for address in list(self._peers):
            await self._drop(address)
        self._listener.stop()
        await self._server.stop(grace=0.2)
        await self._routes.close(self.address)

    def post(self, to: str, message: Message) -> None:
        """Queue a message for a peer; messages to one peer arrive in order."""
        if to == self.address:
            self._receive([message], to)
            return
        peer = self._peer(to)
        peer.outbox.put(message)
        if len(peer.outbox) > MAX_WAITING:
            logger.warning("%s: %s messages wait for it; dropping them", to, len(peer.outbox))
            self._report_lost(to, peer)

    def watch(self, address: str, found: Callable[[], None] = lambda: None) -> None:
        """Report this peer when it is lost; ``found`` is called when it first answers."""
        peer = self._peer(address)
        peer.tasks.append(asyncio.create_task(self._watch(address, peer, found)))

    # ---------------------------------------------------------------- receiving

    def _refuse(self, reason: str) -> None:
        self.refused += 1
        logger.warning("%s refused a call: %s", self.address, reason)

    def _handlers(self) -> grpc.GenericRpcHandler:
        methods = {
            "Deliver": grpc.unary_unary_rpc_method_handler(self._on_deliver),
            "Watch": grpc.unary_stream_rpc_method_handler(self._on_watch),
        }
        return grpc.method_handlers_generic_handler(SERVICE, methods)

    def _admit(self, shown: Metadata) -> str:
        """Why a sender on this node is not listened to; "" if it is."""
        access = self._routes.access
        reason = access.refusal(shown) if access else ""
        if reason:
            self._refuse(reason)
        return reason

    async def _on_deliver(
        self, frame: bytes, context: grpc.aio.ServicerContext[bytes, bytes]
    ) -> bytes:
        told = {key: str(value) for key, value in context.invocation_metadata() or ()}
        number = int(told[NUMBER][:20]) if told.get(NUMBER, "").isdecimal() else 1
        try:
            refusal = self._take(frame, told.get(SENDER, ""), told.get(SESSION, "")[:64], number)
        except OutOfOrder as error:
            await context.abort(grpc.StatusCode.FAILED_PRECONDITION, str(error))
        if refusal:
            await context.abort(grpc.StatusCode.INVALID_ARGUMENT, refusal)
        return b""

    def _take(self, frame: bytes, sender: str, session: str, number: int) -> str:
        """Take a frame; returns why it is refused, or "".

        Raises: OutOfOrder if frames before it are missing
        """
        last = self._received.get(session, 0) if session else number - 1
        if number <= last:
            return ""  # it was sent again because the acknowledgement was lost
        if number > last + 1:
            raise OutOfOrder(f"frame {number} of a session of which this process has {last}")
        try:
            messages = unpack(frame)
        except MessageError as error:
            self._refuse(f"a frame from {sender:.80}: {error}")
            return str(error)[:200]
        if session:
            self._received[session] = number
            self._received.move_to_end(session)
            if len(self._received) > MAX_SESSIONS:
                self._received.popitem(last=False)
        try:
            self._receive(messages, sender)
        except Exception:  # the frame has arrived: to send it again would repeat the fault
            logger.exception("%s: a frame from %s caused an error", self.address, sender)
        return ""

    async def _on_watch(
        self, _: bytes, context: grpc.aio.ServicerContext[bytes, bytes]
    ) -> AsyncIterator[bytes]:
        yield b""
        await self._open.wait()

    # ---------------------------------------------------------------- sending

    def _peer(self, address: str) -> Peer:
        if address not in self._peers:
            peer = Peer(asyncio.create_task(self._connect(address)))
            peer.tasks.append(asyncio.create_task(self._drain(address, peer)))
            self._peers[address] = peer
        return self._peers[address]

    async def _connect(self, address: str) -> tuple[grpc.aio.Channel, Route]:
        route = await self._routes.find(address)
        options, access = OPTIONS, route.access if route.is_remote else None
        if access is None or access.channel_credentials is None:
            return grpc.aio.insecure_channel(route.target, options=options), route
        options = [*options, *access.channel_options]
        credentials = access.channel_credentials
        return grpc.aio.secure_channel(route.target, credentials, options=options), route

    async def _drain(self, address: str, peer: Peer) -> None:
        """Deliver what is in the outbox, until the peer is lost."""
        try:
            channel, route = await asyncio.shield(peer.connecting)
            shown = route.access.metadata if route.access else ()
            if route.frames is None:
                own = ((SENDER, self.address), (SESSION, peer.session), *shown)
                delivery = GrpcDelivery(address, channel.unary_unary(DELIVER), own)
                await self._deliver_all(address, peer, delivery.deliver)
            else:
                sender = FrameSender(route.frames, self.address, peer.session, shown)
                with contextlib.closing(sender):
                    delivery = SocketDelivery(address, sender)
                    await self._deliver_all(address, peer, delivery.deliver)
        except (LookupError, MessageError) as error:
            logger.info("cannot resolve %s: %s", address, error)
        except PeerLost as error:
            logger.info("%s", error)
        except Exception:
            logger.exception("%s: sending ended by an error", address)
        self._report_lost(address, peer)

    async def _deliver_all(self, address: str, peer: Peer, deliver: Deliver) -> None:
        number = 1
        while True:
            batch = await peer.outbox.take()
            frame = pack(batch)
            if len(frame) > SPLIT_BYTES and len(batch) > 1:
                half = len(batch) // 2
                peer.outbox.put_back(batch[:half], batch[half:])
                continue
            if len(frame) > MAX_FRAME_BYTES:
                self._drop_message(address, batch[0], _too_large(len(frame)))
                continue
            connect_s = CONNECT_S if number == 1 else GIVE_UP_S
            refusal = await deliver(frame, number, connect_s)
            if not refusal:
                number += 1
            elif len(batch) > 1:  # one of them is refused, and the others are not
                peer.outbox.put_back(*([message] for message in batch))
            else:
                self._drop_message(address, batch[0], MessageError(refusal))

    def _drop_message(self, address: str, message: Message, error: TriptychError) -> None:
        logger.error("%s cannot take a %s: %s", address, type(message).__name__, error)
        if self._undeliverable is not None:
            self._undeliverable(message, error)

    async def _watch(self, address: str, peer: Peer, found: Callable[[], None]) -> None:
        with contextlib.suppress(grpc.aio.AioRpcError, LookupError, MessageError):
            channel, route = await asyncio.shield(peer.connecting)
            shown = route.access.metadata if route.access else None
            async for _ in channel.unary_stream(WATCH)(b"", metadata=shown):
                found()
        self._report_lost(address, peer)

    def _report_lost(self, address: str, peer: Peer) -> None:
        """Report a lost peer once and drop it; a later message opens a new connection."""
        if self._peers.get(address) is peer:
            del self._peers[address]
            closing = asyncio.create_task(self._close(peer))
            _CLOSING.add(closing)
            closing.add_done_callback(_CLOSING.discard)
            self._lost(address)

    async def _drop(self, address: str) -> None:
        peer = self._peers.pop(address, None)
        if peer is not None:
            await self._close(peer)

    async def _close(self, peer: Peer) -> None:
        for task in peer.tasks:
            if task is not asyncio.current_task():
                task.cancel()
        peer.connecting.cancel()  # has no effect if it is done
        with contextlib.suppress(asyncio.CancelledError, LookupError, MessageError):
            channel, _ = await peer.connecting
            await channel.close()


def _too_large(nbytes: int) -> RequestTooLarge:
    return RequestTooLarge(
        f"the request takes {nbytes} bytes in a message between stages, and the limit is "
        f"{MAX_FRAME_BYTES}: send fewer logit_bias entries, or a shorter prompt or grammar"
    )


@dataclass(frozen=True, slots=True)
class GrpcDelivery:
    """Delivers the frames of a session by gRPC calls."""

    address: str
    call: Call
    metadata: Metadata

    async def deliver(self, frame: bytes, number: int, connect_s: float) -> str:
        """Raises: PeerLost"""
        began, delay_s = time.monotonic(), RETRY_S
        metadata = (*self.metadata, (NUMBER, str(number)))
        while True:
            try:
                await self.call(
                    frame, timeout=DELIVER_TIMEOUT_S, metadata=metadata, wait_for_ready=False
                )
            except grpc.aio.AioRpcError as error:
                if error.code() is grpc.StatusCode.INVALID_ARGUMENT:
                    return error.details() or "no reason"
                is_connected = error.code() is grpc.StatusCode.DEADLINE_EXCEEDED
                until = began + (GIVE_UP_S if is_connected else connect_s)
                if not _may_be_there(error) or time.monotonic() > until:
                    told = failure(self.address, error.code(), error.details())
                    raise PeerLost(told) from error
            else:
                return ""
            await asyncio.sleep(delay_s)
            delay_s = min(MAX_RETRY_S, 2 * delay_s)


@dataclass(frozen=True, slots=True)
class SocketDelivery:
    """Delivers the frames of a session over a socket of this node."""

    address: str
    sender: FrameSender

    async def deliver(self, frame: bytes, number: int, connect_s: float) -> str:
        """Raises: PeerLost"""
        began, delay_s = time.monotonic(), RETRY_S
        while True:
            try:
                async with asyncio.timeout(GIVE_UP_S):
                    return await self.sender.deliver(frame, number)
            except (FileNotFoundError, ConnectionRefusedError) as error:  # the process has exited
                raise PeerLost(f"{self.address} is gone: {error}") from error
            except TimeoutError as error:
                raise PeerLost(f"{self.address} took nothing for {GIVE_UP_S:.0f} s") from error
            except OutOfOrder as error:
                raise PeerLost(f"{self.address} does not answer: {error}") from error
            except OSError as error:
                if time.monotonic() > began + connect_s:
                    raise PeerLost(f"{self.address} does not answer: {error}") from error
            await asyncio.sleep(delay_s)
            delay_s = min(MAX_RETRY_S, 2 * delay_s)


def _may_be_there(error: grpc.aio.AioRpcError) -> bool:
    """Whether the process may still exist: it is slow or paused, or its connection broke.

    Where nothing listens at an address, the process has exited.
    """
    told = (error.details() or "").lower()
    is_temporary = error.code() in (
        grpc.StatusCode.DEADLINE_EXCEEDED,
        grpc.StatusCode.UNAVAILABLE,
    )
    return is_temporary and not any(text in told for text in _NOBODY_LISTENS)


_NOBODY_LISTENS = ("connection refused", "no such file", "handshake", "certificate")
_CLOSING = set["asyncio.Task[None]"]()
"""Closing tasks, kept from the garbage collector until they are done."""
