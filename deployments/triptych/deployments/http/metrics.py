"""Metrics of the ingress: vLLM's metrics with the prefix ``triptych_``."""

import time
from collections import defaultdict
from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from types import TracebackType
from typing import Self, cast

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, Metric, generate_latest
from prometheus_client.samples import Sample

from triptych.core.errors import TooManyRequests, TriptychError
from triptych.core.messages import ClassShares, CompressionReport, Request, Tokens
from triptych.deployments.http.errors import RequestFailed

OPEN = "num_requests_open"
FINISH_REASONS = ("stop", "length", "abort")
REJECTION_REASONS = ("rate_limit_exceeded", "overloaded", "worker_lost", "slo_unmeetable")
"""Reasons whose counters exist from the start: Prometheus sees no increase in a series that
begins with 1, and a panel without a series shows "No data"."""

Gauges = Callable[[], Awaitable[Mapping[str, float]]]
"""Fetches metrics of other processes; a key is a metric's name, with its labels if any. Names that
end with ``_bucket``, ``_count`` and ``_sum`` are a histogram."""

# fmt: off
TTFT_BUCKETS = (
    0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0,
    20.0, 40.0, 80.0, 160.0, 640.0, 2560.0,
)
TOKEN_BUCKETS = (
    0.001, 0.0025, 0.005, 0.01, 0.015, 0.02, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5,
    0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0,
)
REQUEST_BUCKETS = (
    0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 40.0, 50.0, 60.0, 120.0,
    240.0, 480.0, 960.0, 1920.0, 7680.0,
)
LENGTH_BUCKETS = tuple(float(count * 10**power) for power in range(6) for count in (1, 2, 5))
# fmt: on


@dataclass(frozen=True, slots=True)
class LabelledSample:
    """A sample of a Prometheus metric of one ingress replica, which the others add to their own."""

    family: str
    name: str
    labels: tuple[tuple[str, str], ...]
    is_gauge: bool
    value: float

    def at(self, value: float) -> Self:
        """The same series with another value."""
        return replace(self, value=value)


Others = Callable[[], Iterable[LabelledSample]]
"""Samples of the other replicas that are scraped through the same port."""


@dataclass(frozen=True, slots=True)
class CacheBlocks:
    """Sizes in the words of vLLM, whose ``cache_config_info`` gateways read."""

    block_size: int
    """Tokens of a block of the prefix cache."""
    num_gpu_blocks: int
    """Blocks that fit into the memory for requests, if all of their tokens are significant."""


class IngressMetrics:
    """Counters and histograms of one ingress, in a registry of their own.

    Times are in seconds, and per choice: a client's request with ``n`` choices counts n times.
    """

    def __init__(
        self,
        methods: Sequence[str] = (),
        cache: CacheBlocks | None = None,
        others: Others = lambda: (),
    ) -> None:
        """``methods``: compression methods that requests may name.

        ``others``: what is added where metrics are scraped
        """
        self.registry = own = CollectorRegistry()
        self._others = others

        def histogram(name: str, text: str, buckets: Sequence[float]) -> Histogram:
            return Histogram(f"triptych_{name}", text, registry=own, buckets=buckets)

        def counter(name: str, text: str, *labels: str) -> Counter:
            return Counter(f"triptych_{name}", text, labels, registry=own)

        # fmt: off
        self.first_token = histogram(
            "time_to_first_token_seconds", "From admission to the first token.", TTFT_BUCKETS)
        self.inter_token = histogram(
            "inter_token_latency_seconds",
            "Time between two output tokens of one choice.", TOKEN_BUCKETS)
        self.per_token = histogram(
            "request_time_per_output_token_seconds",
            "Mean time per output token of one choice, without the first.", TOKEN_BUCKETS)
        self.end_to_end = histogram(
            "e2e_request_latency_seconds", "From admission to the last token.", REQUEST_BUCKETS)
        self.decode_time = histogram(
            "request_decode_time_seconds",
            "From the first to the last token of one choice.", REQUEST_BUCKETS)
        self.prompt_length = histogram(
            "request_prompt_tokens", "Tokens of the prompt of one choice.", LENGTH_BUCKETS)
        self.output_length = histogram(
            "request_generation_tokens", "Output tokens of one choice.", LENGTH_BUCKETS)

        self.prompt_tokens = counter(
            "prompt_tokens", "Tokens of prompts with at least one output token.")
        self.cached_tokens = counter(
            "prompt_tokens_cached", "Prompt tokens that were in the prefix cache.")
        self.generation_tokens = counter("generation_tokens", "Output tokens.")
        self.success = counter(
            "request_success",
            "Finished choices by reason; abort: the client disconnected, or the timeout passed.",
            "finished_reason")
        self.ended_by = counter(
            "answers_ended_by_plugin",
            "Finished choices that a plug-in of the decode step ended.", "plugin")
        self.failed = counter("request_failed", "Choices that ended in an error.")
        self.rejections = counter(
            "admission_rejections", "Rejected client requests, by reason.", "reason")
        self.raw_bytes = counter(
            "kv_raw_bytes", "Bytes of keys and values before compression.")
        self.stored_bytes = counter("kv_stored_bytes", "Bytes of keys and values as stored.")
        self.class_raw_bytes = counter(
            "kv_raw_bytes_by_class",
            "Bytes of keys and values of prompts before compression, by class of their tokens: "
            "recent, high, low, merged or pruned.", "token_class")
        self.method_choices = counter(
            "compression_method_choices",
            "Choices whose prompt was compressed, by compression method.", "method")
        self.method_raw_bytes = counter(
            "compression_method_raw_bytes",
            "Bytes of keys and values before compression, by compression method.", "method")
        self.method_stored_bytes = counter(
            "compression_method_stored_bytes",
            "Bytes of keys and values as stored, by compression method.", "method")
        # fmt: on
        self.open = Gauge(
            f"triptych_{OPEN}",
            "Choices that clients wait for: running, waiting, or on their way to the client.",
            registry=own,
        )
        if cache is not None:
            labels = {name: str(value) for name, value in asdict(cache).items()}
            info = "Memory for pages of requests, in blocks of the prefix cache."
            names = tuple(labels)
            Gauge("triptych_cache_config_info", info, names, registry=own).labels(**labels).set(1)
        for method in methods:
            for each in self.by_method:
                each.labels(method)
        for name in ClassShares.__dataclass_fields__:
            self.class_raw_bytes.labels(name)
        for reason in FINISH_REASONS:
            self.success.labels(reason)
        for reason in REJECTION_REASONS:
            self.rejections.labels(reason)

    @property
    def by_method(self) -> tuple[Counter, Counter, Counter]:
        """Counters with a series for each compression method: choices, raw and stored bytes."""
        return self.method_choices, self.method_raw_bytes, self.method_stored_bytes

    def compressed(self, reports: Iterable[CompressionReport]) -> None:
        """Count the bytes of choices that ended; a method is one of those that a server offers."""
        for report in reports:
            stored = report.stored_bytes + report.shared_bytes
            self.raw_bytes.inc(report.raw_bytes)
            self.stored_bytes.inc(stored)
            for each, value in zip(self.by_method, (1, report.raw_bytes, stored), strict=True):
                each.labels(report.policy).inc(value)
            for name, share in asdict(report.classes).items() if report.classes else ():
                self.class_raw_bytes.labels(name).inc(share * report.raw_bytes)

    def snapshot(self) -> dict[str, object]:
        """All values, for the dashboard. Histogram counts are cumulative, as in Prometheus."""
        return {
            "first_token": _histogram(self.first_token),
            "inter_token": _histogram(self.inter_token),
            "per_token": _histogram(self.per_token),
            "prompt_tokens": _value(self.prompt_tokens),
            "cached_tokens": _value(self.cached_tokens),
            "generation_tokens": _value(self.generation_tokens),
            "open": _value(self.open),
            "success": _by_label(self.success),
            "failed": _value(self.failed),
            "rejections": _by_label(self.rejections),
            "raw_bytes": _value(self.raw_bytes),
            "stored_bytes": _value(self.stored_bytes),
        }

    @property
    def in_progress(self) -> int:
        """Number of choices that clients wait for."""
        return int(_value(self.open))

    @property
    def load(self) -> int:
        """Number of choices that clients of all replicas of the port wait for."""
        others = (one.value for one in self._others() if one.name == f"triptych_{OPEN}")
        return self.in_progress + int(sum(others))

    def samples(self) -> list[LabelledSample]:
        """The numbers of this ingress that other replicas add to theirs."""
        return [
            LabelledSample(
                family.name,
                one.name,
                tuple(sorted(one.labels.items())),
                family.type == "gauge",
                one.value,
            )
            for family in self.registry.collect()
            if not family.name.endswith("_info")
            for one in family.samples
            if not one.name.endswith("_created")
        ]

    def collect(self) -> Iterator[Metric]:
        """The families of all replicas of the port, as ``generate_latest`` reads them."""
        more = defaultdict[str, Counts](lambda: defaultdict(float))
        for one in self._others():
            more[one.family][one.name, one.labels] += one.value
        for family in self.registry.collect():
            yield _sum(family, more[family.name])

    def refuse(self) -> None:
        """Count a request that exceeds a limit of its API key."""
        self.rejections.labels(TooManyRequests.code).inc()

    def track(self, requests: Sequence[Request]) -> "RequestTimer":
        """Measure the requests of one client request until the ``with`` block ends."""
        return RequestTimer(self, requests)

    def exposition(self, gauges: Mapping[str, float]) -> bytes:
        """All metrics in Prometheus' text format, the given gauges last."""
        lines: list[str] = []
        names = {key: key.partition("{")[0] for key in gauges}
        buckets = {name for name in names.values() if name.endswith("_bucket")}
        begun = ""
        for key in sorted(gauges, key=names.__getitem__):  # buckets stay in their order
            whole = names[key].rpartition("_")[0]
            is_histogram = f"{whole}_bucket" in buckets
            family = whole if is_histogram else names[key]
            if family != begun:
                lines.append(f"# TYPE {family} {'histogram' if is_histogram else 'gauge'}")
                begun = family
            lines.append(f"{key} {float(gauges[key])}")
        text = "".join(f"{line}\n" for line in lines)
        return generate_latest(cast("CollectorRegistry", self)) + text.encode()


class RequestTimer:
    """Measures latencies of the choices of one client request."""

    def __init__(self, metrics: IngressMetrics, requests: Sequence[Request]) -> None:
        self._metrics = metrics
        self._prompt_tokens = {request.id: len(request.prompt) for request in requests}
        self._first: dict[str, float] = {}
        self._last: dict[str, float] = {}
        self._tokens = dict.fromkeys(self._prompt_tokens, 0)
        self._reports: dict[str, CompressionReport] = {}
        self._running = set(self._prompt_tokens)
        self._start = 0.0

    def __enter__(self) -> Self:
        self._start = time.monotonic()
        self._metrics.open.inc(len(self._running))
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._metrics.open.dec(len(self._running))
        self._metrics.compressed(self._reports.values())
        reason = _rejection(error)
        if reason and not self._first:
            self._metrics.rejections.labels(reason).inc()
        elif isinstance(error, Exception):
            self._metrics.failed.inc(len(self._running))
        elif self._running:
            self._metrics.success.labels("abort").inc(len(self._running))

    def add(self, item: Tokens) -> None:
        """Count tokens that arrived now."""
        now, name, count = time.monotonic(), item.request, len(item.tokens)
        if count and name not in self._first:
            self._first[name] = self._last[name] = now
            self._metrics.first_token.observe(now - self._start)
            self._metrics.prompt_tokens.inc(self._prompt_tokens[name])
            self._metrics.cached_tokens.inc(item.cached_tokens)
        elif count:
            for _ in range(count):
                self._metrics.inter_token.observe((now - self._last[name]) / count)
            self._last[name] = now
        self._tokens[name] += count
        self._metrics.generation_tokens.inc(count)
        if item.compression:
            self._reports[name] = item.compression
        if item.finish and name in self._running:
            self._running.remove(name)
            if item.ended_by:
                self._metrics.ended_by.labels(item.ended_by).inc()
            self._finish(name, item.finish, now)

    def _finish(self, name: str, reason: str, now: float) -> None:
        self._metrics.open.dec()
        self._metrics.success.labels(reason).inc()
        self._metrics.end_to_end.observe(now - self._start)
        self._metrics.prompt_length.observe(self._prompt_tokens[name])
        self._metrics.output_length.observe(self._tokens[name])
        self._metrics.decode_time.observe(now - self._first.get(name, now))
        later_tokens = self._tokens[name] - 1
        if later_tokens > 0:
            self._metrics.per_token.observe((now - self._first[name]) / later_tokens)


Counts = defaultdict[tuple[str, tuple[tuple[str, str], ...]], float]
"""Values by the name and the sorted labels of a sample."""


def _sum(family: Metric, more: Counts) -> Metric:
    """A family with the values of other replicas added, and with series that only they have."""
    total = Metric(family.name, family.documentation, family.type)
    for one in family.samples:
        value = one.value + more.pop((one.name, tuple(sorted(one.labels.items()))), 0.0)
        total.samples.append(one._replace(value=value))
    total.samples += (Sample(name, dict(labels), value) for (name, labels), value in more.items())
    return total


def _samples(metric: Counter | Gauge | Histogram) -> Iterator[Sample]:
    for family in metric.collect():
        yield from (one for one in family.samples if not one.name.endswith("_created"))


def _value(metric: Counter | Gauge) -> float:
    return sum(sample.value for sample in _samples(metric))


def _by_label(metric: Counter) -> dict[str, float]:
    return {",".join(sample.labels.values()): sample.value for sample in _samples(metric)}


def _histogram(metric: Histogram) -> dict[str, object]:
    """Upper bounds without infinity, cumulative counts with the total, and the sum of values."""
    samples = list(_samples(metric))
    buckets = [one for one in samples if one.name.endswith("_bucket")]
    return {
        "bounds": [float(one.labels["le"]) for one in buckets[:-1]],
        "counts": [one.value for one in buckets],
        "sum": sum(one.value for one in samples if one.name.endswith("_sum")),
    }


def _rejection(error: BaseException | None) -> str | None:
    """The reason for which a request was rejected; None if it was not."""
    match error:
        case RequestFailed(failed=failed) if failed.status in (429, 503):
            return failed.code or "unavailable"
        case TriptychError() if error.http_status in (429, 503):
            return error.code or "unavailable"
        case _:
            return None
