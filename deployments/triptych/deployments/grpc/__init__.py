"""The gRPC side: what ``triptych.proto`` says, over the same intake as HTTP."""

from triptych.deployments.grpc.server import GrpcServer

__all__ = ["GrpcServer"]
