# grpcio has no type hints; nothing untyped leaves this module.
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false
# pyright: reportUnknownArgumentType=false
"""The gRPC server of one ingress: the service, its health, and reflection."""

import asyncio
import logging
from collections.abc import AsyncGenerator
from typing import TYPE_CHECKING

import grpc
import grpc.aio
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection

from triptych.core.errors import ConfigError, TriptychError
from triptych.deployments.grpc.service import SERVICE, Service
from triptych.deployments.http.limits import MAX_HEADER_BYTES
from triptych.deployments.http.serving import OpenAIServing
from triptych.kvpool import bracketed

if TYPE_CHECKING:
    Request, Response = health_pb2.HealthCheckRequest, health_pb2.HealthCheckResponse
    Context = grpc.aio.ServicerContext[Request, Response]

logger = logging.getLogger(__name__)

WATCH_S = 2.0
"""From one look at the health for who watches it to the next."""
MAX_STREAMS = 1024
"""Calls of one connection at a time; more wait."""
GRACE_S = 1.0


class GrpcServer:
    """Answers gRPC for an intake, if its configuration names a port.

    Copies of the ingress on one node share the port: the kernel spreads connections over them,
    and a copy that takes the place of another listens before that one ends.
    """

    def __init__(self, intake: OpenAIServing) -> None:
        self._intake = intake
        self._server: grpc.aio.Server | None = None
        self.port = 0
        """Where it listens; 0: nowhere."""

    async def start(self) -> None:
        """Raises: ConfigError if it cannot listen there"""
        config = self._intake.config
        if not config.grpc_port:
            return
        server = grpc.aio.server(
            options=[
                ("grpc.so_reuseport", 1),
                ("grpc.max_receive_message_length", config.max_body_bytes),
                ("grpc.max_send_message_length", -1),
                ("grpc.max_metadata_size", MAX_HEADER_BYTES),
                ("grpc.absolute_max_metadata_size", MAX_HEADER_BYTES),
                ("grpc.max_concurrent_streams", MAX_STREAMS),
            ]
        )
        handlers = Service(self._intake).handlers()
        server.add_generic_rpc_handlers([grpc.method_handlers_generic_handler(SERVICE, handlers)])
        health_pb2_grpc.add_HealthServicer_to_server(Health(self._intake), server)
        names = (SERVICE, health.SERVICE_NAME, reflection.SERVICE_NAME)
        reflection.enable_server_reflection(names, server)
        address = f"{bracketed(config.grpc_host)}:{config.grpc_port}"
        try:
            self.port = server.add_insecure_port(address)
        except RuntimeError as error:
            raise ConfigError(
                f"ingress.grpc_port={config.grpc_port}: cannot listen at {address}: {error}; stop "
                "who does, or set another port or grpc_host"
            ) from error
        self._server = server
        await server.start()
        logger.info("gRPC at %s", address)

    async def stop(self) -> None:
        if self._server is not None:
            await self._server.stop(GRACE_S)


class Health(health_pb2_grpc.HealthServicer):
    """gRPC's own health service: what ``/health`` says, for the server and for its service."""

    def __init__(self, intake: OpenAIServing) -> None:
        self._intake = intake

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
        last = None
        while True:
            status = await self._status()
            if status != last:
                yield health_pb2.HealthCheckResponse(status=status)
            last = status
            await asyncio.sleep(WATCH_S)

    async def _status(self) -> int:
        states = health_pb2.HealthCheckResponse.ServingStatus
        try:
            is_well = (await self._intake.health()).ok
        except TriptychError:
            is_well = False
        return states.SERVING if is_well else states.NOT_SERVING
