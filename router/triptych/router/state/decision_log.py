"""Records the reason of each decision in the history of recent requests."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Literal

from triptych.core.errors import TriptychError
from triptych.core.messages import Request
from triptych.router.state.cluster_state import ClusterState
from triptych.router.state.history import Alternative, Decision
from triptych.router.state.request_table import Entry, PromptWait

LOOKED_AT = 3
"""Alternative workers that a decision records."""

Step = Literal["prefill", "compress", "decode"]
Seen = Sequence[tuple[str, int, int]]
"""Workers that were looked at, as ``Alternative`` has them."""
NotedStep = Step | Literal["method", "encode", "wait", "resume", "lower"]


@dataclass
class DecisionLog:
    """Records each decision in the history and counts it by step and reason."""

    cluster: ClusterState

    def looked_at(self, step: Step) -> Seen:
        """The best workers of a stage at present. Call it before anything is booked."""
        load_index, ledger = self.cluster.load_index, self.cluster.ledger
        return [
            (address, ledger.free(load_index.arena_of(address)), load_index.load_of(step, address))
            for address in load_index.best(step, LOOKED_AT)
        ]

    def started(
        self,
        entry: Entry,
        reason: str,
        placement: str,
        queue: tuple[int, int],
        seen: Seen,
    ) -> None:
        """A waiting request was sent to a prefill worker.

        ``reason``: why now; ``placement``: why there. ``queue``: how many waited, and how many of
        them had come before.
        """
        waiting, older = queue
        self.cluster.counters[f"placement:{placement}"] += 1
        self._note(
            entry, "prefill", reason, entry.worker, seen, entry.since, waiting, older, placement
        )

    def chosen(
        self, entry: Entry, step: Step | Literal["resume"], reason: str, to: str, now: float
    ) -> None:
        """A worker was chosen for a running request."""
        seen = self.looked_at("decode" if step == "resume" else step)
        self._note(entry, step, reason, to, seen, now)

    def chose_method(self, entry: Entry, now: float) -> None:
        """The router has chosen the method of a request that arrives, if it was to."""
        choice = entry.request.choice
        if choice is not None and not entry.request.attempt:
            self._note(entry, "method", choice.reason, choice.method, (), now)
            self.cluster.counters[f"method_chosen:{choice.method}"] += 1

    def sent_images(self, entry: Entry, reason: str, to: str, now: float) -> None:
        """The images of a request were sent to an encode worker."""
        self._note(entry, "encode", reason, to, (), now)

    def lowered(self, entry: Entry, reason: str, now: float) -> None:
        """High tokens of a running request were stored as low ones."""
        self._note(entry, "lower", reason, entry.worker, (), now)
        self.cluster.requests.history.reported(entry.id, entry.transfer.report)

    def waits(self, entry: Entry, wait: PromptWait, now: float) -> None:
        """A request waits for blocks of its prompt that another request computes."""
        self._note(entry, "wait", "shared_prompt", wait.leader, (), now)

    def refused(self, request: Request, error: TriptychError, now: float) -> None:
        """A request was refused."""
        history, code = self.cluster.requests.history, error.code or "unknown"
        history.begin(request, "refused", now)
        history.decided(request.id, partial(Decision, step="refuse", at=now, reason=code))
        history.end(request.id, "failed", now, code=code)
        self.cluster.counters[f"refuse:{code}"] += 1

    def _note(
        self,
        entry: Entry,
        step: NotedStep,
        reason: str,
        to: str,
        seen: Seen,
        now: float,
        waiting: int = 0,
        older: int = 0,
        placement: str = "",
    ) -> None:
        sizes, booked_bytes = entry.sizes, self.cluster.ledger.booked_by(entry.id)

        def decision() -> Decision:
            return Decision(
                step=step,
                at=now,
                reason=reason,
                chosen=to,
                raw_bytes=sizes.raw,
                grown_bytes=sizes.grown,
                booked_bytes=booked_bytes,
                waiting=waiting,
                older=older,
                placement=placement,
                alternatives=tuple(Alternative(*one) for one in seen),
            )

        self.cluster.requests.history.decided(entry.id, decision)
        self.cluster.counters[f"{step}:{reason}"] += 1
