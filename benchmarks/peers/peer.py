"""Description of a server under comparison: its environment, its command and its endpoint."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True, kw_only=True)
class ServerNeeds:
    """Settings of a server that a workload determines."""

    port: int
    clients: int
    """Requests at a time."""
    context_tokens: int
    """Of the longest request: prompt and answer."""
    prefix_cache: bool


@dataclass(frozen=True, kw_only=True)
class Peer:
    """One server. All take token ids at ``/v1/completions``, and stream."""

    name: str
    command: Callable[[ServerNeeds], list[str]]
    """How it starts; servers with equal commands are not started again between workloads."""
    prepare: Callable[[], None]
    """Makes environment and weights, if they are not there."""
    variables: Mapping[str, str] = field(default_factory=dict[str, str])
    """Environment variables of its processes."""
    ready_path: str = "/health"
    """Answers 200 from when on it takes requests."""
    start_timeout_s: float = 300.0
