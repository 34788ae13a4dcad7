"""How a request ends: finished, failed or cancelled, and when its bytes are free again."""

from collections import deque
from dataclasses import dataclass, field, replace

from triptych.core.errors import StageLost, TriptychError
from triptych.core.messages import POOL, Expel, Failed, Request, Send, failed
from triptych.router.passes.migration import can_go_on
from triptych.router.state.cluster_state import ClusterState
from triptych.router.state.request_table import Entry, State

LAST_WORDS_S = 5.0
"""Time in which the end of an answer reaches its ingress, if it does at all."""


@dataclass
class RequestCompletion:
    """Ends requests once and only once, and never frees bytes that somebody may still hold.

    A request that ends while workers may hold pages of it is *leaving*: they are sent
    ``Cancel``, and its bytes stay booked until each has answered with ``Finished``, or until
    a time-out for those that do not answer.
    """

    cluster: ClusterState
    cancel_timeout_s: float
    reclaim_s: float
    _finished: deque[tuple[float, str, Send]] = field(
        default_factory=deque[tuple[float, str, Send]]
    )
    """When, by whom, and what the ingress must hear if that worker dies right afterwards."""

    def finish(self, entry: Entry, worker: str, tokens: int, now: float) -> None:
        """The answer is complete, as its last worker says; nobody holds anything of it, unless a
        compressor has layers of its prompt.

        The last words go to the ingress on a way of their own, on which the worker's death may
        overtake them.
        """
        self.cluster.counters["finished"] += 1
        self.cluster.requests.history.end(entry.id, "finished", now, tokens=tokens)
        lost = failed(entry.id, StageLost(entry.stage))
        self._finished.append((now, worker, Send(entry.request.reply_to, lost)))
        if entry.transfer.first_token_at:
            self.cluster.latency.record_decode(
                now - entry.transfer.first_token_at, tokens, entry.transfer.concurrency_s, now
            )
        if entry.placement.encoder:  # the first token was the last one, and it has layers
            self._part(entry, now)
            return
        self.cluster.requests.accrue(entry, now)
        self._remove(entry)

    def refuse(self, request: Request, error: TriptychError) -> None:
        """Tell the client that the request was not even taken in."""
        self._tell(request, failed(request.id, error))

    def fail(self, entry: Entry, error: TriptychError | Failed, now: float) -> None:
        """Tell the client, and have every page freed."""
        last_word = failed(entry.id, error) if isinstance(error, TriptychError) else error
        self._tell(entry.request, replace(last_word, request=entry.id))
        code = last_word.code or "unknown"
        self.cluster.requests.history.end(entry.id, "failed", now, code=code)
        self._part(entry, now)

    def cancel(self, entry: Entry, now: float) -> None:
        """The client is gone: say nothing, and have every page freed."""
        self.cluster.counters["cancelled"] += 1
        self.cluster.requests.history.end(entry.id, "cancelled", now)
        self._part(entry, now)

    def lost(self, address: str, name: str, now: float) -> None:
        """A peer that has left the fleet died: end what was in it or was for it.

        ``name``: what the pool calls it, if it keeps what the peer held.
        """
        for end in [end for end in self._finished if end[1] == address]:
            self._finished.remove(end)
            _, _, send = end  # an ingress that has heard the end does not care
            self.cluster.outbox.post(send.to, send.message)
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
            else:
                self._survive(entry, address)

    def leave_lost_arenas(self, now: float) -> None:
        """Begin requests anew where a decode worker lives, if none lives where their pages are.

        Their pool may be dead, too; to wait for it would cost more than to compute them again.
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
        """Have the pool free what the dead left, once nobody is to take it over any more."""
        for name in sorted(
            self.cluster.dead_workers - {entry.transfer.previous_worker for entry in self._living}
        ):
            self.cluster.dead_workers.remove(name)
            self.cluster.outbox.post(POOL, Expel(worker=name))

    @property
    def _living(self) -> list[Entry]:
        return [entry for entry in self.cluster.requests if entry.state is not State.LEAVING]

    def _can_be_inherited(self, entry: Entry, name: str) -> bool:
        """Not if its worker was taking over from another dead one: whose the pages are is open."""
        return can_go_on(
            entry
        ) and entry.transfer.previous_worker not in self.cluster.dead_workers - {name}

    def _orphan(self, entry: Entry, previous_worker: str, now: float) -> None:
        self.cluster.counters["orphaned"] += 1
        entry.transfer.previous_worker, entry.worker, entry.placement.decode_worker = (
            previous_worker,
            "",
            "",
        )
        self.cluster.requests.move(entry, State.ORPHANED, now)

    def settle(self, entry: Entry, address: str) -> None:
        """A worker says that it holds nothing of a leaving request."""
        entry.owed.pop(address, None)
        if not entry.owed:
            self._remove(entry)

    def expire(self, now: float) -> None:
        """Stop waiting for workers that do not answer, and for their last words."""
        while self._finished and now - self._finished[0][0] > LAST_WORDS_S:
            self._finished.popleft()
        for entry in self.cluster.requests.in_state(State.LEAVING):
            entry.owed = {who: until for who, until in entry.owed.items() if now < until}
            if not entry.owed:
                self.cluster.counters["leaving_timed_out"] += 1
                self._remove(entry)

    def _survive(self, entry: Entry, address: str) -> None:
        """Go on without a peer that did not have the request.

        If it was the giver, its pages live on in the pool for the length of a lease. Either
        ``entry.worker`` attaches them in time, or it says that it could not.
        """
        if entry.transfer.source_worker == address:
            entry.transfer.source_worker = ""
        if entry.placement.decode_worker == address:
            entry.placement.decode_worker = ""
            self.cluster.requests.touch(entry)

    def _part(self, entry: Entry, now: float) -> None:
        """Cancel the request wherever it may be; remove it once nobody may hold its pages."""
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

    def _tell(self, request: Request, last_word: Failed) -> None:
        self.cluster.outbox.post(request.reply_to, last_word)
        self.cluster.counters["failed"] += 1
        self.cluster.counters[f"failed:{last_word.code}"] += 1

    def _remove(self, entry: Entry) -> None:
        self.cluster.requests.remove(entry)
        self.cluster.ledger.release(entry.id)


def mark_dead(address: str) -> str:
    """Who owes what a dead worker held: nobody who comes to its address can say it is free."""
    return f"{address} (dead)"


def _is_on_offer(entry: Entry) -> bool:
    """Whether a decode worker has put it on offer: the pool keeps that if the worker dies."""
    is_unclaimed = entry.state is State.COMPRESSED or entry.waits_with_pages
    return is_unclaimed and entry.stage == "decode"
