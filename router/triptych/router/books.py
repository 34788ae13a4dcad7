"""What the router knows, in one place for the parts that change it."""

from collections import Counter
from dataclasses import dataclass, field

from triptych.router.drain import DrainRate
from triptych.router.fleet import Fleet
from triptych.router.ledger import ByteLedger
from triptych.router.outbox import Outbox
from triptych.router.snapshot import WorkerLoad
from triptych.router.state import Entry, Requests, State


@dataclass
class Books:
    """Peers, requests, bookings, and what is to be sent."""

    fleet: Fleet
    ledger: ByteLedger
    requests: Requests = field(default_factory=Requests)
    outbox: Outbox = field(default_factory=Outbox)
    drain: DrainRate = field(default_factory=DrainRate)
    formers: set[str] = field(default_factory=set[str])
    """Dead decode workers, by name, that left pages which the pool keeps for others."""
    counters: Counter[str] = field(default_factory=Counter[str])
    """Decisions and oddities by reason."""


def worker_loads(books: Books, now: float) -> dict[str, WorkerLoad]:
    """Every worker as placement sees it, by address."""
    prefill, compress, slots = Counter[str](), Counter[str](), Counter[str]()
    for entry in books.requests:
        if entry.decode:
            slots[entry.decode] += 1
        if is_being_read(entry):
            prefill[entry.worker] += entry.prompt_tokens
        elif is_being_compressed(entry):
            compress[entry.worker] += entry.prompt_tokens
    loads = dict[str, WorkerLoad]()
    for peer in books.fleet:
        if not peer.hello.stages:
            continue
        address, is_full = peer.address, books.fleet.is_full(peer, now)
        takes_joins = "decode" in peer.hello.stages and not is_full
        loads[address] = WorkerLoad(
            name=peer.name,
            address=address,
            arena=peer.hello.arena,
            stages=peer.hello.stages,
            is_full=is_full,
            prefill_tokens=prefill[address],
            compress_tokens=compress[address],
            free_slots=max(0, peer.hello.max_requests - slots[address]) if takes_joins else 0,
        )
    return loads


def is_being_read(entry: Entry) -> bool:
    """Whether its prompt is in the queue of a prefill worker."""
    return entry.state is State.PREFILLING or (
        entry.state is State.LEAVING and entry.stage == "prefill"
    )


def is_being_compressed(entry: Entry) -> bool:
    """Whether it is in the queue of a compressor."""
    if entry.state is State.LEAVING:
        return entry.stage == "compress"
    return entry.state in (State.COMPRESSING, State.PLANNED, State.ENCODING)
