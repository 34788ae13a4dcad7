"""The gRPC server of ``triptych.proto``, over the same ``OpenAIServing`` as HTTP."""

from triptych.deployments.grpc.server import GrpcServer

__all__ = ["GrpcServer"]
