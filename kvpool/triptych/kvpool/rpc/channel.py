"""Frames: bytes in, bytes out, over a Unix socket on a node, over gRPC between nodes.

On a node there is a gRPC port, too: for health probes, and for clients that wait for the server.
"""

# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false
# pyright: reportUnknownArgumentType=false, reportUnknownParameterType=false
# grpcio has no type hints; nothing untyped leaves this module.

from collections.abc import Callable, Generator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, cast

import grpc

from triptych.core.errors import MessageError, PoolError, PoolUnavailable
from triptych.kvpool.rpc.auth import Access, failure
from triptych.kvpool.rpc.local_frames import Answer, CallChannel, CallServer, call_socket

MAX_FRAME_BYTES = 16 << 20

SERVICE = "triptych.kvpool.Pool"
CALL = f"/{SERVICE}/Call"
_HEALTH_SERVICE = "grpc.health.v1.Health"
_SERVING = b"\x08\x01"
"""``HealthCheckResponse(status=SERVING)`` in protobuf: two bytes are no reason for a package."""
_LIMITS = [
    ("grpc.max_receive_message_length", MAX_FRAME_BYTES),
    ("grpc.max_send_message_length", MAX_FRAME_BYTES),
]
KEEPALIVE = [
    # A process that is stopped, not dead, or whose node lost its network keeps its connection;
    # unanswered pings break it.
    ("grpc.keepalive_time_ms", 5_000),
    ("grpc.keepalive_timeout_ms", 5_000),
    ("grpc.keepalive_permit_without_calls", 1),
    ("grpc.http2.max_pings_without_data", 0),
    ("grpc.http2.min_ping_interval_without_data_ms", 4_000),
]
CALL_THREADS = 4
_RECONNECT_MS = 200
"""Longest pause between attempts to connect on the same node."""
_FAR_RECONNECT_MS = 1_000

if TYPE_CHECKING:
    Handler = grpc.RpcMethodHandler[bytes, bytes]


@dataclass(frozen=True, slots=True)
class Outside:
    """Settings of a server that is open to other nodes."""

    access: Access
    refused: Callable[[str], None]
    """Called with the reason why a call was refused."""


class FrameServer:
    """Answers frames until it is stopped, and gRPC's own health probes beside them."""

    def __init__(self, answer: Answer, address: str, outside: Outside | None = None) -> None:
        """Listen on ``unix:/path`` or ``host:port``, where port 0 finds a free one.

        Only with ``outside`` may the address be one that other machines reach.

        Raises: PoolError if the address cannot be had, or is open to other machines
        """
        if outside is None:
            _require_local(address)
        self._server = grpc.server(
            ThreadPoolExecutor(CALL_THREADS, thread_name_prefix="pool-call"),
            options=[*_LIMITS, *KEEPALIVE, ("grpc.so_reuseport", 0)],
            interceptors=[_TokenInterceptor(outside)] if outside else [],
        )
        self._server.add_generic_rpc_handlers(_handlers(answer))
        credentials = outside.access.server_credentials if outside else None
        try:
            if credentials is None:
                port = self._server.add_insecure_port(address)
            else:
                port = self._server.add_secure_port(address, credentials)
            path = call_socket(address)
            self._calls = CallServer(answer, path, MAX_FRAME_BYTES) if path else None
        except (RuntimeError, OSError) as error:
            raise PoolError(f"the pool cannot listen on {address}: {error}") from error
        host, _, asked = address.rpartition(":")
        self.address = f"{host}:{port}" if asked == "0" else address
        self._server.start()

    def stop(self) -> None:
        """Refuse new frames, finish those that are being answered."""
        if self._calls:
            self._calls.stop()
        self._server.stop(grace=0.5).wait()


def _handlers(answer: Answer) -> tuple[grpc.GenericRpcHandler, ...]:
    def call(frame: bytes, _: grpc.ServicerContext) -> bytes:
        return answer(frame)

    def is_healthy(_: bytes, __: grpc.ServicerContext) -> bytes:
        return _SERVING

    methods = {CALL.rpartition("/")[2]: grpc.unary_unary_rpc_method_handler(call)}
    check = grpc.unary_unary_rpc_method_handler(is_healthy)
    return (
        grpc.method_handlers_generic_handler(SERVICE, methods),
        grpc.method_handlers_generic_handler(_HEALTH_SERVICE, {"Check": check}),
    )


class _TokenInterceptor(grpc.ServerInterceptor):
    """Refuses calls without the token; health probes need none."""

    def __init__(self, outside: Outside) -> None:
        self._outside = outside

    def intercept_service(  # pyright: ignore[reportIncompatibleMethodOverride]
        self,
        continuation: "Callable[[grpc.HandlerCallDetails], Handler]",
        handler_call_details: grpc.HandlerCallDetails,
    ) -> "Handler":
        called = handler_call_details
        if called.method.startswith(f"/{_HEALTH_SERVICE}/"):
            return continuation(called)
        reason = self._outside.access.refusal(called.invocation_metadata)
        if not reason:
            return continuation(called)
        self._outside.refused(reason)

        def refuse(_: bytes, context: grpc.ServicerContext) -> None:
            context.abort(grpc.StatusCode.UNAUTHENTICATED, reason)

        return grpc.unary_unary_rpc_method_handler(refuse)


class FrameChannel:
    """Sends frames to a server and waits for the answers; safe to use from several threads."""

    def __init__(self, address: str, access: Access | None = None) -> None:
        """``access``: credentials for a server of another node."""
        if access is None:
            _require_local(address)
        self.address = address
        options = [
            *_LIMITS,
            *(KEEPALIVE if access else ()),
            *(access.channel_options if access else ()),
            ("grpc.enable_retries", 0),
            ("grpc.enable_http_proxy", 0),
            ("grpc.use_local_subchannel_pool", 1),
            ("grpc.initial_reconnect_backoff_ms", 100),
            ("grpc.max_reconnect_backoff_ms", _FAR_RECONNECT_MS if access else _RECONNECT_MS),
        ]
        credentials = access.channel_credentials if access else None
        if credentials is None:
            self._channel = grpc.insecure_channel(address, options=options)
        else:
            self._channel = grpc.secure_channel(address, credentials, options=options)
        self._metadata = access.metadata if access else None
        self._call = self._channel.unary_unary(CALL)
        path = None if access else call_socket(address)
        name = f"the pool at {address}"
        self._local = CallChannel(path, name, MAX_FRAME_BYTES) if path else None

    def ask(self, frame: bytes, timeout_s: float, *, wait: bool = False) -> bytes:
        """Send one frame and return the answer; ``wait`` for a server that is still starting.

        Raises: PoolUnavailable if there is no answer in time: whether the frame was heard is
            then unknown; AccessRefused; MessageError if it is too large; PoolError if the server
            failed
        """
        if len(frame) > MAX_FRAME_BYTES:
            raise MessageError(f"frame of {len(frame)} bytes: the limit is {MAX_FRAME_BYTES}")
        answer = self._local.ask(frame, timeout_s) if self._local else None
        if answer is not None:
            return answer
        with self._translated():  # on a node: it is not there yet, or has gone
            metadata = self._metadata
            return cast(
                "bytes",
                self._call(frame, timeout=timeout_s, wait_for_ready=wait, metadata=metadata),
            )

    def close(self) -> None:
        if self._local:
            self._local.close()
        self._channel.close()

    @contextmanager
    def _translated(self) -> Generator[None]:
        try:
            yield
        except grpc.RpcError as error:
            raise self._error(cast("grpc.Call", error)) from error
        except ValueError as error:  # grpc's word for a closed channel
            raise PoolUnavailable(f"the channel to {self.address} is closed") from error

    def _error(self, error: grpc.Call) -> PoolError | MessageError:
        code, details = error.code(), error.details()
        if code is grpc.StatusCode.RESOURCE_EXHAUSTED:
            return MessageError(f"{self.address}: {details}")
        if code in (grpc.StatusCode.UNKNOWN, grpc.StatusCode.UNIMPLEMENTED):
            return PoolError(f"the pool at {self.address} failed: {details}")
        return failure(f"the pool at {self.address}", code, details)


def _require_local(address: str) -> None:
    if not address.startswith(("unix:/", "127.0.0.1:", "localhost:", "[::1]:")):
        raise PoolError(
            f"pool address {address!r}: expected unix:/path or 127.0.0.1:port, since no token "
            "protects it"
        )
