"""Benchmark a server: warm-up, then one row of figures per level of load."""

from collections.abc import AsyncGenerator, Callable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

import httpx

from triptych.core.errors import BenchmarkError
from triptych.loadgen.client import open_client
from triptych.loadgen.report.gauges import Series, watch_gauges
from triptych.loadgen.report.processes import FindProcesses, Usage, watch
from triptych.loadgen.report.sample import Sample
from triptych.loadgen.report.stats import (
    Figures,
    Slo,
    error_counts,
    goodput_per_gb,
    per_request,
    summarize,
)
from triptych.loadgen.run import Run, calibrate, closed_loop, open_loop
from triptych.loadgen.workload.openai_requests import Workload
from triptych.loadgen.workload.turns import Session

OPEN_LOOP_CONNECTIONS = 1024


@dataclass(frozen=True, slots=True, kw_only=True)
class Level:
    """One level of load: a concurrency or an arrival rate."""

    requests: int
    concurrency: int | None = None
    rate_per_s: float | None = None

    """Requests per second; without rate and concurrency, arrival times come from a trace."""

    @property
    def connections(self) -> int:
        return self.concurrency or OPEN_LOOP_CONNECTIONS

    def __str__(self) -> str:
        if self.concurrency:
            return f"c={self.concurrency}"
        return "trace" if self.rate_per_s is None else f"{self.rate_per_s:g}/s"


@dataclass(frozen=True, slots=True, kw_only=True)
class ServeBenchmark:
    """Settings of a benchmark: server, workload and levels."""

    url: str
    workload: Workload
    levels: tuple[Level, ...]
    warmup_requests: int = 2
    slo: Slo = field(default_factory=Slo)
    server: FindProcesses | None = None
    """Finds the server's processes, to report their memory and CPU time."""

    timeout_s: float = 600.0
    api_key: str | None = None

    def open_client(self, connections: int) -> httpx.AsyncClient:
        return open_client(self.url, connections, self.timeout_s, self.api_key)


@dataclass(frozen=True, slots=True)
class Row:
    """Results of one level."""

    level: Level
    figures: Figures
    errors: dict[str, int]
    run: Run
    series: Series | None = None
    """Metrics of the server during the run, if it has them."""
    cpu_s: Mapping[str, float] = field(default_factory=dict[str, float])
    """CPU time of the server's processes, by kind."""

    def as_json(self) -> dict[str, object]:
        """A flat mapping with the names of vLLM's result files."""
        return {
            "max_concurrency": self.level.concurrency,
            "request_rate": self.level.rate_per_s,
            "num_prompts": self.level.requests,
            **self.figures,
            "errors": self.errors,
            "stage_seconds": self.series.seconds_per_request(self.run) if self.series else {},
            "busy_share": self.series.busy_share() if self.series else {},
            "cpu_s": dict(self.cpu_s),
        }

    def detailed_json(self) -> dict[str, object]:
        """A full result file in vLLM's format, with every request and the server's metrics.

        The rate of a closed loop is ``inf``, as in vLLM's files.
        """
        rate = "inf" if self.level.rate_per_s is None else self.level.rate_per_s
        series = self.series.as_json() if self.series else {}
        flat = {**self.as_json(), "request_rate": rate, "error_counts": self.errors}
        return {**flat, **per_request(self.run), "server_series": series}


@dataclass(frozen=True, slots=True)
class Results:
    """The calibrated workload, and a row per level."""

    workload: Workload
    rows: list[Row]


OnLevel = Callable[[Level], Callable[[Sample], None]]
"""Called at the start of a level; returns a callback for each finished request."""


async def measure(benchmark: ServeBenchmark, on_level: OnLevel) -> Results:
    """Run all levels one after the other. No prompt is sent twice.

    Raises: BenchmarkError if the server cannot be reached or does not answer
    """
    workload, rows = await _prepare(benchmark), list[Row]()
    for scope, level in enumerate(benchmark.levels):
        on_done = on_level(level)
        async with (
            benchmark.open_client(level.connections) as client,
            _watch(benchmark) as usage,
            watch_gauges(benchmark.url, benchmark.api_key) as series,
        ):
            run = await _run(client, workload, level, scope, on_done)
        cost = usage.figures() if usage else {}
        figures = summarize(run, benchmark.slo) | cost | series.figures()
        figures |= goodput_per_gb(figures)
        errors = error_counts(run.samples)
        by_kind = usage.cpu_s_by_kind() if usage else {}
        rows.append(Row(level, figures, errors, run, series if series.at_s else None, by_kind))
    return Results(workload, rows)


async def served_model(url: str, api_key: str | None) -> str:
    """The first model that the server lists.

    Raises: BenchmarkError if it lists none
    """
    async with open_client(url, 1, 30.0, api_key) as client:
        try:
            answer = (await client.get("/v1/models")).raise_for_status().json()
            return str(answer["data"][0]["id"])
        except (httpx.HTTPError, ValueError, LookupError, TypeError) as error:
            raise BenchmarkError(f"{url}/v1/models: {error!r}: say --model") from error


async def _prepare(benchmark: ServeBenchmark) -> Workload:
    async with benchmark.open_client(1) as client:
        workload = await calibrate(client, benchmark.workload)
        single = [Session((workload.turn(index),)) for index in range(benchmark.warmup_requests)]
        run = await closed_loop(client, workload, single, 1, lambda _: None)
    for error in error_counts(run.samples):
        raise BenchmarkError(f"{benchmark.url}: the warm-up failed: {error}")
    return workload


async def _run(
    client: httpx.AsyncClient,
    workload: Workload,
    level: Level,
    scope: int,
    on_done: Callable[[Sample], None],
) -> Run:
    sessions = workload.sessions(level.requests, rate_per_s=level.rate_per_s, scope=scope)
    if level.concurrency is not None:
        return await closed_loop(client, workload, sessions, level.concurrency, on_done)
    return await open_loop(client, workload, sessions, on_done)


@asynccontextmanager
async def _watch(benchmark: ServeBenchmark) -> AsyncGenerator[Usage | None]:
    if benchmark.server is None:
        yield None
        return
    async with watch(benchmark.server) as usage:
        yield usage


def levels_of(
    concurrencies: list[int], rates: list[float], requests: int | None
) -> tuple[Level, ...]:
    """Levels in the order given; without ``requests``, enough for steady figures.

    >>> [level.requests for level in levels_of([1, 4, 16], [], None)]
    [10, 12, 32]
    """

    def enough(step: int) -> int:
        return requests or -(-max(10, 2 * step) // step) * step

    closed = [Level(requests=enough(count), concurrency=count) for count in concurrencies]
    opened = [Level(requests=enough(30), rate_per_s=rate) for rate in rates]
    return (*closed, *opened)
