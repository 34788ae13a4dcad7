"""The end of a request: finished, failed or cancelled, and the release of its bytes."""

from collections import deque
from dataclasses import dataclass, field, replace

from triptych.core.errors import StageLost, TriptychError
from triptych.core.messages import POOL, Expel, Failed, Request, failed
from triptych.router.passes.migration import can_go_on
from triptych.router.state.cluster_state import ClusterState
from triptych.router.state.request_table import Entry, State

END_DELIVERY_S = 5.0
"""Time within which the end of the output reaches its ingress, or is lost."""


@dataclass
class RequestCompletion:
    """Ends each request exactly once, and never frees bytes that a worker may still hold.

    A request that ends while workers may hold pages of it is *leaving*: they are sent
    ``Cancel``, and its bytes stay booked until each has answered with ``Finished``, or until
    a time-out for those that do not answer.
    """

    cluster: ClusterState
    cancel_timeout_s: float
    reclaim_s: float
    _finished: deque[tuple[float, str, Entry]] = field(
        default_factory=deque[tuple[float, str, Entry]]
    )
    """Time, worker, and the request, whose ingress is told if that worker dies right afterwards."""
    _names: dict[str, str] = field(default_factory=dict[str, str])
    """Names of dead decode workers, by ``mark_dead`` of their addresses."""

    def finish(self, entry: Entry, worker: str, tokens: int, now: float) -> None:
        """The last worker reports that the output is complete and holds nothing of the request.

        A compressor may still hold layers of the prompt. The worker sends the last tokens to the
        ingress directly, so the news of its death can arrive first.
        """
        self.cluster.counters["finished"] += 1
        self.cluster.requests.history.end(entry.id, "finished", now, tokens=tokens)
        self._finished.append((now, worker, entry))
        if entry.transfer.first_token_at and not entry.was_evicted:
            self.cluster.latency.record_decode(
                now - entry.transfer.first_token_at, tokens, entry.transfer.concurrency_s, now
            )
        if entry.placement.encoder:  # the first token was the last one, and it has layers
            self._part(entry, now)
            return
        self.cluster.requests.accrue(entry, now)
        self._remove(entry)

    def refuse(self, request: Request, error: TriptychError) -> None:
        """Reject a request that was not admitted."""
        self._tell(request, failed(request.id, error))

    def fail(self, entry: Entry, error: TriptychError | Failed, now: float) -> None:
        """Send the error to the client and free all pages of the request."""
        failure = failed(entry.id, error) if isinstance(error, TriptychError) else error
        self._tell(entry.request, replace(failure, request=entry.id))
        code = failure.code or "unknown"
        self.cluster.requests.history.end(entry.id, "failed", now, code=code)
        self._part(entry, now)

    def cancel(self, entry: Entry, now: float) -> None:
        """The client disconnected: free all pages of the request, send nothing."""
        self.cluster.counters["cancelled"] += 1
        self.cluster.requests.history.end(entry.id, "cancelled", now)
        self._part(entry, now)

    def lost(self, address: str, name: str, now: float) -> None:
        """A peer died: end, or prepare for takeover, the requests that it had or that were for it.

        ``name``: its name in the pool, if the pool keeps the pages that the peer held.
        """
        if name:
            self._names[mark_dead(address)] = name
        for end in [end for end in self._finished if end[1] == address]:
            self._finished.remove(end)
            ended = end[2]  # an ingress that has the end already ignores it
            lost = failed(ended.id, StageLost(ended.stage))
            self.cluster.outbox.post(ended.request.reply_to, lost)
        for entry in list(self.cluster.requests):
            if entry.state is State.LEAVING:
                if entry.owed.pop(address, None) is not None:
                    entry.owed[mark_dead(address)] = now + self.reclaim_s
            elif entry.request.reply_to == address:
                self.cancel(entry, now)
            elif entry.worker == address and name and self._can_be_inherited(entry, name):
                self._orphan(entry, name, now)
            elif entry.worker == address and name and _is_on_offer(entry):
                entry.worker = ""
                self._survive(entry, address)
            elif entry.worker == address:
                self.fail(entry, StageLost(entry.stage), now)
            elif entry.placement.encoder == address:
                self.fail(entry, StageLost("compress"), now)
            elif entry.placement.image_encoder == address:
                self.fail(entry, StageLost("encode"), now)
            else:
                self._survive(entry, address)

    def has_returned(self, name: str, now: float) -> None:
        """A worker registers again, without the requests and pages that it had.

        No other worker can go on from its pages, and the pool must not end its process.
        """
        self.cluster.dead_workers.discard(name)
        for entry in self._living:
            if entry.transfer.previous_worker == name and not entry.worker:
                entry.transfer.previous_worker = ""
                self.fail(entry, StageLost("decode"), now)

    def leave_lost_arenas(self, now: float) -> None:
        """Fail (for a retry) requests with pages in an arena that has no decode worker left.

        Its pool may be dead as well. Waiting would cost more than computing the pages again.
        """
        for state in (State.COMPRESSED, State.ORPHANED, State.WAITING):
            for entry in self.cluster.requests.in_state(state):
                if state is State.WAITING and not entry.waits_with_pages:
                    continue
                if (
                    self.cluster.membership.absent_since("decode", entry.placement.final_arena)
                    is not None
                ):
                    self.fail(entry, StageLost("decode"), now)

    def expel_dead_workers(self) -> None:
        """Have the pool free pages of dead workers once no request needs them for a takeover."""
        for name in sorted(
            self.cluster.dead_workers - {entry.transfer.previous_worker for entry in self._living}
        ):
            self.cluster.dead_workers.remove(name)
            self.cluster.outbox.post(POOL, Expel(worker=name))
        self._names = {
            key: name for key, name in self._names.items() if name in self.cluster.dead_workers
        }

    @property
    def _living(self) -> list[Entry]:
        return [entry for entry in self.cluster.requests if entry.state is not State.LEAVING]

    def _can_be_inherited(self, entry: Entry, name: str) -> bool:
        """False if its worker was taking over from a dead one: the pages have no clear owner."""
        return can_go_on(
            entry
        ) and entry.transfer.previous_worker not in self.cluster.dead_workers - {name}

    def _orphan(self, entry: Entry, previous_worker: str, now: float) -> None:
        self.cluster.counters["orphaned"] += 1
        entry.is_preempt_sent = entry.is_preempted = False  # the dead worker does not answer
        entry.transfer.previous_worker, entry.worker, entry.placement.decode_worker = (
            previous_worker,
            "",
            "",
        )
        self.cluster.requests.move(entry, State.ORPHANED, now)

    def settle(self, entry: Entry, address: str) -> None:
        """A worker confirms that it holds nothing of a leaving request."""
        entry.owed.pop(address, None)
        if not entry.owed:
            self._remove(entry)

    def expire(self, now: float) -> None:
        """Stop waiting for workers that do not answer, and for the end of finished outputs.

        While another request is to be taken over from a dead worker, the pool keeps all its pages.
        """
        while self._finished and now - self._finished[0][0] > END_DELIVERY_S:
            self._finished.popleft()
        for entry in self.cluster.requests.in_state(State.LEAVING):
            entry.owed = {
                who: until
                for who, until in entry.owed.items()
                if now < until or self._names.get(who, who) in self.cluster.dead_workers
            }
            if not entry.owed:
                self.cluster.counters["leaving_timed_out"] += 1
                self._remove(entry)

    def _survive(self, entry: Entry, address: str) -> None:
        """Continue without a peer that did not have the request.

        If it was the source worker, the pool keeps its pages for the length of a lease. Either
        ``entry.worker`` attaches them in time, or it reports an error.
        """
        if entry.transfer.source_worker == address:
            entry.transfer.source_worker = ""
        if entry.placement.decode_worker == address:
            entry.placement.decode_worker = ""
            self.cluster.requests.touch(entry)

    def _part(self, entry: Entry, now: float) -> None:
        """Cancel the request at all workers; remove it once no worker can hold its pages."""
        living = [address for address in entry.holders if address in self.cluster.membership]
        for address in living:
            self.cluster.outbox.cancel(address, entry.id)
        if entry.stage != "decode" or entry.placement.decode_worker not in living:
            entry.placement.decode_worker = ""
        for address in entry.holders:
            if address in living:
                entry.owed[address] = now + self.cancel_timeout_s
            else:
                entry.owed[mark_dead(address)] = now + self.reclaim_s
        if entry.transfer.previous_worker in self.cluster.dead_workers:
            entry.owed[entry.transfer.previous_worker] = now + self.reclaim_s
        if entry.owed:
            self.cluster.requests.move(entry, State.LEAVING, now)
        else:
            self._remove(entry)

    def _tell(self, request: Request, failure: Failed) -> None:
        self.cluster.outbox.post(request.reply_to, failure)
        self.cluster.counters["failed"] += 1
        self.cluster.counters[f"failed:{failure.code}"] += 1

    def _remove(self, entry: Entry) -> None:
        self.cluster.requests.remove(entry)
        self.cluster.ledger.release(entry.id)


def mark_dead(address: str) -> str:
    """Key for pages of a dead worker: a new worker at its address cannot confirm their release."""
    return f"{address} (dead)"


def _is_on_offer(entry: Entry) -> bool:
    """Whether a decode worker was preempted of it: the pool keeps its pages if that worker dies."""
    is_unclaimed = entry.state is State.COMPRESSED or entry.waits_with_pages
    return is_unclaimed and entry.stage == "decode"
