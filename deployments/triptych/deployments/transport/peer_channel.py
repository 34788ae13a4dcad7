# grpcio has no type hints; nothing untyped leaves this module.
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false
# pyright: reportUnknownArgumentType=false
"""Messages between the processes of one application: msgpack frames over gRPC, no pickle.

Every process has one channel. Messages to a peer are queued in its outbox, and all that are queued
are sent in one frame, in order: the tokens of a whole decode step are one frame. A watched peer is
lost when its connection breaks, which is noticed long before a health check would fail.
"""

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass, field

import grpc
import grpc.aio

from triptych.core.errors import MessageError
from triptych.core.messages import MAX_FRAME_BYTES, Message, pack, unpack
from triptych.deployments.transport.addressing import LOCAL, Route, Routes, TokenInterceptor
from triptych.kvpool.rpc.auth import failure

logger = logging.getLogger(__name__)

SERVICE = "triptych.Mailbox"
"""Unchanged between releases, so that a process of another release gets a readable error."""
DELIVER, WATCH = f"/{SERVICE}/Deliver", f"/{SERVICE}/Watch"
SENDER = "triptych-sender"
DELIVER_TIMEOUT_S = 20.0
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


@dataclass(eq=False)
class Peer:
    """The sending side of the connection to one peer."""

    connecting: asyncio.Task[tuple[grpc.aio.Channel, Route]]
    outbox: asyncio.Queue[Message] = field(default_factory=asyncio.Queue[Message])
    tasks: list[asyncio.Task[None]] = field(default_factory=list["asyncio.Task[None]"])


class PeerChannel:
    """A process's gRPC server at its address, and its connections to peers."""

    def __init__(self, address: str, receive: Receive, lost: Lost, routes: Routes = LOCAL) -> None:
        self.address = address
        self._receive, self._lost, self._routes = receive, lost, routes
        self._peers = dict[str, Peer]()
        self.refused = 0
        """Number of frames that could not be decoded, and of calls without the right token."""
        interceptors = [TokenInterceptor(routes.access, self._refuse)] if routes.access else []
        self._server = grpc.aio.server(options=OPTIONS, interceptors=interceptors)
        self._server.add_generic_rpc_handlers((self._handlers(),))
        self._open = asyncio.Event()

    async def start(self) -> None:
        """Start to listen; a socket file that a dead process left is replaced."""
        await self._routes.open(self.address, self._server)
        await self._server.start()

    async def stop(self) -> None:
        self._open.set()
        for address in list(self._peers):
            await self._drop(address)
        await self._server.stop(grace=0.2)
        await self._routes.close(self.address)

    def post(self, to: str, message: Message) -> None:
        """Queue a message for a peer; messages to one peer arrive in order."""
        if to == self.address:
            self._receive([message], to)
            return
        self._peer(to).outbox.put_nowait(message)

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

    async def _on_deliver(
        self, frame: bytes, context: grpc.aio.ServicerContext[bytes, bytes]
    ) -> bytes:
        sender = str(dict(context.invocation_metadata() or ()).get(SENDER, ""))
        try:
            messages = unpack(frame)
        except MessageError as error:
            self._refuse(f"a frame from {sender:.80}: {error}")
            await context.abort(grpc.StatusCode.INVALID_ARGUMENT, str(error)[:200])
        self._receive(messages, sender)
        return b""

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
        try:
            channel, route = await asyncio.shield(peer.connecting)
        except (LookupError, MessageError) as error:
            logger.info("cannot resolve %s: %s", address, error)
            self._report_lost(address, peer)
            return
        deliver = channel.unary_unary(DELIVER)
        shown = route.access.metadata if route.access else ()
        while True:
            batch = [await peer.outbox.get()]
            while not peer.outbox.empty():
                batch.append(peer.outbox.get_nowait())
            try:
                await deliver(
                    pack(batch),
                    timeout=DELIVER_TIMEOUT_S,
                    metadata=((SENDER, self.address), *shown),
                    wait_for_ready=False,
                )
            except grpc.aio.AioRpcError as error:
                if error.code() is grpc.StatusCode.INVALID_ARGUMENT:
                    logger.error("%s refused a frame: %s", address, error.details())
                    continue
                logger.info("%s", failure(address, error.code(), error.details()))
                self._report_lost(address, peer)
                return

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


_CLOSING = set["asyncio.Task[None]"]()
"""Closing tasks, kept from the garbage collector until they are done."""
