"""Assigns prefill or decode to colocated workers, as the load requires."""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from math import ceil, exp, floor, inf

from triptych.core.messages import Preempt
from triptych.router.passes.migration import can_move
from triptych.router.snapshot import HeldBy, Role, WorkerLoad
from triptych.router.state.cluster_state import ClusterState
from triptych.router.state.request_table import Entry, State

PREFILL_SHARE = 0.8
"""Target share of busy time of a worker with the role ``prefill``."""
DRAIN_S = 1.0
"""Time within which prompts in the queues of workers should be prefilled."""
DECAY_S = 10.0
"""Time constant of the decaying sum of prefill work."""
CALM_S = 10.0
"""Time without waiting requests before roles are assigned: a queue needs all workers for both."""
SLACK = 0.25
"""Workers by which the demand may leave the range of an assignment before it changes."""


def divide(workers: Sequence[WorkerLoad], wanted: float) -> dict[str, Role]:
    """A role for each worker, by address, so that ``wanted`` of them prefill.

    The whole part of ``wanted`` only prefills, one does both for the rest, and at least one can
    prefill. Each arena keeps a worker that decodes, since requests move within an arena. Workers
    that prefill already keep their role; of the others those with fewest requests are next.

    >>> loads = [WorkerLoad(name, name, "a", ("prefill", "decode"), False) for name in "xyz"]
    >>> divide(loads, 1.5)
    {'x': 'prefill', 'y': 'both', 'z': 'decode'}
    >>> divide(loads, 9.0)
    {'x': 'prefill', 'y': 'prefill', 'z': 'both'}
    """
    decoding = Counter(worker.arena for worker in workers)
    prefilling, rest = list[str](), list[str]()
    for worker in sorted(workers, key=_readiness):
        if len(prefilling) < int(wanted) and decoding[worker.arena] > 1:
            decoding[worker.arena] -= 1
            prefilling.append(worker.address)
        else:
            rest.append(worker.address)
    both = max(1, ceil(wanted)) - len(prefilling)
    return {
        **dict.fromkeys(prefilling, "prefill"),
        **dict.fromkeys(rest[:both], "both"),
        **dict.fromkeys(rest[both:], "decode"),
    }


def _readiness(worker: WorkerLoad) -> tuple[bool, int, str]:
    return worker.role != "prefill", worker.running, worker.name


@dataclass
class PrefillWork:
    """Seconds of prefill in each second, as an exponentially decaying sum."""

    _sum_s: float = 0.0
    _at: float = -inf

    def note(self, seconds: float, now: float) -> None:
        """A worker prefilled a prompt in this time."""
        self._sum_s, self._at = self._faded(now) + seconds, now

    def at(self, now: float) -> float:
        """Number of workers that the work would keep busy."""
        return self._faded(now) / DECAY_S

    def _faded(self, now: float) -> float:
        return self._sum_s * exp((self._at - now) / DECAY_S)


@dataclass
class Roles:
    """Assigns roles to colocated workers so that most decode steps do not wait for prefill.

    A worker with both engines runs them in turn, so its decode waits for its prefill. As many
    workers prefill as the load needs, and the others decode; a decode worker without requests may
    prefill as well. Requests of a worker that becomes a prefill worker migrate to others by their
    handles, as slots allow. While requests wait in the queue, all workers do both.

    Source: DistServe (the two disturb each other); Arrow, TaiChi (roles that follow the load)
    """

    cluster: ClusterState
    is_on: bool
    _work: PrefillWork = field(default_factory=PrefillWork)
    _token_s: float = 0.0
    """Seconds per token of the last prompt."""
    _queue_seen: float = -inf
    _divided: frozenset[str] = frozenset()
    """Workers of the present assignment; empty: all do both."""
    _divided_for: float = 0.0
    """Demand for prefill workers at that time."""

    def record_prefill(self, entry: Entry, now: float) -> None:
        """A prompt was prefilled."""
        tokens = max(0, entry.prompt_tokens - entry.transfer.hit_tokens)
        self._work.note(tokens * entry.transfer.token_s, now)
        self._token_s = entry.transfer.token_s or self._token_s

    def run(self, blocked_reason: HeldBy, now: float) -> None:
        """Assign roles again if the demand has changed, and drain workers that only prefill."""
        if not self.is_on:
            return
        if blocked_reason:
            self._queue_seen = now
        workers = [load for load in self.cluster.load_index.loads() if _is_able(load)]
        if now - self._queue_seen < CALM_S:
            self._assign(frozenset(), {load.address: "both" for load in workers})
            return
        wanted, names = self._wanted(now), frozenset(load.address for load in workers)
        least = floor(self._divided_for)
        if names != self._divided or not least - SLACK <= wanted <= least + 1 + SLACK:
            self._divided_for = wanted
            self._assign(names, divide(workers, wanted))
        self._clear()

    def _assign(self, divided: frozenset[str], roles: Mapping[str, Role]) -> None:
        self._divided = divided
        changed = self.cluster.load_index.assign(roles)
        if changed:
            self.cluster.counters["role_changes"] += changed

    def _wanted(self, now: float) -> float:
        """Prefill workers that the demand needs."""
        queued_s = self.cluster.load_index.queued_tokens * self._token_s
        return self._work.at(now) / PREFILL_SHARE + queued_s / DRAIN_S

    def _clear(self) -> None:
        """Preempt requests at workers that only prefill, as far as others have slots."""
        load_index = self.cluster.load_index
        running = self.cluster.requests.in_state(State.DECODING)
        there = [entry for entry in running if load_index.role_of(entry.worker) == "prefill"]
        if not there:
            return
        room = load_index.free_slots()
        room.subtract(entry.placement.final_arena for entry in there if entry.is_preempt_sent)
        for entry in there:
            if (
                room[entry.placement.final_arena] > 0
                and can_move(entry)
                and not entry.is_preempt_sent
            ):
                room[entry.placement.final_arena] -= 1
                entry.is_preempt_sent = True
                self.cluster.outbox.post(entry.worker, Preempt(requests=(entry.id,)))


def _is_able(worker: WorkerLoad) -> bool:
    return not worker.is_full and {"prefill", "decode"} <= {*worker.stages}
