"""SLO admission: refuses requests that would miss their SLO, and fails those that missed it."""

from dataclasses import dataclass, field
from heapq import heappop, heappush
from math import inf

from triptych.core.errors import DeadlineExceeded, SloUnmeetable
from triptych.core.messages import NO_SLO, Request
from triptych.router.models.latency_forecast import (
    HEADROOM,
    Forecast,
    latest_start_s,
    miss,
)
from triptych.router.models.retry_after import MAX_RETRY_S, MIN_RETRY_S
from triptych.router.passes.completion import RequestCompletion
from triptych.router.state.cluster_state import ClusterState
from triptych.router.state.request_table import Entry, SloStatus, State


@dataclass
class SloAdmission:
    """Keeps the server from computing late responses, and orders the queue by slack.

    It ignores requests without an SLO and retried attempts.
    """

    cluster: ClusterState
    completion: RequestCompletion
    _times: list[tuple[float, str]] = field(default_factory=list[tuple[float, str]])
    """Heap of the times by which requests must have started or ended."""

    def assess(
        self, request: Request, due: float, now: float
    ) -> tuple[SloStatus, SloUnmeetable | None]:
        """The times of a request that arrives, and the error if its SLO cannot be met.

        ``due``: the time until which others may overtake it, SLOs aside. The forecast for later
        comparison is without the margin that the decision adds.
        """
        slo, latency = request.slo, self.cluster.latency
        if slo == NO_SLO or request.attempt:
            return SloStatus(due), None
        forecast = self.forecast(request, due, now)
        cautious = latency.cautious(forecast, now)
        wait_s = latest_start_s(slo, cautious)
        status = SloStatus(min(due, now + HEADROOM * wait_s), now + wait_s, forecast)
        missed = miss(slo, cautious)
        if missed is None or not self.cluster.requests.in_work:  # an idle server needs measurements
            return status, None
        retry_s = min(MAX_RETRY_S, max(MIN_RETRY_S, missed.over_s))
        return status, SloUnmeetable(missed.what, missed.asked_s, missed.predicted_s, retry_s)

    def forecast(self, request: Request, due: float, now: float) -> Forecast:
        """The times of a request that arrives now; ``due`` as in ``assess``."""
        load_index, queue = self.cluster.load_index, self.cluster.requests.queue
        busy = sum(load_index.queue_tokens(address) for address in load_index.best("prefill", 1))
        ahead = queue.ahead_of(request.tenant, due)
        return self.cluster.latency.forecast(
            ahead=ahead,
            concurrency=self.cluster.concurrency_with(ahead + 1),
            prefill_tokens=busy + request.known_tokens,
            max_tokens=request.sampling.max_tokens,
            now=now,
        )

    def watch(self, entry: Entry) -> None:
        """Remember when an admitted request has missed its SLO."""
        if entry.slo.latest < inf:
            heappush(self._times, (entry.slo.latest, entry.id))
        if entry.request.slo.deadline_s:
            heappush(self._times, (entry.arrived + entry.request.slo.deadline_s, entry.id))

    def run(self, now: float) -> None:
        """Fail requests that should have started or ended by now."""
        while self._times and self._times[0][0] < now:
            _, name = heappop(self._times)
            entry = self.cluster.requests.get(name)
            if entry is None or entry.state is State.LEAVING:
                continue
            slo = entry.request.slo
            if slo.deadline_s and now > entry.arrived + slo.deadline_s:
                self.cluster.counters["slo:deadline_passed"] += 1
                late = DeadlineExceeded(f"deadline_ms={slo.deadline_s * 1e3:.0f} has passed")
                self.completion.fail(entry, late, now)
            elif entry.state is State.WAITING and not (entry.waits_with_pages or entry.was_evicted):
                self.cluster.counters["slo:waited_too_long"] += 1
                would_be_s = now - entry.arrived + entry.slo.forecast.prefill_s
                self.cluster.latency.record_ttft(would_be_s, entry.slo.forecast, now)
                waiting = len(self.cluster.requests.queue)
                retry_s = self.cluster.drain.retry_after_s(waiting, now)
                what, asked_s = _nearest(entry)
                waited_s = now - entry.arrived
                self.completion.fail(entry, SloUnmeetable(what, asked_s, waited_s, retry_s), now)


def _nearest(entry: Entry) -> tuple[str, float]:
    slo = entry.request.slo
    if slo.ttft_s:
        return "ttft_slo_ms", slo.ttft_s
    return "deadline_ms", slo.deadline_s
