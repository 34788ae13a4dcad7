"""Moves requests from decode workers that have many to those that have few."""

from dataclasses import dataclass

from triptych.core.messages import Preempt
from triptych.router.state.cluster_state import ClusterState
from triptych.router.state.request_table import Entry, State


@dataclass
class Migration:
    """Takes one request at a time back from the fullest decode worker of each arena.

    Its pages stay where they are; whoever has most free slots joins it next. A worker that has
    just started, or come back, so gets its share of what runs already, not only of what comes.

    Source: Llumnix (requests move between instances while they run)
    """

    cluster: ClusterState
    threshold: int
    """Requests that a worker must have more than another one; 0: none is ever moved."""

    def run(self) -> None:
        """Ask for requests whose move makes the workers of an arena more even."""
        imbalanced = self.cluster.load_index.imbalanced(self.threshold) if self.threshold else []
        for address in imbalanced:
            entry = self._next_of(address)
            if entry is not None:
                entry.is_preempt_sent = True
                self.cluster.outbox.post(address, Preempt(requests=(entry.id,)))

    def _next_of(self, address: str) -> Entry | None:
        """The one that joined last; None while the move before is under way."""
        running = [
            entry
            for entry in self.cluster.requests.in_state(State.DECODING)
            if entry.worker == address
        ]
        if any(entry.is_preempt_sent for entry in running):
            return None
        return next((entry for entry in reversed(running) if can_move(entry)), None)


def can_move(entry: Entry) -> bool:
    """Whether its worker may be asked for it: not before that has said that it took it over.

    Nor if it tells log probabilities: a handle has no room for those that are on their way.
    """
    tells = entry.request.sampling.reports_logprobs
    return can_go_on(entry) and not entry.transfer.previous_worker and not tells


def can_go_on(entry: Entry) -> bool:
    """Whether another decode worker can go on with a request just where this one is.

    What was said last may be lost on its way; the checkpoint has it, to be said again.
    """
    return entry.state is State.DECODING and entry.transfer.report is not None
