"""Workers, ingresses and pools: how they register and report, and what follows when one is lost."""

from collections.abc import Sequence
from dataclasses import dataclass, field

from triptych.core.errors import Overloaded
from triptych.core.messages import (
    POOL,
    Confirm,
    Message,
    Register,
    RegisterAgain,
    Report,
    Stage,
)
from triptych.router.passes.completion import RequestCompletion
from triptych.router.passes.draining import Draining
from triptych.router.state.cluster_state import ClusterState
from triptych.router.state.request_table import Entry, State

MISSED_TICK_S = 2.0
"""Time between two ticks after which the router process itself must have been paused."""

NEEDED_IN: dict[Stage, tuple[State, ...]] = {
    "prefill": (State.WAITING,),
    "compress": (State.WAITING, State.PREFILLED),
    "decode": (
        State.WAITING,
        State.PREFILLED,
        State.PLANNED,
        State.COMPRESSED,
        State.ORPHANED,
    ),
}
"""States in which a request needs a worker of the stage to continue."""

_FROM_PEERS = (Report, Confirm)
"""Messages that a registered process sends again and again."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Timeouts:
    """How long the router waits for workers, for the pool and for other routers."""

    report_bound_s: float = 3.0
    """A worker whose last report is older gets no new requests."""

    silent_s: float = 8.0
    """A worker without a report for this long counts as stuck; a running one sends two a second."""

    grace_s: float = 30.0
    """Time that a request waits for a stage without any worker before it fails with 503."""

    refuse_s: float | None = None
    """The same for a request that has not started, if another router may take it; None:
    ``grace_s``."""

    cancel_timeout_s: float = 1.0
    """Time after which a cancelled request's bytes count as free without the worker's answer."""

    reclaim_s: float = 10.0
    """Time after which the pool has reclaimed the pages of a dead worker: its lease."""


@dataclass(slots=True)
class Peers:
    """Follows the processes that the router works with."""

    cluster: ClusterState
    completion: RequestCompletion
    draining: Draining
    timeouts: Timeouts
    _ticked: float = field(default=0.0, init=False)

    def report(self, report: Report, sender: str, now: float) -> bool:
        """Store a report; whether a worker takes requests again after it."""
        if self.cluster.membership.note(report, sender, now):
            self.cluster.method_costs.reported(sender, report.link_bytes_s)
            return self.cluster.load_index.record_report(sender, now)
        self.cluster.counters["stray_report"] += 1
        return False

    def is_unregistered(self, messages: Sequence[Message], sender: str) -> bool:
        """Whether the sender is no peer, and is told so: it was lost while it was paused."""
        if sender in self.cluster.membership or sender == POOL:
            return False
        if not any(isinstance(message, _FROM_PEERS) for message in messages):
            return False
        self.cluster.counters["unregistered"] += 1
        self.cluster.outbox.post(sender, RegisterAgain())
        return True

    def register(self, registration: Register, now: float) -> None:
        membership = self.cluster.membership
        for address in membership.replaced_by(registration):
            self.remove(address, now)
        has_dropped = membership.has_dropped_requests(registration)
        if has_dropped:
            self.cluster.counters["dropped_requests"] += 1
            self.completion.lost(registration.address, "", now)
            self.cluster.load_index.leave(registration.address)
        if has_dropped or registration.name in self.cluster.dead_workers:
            self.completion.has_returned(registration.name, now)
        membership.join(registration)
        self.cluster.load_index.join(registration)
        self.draining.tell(registration.address, now)

    def remove(self, address: str, now: float) -> None:
        self.cluster.counters["peers_lost"] += 1
        peer = self.cluster.membership.leave(address, now)
        self.cluster.load_index.leave(address)
        self.cluster.method_costs.left(address)
        name = peer.name if peer and "decode" in peer.registration.stages else ""
        if name:
            self.cluster.dead_workers.add(name)
        self.completion.lost(address, name, now)

    def remove_stalled(self, now: float) -> None:
        """Remove workers that are stuck; the pool ends their processes."""
        if now - self._ticked > MISSED_TICK_S:
            for peer in self.cluster.membership.forgive(now):  # this process was paused
                self.cluster.load_index.record_report(peer.address, now)
        self._ticked = now
        for peer in self.cluster.membership.stalled(now, self.timeouts.silent_s):
            self.cluster.counters["stalled"] += 1
            self.cluster.dead_workers.add(peer.name)
            self.remove(peer.address, now)

    def fail_stranded(self, now: float) -> None:
        """Fail requests that have waited too long for a stage without workers."""
        membership, requests = self.cluster.membership, self.cluster.requests
        for stage, states in NEEDED_IN.items():
            absent = membership.absent_since(stage)
            if absent is not None:
                for state in states:
                    for entry in requests.in_state(state):
                        self._fail_stranded_request(entry, stage, absent, now)
        self._fail_without_encoder(now)
        if membership.absent_since("decode") is None:
            self.completion.leave_lost_arenas(now)
        self._fail_largest_stranded(now)

    def _fail_without_encoder(self, now: float) -> None:
        """Fail requests with images that have waited too long for an encode worker."""
        absent = self.cluster.membership.absent_since("encode")
        if absent is not None:
            for entry in list(self.cluster.image_encoders.without.values()):
                self._fail_stranded_request(entry, "encode", absent, now)

    def _fail_largest_stranded(self, now: float) -> None:
        """Fail requests that fit only with layer-wise prefill, after a wait for a compressor."""
        membership, cluster = self.cluster.membership, self.cluster
        absent = [
            membership.absent_since("compress", arena)
            for arena in cluster.load_index.prefill_arenas
        ]
        if None in absent or not absent:
            return
        since = max(moment for moment in absent if moment is not None)
        for entry in cluster.requests.in_state(State.WAITING):
            if entry.whole is not None and entry.whole.peak > cluster.ledger.capacity_bytes:
                self._fail_stranded_request(entry, "compress", since, now)

    def _fail_stranded_request(self, entry: Entry, stage: Stage, absent: float, now: float) -> None:
        limit_s = self.timeouts.grace_s
        has_begun = entry.state is not State.WAITING or entry.waits_with_pages or entry.was_evicted
        if self.timeouts.refuse_s is not None and not has_begun:
            limit_s = self.timeouts.refuse_s
        if now - max(absent, entry.since) >= limit_s:
            error = Overloaded(f"no {stage} worker is running: try again later")
            self.completion.fail(entry, error, now)
