"""The HTTP ingress."""

from dataclasses import dataclass

from triptych.core.config.values import MIB, require


@dataclass(frozen=True, slots=True, kw_only=True)
class IngressConfig:
    """The HTTP side, and gRPC beside it."""

    num_replicas: int = 1
    """Copies of the HTTP ingress."""

    grpc_port: int = 0
    """Port on which every copy of the ingress answers gRPC as well (``triptych.proto``), with the
    same checks, limits and keys; 0: none does."""

    grpc_host: str = "127.0.0.1"
    """Address at which it does; ``0.0.0.0``: at all that its node has."""

    max_body_bytes: int = 4 * MIB
    """Largest request body; a larger one is answered with 413."""

    max_choices: int = 8
    """Largest ``n`` of one request."""

    request_timeout_s: float = 600.0
    """Seconds after which a request is given up."""

    api_keys: str = ""
    """File with the digests of API keys and the limits of each; empty: everybody may ask."""

    open_admin: bool = False
    """Whether everybody may read why the router decided as it did (``/router/explain``), and where
    the time of steps goes (``/profile``), while there is no file of keys; with one, those keys may
    that are marked ``admin``."""

    decision_header: bool = False
    """Whether whole answers say in ``X-Triptych-Decision`` what the router decided."""

    strict_params: bool = False
    """Whether a field of a request that nobody knows is an error (400); else it is let be."""

    vllm_metrics: bool = False
    """Whether ``/metrics`` has the common ones under vLLM's names as well (``vllm:...``), for
    gateways, autoscalers and dashboards that ask for those."""

    share_prefixes: bool = False
    """Whether clients with different keys may share cached prefixes of prompts; by default nobody
    can tell from the time to the first token what others asked."""

    def __post_init__(self) -> None:
        require(self.num_replicas >= 1, "ingress.num_replicas", self.num_replicas, ">= 1")
        port, host = self.grpc_port, self.grpc_host
        require(0 <= port < 1 << 16, "ingress.grpc_port", port, "0 to 65535")
        require(bool(host.strip()), "ingress.grpc_host", host, "an address")
        require(
            self.max_body_bytes >= 1024, "ingress.max_body_bytes", self.max_body_bytes, ">= 1024"
        )
        require(self.max_choices >= 1, "ingress.max_choices", self.max_choices, ">= 1")
        require(
            self.request_timeout_s > 0, "ingress.request_timeout_s", self.request_timeout_s, "> 0"
        )
