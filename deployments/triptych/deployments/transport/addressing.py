# grpcio has no type hints; nothing untyped leaves this module.
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false
# pyright: reportUnknownArgumentType=false
"""Where mailboxes listen, and the way from one to another.

On one node an address is that of a unix socket, and says all. Between nodes an address is a
name, nothing more: where the process of that name listens, it has announced in a directory that
only members of the cluster write. So what a message says is looked up, and never connected to.
"""

import asyncio
import re
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

import grpc
import grpc.aio

from triptych.core.errors import MessageError
from triptych.core.messages import message, pack, unpack
from triptych.kvpool import Access, PoolAddress, bracketed

_NAME = re.compile(r"[a-z0-9][a-z0-9-]{0,63}")

if TYPE_CHECKING:
    Handler = grpc.RpcMethodHandler[bytes, bytes]


@dataclass(frozen=True, slots=True)
class Route:
    """How to reach a mailbox."""

    target: str
    """In gRPC's form."""
    access: Access | None = None
    """What to show there."""
    is_far: bool = False
    """Whether it is on another node."""


class Routes(Protocol):
    """The ways that mailboxes of one process have."""

    @property
    def access(self) -> Access | None:
        """What who comes in must show."""
        ...

    async def open(self, address: str, server: grpc.aio.Server) -> None:
        """Have the server of a mailbox listen at its address."""
        ...

    async def find(self, address: str) -> Route:
        """The way to another mailbox.

        Raises: LookupError if there is none
        """
        ...

    async def close(self, address: str) -> None:
        """Nobody listens there any more."""
        ...


class LocalRoutes:
    """Unix sockets of one node: an address is the way."""

    access = None

    async def open(self, address: str, server: grpc.aio.Server) -> None:
        _make_way(address)
        server.add_insecure_port(address)

    async def find(self, address: str) -> Route:
        return Route(address)

    async def close(self, address: str) -> None:
        pass


LOCAL = LocalRoutes()


class Directory(Protocol):
    """Small values by key that all nodes see. Calls block for a moment."""

    def put(self, key: str, value: bytes) -> None: ...
    def get(self, key: str) -> bytes | None: ...
    def remove(self, key: str) -> None: ...
    def keys(self, prefix: str) -> list[str]: ...
    def nodes(self) -> set[str]:
        """The nodes that are alive: what others have put is there still."""
        ...


@message
@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """What a process announces: where it listens."""

    node: str
    host: str
    port: int
    pages_port: int = 0
    """Of a pool: where its pages are read."""
    arena: str = ""
    """Of a pool."""

    def __post_init__(self) -> None:
        for port in (self.port, self.pages_port):
            if not 0 <= port < 1 << 16:
                raise ValueError(f"port {port}: expected 0 to 65535")


@dataclass(frozen=True)
class Network:
    """One node of several: where it is, whom it believes, and where the others are."""

    node: str
    host: str
    """Address of this node as others reach it."""
    run_dir: Path
    """Holds the sockets for processes of this node."""
    directory: Directory
    access: Access
    pool: str = "pool"
    """What pools of this cell are called: those of another one are none of its business."""

    # ---------------------------------------------------------------- mailboxes

    async def open(self, address: str, server: grpc.aio.Server) -> None:
        unix = self._unix(address)
        _make_way(unix)
        server.add_insecure_port(unix)
        credentials, outside = self.access.server_credentials, f"{bracketed(self.host)}:0"
        if credentials is None:
            port = server.add_insecure_port(outside)
        else:
            port = server.add_secure_port(outside, credentials)
        place = Place(node=self.node, host=self.host, port=port)
        await asyncio.to_thread(self._announce, f"mailbox/{address}", place)

    async def find(self, address: str) -> Route:
        unix = self._unix(address)
        place = await asyncio.to_thread(self._place, f"mailbox/{address}")
        if place is None:
            raise LookupError(f"nobody called {address!r} has said where it listens")
        if place.node == self.node:
            return Route(unix, self.access)
        return Route(f"{bracketed(place.host)}:{place.port}", self.access, is_far=True)

    async def close(self, address: str) -> None:
        await asyncio.to_thread(self.directory.remove, f"mailbox/{address}")

    def _unix(self, address: str) -> str:
        if not _NAME.fullmatch(address):
            raise LookupError(f"{address!r:.80} is not the name of a mailbox")
        return f"unix:{self.run_dir / address}.sock"

    # ---------------------------------------------------------------- pools

    def announce_pool(self, arena: str, address: PoolAddress) -> None:
        """Say where the pool of this node is; the one before it is gone."""
        ports = {"port": address.calls, "pages_port": address.pages}
        place = Place(node=self.node, host=address.host, arena=arena, **ports)
        self._announce(f"{self.pool}/{self.node}", place)

    def forget_pool(self) -> None:
        self.directory.remove(f"{self.pool}/{self.node}")

    def pools(self) -> dict[str, PoolAddress]:
        """Where the pools of the cell are, one on each node, by arena."""
        alive = self.directory.nodes()
        places = [self._place(key) for key in self.directory.keys(f"{self.pool}/")]
        return {
            place.arena: PoolAddress(place.host, place.port, place.pages_port)
            for place in places
            if place is not None and place.node in alive
        }

    def find_pool(self, arena: str) -> PoolAddress | None:
        """Where the pool of an arena is; None if nobody has said."""
        return self.pools().get(arena)

    # ---------------------------------------------------------------- the directory

    def _announce(self, key: str, place: Place) -> None:
        self.directory.put(key, pack([place]))

    def _place(self, key: str) -> Place | None:
        value = self.directory.get(key)
        if value is None:
            return None
        match unpack(value):
            case [Place() as place]:
                return place
            case _:
                raise MessageError(f"{key} in the directory is no place")


class Doorkeeper(grpc.aio.ServerInterceptor):
    """Lets nobody in who does not show the token."""

    def __init__(self, access: Access, refused: Callable[[str], None]) -> None:
        self._access, self._refused = access, refused

    async def intercept_service(  # pyright: ignore[reportIncompatibleMethodOverride]
        self,
        continuation: "Callable[[grpc.HandlerCallDetails], Awaitable[Handler | None]]",
        handler_call_details: grpc.HandlerCallDetails,
    ) -> "Handler | None":
        handler = await continuation(handler_call_details)
        reason = self._access.refusal(handler_call_details.invocation_metadata)
        if not reason or handler is None:
            return handler
        self._refused(reason)

        async def refuse(_: bytes, context: grpc.aio.ServicerContext[bytes, bytes]) -> bytes:
            return await context.abort(grpc.StatusCode.UNAUTHENTICATED, reason)

        if handler.response_streaming:
            return grpc.unary_stream_rpc_method_handler(refuse)
        return grpc.unary_unary_rpc_method_handler(refuse)


def _make_way(address: str) -> None:
    """Make a unix socket's directory, for this user alone, and remove a dead one's socket."""
    if address.startswith("unix:"):
        path = Path(address.removeprefix("unix:"))
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        path.unlink(missing_ok=True)
