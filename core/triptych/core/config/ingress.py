"""The HTTP ingress."""

from dataclasses import dataclass, field

from triptych.core.config.request_limits import ImageLimitsConfig, RequestLimitsConfig
from triptych.core.config.values import HOST, MIB, is_host, require


@dataclass(frozen=True, slots=True, kw_only=True)
class IngressConfig:
    """The HTTP side, and gRPC beside it."""

    num_replicas: int = 1
    """Copies of the HTTP ingress behind one port. Limits of a key and metrics count over all of a
    node."""

    grpc_port: int = 0
    """Port of the gRPC server (``triptych.proto``) of every ingress replica; it has the same
    checks, limits and keys as HTTP. 0: no gRPC."""

    grpc_host: str = "127.0.0.1"
    """Address that the gRPC server listens on; ``0.0.0.0``: all addresses of its node."""

    grpc_reflection: bool = True
    """Whether the gRPC server tells its schema to tools such as ``grpcurl``, without a key."""

    max_body_bytes: int = 4 * MIB
    """Largest request body; a larger one is answered with 413."""

    max_choices: int = 8
    """Largest ``n`` of one request."""

    request_timeout_s: float = 600.0
    """Maximum duration of a request; after it, the request ends with 504."""

    graceful_shutdown_timeout_s: float = 20.0
    """Seconds that running requests have to finish when the server stops or is redeployed. Those
    that remain end with an error event, or with 503. New requests get 503 meanwhile."""

    write_timeout_s: float = 60.0
    """Maximum time for a client to take one part of a stream; after it, the stream is closed and
    its request is cancelled. It needs a server that reports when the client reads: gRPC, and HTTP
    of the proxy of ``triptych serve`` or the image, on the node of the ingress."""

    max_open_requests: int = 2048
    """Completions in progress at one ingress replica over HTTP; further ones get 503."""

    api_keys: str = ""
    """File with the digests of API keys and the limits of each key; empty: no key is needed."""

    open_admin: bool = False
    """Whether ``/router/explain`` and ``/profile`` may be read without an admin key. Only without
    ``api_keys``; with it, keys marked ``admin`` may read them."""

    decision_header: bool = False
    """Whether responses that are not streamed carry the router's decisions in the header
    ``X-Triptych-Decision``."""

    strict_params: bool = False
    """Whether an unknown field of a request is an error (400); otherwise it is ignored."""

    private_metrics: bool = False
    """Whether ``/metrics`` needs an admin key, which Prometheus sends as a bearer token. Only with
    ``api_keys``."""

    vllm_metrics: bool = False
    """Whether ``/metrics`` also has the common metrics under vLLM's names (``vllm:...``), for
    gateways, autoscalers and dashboards that expect them."""

    share_prefixes: bool = False
    """Whether clients with different keys share cached prefixes. Off by default: with it, a client
    could infer from its time to first token what other clients sent."""

    limits: RequestLimitsConfig = field(default_factory=RequestLimitsConfig)
    """Bounds on what one request may hold."""

    images: ImageLimitsConfig = field(default_factory=ImageLimitsConfig)
    """Bounds on images."""

    def __post_init__(self) -> None:
        require(self.num_replicas >= 1, "ingress.num_replicas", self.num_replicas, ">= 1")
        port, host = self.grpc_port, self.grpc_host
        require(0 <= port < 1 << 16, "ingress.grpc_port", port, "0 to 65535")
        require(is_host(host), "ingress.grpc_host", host, HOST)
        require(
            self.max_body_bytes >= 1024, "ingress.max_body_bytes", self.max_body_bytes, ">= 1024"
        )
        require(self.max_choices >= 1, "ingress.max_choices", self.max_choices, ">= 1")
        require(
            self.request_timeout_s > 0, "ingress.request_timeout_s", self.request_timeout_s, "> 0"
        )
        grace_s = self.graceful_shutdown_timeout_s
        require(grace_s >= 0, "ingress.graceful_shutdown_timeout_s", grace_s, ">= 0")
        seconds, opened = self.write_timeout_s, self.max_open_requests
        require(seconds > 0, "ingress.write_timeout_s", seconds, "> 0")
        require(opened >= 1, "ingress.max_open_requests", opened, ">= 1")
        private, has_keys = self.private_metrics, bool(self.api_keys)
        require(
            has_keys or not private, "ingress.private_metrics", private, "False without api_keys"
        )
