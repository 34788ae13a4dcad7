"""Which of the workers that have all stages read prompts, and which write answers."""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from math import ceil, exp, floor, inf

from triptych.core.messages import Preempt
from triptych.router.passes.migration import can_move
from triptych.router.snapshot import HeldBy, Role, WorkerLoad
from triptych.router.state.cluster_state import ClusterState
from triptych.router.state.request_table import Entry, State

READ_SHARE = 0.8
"""Share of its time that a worker which only reads is to be busy."""
DRAIN_S = 1.0
"""Time in which what was sent to workers should be read."""
REMEMBERED_S = 10.0
"""Time in which what was read counts for less and less."""
CALM_S = 10.0
"""Time without a waiting line before there are roles: where one forms, nobody has time to spare."""
SLACK = 0.25
"""Workers by which the work may leave the bounds of a division before there is another one."""


def divide(workers: Sequence[WorkerLoad], wanted: float) -> dict[str, Role]:
    """A role for each worker, by address, so that ``wanted`` of them read.

    As many as that is whole only read, one does both for the rest, and at least one reads at all.
    Each arena keeps one that does not only read, since requests move within an arena. Whoever
    reads already goes on; of the others those begin that write least.

    >>> loads = [WorkerLoad(name, name, "a", ("prefill", "decode"), False) for name in "xyz"]
    >>> divide(loads, 1.5)
    {'x': 'prefill', 'y': 'both', 'z': 'decode'}
    >>> divide(loads, 9.0)
    {'x': 'prefill', 'y': 'prefill', 'z': 'both'}
    """
    writing = Counter(worker.arena for worker in workers)
    readers, rest = list[str](), list[str]()
    for worker in sorted(workers, key=_readiness):
        if len(readers) < int(wanted) and writing[worker.arena] > 1:
            writing[worker.arena] -= 1
            readers.append(worker.address)
        else:
            rest.append(worker.address)
    both = max(1, ceil(wanted)) - len(readers)
    return {
        **dict.fromkeys(readers, "prefill"),
        **dict.fromkeys(rest[:both], "both"),
        **dict.fromkeys(rest[both:], "decode"),
    }


def _readiness(worker: WorkerLoad) -> tuple[bool, int, str]:
    return worker.role != "prefill", worker.running, worker.name


@dataclass
class ReadingWork:
    """Seconds that workers read in each second: a sum that forgets."""

    _sum_s: float = 0.0
    _at: float = -inf

    def note(self, seconds: float, now: float) -> None:
        """A prompt was read, which took a worker so long."""
        self._sum_s, self._at = self._faded(now) + seconds, now

    def at(self, now: float) -> float:
        """Workers that would do if they never paused."""
        return self._faded(now) / REMEMBERED_S

    def _faded(self, now: float) -> float:
        return self._sum_s * exp((self._at - now) / REMEMBERED_S)


@dataclass
class Roles:
    """Divides workers of all stages so that most answers do not wait for chunks of prompts.

    A worker with both engines steps them in turn, so whatever it writes waits for whatever it
    reads. Here as many read as it takes to keep up, and the others write; one that writes nothing
    at the moment reads as well, since that delays nobody. What a worker was writing when it begins
    to read moves to others by its handle, as far as they have slots. While a line waits, all do
    both: then no worker can be spared, and each pause of one that only reads would be lost.

    Source: DistServe (the two disturb each other); Arrow, TaiChi (roles that follow the load)
    """

    cluster: ClusterState
    is_on: bool
    _work: ReadingWork = field(default_factory=ReadingWork)
    _token_s: float = 0.0
    """Seconds that the last prompt took for each of its tokens."""
    _queue_seen: float = -inf
    _divided: frozenset[str] = frozenset()
    """Whom the present division is of; nobody: all do both."""
    _divided_for: float = 0.0
    """How many of them were to read."""

    def record_prefill(self, entry: Entry, now: float) -> None:
        """A prompt was read."""
        tokens = max(0, entry.prompt_tokens - entry.transfer.hit_tokens)
        self._work.note(tokens * entry.transfer.token_s, now)
        self._token_s = entry.transfer.token_s or self._token_s

    def run(self, blocked_reason: HeldBy, now: float) -> None:
        """Divide anew if the work asks for it, and clear those that only read."""
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
        """Workers that would keep up with reading."""
        queued_s = self.cluster.load_index.queued_tokens * self._token_s
        return self._work.at(now) / READ_SHARE + queued_s / DRAIN_S

    def _clear(self) -> None:
        """Ask those that only read for what they still write, as far as others have slots."""
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
