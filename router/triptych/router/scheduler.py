"""The scheduler: admits requests, assigns them to workers, and follows each one to its end.

Read ``Scheduler.schedule`` first: it names the passes of a scheduling round in their order. The
scheduler has neither a clock nor sockets: messages and the time go in, messages come out.
"""

from collections.abc import Sequence
from dataclasses import replace

from triptych.core.config import RouterConfig
from triptych.core.errors import (
    TriptychError,
)
from triptych.core.handles import KVHandle
from triptych.core.messages import (
    CacheMemoryBorrowed,
    Cancel,
    Compressed,
    Confirm,
    Drain,
    Evicted,
    Fetched,
    Finished,
    ImagesEncoded,
    Lowered,
    Message,
    PagesWanted,
    Planned,
    Preempted,
    Prefilled,
    Register,
    Report,
    Resumed,
    Send,
    Submit,
    requests_in,
)
from triptych.core.pages import PagePlan
from triptych.router.events.adaptive_method import AdaptiveMethod
from triptych.router.events.peers import Peers, Timeouts
from triptych.router.events.progress import Progress
from triptych.router.events.submission import Submission
from triptych.router.models.booking import BookingModel
from triptych.router.models.memory_estimate import ByteModel
from triptych.router.models.overcommit import Overcommit
from triptych.router.passes.autoscaling import Demand, Scaling
from triptych.router.passes.cache_borrowing import CacheBorrowing
from triptych.router.passes.completion import RequestCompletion
from triptych.router.passes.dispatching.dispatch import Dispatch
from triptych.router.passes.dispatching.stage_batches import (
    AdaptiveBatchDispatch,
    StaticBatchDispatch,
)
from triptych.router.passes.draining import Draining
from triptych.router.passes.growth import Growth
from triptych.router.passes.lowering import MemoryLowering
from triptych.router.passes.migration import Migration
from triptych.router.passes.placement_view import Placer
from triptych.router.passes.preemption import Preemption
from triptych.router.passes.roles import Roles
from triptych.router.passes.slo_admission import SloAdmission
from triptych.router.plugins import PLACEMENT_POLICIES, schedule_named
from triptych.router.policies.batch_gates import Schedule
from triptych.router.policies.prefix_map import PrefixMap
from triptych.router.snapshot import Explanation, HeldBy, Memory, RouterSnapshot
from triptych.router.state.cluster_state import ClusterState
from triptych.router.state.decision_log import DecisionLog
from triptych.router.state.history import RequestTrace
from triptych.router.state.request_table import Entry, Requests, State
from triptych.router.state.shared_prompts import SharedPrompts

SHOWN = 256
"""Default number of request traces that ``Scheduler.traces`` returns."""


class Scheduler:
    """Schedules every request from its submission to its end, over all workers.

    All methods must be called from one thread. ``now`` is in monotonic seconds and never goes
    back. ``sender`` is the address that a message came from. An invalid message never raises: it
    is counted and, where pages could be stuck, answered with ``Cancel``.
    """

    def __init__(
        self,
        config: RouterConfig,
        plan: PagePlan,
        capacity_bytes: int,
        timeouts: Timeouts | None = None,
    ) -> None:
        """``capacity_bytes``: page memory of each arena, less what workers reserve ahead."""
        timeouts = timeouts or Timeouts()
        model = ByteModel(plan)
        batches = schedule_named(config.batch_policy)
        long_tokens = max(1, config.prefill_batch_tokens // 2)
        cluster = ClusterState.open(capacity_bytes, timeouts.report_bound_s, batches, long_tokens)
        self._cluster = cluster
        self._completion = RequestCompletion(cluster, timeouts.cancel_timeout_s, timeouts.reclaim_s)
        placer = Placer(
            PLACEMENT_POLICIES.load(config.placement),
            cluster.load_index,
            cluster.latency,
            lambda method: plan.of_method(method).prefix_block_tokens,
            PrefixMap(plan.prefix_blocks),
            config.affinity_ttft_s,
        )
        may_interrupt = not batches.runs_batches_to_end
        self._borrowing = CacheBorrowing(cluster, plan.prefix_bytes)
        is_layerwise = batches.compress.most is None
        bookings = BookingModel(model, capacity_bytes, is_layerwise=is_layerwise)
        self._growth = Growth(
            cluster,
            self._completion,
            self._borrowing,
            MemoryLowering(cluster, bookings, DecisionLog(cluster)),
            bookings,
            Overcommit(config.overcommit_risk, capacity_bytes),
            is_on=config.booking == "forecast" and may_interrupt,
        )
        keeps_prefixes = plan.prefix_bytes > 0
        # The baselines of the paper keep their batches as they are.
        shares = keeps_prefixes and may_interrupt
        shared = SharedPrompts(shares, PrefixMap(plan.prefix_blocks))
        self._dispatch = _dispatch_for(batches)(
            cluster, batches, config, placer, self._growth, shared, keeps_prefixes
        )
        self._migration = Migration(cluster, config.rebalance_requests if may_interrupt else 0)
        self._roles = Roles(cluster, config.roles == "dynamic" and may_interrupt)
        self._slo_admission = SloAdmission(cluster, self._completion)
        self._draining = Draining(cluster, self._completion)
        may_wait = self._growth.may_wait
        self._preemption = Preemption(cluster, may_wait) if may_interrupt else None
        self._autoscaling = Scaling(cluster, config.max_overtake_s)
        self._submission = Submission(
            cluster,
            config,
            model,
            self._growth,
            self._dispatch,
            self._slo_admission,
            self._completion,
            self._draining,
            AdaptiveMethod(cluster, plan, self._growth, self._slo_admission),
        )
        self._progress = Progress(
            cluster,
            model,
            self._growth,
            shared,
            self._roles,
            self._completion,
            self._submission,
        )
        self._peers = Peers(cluster, self._completion, self._draining, timeouts)

    # ---------------------------------------------------------------- one scheduling round

    def schedule(self, now: float, *, is_tick: bool = False) -> list[Send]:
        """Run the passes of a scheduling round; returns the messages to send.

        The passes of a tick are those that depend on the time, about twice a second.
        """
        if is_tick:
            self._completion.expire(now)
            self._peers.remove_stalled(now)
            self._completion.expel_dead_workers()
            self._peers.fail_stranded(now)
            self._roles.run(self._dispatch.blocked_reason, now)
            self._migration.run()
            self._dispatch.expire()
        self._draining.run(now)
        self._slo_admission.run(now)
        self._growth.run(now)
        self._dispatch.run(now)  # resume, join, encode, compress, admit
        self._borrowing.run(self._dispatch.blocked_reason, now, self._growth.short_bytes)
        self._growth.relieve(self._dispatch.blocked_reason, now)
        if self._preemption is not None:
            self._preemption.run(self._dispatch.blocked_reason, now)
        return self._cluster.outbox.take()

    # ---------------------------------------------------------------- events

    def on(self, message: Message, sender: str, now: float) -> list[Send]:
        """Take one message."""
        return self.receive([message], sender, now)

    def receive(self, messages: Sequence[Message], sender: str, now: float) -> list[Send]:
        """Take the messages of one frame, then schedule once for all of them."""
        self._record_concurrency(now)
        must_schedule = self._peers.is_unregistered(messages, sender)
        for message in messages:
            if isinstance(message, Report):
                must_schedule |= self._peers.report(message, sender, now)
            else:
                self._take(message, sender, now)
                must_schedule = True
        # 1,000 workers send 2,000 reports a second. A report alone rarely changes what can run.
        return self.schedule(now) if must_schedule else []

    def lost(self, address: str, now: float) -> list[Send]:
        """The peer at ``address`` died."""
        self._record_concurrency(now)
        self._peers.remove(address, now)
        return self.schedule(now)

    def undeliverable(self, message: Message, error: TriptychError, now: float) -> list[Send]:
        """A worker cannot take a message: the requests that it contains fail with ``error``."""
        for request in requests_in(message):
            entry = self._cluster.requests.get(request.id)
            if entry is not None and entry.state is not State.LEAVING:
                self._completion.fail(entry, error, now)
        return self.schedule(now)

    def tick(self, now: float) -> list[Send]:
        """Schedule with the passes that depend on the time: call it about twice a second."""
        self._record_concurrency(now)
        return self.schedule(now, is_tick=True)

    def _record_concurrency(self, now: float) -> None:
        """Account the time since the last call to the present number of running requests."""
        self._cluster.latency.record_concurrency(self._cluster.concurrency_with(0), now)

    def _take(self, message: Message, sender: str, now: float) -> None:
        match message:
            case Submit():
                self._submission.submit(message.requests, now)
            case Cancel():
                self._submission.cancel(message, now)
            case Confirm():
                self._progress.confirm(message, sender)
            case Prefilled():
                self._progress.prefilled(message, sender, now)
            case ImagesEncoded():
                self._progress.images_encoded(message, sender)
            case Planned():
                self._progress.planned(message, sender, now)
            case Compressed():
                self._progress.compressed(message, sender, now)
            case Fetched():
                self._progress.fetched(message, sender)
            case Resumed():
                self._progress.resumed(message, sender)
            case Preempted():
                self._progress.preempted(message, sender, now)
            case PagesWanted():
                self._growth.ask(message, sender, now)
            case Lowered():
                self._growth.lowered(message, sender, now)
            case Evicted():
                self._progress.evicted(message, sender, now)
            case Finished():
                self._progress.finished(message, sender, now)
            case CacheMemoryBorrowed():
                self._borrowing.on_borrowed(message, now)
            case Register():
                self._peers.register(message, now)
            case Drain():
                self._draining.begin(message.timeout_s, now)
            case _:
                self._cluster.counters["unknown_message"] += 1

    # ---------------------------------------------------------------- status

    def snapshot(self, now: float) -> RouterSnapshot:
        """State of the router, for metrics and status."""
        requests: Requests = self._cluster.requests
        oldest = requests.queue.oldest_arrival()
        self._cluster.load_index.refresh(now)
        return RouterSnapshot(
            requests={state.value: requests.count(state) for state in State},
            booked_bytes=self._cluster.ledger.arenas,
            held_bytes=self._cluster.ledger.held_bytes,
            bound_bytes=self._cluster.ledger.bound_bytes,
            capacity_bytes=max(1, len(self._cluster.load_index.arenas))
            * self._cluster.ledger.capacity_bytes,
            blocked_reason=self._dispatch.blocked_reason,
            oldest_waiting_s=0.0 if oldest is None else now - oldest,
            counters=dict(self._cluster.counters),
            workers=tuple(
                replace(load, encode_pixels=self._cluster.image_encoders.pixels_at(load.address))
                for load in self._cluster.load_index.loads()
            ),
            stage_times=requests.stage_times.snapshot(),
        )

    def demand(self, now: float) -> Demand:
        """Input of autoscaling; a few seconds old at most."""
        return self._autoscaling.demand(now)

    def census(self) -> tuple[dict[str, int], Memory]:
        """Requests by state, and bytes in all arenas; cheaper than ``snapshot``."""
        counts = {state.value: self._cluster.requests.count(state) for state in State}
        ledger = self._cluster.ledger
        return counts, Memory(ledger.held_bytes, sum(ledger.arenas.values()), ledger.bound_bytes)

    @property
    def is_drained(self) -> bool:
        """Whether the application stops and no request is left."""
        return self._draining.is_over

    def traces(self, most: int = SHOWN) -> tuple[RequestTrace, ...]:
        """Traces of the latest requests, in order of arrival; times are those of ``now``."""
        return tuple(self._cluster.requests.history.latest(most))

    def handles(self) -> dict[str, KVHandle]:
        """The handle of each request, as its last stage handed it over."""
        entries = self._cluster.requests
        return {
            entry.id: entry.transfer.handle
            for entry in entries
            if entry.transfer.handle is not None
        }

    def report_ages_s(self, now: float) -> dict[str, float]:
        """Seconds since the last report of each worker, by name."""
        return {peer.name: now - peer.reported for peer in self._cluster.membership if peer.report}

    def decisions(self, client_id: str) -> tuple[RequestTrace, ...]:
        """Decisions about a client's request: a trace for each choice and attempt.

        Empty if the request is unknown or too old.
        """
        return tuple(self._cluster.requests.history.of(client_id))

    def explain(self, request: str, now: float) -> Explanation | None:
        """State of a request and what it waits for; None if it has ended or is unknown."""
        entry = self._cluster.requests.get(request)
        if entry is None:
            return None
        return Explanation(
            request=request,
            state=entry.state.value,
            in_state_s=now - entry.since,
            worker=entry.worker,
            decode_worker=entry.placement.decode_worker,
            image_encoder=entry.placement.image_encoder,
            held_bytes=self._cluster.ledger.held_of(request),
            booked_bytes=self._cluster.ledger.booked_by(request),
            bound_bytes=self._cluster.ledger.bound_of(request),
            blocked_reason=self._blocked_reason(entry),
            waits_for=entry.placement.waits_for.leader if entry.placement.waits_for else "",
        )

    def _blocked_reason(self, entry: Entry) -> HeldBy:
        if entry.placement.waits_for is not None:
            return "shared_prompt"
        if entry.id in self._cluster.image_encoders.without:
            return "no_encoder"
        return self._dispatch.blocked_reason if entry.state is State.WAITING else ""


def _dispatch_for(schedule: Schedule) -> type[Dispatch]:
    if schedule.is_adaptive:
        return AdaptiveBatchDispatch
    return StaticBatchDispatch if schedule.has_batch_sizes else Dispatch
