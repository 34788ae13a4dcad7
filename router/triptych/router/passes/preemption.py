"""Preempts running requests for more urgent ones; they keep their pages and resume later."""

from collections.abc import Callable
from dataclasses import dataclass

from triptych.core.messages import Preempt
from triptych.router.passes.migration import can_move
from triptych.router.snapshot import HeldBy, Waiting
from triptych.router.state.cluster_state import ClusterState
from triptych.router.state.request_table import Entry, State


@dataclass
class Preemption:
    """Takes the decode slot and the unused bookings of the least urgent request of a tenant.

    Only within one tenant, since clients set priorities themselves. A preempted request rejoins the
    waiting queue with its pages, at its own priority; bytes that it booked for growth become free.
    It ages in the queue as all requests do. An overdue request is never preempted, so no request
    is preempted for ever.

    Source: vLLM (preemption of the lowest priority), which recomputes or swaps; pages stay here
    """

    cluster: ClusterState
    may_wait: Callable[[Entry], bool] = lambda _: True
    """Whether a request may wait with its pages: not if nothing could free them for others."""

    def run(self, blocked_reason: HeldBy, now: float) -> None:
        """Preempt one request if the first waiting request is more urgent."""
        if blocked_reason not in ("no_decode_slot", "no_bytes"):
            return
        first = next(self.cluster.requests.queue.at(now).in_order(), None)
        if first is None:
            return
        if not self.cluster.requests.runs_less_urgent(first.tenant, first.priority):
            return
        victim = self._victim(first, now)
        if victim is not None:
            victim.is_preempt_sent = victim.is_preempted = True
            self.cluster.counters["preempted"] += 1
            self.cluster.outbox.post(victim.worker, Preempt(requests=(victim.id,)))

    def _victim(self, first: Waiting, now: float) -> Entry | None:
        """The least urgent running request, the latest of equals; None while one is preempted."""
        running = self.cluster.requests.in_state(State.DECODING)
        own = [entry for entry in running if entry.request.tenant == first.tenant]
        if any(entry.is_preempted for entry in own):
            return None
        worse = [
            entry
            for entry in own
            if entry.request.priority > first.priority
            and entry.slo.due >= now
            and can_move(entry)
            and not entry.is_preempt_sent
            and self.may_wait(entry)
        ]
        return max(worse, key=lambda entry: (entry.request.priority, entry.since), default=None)
