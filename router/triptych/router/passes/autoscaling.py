"""Autoscaling: workers that each stage needs, from busy time, queued work, slots and SLOs."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from math import inf

from triptych.core.messages import NO_SLO, Report, Stage
from triptych.router.state.cluster_state import ClusterState
from triptych.router.state.request_table import State

LEAST_DRAIN_S, MOST_DRAIN_S = 1.0, 60.0
"""Bounds of the time within which waiting prompts are to be prefilled."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Demand:
    """Load of all stages at one moment."""

    workers: Mapping[Stage, int]
    """Workers of each stage."""
    busy: Mapping[Stage, float]
    """Sum of the busy shares of a stage's workers. Workers that decode do not count: they are busy
    as soon as they have one request, and take more of them in the same time."""
    waiting_tokens: int = 0
    """Prompt tokens of waiting requests."""
    queued_tokens: int = 0
    """Prompt tokens in the queues of prefill workers."""
    prefill_token_s: float = 0.0
    """Seconds for each of them, at one worker; 0 if nothing was measured for long."""
    drain_s: float = MOST_DRAIN_S
    """Time within which the queue is to be prefilled: the least left of an SLO or of
    ``router.max_overtake_s``."""
    waiting_requests: int = 0
    slots_used: int = 0
    """Decode slots that are used, or reserved for a request in an earlier stage."""
    worker_slots: int = 1
    """Of one decode worker."""
    fitting: float = 1.0
    """Share of the queue for which there are free bytes; more workers do not help the rest."""
    tpot_ratio: float = 0.0
    """Present TPOT divided by the strictest TPOT limit of running requests."""


def wanted(stage: Stage, demand: Demand, target: float) -> float:
    """Workers that a stage should have, before rounding and bounds.

    The result is the largest of: for prefill and compress, busy time over ``target``; for prefill,
    waiting work over the time left for it; for decode, slots, and the ratio to the TPOT limit.
    Requests that wait for bytes need no workers.

    >>> queue = Demand(workers={"prefill": 1}, busy={"prefill": 0.5}, waiting_tokens=4000,
    ...               prefill_token_s=1e-3, drain_s=2.0)
    >>> wanted("prefill", queue, 0.5)
    2.0
    """
    here = demand.workers.get(stage, 0)
    asked = [demand.busy.get(stage, 0.0) / target]
    if stage == "prefill":
        tokens = demand.queued_tokens + demand.fitting * demand.waiting_tokens
        asked.append(tokens * demand.prefill_token_s / demand.drain_s)
    if stage == "decode":
        used = demand.slots_used + demand.fitting * demand.waiting_requests
        asked.append(used / (target * demand.worker_slots))
        if demand.tpot_ratio > 1.0:
            asked.append(here * demand.tpot_ratio)
    return max(asked)


@dataclass
class BusyTime:
    """Busy share of each worker between two samples of its reports."""

    _before: dict[str, tuple[float, float]] = field(default_factory=dict[str, tuple[float, float]])
    """Time and busy seconds at the last sample, by address."""

    def look(self, reports: Iterable[tuple[str, Report | None]], now: float) -> dict[str, float]:
        """Busy share of each worker since the last sample; without a report it counts as busy."""
        shares, after = dict[str, float](), dict[str, tuple[float, float]]()
        for address, report in reports:
            shares[address] = 1.0
            if report is None:
                continue
            busy_s = report.busy_s + report.step_age_s
            since, before_s = self._before.get(address, (now, busy_s))
            if now > since:
                shares[address] = min(1.0, max(0.0, (busy_s - before_s) / (now - since)))
            elif address not in self._before:
                shares[address] = 0.0  # it is new
            after[address] = (now, busy_s)
        self._before = after
        return shares


@dataclass
class Scaling:
    """Computes the demand. A sample costs time for each request, so results are reused."""

    cluster: ClusterState
    max_overtake_s: float
    look_every_s: float = 2.0
    _busy: BusyTime = field(default_factory=BusyTime)
    _demand: Demand | None = None
    _looked: float = -inf

    def demand(self, now: float) -> Demand:
        """The demand at the last sample."""
        if self._demand is None or now - self._looked >= self.look_every_s:
            self._demand, self._looked = self._look(now), now
        return self._demand

    def _look(self, now: float) -> Demand:
        cluster = self.cluster
        cluster.load_index.refresh(now)
        loads = list(cluster.load_index.loads())
        slots = {
            peer.address: cluster.load_index.slots_of(peer.registration.max_requests)
            for peer in cluster.membership
            if "decode" in peer.registration.stages
        }
        full = {load.address for load in loads if load.is_full}
        peers = [peer for peer in cluster.membership if peer.registration.stages]
        shares = self._busy.look(
            ((one.address, None if one.address in full else one.report) for one in peers), now
        )
        workers, busy = dict[Stage, int](), dict[Stage, float]()
        for peer in peers:
            for stage in peer.registration.stages:
                workers[stage] = workers.get(stage, 0) + 1
                if "decode" not in peer.registration.stages:
                    busy[stage] = busy.get(stage, 0.0) + shares[peer.address]
        waiting = [
            one for one in cluster.requests.in_state(State.WAITING) if not one.waits_with_pages
        ]
        arenas = len(cluster.load_index.arenas)
        free = arenas * cluster.ledger.capacity_bytes - cluster.load_index.used_bytes
        needed = sum(one.sizes.peak for one in waiting)
        limits = [one.slo.latest - now for one in waiting if one.slo.latest < inf]
        tpots = [
            one.request.slo.tpot_s
            for one in cluster.requests.in_state(State.DECODING)
            if one.request.slo != NO_SLO and one.request.slo.tpot_s
        ]
        taken = sum(bool(one.placement.decode_worker) for one in cluster.requests)
        return Demand(
            workers=workers,
            busy=busy,
            waiting_tokens=sum(one.prompt_tokens for one in waiting),
            queued_tokens=sum(load.prefill_tokens for load in loads),
            prefill_token_s=cluster.latency.prefill_token_s.at(now),
            drain_s=min(MOST_DRAIN_S, max(LEAST_DRAIN_S, min([self.max_overtake_s, *limits]))),
            waiting_requests=len(waiting),
            slots_used=taken + cluster.load_index.needs_slot,
            worker_slots=max(1, min(slots.values(), default=1)),
            fitting=min(1.0, max(0, free) / needed) if needed else 1.0,
            tpot_ratio=cluster.latency.token_s.mean(now) / min(tpots) if tpots else 0.0,
        )
