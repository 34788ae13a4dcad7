"""The end of an application: no new requests, and a grace period for those that run."""

from dataclasses import dataclass
from math import inf

from triptych.core.errors import ShuttingDown
from triptych.core.messages import Drain, Drained, Request
from triptych.router.passes.completion import RequestCompletion
from triptych.router.state.cluster_state import ClusterState
from triptych.router.state.request_table import State


@dataclass
class Draining:
    """Refuses new requests once it has begun, and fails those that outlast the grace period.

    Requests that run go on through all stages, and those that lose their worker are retried, so
    workers must stay until ``Drained``.
    """

    cluster: ClusterState
    completion: RequestCompletion
    _until: float = inf
    """When the grace period ends; infinity: it has not begun."""
    is_over: bool = False
    """Whether all peers were sent ``Drained``."""

    @property
    def has_begun(self) -> bool:
        return self._until < inf

    def begin(self, timeout_s: float, now: float) -> None:
        """Begin the grace period; a second call can only shorten it."""
        self._until = min(self._until, now + timeout_s)
        for peer in self.cluster.membership:
            self.tell(peer.address, now)

    def tell(self, address: str, now: float) -> None:
        """Tell a peer; one that registers later has to know it, too."""
        if self.has_begun:
            left_s = max(0.0, self._until - now)
            self.cluster.outbox.post(address, Drain(timeout_s=left_s))
        if self.is_over:
            self.cluster.outbox.post(address, Drained())

    def refusal(self, request: Request) -> ShuttingDown | None:
        """The error of a new request. A retry of one that runs is not refused."""
        return ShuttingDown() if self.has_begun and not request.attempt else None

    def run(self, now: float) -> None:
        """Fail what is left after the grace period; tell all peers once nothing is."""
        if not self.has_begun or self.is_over:
            return
        if now >= self._until:
            for entry in list(self.cluster.requests):
                if entry.state is not State.LEAVING:
                    self.completion.fail(entry, ShuttingDown(), now)
        if next(iter(self.cluster.requests), None) is None:
            self.is_over = True
            for peer in self.cluster.membership:
                self.cluster.outbox.post(peer.address, Drained())
