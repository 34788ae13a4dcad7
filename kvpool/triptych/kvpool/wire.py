"""Frames over gRPC: bytes in, bytes out, over a unix socket or loopback TCP."""

# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false
# pyright: reportUnknownArgumentType=false, reportUnknownParameterType=false
# grpcio has no type hints; nothing untyped leaves this module.

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import cast

import grpc

from triptych.core.errors import MessageError, PoolError, PoolUnavailable

MAX_FRAME_BYTES = 16 << 20

_SERVICE = "triptych.kvpool.Pool"
_METHOD = "Call"
_HEALTH_SERVICE = "grpc.health.v1.Health"
_SERVING = b"\x08\x01"
"""``HealthCheckResponse(status=SERVING)`` in protobuf: two bytes are no reason for a package."""
_LIMITS = [
    ("grpc.max_receive_message_length", MAX_FRAME_BYTES),
    ("grpc.max_send_message_length", MAX_FRAME_BYTES),
]


class FrameServer:
    """Answers frames until it is stopped, and gRPC's own health probes beside them."""

    def __init__(self, answer: Callable[[bytes], bytes], address: str) -> None:
        """Listen on ``unix:/path`` or ``127.0.0.1:port``, where port 0 finds a free one.

        Raises: PoolError if the address cannot be had, or is open to other machines
        """
        _require_local(address)
        self._server = grpc.server(
            ThreadPoolExecutor(4, thread_name_prefix="pool-call"),
            options=[*_LIMITS, ("grpc.so_reuseport", 0)],
        )

        def handle(frame: bytes, _: grpc.ServicerContext) -> bytes:
            return answer(frame)

        def is_healthy(_: bytes, __: grpc.ServicerContext) -> bytes:
            return _SERVING

        method = grpc.unary_unary_rpc_method_handler(handle)
        check = grpc.unary_unary_rpc_method_handler(is_healthy)
        self._server.add_generic_rpc_handlers(
            (
                grpc.method_handlers_generic_handler(_SERVICE, {_METHOD: method}),
                grpc.method_handlers_generic_handler(_HEALTH_SERVICE, {"Check": check}),
            )
        )
        try:
            port = self._server.add_insecure_port(address)
        except RuntimeError as error:
            raise PoolError(f"the pool cannot listen on {address}: {error}") from error
        host, _, asked = address.rpartition(":")
        self.address = f"{host}:{port}" if asked == "0" else address
        self._server.start()

    def stop(self) -> None:
        """Refuse new frames, finish those that are being answered."""
        self._server.stop(grace=0.5).wait()


class FrameChannel:
    """Sends frames to a server and waits for the answers; safe to use from several threads."""

    def __init__(self, address: str) -> None:
        _require_local(address)
        self.address = address
        self._channel = grpc.insecure_channel(
            address,
            options=[
                *_LIMITS,
                ("grpc.enable_retries", 0),
                ("grpc.enable_http_proxy", 0),
                ("grpc.use_local_subchannel_pool", 1),
                ("grpc.initial_reconnect_backoff_ms", 100),
                ("grpc.max_reconnect_backoff_ms", 1000),
            ],
        )
        self._call = self._channel.unary_unary(f"/{_SERVICE}/{_METHOD}")

    def ask(self, frame: bytes, timeout_s: float, *, wait: bool = False) -> bytes:
        """Send one frame and return the answer; ``wait`` for a server that is still starting.

        Raises: PoolUnavailable if there is no answer in time: whether the frame was heard is
            then unknown; MessageError if it is too large; PoolError if the server failed
        """
        if len(frame) > MAX_FRAME_BYTES:
            raise MessageError(f"frame of {len(frame)} bytes: the limit is {MAX_FRAME_BYTES}")
        try:
            return cast("bytes", self._call(frame, timeout=timeout_s, wait_for_ready=wait))
        except grpc.RpcError as error:
            raise self._translated(cast("grpc.Call", error)) from error
        except ValueError as error:  # grpc's word for a closed channel
            raise PoolUnavailable(f"the channel to {self.address} is closed") from error

    def close(self) -> None:
        self._channel.close()

    def _translated(self, error: grpc.Call) -> PoolError | MessageError:
        code, details = error.code(), error.details()
        if code is grpc.StatusCode.RESOURCE_EXHAUSTED:
            return MessageError(f"{self.address}: {details}")
        if code in (grpc.StatusCode.UNKNOWN, grpc.StatusCode.UNIMPLEMENTED):
            return PoolError(f"the pool at {self.address} failed: {details}")
        return PoolUnavailable(f"the pool at {self.address} does not answer: {details}")


def _require_local(address: str) -> None:
    if not address.startswith(("unix:/", "127.0.0.1:", "localhost:", "[::1]:")):
        raise PoolError(f"pool address {address!r}: expected unix:/path or 127.0.0.1:port")
