"""Handlers of ingresses' messages: queue or refuse a request, cancel a request."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from triptych.core.config import RouterConfig
from triptych.core.errors import PromptTooLong, QueueFull, ShuttingDown, UnknownMethod
from triptych.core.messages import Cancel, Request
from triptych.router.events.adaptive_method import AdaptiveMethod
from triptych.router.models.booking import Booking
from triptych.router.models.memory_estimate import ByteModel, RequestBytes
from triptych.router.passes.completion import RequestCompletion
from triptych.router.passes.dispatching.dispatch import Dispatch
from triptych.router.passes.draining import Draining
from triptych.router.passes.growth import Growth
from triptych.router.passes.slo_admission import SloAdmission
from triptych.router.queue.waiting_queue import due_s
from triptych.router.state.cluster_state import ClusterState
from triptych.router.state.request_table import Entry, State


class Estimate(NamedTuple):
    """Bytes of a request."""

    bound: RequestBytes
    """The most that it can ever need."""
    booking: Booking
    sizes: RequestBytes
    """What it starts with."""
    whole: RequestBytes | None
    """The same without layer-wise prefill; None if it cannot use that."""


@dataclass(frozen=True, slots=True)
class Submission:
    """Queues or refuses requests, and cancels those whose clients left."""

    cluster: ClusterState
    config: RouterConfig
    byte_model: ByteModel
    growth: Growth
    dispatch: Dispatch
    slo_admission: SloAdmission
    completion: RequestCompletion
    draining: Draining
    adaptive: AdaptiveMethod

    def submit(self, requests: Sequence[Request], now: float) -> None:
        """Queue or refuse the sequences of one client's request."""
        before: Request | None = None
        for request in requests:
            if request.id in self.cluster.requests:
                self.cluster.counters["duplicate_submit"] += 1
                continue
            before = self.adaptive.resolve(request, before, now)
            self._submit(before, now)

    def _submit(self, request: Request, now: float) -> None:
        cluster = self.cluster
        cluster.counters["submitted"] += 1
        methods = tuple(self.byte_model.plan.by_method)
        if request.method not in ("", *methods):
            self.completion.refuse(request, UnknownMethod(request.method, methods))
            return
        if self.byte_model.plan.of_method(request.method).merges:
            request = replace(request, cached_at_most=0)
        bound, booking, sizes, whole = self.estimate(request)
        if not len(cluster.requests.queue):
            cluster.latency.reset_start_gap()
        max_overtake_s, ageing_s = self.config.max_overtake_s, self.config.ageing_s
        due = due_s(now, request.priority, max_overtake_s=max_overtake_s, ageing_s=ageing_s)
        slo, slo_refusal = self.slo_admission.assess(request, due, now)
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
            self.dispatch.reasons.chose_method(entry, now)
            self.slo_admission.watch(entry)
        else:
            self.dispatch.reasons.refused(request, refusal, now)
            self.completion.refuse(request, refusal)

    def estimate(self, request: Request) -> Estimate:
        """Bytes to book for a request that starts, or starts again."""
        left = max(0, request.sampling.max_tokens - len(request.output_tokens))
        bound, whole = self._sizes(request, left)
        booking = self.growth.open(request, bound, left)
        first = self.growth.first_tokens(booking)
        if first == left:
            return Estimate(bound, booking, bound, whole)
        sizes, whole = self._sizes(request, first)
        return Estimate(bound, booking, sizes, whole)

    def _sizes(self, request: Request, left: int) -> tuple[RequestBytes, RequestBytes | None]:
        """Bytes that a request of ``left`` new tokens needs, and without layer-wise prefill.

        The second is None if it cannot use that. Prompts with prompt log probabilities are
        prefilled with all layers at a time, and batches of a given size go to compressors as a
        whole.
        """
        model = self.byte_model.of_method(request.method).of_floor(request.floor)
        page_bytes = model.plan.page_bytes
        features = sum(-(-one.feature_bytes // page_bytes) for one in request.images) * page_bytes
        whole = model.estimate(request.known_tokens, left).with_features(features)
        is_scored = request.sampling.prompt_logprobs >= 0
        if is_scored or not self.dispatch.is_layerwise:
            return whole, None
        parts = model.estimate_in_parts(request.known_tokens, left)
        return (whole, None) if parts is None else (parts.with_features(features), whole)

    def _refusal(
        self, request: Request, bound: RequestBytes, now: float
    ) -> ShuttingDown | PromptTooLong | QueueFull | None:
        """The error of a request that cannot be queued; None if it can."""
        if (ending := self.draining.refusal(request)) is not None:
            return ending
        capacity = self.cluster.ledger.capacity_bytes
        if bound.peak > capacity:
            return PromptTooLong(
                f"{len(request.prompt)} prompt tokens and {request.sampling.max_tokens} new tokens "
                f"take up to {bound.peak} bytes of pages, and the server has {capacity}"
            )
        limit = self.config.max_queued_requests
        waiting = self.cluster.requests.count(State.WAITING)
        if waiting < limit or request.attempt:
            return None
        error = QueueFull(waiting, limit, self.cluster.drain.retry_after_s(waiting, now))
        return None if self._displace(request, error, now) else error

    def _displace(self, request: Request, error: QueueFull, now: float) -> bool:
        """Refuse a waiting request of the largest tenant instead; False if there is none.

        Requests that are retried, or wait with their pages, have begun and are not displaced.
        """
        requests = self.cluster.requests
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
        self.cluster.counters["displaced"] += 1
        self.completion.fail(entry, error, now)
        return True

    def cancel(self, message: Cancel, now: float) -> None:
        for request in message.requests:
            entry = self.cluster.requests.get(request)
            if entry is None or entry.state is State.LEAVING:
                self.cluster.counters["stray_cancel"] += 1
            else:
                self.completion.cancel(entry, now)
