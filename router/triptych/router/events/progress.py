"""Handlers of workers' messages about a request: each moves it to its next state."""

from dataclasses import dataclass

from triptych.core.errors import PoolExhausted, StageLost
from triptych.core.handles import KVHandle
from triptych.core.messages import (
    Compressed,
    Confirm,
    Evicted,
    Fetched,
    Finished,
    ImagesEncoded,
    ImagesRead,
    Planned,
    Preempted,
    Prefilled,
    Resumed,
    Unknown,
)
from triptych.router.events.submission import Submission
from triptych.router.models.memory_estimate import ByteModel
from triptych.router.passes.completion import RequestCompletion
from triptych.router.passes.growth import Growth
from triptych.router.passes.roles import Roles
from triptych.router.state.byte_ledger import (
    are_peers,
    lines_after_encoding,
    lines_before_encoding,
)
from triptych.router.state.cluster_state import ClusterState
from triptych.router.state.request_table import Entry, State
from triptych.router.state.shared_prompts import SharedPrompts

TOGETHER_S = 0.1
"""Longest time between the prefill messages of requests whose prompt was computed once."""


@dataclass(frozen=True, slots=True)
class Progress:
    """Follows requests through the stages, by the messages of their workers.

    A message that does not fit the state of its request is counted. If its sender could hold pages
    that nobody will take, it is told to free them.
    """

    cluster: ClusterState
    byte_model: ByteModel
    growth: Growth
    shared: SharedPrompts
    roles: Roles
    completion: RequestCompletion
    submission: Submission

    def prefilled(self, message: Prefilled, sender: str, now: float) -> None:
        if message.handle is None:
            self.finished(Finished(request=message.request, tokens=1), sender, now)
            return
        entry = self._expect(message.request, sender, State.PREFILLING, "stray_prefilled")
        if entry is not None:
            self._images_read(entry)
            entry.transfer.output_tokens = (message.first_token,)
            entry.transfer.handle = message.handle
            entry.transfer.plugin_memory = entry.transfer.logprobs = ()
            entry.transfer.token_s, entry.transfer.first_token_at = message.token_s, now
            entry.transfer.concurrency_s = self.cluster.latency.concurrency_s
            entry.transfer.hit_tokens = message.cached_tokens
            self._record_shared(entry, now)
            self.cluster.latency.record_prefill(
                now - entry.since, entry.placement.ahead_tokens, now
            )
            if not entry.was_evicted:
                self.cluster.latency.record_ttft(now - entry.arrived, entry.slo.forecast, now)
            self.growth.prefilled(entry)
            self.roles.record_prefill(entry, now)
            self.cluster.requests.history.cached(entry.id, message.cached_tokens)
            self.cluster.requests.move(entry, State.PREFILLED, now)

    def _record_shared(self, entry: Entry, now: float) -> None:
        """Count the tokens of a prompt that another request computed for this one.

        A request that reached its worker after the last step of an equal prompt computed its own.
        """
        self.shared.prefilled(entry)
        hit, shared = entry.transfer.hit_tokens, entry.placement.shared_tokens
        tokens = min(hit, shared)
        if entry.placement.equal_to:
            other = self.cluster.requests.get(entry.placement.equal_to)
            is_together = other is None or now - other.since < TOGETHER_S
            tokens = (shared - hit) * is_together
        if tokens > 0:
            self.cluster.counters["shared_prompt:tokens"] += tokens

    def images_encoded(self, message: ImagesEncoded, sender: str) -> None:
        """The features of a request's images are in the pool; the prefill worker knows it."""
        entry = self.cluster.requests.get(message.request)
        if entry is None or entry.placement.image_encoder != sender:
            self.cluster.counters["stray_images_encoded"] += 1
            return
        self.cluster.image_encoders.ended(entry)
        entry.placement.is_encoding = False
        self.cluster.requests.touch(entry)
        different = len({image.digest for image in entry.request.images})
        self.cluster.counters["images:encoded"] += different - message.cached
        self.cluster.counters["images:cached"] += message.cached

    def _images_read(self, entry: Entry) -> None:
        """The prompt of a request is computed, so its images are needed no more."""
        if entry.placement.image_encoder:
            address, entry.placement.image_encoder = entry.placement.image_encoder, ""
            self.cluster.outbox.post(address, ImagesRead(request=entry.id))
            self.cluster.image_encoders.ended(entry)

    def planned(self, message: Planned, sender: str, now: float) -> None:
        entry = self._expect(message.request, sender, State.COMPRESSING, "stray_planned")
        if entry is None:
            return
        entry.transfer.source_worker, entry.transfer.plan_s = "", now - entry.since
        self.shared.is_published(entry)
        page_bytes, ledger = self.byte_model.plan.page_bytes, self.cluster.ledger
        own, shared = (max(0, pages) * page_bytes for pages in (message.pages, message.shared))
        self.growth.planned(entry, own, shared)
        if not are_peers(entry.placement.raw_arena, entry.placement.work_arena):
            entry.placement.raw_arena = entry.placement.work_arena  # the pages were fetched
        lines = lines_before_encoding(
            entry.sizes,
            entry.placement.raw_arena,
            entry.placement.work_arena,
            entry.placement.final_arena,
        )
        if ledger.book(entry.id, lines):
            self.cluster.requests.move(entry, State.PLANNED, now)
        else:
            self.cluster.counters["estimate_too_low"] += 1
            free = ledger.free(entry.placement.final_arena) // page_bytes
            self.completion.fail(entry, PoolExhausted(message.pages, free), now)

    def compressed(self, message: Compressed, sender: str, now: float) -> None:
        entry = self._expect(message.request, sender, State.ENCODING, "stray_compressed")
        if entry is not None:
            entry.transfer.handle, entry.transfer.report = message.handle, message.report
            if are_peers(entry.placement.work_arena, entry.placement.final_arena):
                entry.placement.work_arena = entry.placement.final_arena
            self._measure(entry, now)
            lines = lines_after_encoding(
                entry.sizes, entry.placement.work_arena, entry.placement.final_arena
            )
            self.cluster.ledger.book(entry.id, lines)
            self.growth.encoded(entry)
            self.cluster.requests.move(entry, State.COMPRESSED, now)

    def _measure(self, entry: Entry, now: float) -> None:
        """Note how long a prompt was compressed, and whether its pages go to another node."""
        place, costs, plan = entry.placement, self.cluster.method_costs, self.byte_model.plan
        method = entry.request.method or plan.policy.name
        seconds = entry.transfer.plan_s + now - entry.since
        us = next((one.compress_us for one in plan.measured if one.name == method), 0.0)
        costs.compressed(method, us, entry.prompt_tokens, seconds)
        costs.sent(entry.id, travels=place.work_arena != place.final_arena)

    def fetched(self, message: Fetched, sender: str) -> None:
        """The worker has copied the pages to its arena; the source is free."""
        entry = self.cluster.requests.get(message.request)
        if entry is None or entry.worker != sender:
            self.cluster.counters["stray_fetched"] += 1
            return
        self.cluster.counters["fetched"] += 1
        self.cluster.method_costs.arrived(entry.id)
        if entry.state is State.DECODING:
            entry.transfer.source_worker = ""
            entry.placement.work_arena = entry.placement.final_arena
            entry.sizes = entry.sizes.moved()
            self.growth.fetched(entry)
            lines = lines_after_encoding(
                entry.sizes, entry.placement.work_arena, entry.placement.final_arena
            )
            self.cluster.ledger.book(entry.id, lines)

    def resumed(self, message: Resumed, sender: str) -> None:
        entry = self.cluster.requests.get(message.request)
        if entry is not None and entry.worker == sender and entry.transfer.previous_worker:
            is_from_the_dead = entry.transfer.previous_worker in self.cluster.dead_workers
            self.cluster.counters["resumed" if is_from_the_dead else "moved"] += 1
            entry.transfer.previous_worker = entry.transfer.source_worker = ""
        else:
            self.cluster.counters["stray_resumed"] += 1

    def preempted(self, message: Preempted, sender: str, now: float) -> None:
        entry = self._expect(message.request, sender, State.DECODING, "stray_suspended")
        if entry is not None:
            self.cluster.counters["suspended"] += 1
            entry.transfer.output_tokens = message.output_tokens
            entry.transfer.handle = message.handle
            entry.transfer.plugin_memory = message.memory
            entry.transfer.logprobs = message.logprobs
            entry.transfer.source_worker = entry.placement.decode_worker = ""
            entry.is_preempt_sent = False
            entry.transfer.previous_worker = self.cluster.membership.name_of(sender)
            if entry.is_preempted:
                self._requeue_with_pages(entry, message.handle, now)
            else:
                self.cluster.requests.move(entry, State.COMPRESSED, now)

    def _requeue_with_pages(self, entry: Entry, handle: KVHandle, now: float) -> None:
        """Release unused bookings of a preempted request, and queue it with its pages."""
        model = self.byte_model.of_method(entry.request.method)
        most = model.grown_bytes(handle.tokens)
        kept = min(most, entry.sizes.grown)
        self.cluster.ledger.book(entry.id, {entry.placement.final_arena: kept})
        self.growth.preempted(entry, kept, handle.tokens)
        self.cluster.requests.preempt(entry, kept, now)

    def evicted(self, message: Evicted, sender: str, now: float) -> None:
        """Queue a request again whose pages are free; it is computed again from its tokens."""
        entry = self.growth.evicted(message, sender)
        if entry is not None:
            _, entry.booking, entry.sizes, entry.whole = self.submission.estimate(entry.request)
            entry.booking.evictions = message.number
            self.cluster.requests.requeue(entry, now)

    def finished(self, message: Finished, sender: str, now: float) -> None:
        entry = self.cluster.requests.get(message.request)
        if entry is None or sender not in (*entry.holders, *entry.owed):
            self.cluster.counters["stray_finished"] += 1
        elif entry.state is State.LEAVING:
            self.completion.settle(entry, sender)
        elif sender == entry.worker:
            self._finished_at_worker(entry, message, now)
        elif sender == entry.placement.image_encoder and message.error is not None:
            entry.placement.image_encoder = ""
            self.completion.fail(entry, message.error, now)
        elif sender == entry.placement.encoder and message.error is not None:
            entry.placement.encoder = ""
            self.completion.fail(entry, message.error, now)
        else:
            entry.transfer.source_worker = ""

    def _finished_at_worker(self, entry: Entry, message: Finished, now: float) -> None:
        """The worker of a request has ended it and holds nothing of it."""
        if entry.transfer.source_worker == entry.worker:
            entry.transfer.source_worker = ""
        worker, entry.worker = entry.worker, ""
        if message.error is None:
            self._images_read(entry)
        if message.error is not None:
            self.completion.fail(entry, message.error, now)
        elif entry.state in (State.PREFILLING, State.DECODING, State.EVICTING):
            self.growth.finished(entry, message.tokens)
            self.completion.finish(entry, worker, message.tokens, now)
        else:
            self.completion.fail(entry, StageLost(entry.stage), now)

    def _expect(self, request: str, sender: str, state: State, oddity: str) -> Entry | None:
        """The entry that a message is about, if ``sender`` has it in ``state``.

        Otherwise the message is late, repeated or unknown. Its sender may hold pages that no other
        worker will attach, so it is sent ``Cancel``, unless it rightly has the request.
        """
        entry = self.cluster.requests.get(request)
        if entry is not None and entry.worker == sender and entry.state is state:
            return entry
        self.cluster.counters[oddity] += 1
        if entry is None or entry.state is State.LEAVING or sender not in entry.holders:
            self.cluster.outbox.cancel(sender, request)
        return None

    def confirm(self, message: Confirm, sender: str) -> None:
        """Tell an ingress which of its requests have no more output, and a worker what to free."""
        if self.cluster.membership.is_worker(sender):
            self._cancel_abandoned(message, sender)
            return
        entries = ((name, self.cluster.requests.get(name)) for name in message.requests)
        gone = [name for name, entry in entries if entry is None or entry.state is State.LEAVING]
        if gone:
            self.cluster.counters["unknown_requests"] += len(gone)
            self.cluster.outbox.post(sender, Unknown(requests=tuple(gone)))

    def _cancel_abandoned(self, message: Confirm, worker: str) -> None:
        """Cancel what a worker holds of requests that are not here or that it should not have.

        Its earlier messages have been taken, and it takes ``Cancel`` before any later message: so a
        request that comes to it again is not meant.
        """
        for name in message.requests:
            entry = self.cluster.requests.get(name)
            if entry is None or worker not in entry.holders:
                self.cluster.counters["abandoned_requests"] += 1
                self.cluster.outbox.cancel(worker, name)
