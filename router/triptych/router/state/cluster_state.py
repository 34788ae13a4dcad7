"""What the router knows, in one place for the parts that change it."""

from collections import Counter
from dataclasses import dataclass, field
from typing import Self

from triptych.router.models.latency_forecast import LatencyForecast
from triptych.router.models.retry_after import DrainRate
from triptych.router.policies.batch_gates import Schedule
from triptych.router.snapshot import WorkerLoad
from triptych.router.state.byte_ledger import ByteLedger
from triptych.router.state.load_index import LoadIndex
from triptych.router.state.membership import Membership
from triptych.router.state.outbox import Outbox
from triptych.router.state.request_table import Requests, compressor_of, is_being_read


@dataclass
class ClusterState:
    """Peers, requests, bookings, and what is to be sent."""

    fleet: Membership
    ledger: ByteLedger
    roster: LoadIndex
    requests: Requests
    outbox: Outbox = field(default_factory=Outbox)
    drain: DrainRate = field(default_factory=DrainRate)
    pace: LatencyForecast = field(default_factory=LatencyForecast)
    formers: set[str] = field(default_factory=set[str])
    """Dead decode workers, by name, that left pages which the pool keeps for others."""
    counters: Counter[str] = field(default_factory=Counter[str])
    """Decisions and oddities by reason."""

    @classmethod
    def open(
        cls,
        capacity_bytes: int,
        report_bound_s: float,
        schedule: Schedule,
        long_tokens: int = 1 << 62,
    ) -> Self:
        """Empty books whose parts tell the roster what changes."""
        ledger = ByteLedger(capacity_bytes)
        roster = LoadIndex(report_bound_s, ledger.used, schedule.slots, long_tokens)
        ledger.on_change = roster.rebook
        requests = Requests(on_change=roster.count, on_removal=roster.forget)
        return cls(Membership(report_bound_s), ledger, roster, requests)

    def concurrency_with(self, more: int) -> float:
        """Requests in work for each decode worker, if so many more come as slots and bytes allow.

        The first of them is counted even if there is no room: it will have taken another's place.
        """
        in_work, roster = self.requests.in_work, self.roster
        free = max(0, len(roster.arenas) * self.ledger.capacity_bytes - roster.used_bytes)
        slots = max(0, roster.open_slots - roster.needs_slot)
        fit = free * in_work // roster.used_bytes if in_work and roster.used_bytes > 0 else more
        return (in_work + min(more, max(1, min(slots, fit)))) / max(1, roster.writers)


def worker_loads(books: ClusterState, now: float) -> dict[str, WorkerLoad]:
    """Every worker as placement sees it, by address, counted anew from all requests.

    What the roster keeps up to date, in plain words; tests compare the two.
    """
    prefill, compress, slots = Counter[str](), Counter[str](), Counter[str]()
    queue = Counter[str]()
    for entry in books.requests:
        if entry.decode:
            slots[entry.decode] += 1
        if is_being_read(entry):
            prefill[entry.worker] += entry.prompt_tokens
            queue[entry.worker] += min(entry.tokens_to_read, books.roster.long_tokens)
        if compressor := compressor_of(entry):
            compress[compressor] += entry.prompt_tokens
    loads = dict[str, WorkerLoad]()
    for peer in books.fleet:
        if not peer.hello.stages:
            continue
        address, is_full = peer.address, books.fleet.is_full(peer, now)
        role = books.roster.role_of(address)
        takes_joins = "decode" in peer.hello.stages and not is_full and role != "read"
        loads[address] = WorkerLoad(
            name=peer.name,
            address=address,
            arena=peer.hello.arena,
            stages=peer.hello.stages,
            is_full=is_full,
            prefill_tokens=prefill[address],
            queue_tokens=queue[address],
            compress_tokens=compress[address],
            free_slots=max(0, books.roster.slots_of(peer.hello.max_requests) - slots[address])
            if takes_joins
            else 0,
            running=slots[address],
            role=role,
        )
    return loads
