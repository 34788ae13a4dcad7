# grpcio has no type hints; nothing untyped leaves this module.
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false
# pyright: reportUnknownArgumentType=false
"""The gRPC server of one ingress: the service, health checks and reflection."""

import asyncio
import logging
from collections import Counter
from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import TYPE_CHECKING

import grpc
import grpc.aio
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection

from triptych.core.errors import ConfigError
from triptych.deployments.grpc.service import SERVICE, Service
from triptych.deployments.http.limits import MAX_HEADER_BYTES
from triptych.deployments.http.serving import OpenAIServing
from triptych.kvpool import bracketed

if TYPE_CHECKING:
    Request, Response = health_pb2.HealthCheckRequest, health_pb2.HealthCheckResponse
    Context = grpc.aio.ServicerContext[Request, Response]

logger = logging.getLogger(__name__)

WATCH_S = 2.0
"""Interval of health checks for a watching client."""
MAX_WATCHERS = 16
"""Health watchers of one connection."""
MAX_CALLS = 4096
"""Calls in progress, watchers included; further ones end with RESOURCE_EXHAUSTED."""
MAX_STREAMS = 1024
"""Concurrent calls of one connection; more of them wait."""
GRACE_S = 1.0


class GrpcServer:
    """Serves gRPC for an ``OpenAIServing``, if its configuration sets a port.

    Ingress replicas of one node share the port: the kernel spreads connections over them, and a
    replacement can listen before the old replica ends.
    """

    def __init__(self, serving: OpenAIServing) -> None:
        self._serving = serving
        self._server: grpc.aio.Server | None = None
        self.port = 0
        """The port that it listens on; 0 if it does not."""

    async def start(self) -> None:
        """Listen at the configured port.

        Raises: ConfigError if that fails
        """
        config = self._serving.config
        if not config.grpc_port:
            return
        server = grpc.aio.server(
            maximum_concurrent_rpcs=MAX_CALLS,
            options=[
                ("grpc.so_reuseport", 1),
                ("grpc.max_receive_message_length", config.max_body_bytes),
                ("grpc.max_send_message_length", -1),
                ("grpc.max_metadata_size", MAX_HEADER_BYTES),
                ("grpc.absolute_max_metadata_size", MAX_HEADER_BYTES),
                ("grpc.max_concurrent_streams", MAX_STREAMS),
            ],
        )
        handlers = Service(self._serving).handlers()
        server.add_generic_rpc_handlers([grpc.method_handlers_generic_handler(SERVICE, handlers)])
        health_pb2_grpc.add_HealthServicer_to_server(Health(self._serving), server)
        if config.grpc_reflection:
            names = (SERVICE, health.SERVICE_NAME, reflection.SERVICE_NAME)
            reflection.enable_server_reflection(names, server)
        address = f"{bracketed(config.grpc_host)}:{config.grpc_port}"
        try:
            self.port = server.add_insecure_port(address)
        except RuntimeError as error:
            raise ConfigError(
                f"ingress.grpc_port={config.grpc_port}: cannot listen at {address}: {error}; stop "
                "the process that does, or set another port or grpc_host"
            ) from error
        self._server = server
        await server.start()
        logger.info("gRPC at %s", address)

    async def stop(self) -> None:
        if self._server is not None:
            await self._server.stop(GRACE_S)


class Health(health_pb2_grpc.HealthServicer):
    """gRPC's health service, with the result of ``/health`` for the server and its service."""

    def __init__(self, serving: OpenAIServing) -> None:
        self._serving = serving
        self._watchers = Counter[str]()
        """By client connection."""

    async def Check(
        self, request: health_pb2.HealthCheckRequest, context: "Context"
    ) -> health_pb2.HealthCheckResponse:
        if request.service not in {"", SERVICE, health.SERVICE_NAME}:
            await context.abort(grpc.StatusCode.NOT_FOUND, "there is no such service")
        return health_pb2.HealthCheckResponse(status=await self._status())

    async def Watch(
        self, request: health_pb2.HealthCheckRequest, context: "Context"
    ) -> AsyncGenerator[health_pb2.HealthCheckResponse, None]:
        states = health_pb2.HealthCheckResponse.ServingStatus
        if request.service not in {"", SERVICE, health.SERVICE_NAME}:
            yield health_pb2.HealthCheckResponse(status=states.SERVICE_UNKNOWN)
            return
        peer = context.peer()
        if self._watchers[peer] >= MAX_WATCHERS:
            text = f"this connection has {MAX_WATCHERS} watchers already: share one"
            await context.abort(grpc.StatusCode.RESOURCE_EXHAUSTED, text)
        self._watchers[peer] += 1
        try:
            async with aclosing(self._changes()) as changes:
                async for status in changes:
                    yield health_pb2.HealthCheckResponse(status=status)
        finally:
            self._watchers -= Counter({peer: 1})  # without entries of zero

    async def _changes(self) -> AsyncGenerator[int, None]:
        last = None
        while True:
            status = await self._status()
            if status != last:
                yield status
            last = status
            await asyncio.sleep(WATCH_S)

    async def _status(self) -> int:
        states = health_pb2.HealthCheckResponse.ServingStatus
        is_serving = (await self._serving.health()).ok
        return states.SERVING if is_serving else states.NOT_SERVING
