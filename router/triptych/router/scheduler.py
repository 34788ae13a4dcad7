"""The scheduler: admits requests, assigns them to workers, and follows each one to its end.

Read ``Scheduler.schedule`` first: it names the passes of a scheduling round in their order. The
scheduler has neither a clock nor sockets: messages and the time go in, messages come out.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from triptych.core.config import RouterConfig
from triptych.core.errors import (
    Overloaded,
    PoolExhausted,
    PromptTooLong,
    QueueFull,
    ShuttingDown,
    StageLost,
    TriptychError,
)
from triptych.core.handles import KVHandle
from triptych.core.messages import (
    POOL,
    CacheMemoryBorrowed,
    Cancel,
    Compressed,
    Confirm,
    Drain,
    Evicted,
    Fetched,
    Finished,
    Lowered,
    Message,
    PagesWanted,
    Planned,
    Preempted,
    Prefilled,
    Register,
    RegisterAgain,
    Report,
    Request,
    Resumed,
    Send,
    Stage,
    Submit,
    Unknown,
    requests_in,
)
from triptych.core.pages import PagePlan
from triptych.router.models.booking import BookingModel
from triptych.router.models.memory_estimate import ByteModel, RequestBytes
from triptych.router.models.overcommit import Overcommit
from triptych.router.passes.autoscaling import Demand, Scaling
from triptych.router.passes.cache_borrowing import CacheBorrowing
from triptych.router.passes.completion import RequestCompletion
from triptych.router.passes.decision_log import DecisionLog
from triptych.router.passes.dispatch import Dispatch
from triptych.router.passes.draining import Draining
from triptych.router.passes.growth import Growth
from triptych.router.passes.lowering import MemoryLowering
from triptych.router.passes.migration import Migration
from triptych.router.passes.placement_view import Placer
from triptych.router.passes.preemption import Preemption
from triptych.router.passes.roles import Roles
from triptych.router.passes.slo_admission import SloAdmission
from triptych.router.passes.stage_batches import AdaptiveBatchDispatch, StaticBatchDispatch
from triptych.router.plugins import PLACEMENT_POLICIES, schedule_named
from triptych.router.policies.batch_gates import Schedule
from triptych.router.policies.prefix_map import PrefixMap
from triptych.router.queue.waiting_queue import due_s
from triptych.router.snapshot import Explanation, HeldBy, Memory, RouterSnapshot
from triptych.router.state.byte_ledger import lines_after_encoding, lines_before_encoding
from triptych.router.state.cluster_state import ClusterState
from triptych.router.state.history import RequestTrace
from triptych.router.state.request_table import Entry, Requests, State
from triptych.router.state.shared_prompts import SharedPrompts


@dataclass(frozen=True, slots=True, kw_only=True)
class Timeouts:
    """How long the router waits for workers, for the pool and for other routers."""

    report_bound_s: float = 3.0
    """A worker whose last report is older gets no new requests."""

    silent_s: float = 8.0
    """A worker without a report for this long counts as stuck; a running one sends two a second."""

    grace_s: float = 30.0
    """Time that a request waits for a stage without any worker before it fails with 503."""

    refuse_s: float | None = None
    """The same for a request that has not started, if another router may take it; None:
    ``grace_s``."""

    cancel_timeout_s: float = 1.0
    """Time after which a cancelled request's bytes count as free without the worker's answer."""

    reclaim_s: float = 10.0
    """Time after which the pool has reclaimed the pages of a dead worker: its lease."""


SHOWN = 256
"""Default number of request traces that ``Scheduler.traces`` returns."""
MISSED_TICK_S = 2.0
"""Time between two ticks after which the router process itself must have been paused."""

TOGETHER_S = 0.1
"""Longest time between the prefill messages of requests whose prompt was computed once."""

NEEDED_IN: dict[Stage, tuple[State, ...]] = {
    "prefill": (State.WAITING,),
    "compress": (State.WAITING, State.PREFILLED),
    "decode": (
        State.WAITING,
        State.PREFILLED,
        State.PLANNED,
        State.COMPRESSED,
        State.ORPHANED,
    ),
}
"""States in which a request needs a worker of the stage to continue."""


_FROM_PEERS = (Report, Confirm)
"""Messages that a registered process sends again and again."""


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
        self._config, self._model, self._timeouts = config, ByteModel(plan), timeouts
        batches = schedule_named(config.batch_policy)
        long_tokens = max(1, config.prefill_batch_tokens // 2)
        cluster = ClusterState.open(capacity_bytes, timeouts.report_bound_s, batches, long_tokens)
        self._cluster = cluster
        self._completion = RequestCompletion(cluster, timeouts.cancel_timeout_s, timeouts.reclaim_s)
        placer = Placer(
            PLACEMENT_POLICIES.load(config.placement),
            cluster.load_index,
            cluster.latency,
            plan.block_tokens,
            PrefixMap(plan.prefix_blocks),
            config.affinity_ttft_s,
        )
        may_interrupt = not batches.runs_batches_to_end
        self._borrowing = CacheBorrowing(cluster, plan.prefix_bytes)
        is_layerwise = batches.compress.most is None
        bookings = BookingModel(self._model, capacity_bytes, is_layerwise=is_layerwise)
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
        block_tokens = plan.block_tokens if keeps_prefixes and may_interrupt else 0
        self._shared = SharedPrompts(block_tokens, PrefixMap(plan.prefix_blocks))
        self._dispatch = _dispatch_for(batches)(
            cluster, batches, config, placer, self._growth, self._shared, keeps_prefixes
        )
        self._migration = Migration(cluster, config.rebalance_requests if may_interrupt else 0)
        self._roles = Roles(cluster, config.roles == "dynamic" and may_interrupt)
        self._slo_admission = SloAdmission(cluster, self._completion)
        self._draining = Draining(cluster, self._completion)
        may_wait = self._growth.may_wait
        self._preemption = Preemption(cluster, may_wait) if may_interrupt else None
        self._autoscaling = Scaling(cluster, config.max_overtake_s)
        self._ticked = 0.0

    # ---------------------------------------------------------------- one scheduling round

    def schedule(self, now: float, *, is_tick: bool = False) -> list[Send]:
        """Run the passes of a scheduling round; returns the messages to send.

        The passes of a tick are those that depend on the time, about twice a second.
        """
        if is_tick:
            self._completion.expire(now)
            self._remove_stalled(now)
            self._completion.expel_dead_workers()
            self._fail_stranded(now)
            self._roles.run(self._dispatch.blocked_reason, now)
            self._migration.run()
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
        must_schedule = self._is_unregistered(messages, sender)
        for message in messages:
            if isinstance(message, Report):
                must_schedule |= self._report(message, sender, now)
            else:
                self._take(message, sender, now)
                must_schedule = True
        # 1,000 workers send 2,000 reports a second. A report alone rarely changes what can run.
        return self.schedule(now) if must_schedule else []

    def lost(self, address: str, now: float) -> list[Send]:
        """The peer at ``address`` died."""
        self._record_concurrency(now)
        self._remove_peer(address, now)
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
                for request in message.requests:
                    self._submit(request, now)
            case Cancel():
                self._cancel(message, now)
            case Confirm():
                self._confirm(message, sender)
            case Prefilled():
                self._prefilled(message, sender, now)
            case Planned():
                self._planned(message, sender, now)
            case Compressed():
                self._compressed(message, sender, now)
            case Fetched():
                self._fetched(message, sender)
            case Resumed():
                self._resumed(message, sender)
            case Preempted():
                self._preempted(message, sender, now)
            case PagesWanted():
                self._growth.ask(message, sender, now)
            case Lowered():
                self._growth.lowered(message, sender, now)
            case Evicted():
                self._evicted(message, sender, now)
            case Finished():
                self._finished(message, sender, now)
            case CacheMemoryBorrowed():
                self._borrowing.on_borrowed(message, now)
            case Register():
                self._register(message, now)
            case Drain():
                self._draining.begin(message.timeout_s, now)
            case _:
                self._cluster.counters["unknown_message"] += 1

    def _report(self, report: Report, sender: str, now: float) -> bool:
        """Store a report; whether a worker takes requests again after it."""
        if self._cluster.membership.note(report, sender, now):
            return self._cluster.load_index.record_report(sender, now)
        self._cluster.counters["stray_report"] += 1
        return False

    # ---------------------------------------------------------------- peers

    def _is_unregistered(self, messages: Sequence[Message], sender: str) -> bool:
        """Whether the sender is no peer, and is told so: it was lost while it was paused."""
        if sender in self._cluster.membership or sender == POOL:
            return False
        if not any(isinstance(message, _FROM_PEERS) for message in messages):
            return False
        self._cluster.counters["unregistered"] += 1
        self._cluster.outbox.post(sender, RegisterAgain())
        return True

    def _register(self, registration: Register, now: float) -> None:
        membership = self._cluster.membership
        for address in membership.replaced_by(registration):
            self._remove_peer(address, now)
        has_dropped = membership.has_dropped_requests(registration)
        if has_dropped:
            self._cluster.counters["dropped_requests"] += 1
            self._completion.lost(registration.address, "", now)
            self._cluster.load_index.leave(registration.address)
        if has_dropped or registration.name in self._cluster.dead_workers:
            self._completion.has_returned(registration.name, now)
        membership.join(registration)
        self._cluster.load_index.join(registration)
        self._draining.tell(registration.address, now)

    def _remove_peer(self, address: str, now: float) -> None:
        self._cluster.counters["peers_lost"] += 1
        peer = self._cluster.membership.leave(address, now)
        self._cluster.load_index.leave(address)
        name = peer.name if peer and "decode" in peer.registration.stages else ""
        if name:
            self._cluster.dead_workers.add(name)
        self._completion.lost(address, name, now)

    def _remove_stalled(self, now: float) -> None:
        """Remove workers that are stuck; the pool ends their processes."""
        if now - self._ticked > MISSED_TICK_S:
            for peer in self._cluster.membership.forgive(now):  # this process was paused
                self._cluster.load_index.record_report(peer.address, now)
        self._ticked = now
        for peer in self._cluster.membership.stalled(now, self._timeouts.silent_s):
            self._cluster.counters["stalled"] += 1
            self._cluster.dead_workers.add(peer.name)
            self._remove_peer(peer.address, now)

    def _fail_stranded(self, now: float) -> None:
        """Fail requests that have waited too long for a stage without workers."""
        membership, requests = self._cluster.membership, self._cluster.requests
        for stage, states in NEEDED_IN.items():
            absent = membership.absent_since(stage)
            if absent is not None:
                for state in states:
                    for entry in requests.in_state(state):
                        self._fail_stranded_request(entry, stage, absent, now)
        if membership.absent_since("decode") is None:
            self._completion.leave_lost_arenas(now)
        self._fail_largest_stranded(now)

    def _fail_largest_stranded(self, now: float) -> None:
        """Fail requests that fit only with layer-wise prefill, after a wait for a compressor."""
        membership, cluster = self._cluster.membership, self._cluster
        absent = [
            membership.absent_since("compress", arena)
            for arena in cluster.load_index.prefill_arenas
        ]
        if None in absent or not absent:
            return
        since = max(moment for moment in absent if moment is not None)
        for entry in cluster.requests.in_state(State.WAITING):
            if entry.whole is not None and entry.whole.peak > cluster.ledger.capacity_bytes:
                self._fail_stranded_request(entry, "compress", since, now)

    def _fail_stranded_request(self, entry: Entry, stage: Stage, absent: float, now: float) -> None:
        limit_s = self._timeouts.grace_s
        has_begun = entry.state is not State.WAITING or entry.waits_with_pages or entry.was_evicted
        if self._timeouts.refuse_s is not None and not has_begun:
            limit_s = self._timeouts.refuse_s
        if now - max(absent, entry.since) >= limit_s:
            error = Overloaded(f"no {stage} worker is running: try again later")
            self._completion.fail(entry, error, now)

    # ---------------------------------------------------------------- from the ingress

    def _submit(self, request: Request, now: float) -> None:
        cluster = self._cluster
        if request.id in cluster.requests:
            cluster.counters["duplicate_submit"] += 1
            return
        cluster.counters["submitted"] += 1
        left = _left(request)
        bound, _ = self._sizes(request, left)
        booking = self._growth.open(request, bound, left)
        sizes, whole = self._sizes(request, self._growth.first_tokens(booking))
        if not len(cluster.requests.queue):
            cluster.latency.reset_start_gap()
        max_overtake_s, ageing_s = self._config.max_overtake_s, self._config.ageing_s
        due = due_s(now, request.priority, max_overtake_s=max_overtake_s, ageing_s=ageing_s)
        slo, slo_refusal = self._slo_admission.assess(request, due, now)
        refusal = self._refusal(request, bound, now) or slo_refusal
        if refusal is None:
            entry = Entry(
                request=request,
                sizes=sizes,
                whole=whole,
                booking=booking,
                arrived=now,
                since=now,
                slo=slo,
            )
            cluster.requests.add(entry)
            self._slo_admission.watch(entry)
        else:
            self._dispatch.reasons.refused(request, refusal, now)
            self._completion.refuse(request, refusal)

    def _sizes(self, request: Request, left: int) -> tuple[RequestBytes, RequestBytes | None]:
        """Bytes that a request of ``left`` new tokens needs, and without layer-wise prefill.

        The second is None if it cannot use that. Prompts with prompt log probabilities are
        prefilled with all layers at a time, and batches of a given size go to compressors as a
        whole.
        """
        whole = self._model.estimate(request.known_tokens, left)
        is_scored = request.sampling.prompt_logprobs >= 0
        if is_scored or not self._dispatch.is_layerwise:
            return whole, None
        parts = self._model.estimate_in_parts(request.known_tokens, left)
        return (whole, None) if parts is None else (parts, whole)

    def _refusal(
        self, request: Request, bound: RequestBytes, now: float
    ) -> ShuttingDown | PromptTooLong | QueueFull | None:
        """The error of a request that cannot be queued; None if it can."""
        if (ending := self._draining.refusal(request)) is not None:
            return ending
        capacity = self._cluster.ledger.capacity_bytes
        if bound.peak > capacity:
            return PromptTooLong(
                f"{len(request.prompt)} prompt tokens and {request.sampling.max_tokens} new tokens "
                f"take up to {bound.peak} bytes of pages, and the server has {capacity}"
            )
        limit = self._config.max_queued_requests
        waiting = self._cluster.requests.count(State.WAITING)
        if waiting < limit or request.attempt:
            return None
        error = QueueFull(waiting, limit, self._cluster.drain.retry_after_s(waiting, now))
        return None if self._displace(request, error, now) else error

    def _displace(self, request: Request, error: QueueFull, now: float) -> bool:
        """Refuse a waiting request of the largest tenant instead; False if there is none.

        Requests that are retried, or wait with their pages, have begun and are not displaced.
        """
        requests = self._cluster.requests
        names = requests.queue.displaceable(request.tenant, request.weight)
        entries = (requests[name] for name in names)
        fresh = (
            one
            for one in entries
            if not (one.request.attempt or one.waits_with_pages or one.was_evicted)
        )
        entry = next(fresh, None)
        if entry is None:
            return False
        self._cluster.counters["displaced"] += 1
        self._completion.fail(entry, error, now)
        return True

    def _cancel(self, message: Cancel, now: float) -> None:
        for request in message.requests:
            entry = self._cluster.requests.get(request)
            if entry is None or entry.state is State.LEAVING:
                self._cluster.counters["stray_cancel"] += 1
            else:
                self._completion.cancel(entry, now)

    def _confirm(self, message: Confirm, sender: str) -> None:
        """Name the requests that will have no more output."""
        entries = ((name, self._cluster.requests.get(name)) for name in message.requests)
        gone = [name for name, entry in entries if entry is None or entry.state is State.LEAVING]
        if gone:
            self._cluster.counters["unknown_requests"] += len(gone)
            self._cluster.outbox.post(sender, Unknown(requests=tuple(gone)))

    # ---------------------------------------------------------------- from the workers

    def _prefilled(self, message: Prefilled, sender: str, now: float) -> None:
        if message.handle is None:
            self._finished(Finished(request=message.request, tokens=1), sender, now)
            return
        entry = self._expect(message.request, sender, State.PREFILLING, "stray_prefilled")
        if entry is not None:
            entry.transfer.output_tokens, entry.transfer.handle = (
                (message.first_token,),
                message.handle,
            )
            entry.transfer.plugin_memory = entry.transfer.logprobs = ()
            entry.transfer.token_s, entry.transfer.first_token_at = message.token_s, now
            entry.transfer.concurrency_s = self._cluster.latency.concurrency_s
            entry.transfer.hit_tokens = message.cached_tokens
            self._record_shared(entry, now)
            self._cluster.latency.record_prefill(
                now - entry.since, entry.placement.ahead_tokens, now
            )
            if not entry.was_evicted:
                self._cluster.latency.record_ttft(now - entry.arrived, entry.slo.forecast, now)
            self._growth.prefilled(entry)
            self._roles.record_prefill(entry, now)
            self._cluster.requests.history.cached(entry.id, message.cached_tokens)
            self._cluster.requests.move(entry, State.PREFILLED, now)

    def _record_shared(self, entry: Entry, now: float) -> None:
        """Count the tokens of a prompt that another request computed for this one.

        A request that reached its worker after the last step of an equal prompt computed its own.
        """
        self._shared.prefilled(entry)
        hit, shared = entry.transfer.hit_tokens, entry.placement.shared_tokens
        tokens = min(hit, shared)
        if entry.placement.equal_to:
            other = self._cluster.requests.get(entry.placement.equal_to)
            is_together = other is None or now - other.since < TOGETHER_S
            tokens = (shared - hit) * is_together
        if tokens > 0:
            self._cluster.counters["shared_prompt:tokens"] += tokens

    def _planned(self, message: Planned, sender: str, now: float) -> None:
        entry = self._expect(message.request, sender, State.COMPRESSING, "stray_planned")
        if entry is None:
            return
        entry.transfer.source_worker = ""
        self._shared.is_published(entry)
        page_bytes, ledger = self._model.plan.page_bytes, self._cluster.ledger
        own, shared = (max(0, pages) * page_bytes for pages in (message.pages, message.shared))
        self._growth.planned(entry, own, shared)
        entry.placement.raw_arena = (
            entry.placement.work_arena
        )  # if it was another one, the pages were fetched
        lines = lines_before_encoding(
            entry.sizes,
            entry.placement.raw_arena,
            entry.placement.work_arena,
            entry.placement.final_arena,
        )
        if ledger.book(entry.id, lines):
            self._cluster.requests.move(entry, State.PLANNED, now)
        else:
            self._cluster.counters["estimate_too_low"] += 1
            free = ledger.free(entry.placement.final_arena) // page_bytes
            self._completion.fail(entry, PoolExhausted(message.pages, free), now)

    def _compressed(self, message: Compressed, sender: str, now: float) -> None:
        entry = self._expect(message.request, sender, State.ENCODING, "stray_compressed")
        if entry is not None:
            entry.transfer.handle, entry.transfer.report = message.handle, message.report
            lines = lines_after_encoding(
                entry.sizes, entry.placement.work_arena, entry.placement.final_arena
            )
            self._cluster.ledger.book(entry.id, lines)
            self._growth.encoded(entry)
            self._cluster.requests.move(entry, State.COMPRESSED, now)

    def _fetched(self, message: Fetched, sender: str) -> None:
        """The worker has copied the pages to its arena; the source is free."""
        entry = self._cluster.requests.get(message.request)
        if entry is None or entry.worker != sender:
            self._cluster.counters["stray_fetched"] += 1
            return
        self._cluster.counters["fetched"] += 1
        if entry.state is State.DECODING:
            entry.transfer.source_worker, entry.placement.work_arena = (
                "",
                entry.placement.final_arena,
            )
            entry.sizes = entry.sizes.moved()
            self._growth.fetched(entry)
            lines = lines_after_encoding(
                entry.sizes, entry.placement.work_arena, entry.placement.final_arena
            )
            self._cluster.ledger.book(entry.id, lines)

    def _resumed(self, message: Resumed, sender: str) -> None:
        entry = self._cluster.requests.get(message.request)
        if entry is not None and entry.worker == sender and entry.transfer.previous_worker:
            is_from_the_dead = entry.transfer.previous_worker in self._cluster.dead_workers
            self._cluster.counters["resumed" if is_from_the_dead else "moved"] += 1
            entry.transfer.previous_worker = entry.transfer.source_worker = ""
        else:
            self._cluster.counters["stray_resumed"] += 1

    def _preempted(self, message: Preempted, sender: str, now: float) -> None:
        entry = self._expect(message.request, sender, State.DECODING, "stray_suspended")
        if entry is not None:
            self._cluster.counters["suspended"] += 1
            entry.transfer.output_tokens, entry.transfer.handle = (
                message.output_tokens,
                message.handle,
            )
            entry.transfer.plugin_memory = message.memory
            entry.transfer.logprobs = message.logprobs
            entry.transfer.source_worker, entry.placement.decode_worker, entry.is_preempt_sent = (
                "",
                "",
                False,
            )
            entry.transfer.previous_worker = self._cluster.membership.name_of(sender)
            if entry.is_preempted:
                self._requeue_with_pages(entry, message.handle, now)
            else:
                self._cluster.requests.move(entry, State.COMPRESSED, now)

    def _requeue_with_pages(self, entry: Entry, handle: KVHandle, now: float) -> None:
        """Release unused bookings of a preempted request, and queue it with its pages."""
        most = self._model.estimate(handle.tokens, max_tokens=0).grown
        kept = min(most, entry.sizes.grown)
        self._cluster.ledger.book(entry.id, {entry.placement.final_arena: kept})
        self._growth.preempted(entry, kept, handle.tokens)
        self._cluster.requests.preempt(entry, kept, now)

    def _evicted(self, message: Evicted, sender: str, now: float) -> None:
        """Queue a request again whose pages are free; it is computed again from its tokens."""
        entry = self._growth.evicted(message, sender)
        if entry is not None:
            left = _left(entry.request)
            bound, _ = self._sizes(entry.request, left)
            entry.booking = self._growth.open(entry.request, bound, left)
            first_tokens = self._growth.first_tokens(entry.booking)
            entry.sizes, entry.whole = self._sizes(entry.request, first_tokens)
            entry.booking.evictions = message.number
            self._cluster.requests.requeue(entry, now)

    def _finished(self, message: Finished, sender: str, now: float) -> None:
        entry = self._cluster.requests.get(message.request)
        if entry is None or sender not in (*entry.holders, *entry.owed):
            self._cluster.counters["stray_finished"] += 1
        elif entry.state is State.LEAVING:
            self._completion.settle(entry, sender)
        elif sender == entry.worker:
            self._finished_at_worker(entry, message, now)
        elif sender == entry.placement.encoder and message.error is not None:
            entry.placement.encoder = ""
            self._completion.fail(entry, message.error, now)
        else:
            entry.transfer.source_worker = ""

    def _finished_at_worker(self, entry: Entry, message: Finished, now: float) -> None:
        """The worker of a request has ended it and holds nothing of it."""
        if entry.transfer.source_worker == entry.worker:
            entry.transfer.source_worker = ""
        worker, entry.worker = entry.worker, ""
        if message.error is not None:
            self._completion.fail(entry, message.error, now)
        elif entry.state in (State.PREFILLING, State.DECODING, State.EVICTING):
            self._growth.finished(entry, message.tokens)
            self._completion.finish(entry, worker, message.tokens, now)
        else:
            self._completion.fail(entry, StageLost(entry.stage), now)

    def _expect(self, request: str, sender: str, state: State, oddity: str) -> Entry | None:
        """The entry that a message is about, if ``sender`` has it in ``state``.

        Otherwise the message is late, repeated or unknown. Its sender may hold pages that no other
        worker will attach, so it is sent ``Cancel``, unless it rightly has the request.
        """
        entry = self._cluster.requests.get(request)
        if entry is not None and entry.worker == sender and entry.state is state:
            return entry
        self._cluster.counters[oddity] += 1
        if entry is None or entry.state is State.LEAVING or sender not in entry.holders:
            self._cluster.outbox.cancel(sender, request)
        return None

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
            workers=tuple(self._cluster.load_index.loads()),
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
            held_bytes=self._cluster.ledger.held_of(request),
            booked_bytes=self._cluster.ledger.booked_by(request),
            bound_bytes=self._cluster.ledger.bound_of(request),
            blocked_reason=self._blocked_reason(entry),
            waits_for=entry.placement.waits_for.leader if entry.placement.waits_for else "",
        )

    def _blocked_reason(self, entry: Entry) -> HeldBy:
        if entry.placement.waits_for is not None:
            return "shared_prompt"
        return self._dispatch.blocked_reason if entry.state is State.WAITING else ""


def _dispatch_for(schedule: Schedule) -> type[Dispatch]:
    if schedule.is_adaptive:
        return AdaptiveBatchDispatch
    return StaticBatchDispatch if schedule.has_batch_sizes else Dispatch


def _left(request: Request) -> int:
    """Output tokens that a request may still get."""
    return max(0, request.sampling.max_tokens - len(request.output_tokens))
