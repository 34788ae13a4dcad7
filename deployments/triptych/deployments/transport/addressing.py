# grpcio has no type hints; nothing untyped leaves this module.
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false
# pyright: reportUnknownArgumentType=false
"""Addresses of peer channels: unix sockets on one node, a directory of endpoints between nodes.

On one node an address is that of a unix socket. With several nodes an address is only a name. The
process of that name publishes its endpoint in a directory that only members of the cluster can
write. So an address from a message is looked up there, and never connected to directly.
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
from triptych.deployments.transport.frame_socket import frame_socket
from triptych.kvpool import Access, PoolAddress, bracketed

_NAME = re.compile(r"[a-z0-9][a-z0-9-]{0,63}")

if TYPE_CHECKING:
    Handler = grpc.RpcMethodHandler[bytes, bytes]


@dataclass(frozen=True, slots=True)
class Route:
    """How to reach a peer channel."""

    target: str
    """gRPC target."""
    access: Access | None = None
    """Credentials to present there."""
    is_remote: bool = False
    """Whether it is on another node."""
    frames: Path | None = None
    """Its socket for frames; None if it has none, or is on another node."""


class Routes(Protocol):
    """Listens at and resolves addresses of peer channels, for one process."""

    @property
    def access(self) -> Access | None:
        """Credentials that incoming calls must present; None: all calls are accepted."""
        ...

    async def open(self, address: str, server: grpc.aio.Server) -> None:
        """Make the server of a channel listen at its address."""
        ...

    def frame_socket(self, address: str) -> Path:
        """Where a channel of this node listens for frames, beside its gRPC server."""
        ...

    async def find(self, address: str) -> Route:
        """The route to another channel.

        Raises: LookupError if there is none
        """
        ...

    async def close(self, address: str) -> None:
        """Withdraw an address."""
        ...


class LocalRoutes:
    """Unix sockets of one node: the address is the gRPC target."""

    access = None

    async def open(self, address: str, server: grpc.aio.Server) -> None:
        _prepare_socket(address)
        server.add_insecure_port(address)

    def frame_socket(self, address: str) -> Path:
        return frame_socket(address)

    async def find(self, address: str) -> Route:
        return Route(address, frames=_existing(frame_socket(address)))

    async def close(self, address: str) -> None:
        pass


LOCAL = LocalRoutes()


class Directory(Protocol):
    """A key-value store that all nodes share. Calls block for a moment."""

    def put(self, key: str, value: bytes) -> None: ...
    def get(self, key: str) -> bytes | None: ...
    def remove(self, key: str) -> None: ...
    def keys(self, prefix: str) -> list[str]: ...
    def nodes(self) -> set[str]:
        """Ids of live nodes; entries of dead nodes stay in the store."""
        ...


@message
@dataclass(frozen=True, slots=True, kw_only=True)
class Endpoint:
    """Where a process listens, as it is published in the directory."""

    node: str
    host: str
    port: int
    pages_port: int = 0
    """Port of a pool from which other nodes read pages; 0 for other processes."""
    arena: str = ""
    """Arena of a pool; empty for other processes."""

    def __post_init__(self) -> None:
        for port in (self.port, self.pages_port):
            if not 0 <= port < 1 << 16:
                raise ValueError(f"port {port}: expected 0 to 65535")


@dataclass(frozen=True)
class Network:
    """One node of several: its address, its credentials and the directory of the others."""

    node: str
    host: str
    """Address of this node as other nodes reach it."""
    run_dir: Path
    """Directory of the sockets for processes of this node."""
    directory: Directory
    access: Access
    pool: str = "pool"
    """Directory prefix of this shard's pools; pools of other shards have another one."""

    # ---------------------------------------------------------------- peer channels

    async def open(self, address: str, server: grpc.aio.Server) -> None:
        unix = self._unix(address)
        _prepare_socket(unix)
        server.add_insecure_port(unix)
        credentials, outside = self.access.server_credentials, f"{bracketed(self.host)}:0"
        if credentials is None:
            port = server.add_insecure_port(outside)
        else:
            port = server.add_secure_port(outside, credentials)
        endpoint = Endpoint(node=self.node, host=self.host, port=port)
        await asyncio.to_thread(self._announce, f"mailbox/{address}", endpoint)

    def frame_socket(self, address: str) -> Path:
        return frame_socket(self._unix(address))

    async def find(self, address: str) -> Route:
        unix = self._unix(address)
        endpoint = await asyncio.to_thread(self._endpoint, f"mailbox/{address}")
        if endpoint is None:
            raise LookupError(f"the directory has no endpoint of {address!r}")
        if endpoint.node == self.node:
            return Route(unix, self.access, frames=_existing(frame_socket(unix)))
        return Route(f"{bracketed(endpoint.host)}:{endpoint.port}", self.access, is_remote=True)

    async def close(self, address: str) -> None:
        await asyncio.to_thread(self.directory.remove, f"mailbox/{address}")

    def _unix(self, address: str) -> str:
        if not _NAME.fullmatch(address):
            raise LookupError(f"{address!r:.80} is not the name of a process")
        return f"unix:{self.run_dir / address}.sock"

    # ---------------------------------------------------------------- pools

    def announce_pool(self, arena: str, address: PoolAddress) -> None:
        """Publish the endpoint of this node's pool in place of its predecessor's."""
        ports = {"port": address.calls, "pages_port": address.pages}
        endpoint = Endpoint(node=self.node, host=address.host, arena=arena, **ports)
        self._announce(f"{self.pool}/{self.node}", endpoint)

    def forget_pool(self) -> None:
        self.directory.remove(f"{self.pool}/{self.node}")

    def pools(self) -> dict[str, PoolAddress]:
        """Addresses of the shard's pools on live nodes, by arena."""
        alive = self.directory.nodes()
        endpoints = [self._endpoint(key) for key in self.directory.keys(f"{self.pool}/")]
        return {
            endpoint.arena: PoolAddress(endpoint.host, endpoint.port, endpoint.pages_port)
            for endpoint in endpoints
            if endpoint is not None and endpoint.node in alive
        }

    def find_pool(self, arena: str) -> PoolAddress | None:
        """Address of the pool of an arena; None if it is unknown."""
        return self.pools().get(arena)

    # ---------------------------------------------------------------- the directory

    def _announce(self, key: str, endpoint: Endpoint) -> None:
        self.directory.put(key, pack([endpoint]))

    def _endpoint(self, key: str) -> Endpoint | None:
        value = self.directory.get(key)
        if value is None:
            return None
        match unpack(value):
            case [Endpoint() as endpoint]:
                return endpoint
            case _:
                raise MessageError(f"{key} in the directory is no endpoint")


class TokenInterceptor(grpc.aio.ServerInterceptor):
    """Rejects calls that do not present the token."""

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


def _existing(path: Path) -> Path | None:
    """None if a process of an older release is there, or none at all."""
    return path if path.exists() else None


def _prepare_socket(address: str) -> None:
    """Make a unix socket's directory, private to this user, and remove a stale socket."""
    if address.startswith("unix:"):
        path = Path(address.removeprefix("unix:"))
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        path.unlink(missing_ok=True)
