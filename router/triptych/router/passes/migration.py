"""Migration: balances running requests between the decode workers of an arena."""

from collections.abc import Sequence
from dataclasses import dataclass

from triptych.core.messages import Preempt
from triptych.router.state.cluster_state import ClusterState
from triptych.router.state.request_table import Entry, State


@dataclass
class Migration:
    """Moves one request at a time from the fullest decode worker of each arena.

    Its pages stay where they are, and the worker with most free slots continues it. So a worker
    that has just started receives running requests, not only new ones.

    Source: Llumnix (requests move between instances while they run)
    """

    cluster: ClusterState
    threshold: int
    """Difference in running requests from which one is moved; 0: never."""

    def run(self) -> None:
        """Preempt one request at each worker that exceeds the threshold."""
        imbalanced = self.cluster.load_index.imbalanced(self.threshold) if self.threshold else []
        running = {address: list[Entry]() for address in imbalanced}
        if running:
            for entry in self.cluster.requests.in_state(State.DECODING):
                if entry.worker in running:
                    running[entry.worker].append(entry)
        for address, entries in running.items():
            entry = _next_of(entries)
            if entry is not None:
                entry.is_preempt_sent = True
                self.cluster.outbox.post(address, Preempt(requests=(entry.id,)))


def _next_of(running: Sequence[Entry]) -> Entry | None:
    """The request of a worker that joined last; None while an earlier move is under way."""
    if any(entry.is_preempt_sent for entry in running):
        return None
    return next((entry for entry in reversed(running) if can_move(entry)), None)


def can_move(entry: Entry) -> bool:
    """Whether its worker may be told to preempt it: not before a takeover is confirmed.

    Log probabilities that may not be delivered yet go with it (``Preempted.logprobs``).
    """
    return can_go_on(entry) and not entry.transfer.previous_worker


def can_go_on(entry: Entry) -> bool:
    """Whether another decode worker can continue a request where this one is.

    The latest tokens may be lost on the way to the client; the checkpoint has them.
    """
    return entry.state is State.DECODING and entry.transfer.report is not None
