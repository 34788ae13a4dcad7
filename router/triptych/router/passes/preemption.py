"""Sets running requests aside for more urgent ones: they keep their pages and go on later."""

from dataclasses import dataclass

from triptych.core.messages import Preempt
from triptych.router.passes.migration import can_move
from triptych.router.snapshot import HeldBy, Waiting
from triptych.router.state.cluster_state import ClusterState
from triptych.router.state.request_table import Entry, State


@dataclass
class Preemption:
    """Takes a decode slot, and bytes that are only promised, from the least urgent request.

    Within one tenant, since a priority is what a client says of itself. What is set aside goes back
    into the waiting line with the pages that it has, at its own priority; what it would grow by is
    free for others. It ages there like all that wait, and who has lost patience is never set aside,
    so nobody is again and again for ever.

    Source: vLLM (preemption of the lowest priority), which recomputes or swaps; pages stay here
    """

    cluster: ClusterState

    def run(self, blocked_reason: HeldBy, now: float) -> None:
        """Ask for one request back if the first that waits is more urgent."""
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
        """The least urgent, and of those the one that joined last; one at a time."""
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
        ]
        return max(worse, key=lambda entry: (entry.request.priority, entry.since), default=None)
