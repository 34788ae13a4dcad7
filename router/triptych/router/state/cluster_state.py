"""The state of the router that all passes share."""

from collections import Counter
from dataclasses import dataclass, field
from typing import Self

from triptych.router.models.latency_forecast import LatencyForecast
from triptych.router.models.method_costs import MethodCosts
from triptych.router.models.retry_after import DrainRate
from triptych.router.policies.batch_gates import Schedule
from triptych.router.snapshot import WorkerLoad
from triptych.router.state.byte_ledger import ByteLedger
from triptych.router.state.image_encoders import ImageEncoders
from triptych.router.state.load_index import LoadIndex, waited_for
from triptych.router.state.membership import Membership
from triptych.router.state.outbox import Outbox
from triptych.router.state.request_table import Requests, compressor_of, is_prefilling


@dataclass
class ClusterState:
    """Peers, requests, loads, bookings and outgoing messages."""

    membership: Membership
    ledger: ByteLedger
    load_index: LoadIndex
    requests: Requests
    image_encoders: ImageEncoders
    outbox: Outbox = field(default_factory=Outbox)
    drain: DrainRate = field(default_factory=DrainRate)
    latency: LatencyForecast = field(default_factory=LatencyForecast)
    method_costs: MethodCosts = field(default_factory=MethodCosts)
    dead_workers: set[str] = field(default_factory=set[str])
    """Names of dead decode workers whose pages the pool keeps for a takeover."""
    counters: Counter[str] = field(default_factory=Counter[str])
    """Decisions and unexpected messages by reason."""

    @classmethod
    def open(
        cls,
        capacity_bytes: int,
        report_bound_s: float,
        schedule: Schedule,
        long_tokens: int = 1 << 62,
    ) -> Self:
        """An empty state whose parts report changes to the load index."""
        ledger = ByteLedger(capacity_bytes)
        load_index = LoadIndex(report_bound_s, ledger.used, schedule.slots, long_tokens)
        ledger.on_change = load_index.rebook
        requests = Requests(on_change=load_index.count, on_removal=load_index.forget)
        membership = Membership(report_bound_s)
        image_encoders = ImageEncoders(membership, load_index)
        requests.on_end.append(image_encoders.ended)
        state = cls(membership, ledger, load_index, requests, image_encoders)
        requests.on_end.append(lambda entry: state.method_costs.arrived(entry.id))
        return state

    def concurrency_with(self, more: int) -> float:
        """Running requests for each decode worker with up to ``more``, as slots and bytes allow.

        The first additional one counts even without room: it will replace another request.
        """
        in_work, load_index = self.requests.in_work, self.load_index
        if not more:  # after each message
            return in_work / max(1, load_index.decode_workers)
        free = max(0, len(load_index.arenas) * self.ledger.capacity_bytes - load_index.used_bytes)
        slots = max(0, load_index.open_slots - load_index.needs_slot)
        fit = (
            free * in_work // load_index.used_bytes
            if in_work and load_index.used_bytes > 0
            else more
        )
        return (in_work + min(more, max(1, min(slots, fit)))) / max(1, load_index.decode_workers)


def worker_loads(cluster: ClusterState, now: float) -> dict[str, WorkerLoad]:
    """The load of every worker, by address, counted from all requests.

    The load index keeps the same numbers incrementally; tests compare the two.
    """
    prefill, compress, slots = Counter[str](), Counter[str](), Counter[str]()
    queue = Counter[str]()
    for entry in cluster.requests:
        if entry.placement.decode_worker:
            slots[entry.placement.decode_worker] += 1
        if is_prefilling(entry):
            prefill[entry.worker] += entry.prompt_tokens
            queue[entry.worker] += waited_for(entry, cluster.load_index.long_tokens)
        if compressor := compressor_of(entry):
            compress[compressor] += entry.prompt_tokens
    loads = dict[str, WorkerLoad]()
    for peer in cluster.membership:
        if not peer.registration.stages:
            continue
        address, is_full = peer.address, cluster.membership.is_full(peer, now)
        role = cluster.load_index.role_of(address)
        takes_joins = "decode" in peer.registration.stages and not is_full and role != "prefill"
        loads[address] = WorkerLoad(
            name=peer.name,
            address=address,
            arena=peer.registration.arena,
            stages=peer.registration.stages,
            is_full=is_full,
            prefill_tokens=prefill[address],
            queue_tokens=queue[address],
            compress_tokens=compress[address],
            free_slots=max(
                0, cluster.load_index.slots_of(peer.registration.max_requests) - slots[address]
            )
            if takes_joins
            else 0,
            running=slots[address],
            role=role,
        )
    return loads
