"""Incremental load index: the load of each worker and the best worker of each stage, in O(log n).

``cluster_state.worker_loads`` counts the same loads from all requests; tests compare the two.
"""

from collections import Counter, OrderedDict, defaultdict
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from itertools import islice
from typing import Literal, NamedTuple

from triptych.core.messages import Register
from triptych.router.queue.sorted_index import SortedIndex
from triptych.router.snapshot import Role, WorkerLoad
from triptych.router.state.request_table import Entry, State, compressor_of, is_prefilling

Fits = Callable[[str], bool]
"""Whether an arena has room for a booking."""


class Share(NamedTuple):
    """The load of one request, and the addresses where it counts."""

    prefill_at: str = ""
    uncached: int = 0
    """Tokens of ``tokens`` that are probably not cached."""
    queued: int = 0
    """How many of them others wait for."""
    compress_at: str = ""
    slot_at: str = ""
    tokens: int = 0
    needs_slot: bool = False
    """It has started, and no decode worker is chosen yet."""


PREFILL_PARTS = 3
"""The first fields of a share, beside its tokens: what prefill workers are counted by."""
NOTHING = Share()


@dataclass(eq=False)
class LoadIndex:
    """Workers ordered by free capacity, as of the last call of ``refresh``."""

    report_bound_s: float
    used: Callable[[str], int]
    """Used bytes of an arena."""
    slots_of: Callable[[int], int] = field(default=lambda slots: slots)
    """Slots to count for a decode worker, from the number that it reports."""
    long_tokens: int = 1 << 62
    """Tokens of a prompt that others wait for at most; short prompts overtake the rest."""

    needs_slot: int = 0
    """Requests that have started and have no decode worker yet."""
    open_slots: int = 0
    """Free slots of all decode workers that take requests."""
    decode_workers: int = 0
    """Number of decode workers, including full ones."""
    queued_tokens: int = 0
    """Prompt tokens in all prefill queues, without cached ones."""
    used_bytes: int = 0
    """Used bytes of all arenas."""
    arenas: Counter[str] = field(default_factory=Counter[str])
    """Workers of each arena."""
    prefill_arenas: Counter[str] = field(default_factory=Counter[str])
    """Prefill workers of each arena, including full ones."""
    generation: int = 0
    """Counts the changes of which arenas have prefill workers."""
    openings: int = 0
    """Counts the changes after which an arena may have more free bytes: a request for which no
    arena had enough finds as few until then."""

    _workers: dict[str, Register] = field(default_factory=dict[str, Register])
    _roles: dict[str, Role] = field(default_factory=dict[str, Role])
    """Roles by address; workers that are not in here do both."""
    _fresh: OrderedDict[str, float] = field(default_factory=OrderedDict[str, float])
    """Time of the last report of each worker that is not full, oldest first."""
    _prefill_tokens: Counter[str] = field(default_factory=Counter[str])
    _queue: Counter[str] = field(default_factory=Counter[str])
    """Those that others wait for (``waited_for``)."""
    _compressed: Counter[str] = field(default_factory=Counter[str])
    _slots: Counter[str] = field(default_factory=Counter[str])
    _shares: dict[str, Share] = field(default_factory=dict[str, Share])
    _free: dict[str, int] = field(default_factory=dict[str, int])
    """Free slots of decode workers that have some."""
    _prefill: defaultdict[str | None, SortedIndex[tuple[int, str]]] = field(
        default_factory=lambda: defaultdict[str | None, SortedIndex[tuple[int, str]]](
            SortedIndex[tuple[int, str]]
        )
    )
    """Prefill workers of each arena, and of all (None)."""
    _compress: defaultdict[str | None, SortedIndex[tuple[int, str]]] = field(
        default_factory=lambda: defaultdict[str | None, SortedIndex[tuple[int, str]]](
            SortedIndex[tuple[int, str]]
        )
    )
    """Compressors of each arena, and of all (None)."""
    _compressors: Counter[str] = field(default_factory=Counter[str])
    """Compressors of each arena, including full ones."""
    _decode: defaultdict[str, SortedIndex[tuple[int, str]]] = field(
        default_factory=lambda: defaultdict[str, SortedIndex[tuple[int, str]]](
            SortedIndex[tuple[int, str]]
        )
    )
    _open_arenas: SortedIndex[tuple[int, int, str]] = field(
        default_factory=SortedIndex[tuple[int, int, str]]
    )
    """Arenas with a free decode slot: least used first, then by their best worker."""
    _raw_arenas: SortedIndex[int] = field(default_factory=SortedIndex[int])
    """All arenas of workers, least used first."""
    _moved: set[str] = field(default_factory=set[str])
    """Arenas whose places in the two are to be renewed before they are read: bookings change more
    often than somebody looks for an arena."""

    # ---------------------------------------------------------------- what changes

    def join(self, registration: Register) -> None:
        """A worker registered, perhaps again."""
        if not registration.stages:
            return
        before = self._workers.get(registration.address)
        if before is not None:
            self._count_arena(before, -1)
            self._withdraw(before)
        self._workers[registration.address] = registration
        self._count_arena(registration, +1)
        self._place(registration.address)

    def leave(self, address: str) -> None:
        """A worker died."""
        registration = self._workers.pop(address, None)
        self._roles.pop(address, None)
        self._fresh.pop(address, None)
        if registration is not None:
            self._withdraw(registration)
            self._count_arena(registration, -1)

    def record_report(self, address: str, now: float) -> bool:
        """A worker reported. Returns whether it was full and takes requests again."""
        if address not in self._workers:
            return False
        was_full = address not in self._fresh
        self._fresh[address] = now
        self._fresh.move_to_end(address)
        if was_full:
            self.openings += 1
            self._place(address)
        return was_full

    def assign(self, roles: Mapping[str, Role]) -> int:
        """Assign roles; returns the number of workers whose role changed."""
        changed = [address for address, role in roles.items() if role != self.role_of(address)]
        for address in changed:
            self._roles[address] = roles[address]
            self._place(address)
        return len(changed)

    def refresh(self, now: float) -> None:
        """Count workers whose last report is too old as full."""
        while self._fresh:
            address, reported = next(iter(self._fresh.items()))
            if now - reported <= self.report_bound_s:
                return
            del self._fresh[address]
            self._withdraw(self._workers[address])

    def count(self, entry: Entry) -> None:
        """Update the loads for a request that moved."""
        self._recount(entry.id, share_of(entry, self.long_tokens))

    def forget(self, entry: Entry) -> None:
        """Remove the load of a request."""
        self._recount(entry.id, NOTHING)
        self._shares.pop(entry.id, None)

    def rebook(self, arena: str, change: int) -> None:
        """The used bytes of an arena changed by ``change``."""
        if arena in self.arenas:
            self.openings += change < 0
            self.used_bytes += change
            self._moved.add(arena)

    # ---------------------------------------------------------------- the best workers

    def prefill_workers(self, arena: str | None = None) -> SortedIndex[tuple[int, str]]:
        """Prefill workers that are not full, of one arena or all: fewest queued tokens first."""
        return self._prefill[arena]

    def with_room(self, tokens: int, limit_tokens: int, arena: str | None = None) -> int:
        """Number of them, from the first on, that have room for a prompt of ``tokens`` tokens.

        A worker takes prompts of ``limit_tokens`` in total. It takes a longer prompt alone, and
        short prompts overtake that in chunks (``PrefillWorkers.tokens_before``).
        """
        ranking = self._prefill[arena]
        return ranking.count_below((max(0, limit_tokens - tokens) + 1, ""))

    def prefill_has_room(self, tokens: int, limit_tokens: int) -> bool:
        """Whether any prefill worker takes a prompt of ``tokens`` tokens, bytes aside."""
        return self.with_room(tokens, limit_tokens) > 0

    def has_stage(self, stage: str) -> bool:
        """Whether there is any worker of a stage, full or not."""
        return any(stage in registration.stages for registration in self._workers.values())

    def workers_of(self, stage: Literal["prefill", "compress"]) -> int:
        """Number of prefill workers or compressors, including full ones."""
        return (self.prefill_arenas if stage == "prefill" else self._compressors).total()

    def has_compressor(self, arena: str) -> bool:
        """Whether any compressor stores in an arena, full or not."""
        return self._compressors[arena] > 0

    def compressor(self, holder: str, arena: str | None = None) -> str | None:
        """The holder of the raw pages if it is a compressor, else the one with fewest tokens.

        A worker with several stages keeps its own request, without a hop to another process.
        ``arena``: only compressors that store there.
        """
        ranking = self._compress[arena]
        return holder if holder in ranking else ranking.first()

    def idle_compressor(self, holder: str, arena: str | None = None) -> str | None:
        """A compressor without work; the holder of the raw pages is preferred."""
        ranking = self._compress[arena]
        if holder in ranking and not self._compressed[holder]:
            return holder
        first = ranking.first()
        return first if first is not None and not self._compressed[first] else None

    def decode_in(self, arena: str) -> str | None:
        """The decode worker of an arena with most free slots."""
        return self._decode[arena].first()

    def imbalanced(self, more: int) -> list[str]:
        """The fullest decode worker of each arena, if another has ``more`` requests fewer."""
        at = defaultdict[str, list[tuple[int, str, str]]](list)
        for address in self._fresh:
            registration = self._workers[address]
            if "decode" in registration.stages and self.role_of(address) != "prefill":
                at[registration.arena].append((self._slots[address], registration.name, address))
        ends = [(min(workers), max(workers)) for workers in at.values()]
        return [fullest[2] for emptiest, fullest in ends if fullest[0] - emptiest[0] >= more]

    def decode(self, own: set[str], fits: Fits) -> str | None:
        """The decode worker with most free bytes, then most free slots, where the request fits.

        ``own``: arenas in which the request has booked already. Of the others, only the arena with
        most free bytes is tried.
        """
        arena = self.final_arena(own, fits)
        return None if arena is None else self.decode_in(arena)

    def final_arena(self, own: set[str], fits: Fits) -> str | None:
        """The arena with a free decode slot and most free bytes that fits."""
        return next((arena for arena in self._candidates(own) if fits(arena)), None)

    def most_free_arena(self) -> str | None:
        """The arena with most free bytes."""
        self._settle()
        return self._raw_arenas.first()

    def most_free_decode_arena(self) -> str | None:
        """The arena with most free bytes of those with a free decode slot."""
        self._settle()
        return self._open_arenas.first()

    def _candidates(self, own: set[str]) -> list[str]:
        self._settle()
        best = next((arena for arena in self._open_arenas if arena not in own), None)
        found = {
            arena for arena in (*own, best) if arena is not None and arena in self._open_arenas
        }
        return sorted(found, key=self._open_arenas.key)

    # ---------------------------------------------------------------- alternatives

    def best(self, step: Literal["prefill", "compress", "decode"], count: int) -> list[str]:
        """Addresses of the best ``count`` workers of a stage, best first."""
        if step == "prefill":
            return list(islice(self._prefill[None], count))
        if step == "compress":
            return list(islice(self._compress[None], count))
        self._settle()
        arenas = islice(self._open_arenas, count)
        return [first for arena in arenas if (first := self._decode[arena].first())]

    def load_of(self, step: Literal["prefill", "compress", "decode"], address: str) -> int:
        """Queued tokens of a worker, or free slots of a decode worker."""
        if step == "prefill":
            return self._queue[address]
        return self._compressed[address] if step == "compress" else self._free.get(address, 0)

    # ---------------------------------------------------------------- what is known

    def arena_of(self, address: str) -> str:
        return self._workers[address].arena

    def is_fresh(self, address: str) -> bool:
        """Whether a worker takes requests: its last report is recent."""
        return address in self._fresh

    def role_of(self, address: str) -> Role:
        return self._roles.get(address, "both")

    def free_slots(self) -> Counter[str]:
        """Free slots of the decode workers of each arena."""
        free = Counter[str]()
        for address, slots in self._free.items():
            free[self.arena_of(address)] += slots
        return free

    def queue_tokens(self, address: str) -> int:
        """Upper bound of the tokens that are prefilled at a worker before a new prompt."""
        return self._queue[address]

    def loads(self) -> Iterator[WorkerLoad]:
        """The load of every worker, in order of registration."""
        for address, registration in self._workers.items():
            yield WorkerLoad(
                name=registration.name,
                address=address,
                arena=registration.arena,
                stages=registration.stages,
                is_full=address not in self._fresh,
                prefill_tokens=self._prefill_tokens[address],
                queue_tokens=self._queue[address],
                compress_tokens=self._compressed[address],
                free_slots=self._free.get(address, 0),
                running=self._slots[address],
                role=self.role_of(address),
            )

    # ---------------------------------------------------------------- counting

    def _recount(self, request: str, share: Share) -> None:
        before = self._shares.get(request, NOTHING)
        if share == before:
            return
        self._shares[request] = share
        touched, is_changed = set[str](), before.tokens != share.tokens
        if is_changed or before[:PREFILL_PARTS] != share[:PREFILL_PARTS]:
            for one, sign in ((before, -1), (share, +1)):
                self._add(self._prefill_tokens, one.prefill_at, sign * one.tokens)
                self._add(self._queue, one.prefill_at, sign * one.queued)
                self.queued_tokens += sign * one.uncached
                touched.add(one.prefill_at)
        if is_changed or before.compress_at != share.compress_at:
            for one, sign in ((before, -1), (share, +1)):
                self._add(self._compressed, one.compress_at, sign * one.tokens)
                touched.add(one.compress_at)
        if before.slot_at != share.slot_at:
            for one, sign in ((before, -1), (share, +1)):
                self._add(self._slots, one.slot_at, sign)
                touched.add(one.slot_at)
        self.needs_slot += share.needs_slot - before.needs_slot
        for address in touched:
            if address in self._fresh:
                self._place(address)

    @staticmethod
    def _add(counter: Counter[str], address: str, count: int) -> None:
        if address and count:
            counter[address] += count
            if not counter[address]:
                del counter[address]

    def _place(self, address: str) -> None:
        """Update the position of a worker; a full one has none."""
        if address not in self._fresh:
            return
        registration, role = self._workers[address], self.role_of(address)
        if "prefill" in registration.stages:
            reads = role != "decode" or not self._slots[address]
            for arena in (None, registration.arena):
                if reads:
                    self._prefill[arena].put(address, (self._queue[address], registration.name))
                else:
                    self._prefill[arena].discard(address)
        if "compress" in registration.stages:
            for arena in (None, registration.arena):
                self._compress[arena].put(address, (self._compressed[address], registration.name))
        if "decode" in registration.stages:
            free = self.slots_of(registration.max_requests) - self._slots[address]
            self._set_free(registration, 0 if role == "prefill" else max(0, free))

    def _withdraw(self, registration: Register) -> None:
        for arena in (None, registration.arena):
            self._prefill[arena].discard(registration.address)
            self._compress[arena].discard(registration.address)
        self._set_free(registration, 0)

    def _set_free(self, registration: Register, free: int) -> None:
        address, before = registration.address, self._free.pop(registration.address, 0)
        self.open_slots += free - before
        ranking = self._decode[registration.arena]
        if free:
            self._free[address] = free
            ranking.put(address, (-free, registration.name))
        else:
            ranking.discard(address)
        self._moved.add(registration.arena)

    def _settle(self) -> None:
        """Renew the places of the arenas that have changed."""
        if not self._moved:
            return
        for arena in self._moved:
            if arena in self.arenas:
                self._raw_arenas.put(arena, self.used(arena))
            self._rank_arena(arena)
        self._moved.clear()

    def _rank_arena(self, arena: str) -> None:
        ranking = self._decode[arena]
        best = ranking.first()
        if best is None:
            self._open_arenas.discard(arena)
        else:
            self._open_arenas.put(arena, (self.used(arena), *ranking.key(best)))

    def _count_arena(self, registration: Register, change: int) -> None:
        arena = registration.arena
        self.decode_workers += change * ("decode" in registration.stages)
        if "compress" in registration.stages:
            self._compressors[arena] += change
        if "prefill" in registration.stages:
            self._count_reader(arena, change)
        before = self.arenas[arena]
        self.arenas[arena] += change
        if before == 0:
            self.used_bytes += self.used(arena)
            self._raw_arenas.put(arena, self.used(arena))
        elif before + change == 0:
            del self.arenas[arena]
            self.used_bytes -= self.used(arena)
            self._raw_arenas.discard(arena)

    def _count_reader(self, arena: str, change: int) -> None:
        was_there = arena in self.prefill_arenas
        self._add(self.prefill_arenas, arena, change)
        self.generation += was_there != (arena in self.prefill_arenas)


def waited_for(entry: Entry, long_tokens: int) -> int:
    """Tokens of a prompt that others at its prefill worker wait for.

    Cached ones do not count, and of a long prompt ``long_tokens``, since short prompts overtake the
    rest. While its images are encoded it is half of that: the worker reads other prompts meanwhile.
    """
    most = long_tokens // 2 if entry.placement.is_encoding else long_tokens
    return min(entry.uncached_tokens, most)


def share_of(entry: Entry, long_tokens: int) -> Share:
    """The load of a request, by the rules of ``cluster_state.worker_loads``."""
    slot_at = entry.placement.decode_worker
    needs_slot = not slot_at and entry.state not in (State.WAITING, State.LEAVING)
    compress_at = compressor_of(entry)
    if entry.worker and is_prefilling(entry):
        uncached, queued = entry.uncached_tokens, waited_for(entry, long_tokens)
        tokens = entry.prompt_tokens
        return Share(entry.worker, uncached, queued, compress_at, slot_at, tokens, needs_slot)
    tokens = entry.prompt_tokens if compress_at else 0
    return Share("", 0, 0, compress_at, slot_at, tokens, needs_slot)
