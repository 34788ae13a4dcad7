"""Metrics of a Triptych server during a run: pages in use, requests by state, busy time."""

import asyncio
from collections.abc import AsyncGenerator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from itertools import pairwise
from statistics import fmean
from time import perf_counter

import httpx
from prometheus_client.parser import text_string_to_metric_families

from triptych.loadgen.client import open_client
from triptych.loadgen.report.stats import Figures
from triptych.loadgen.run import Run

EVERY_S = 0.5

GaugeValues = Mapping[tuple[str, str], float]
"""Values by name and by the label of the gauge, if it has one."""


@dataclass
class Series:
    """Time series of each metric, oldest sample first."""

    at_s: list[float] = field(default_factory=list[float])
    """Seconds since the first sample."""
    kv_bytes: list[float] = field(default_factory=list[float])
    """Pages that requests hold."""
    booked_bytes: list[float] = field(default_factory=list[float])
    """Bytes that the router has booked for requests."""
    requests: dict[str, list[float]] = field(default_factory=dict[str, list[float]])
    """Requests in each state of the router."""
    busy_s: dict[str, list[float]] = field(default_factory=dict[str, list[float]])
    """Seconds that each worker spent in steps since its start."""

    def add(self, at_s: float, gauges: GaugeValues) -> None:
        """Add one sample."""
        pages = gauges.get(("triptych_pool_pages_in_requests", ""), 0.0)
        page_bytes = gauges.get(("triptych_pool_page_bytes", ""), 0.0)
        self.kv_bytes.append(pages * page_bytes)
        self.booked_bytes.append(gauges.get(("triptych_router_booked_bytes", ""), 0.0))
        for (name, label), value in gauges.items():
            if name == "triptych_router_requests":
                self.requests.setdefault(label, [0.0] * len(self.at_s)).append(value)
            if name == "triptych_workers_busy_seconds":
                self.busy_s.setdefault(label, []).append(value)
        self.at_s.append(at_s)

    def figures(self) -> Figures:
        """Time-weighted mean and peak; empty without samples."""
        if not self.at_s:
            return {}
        return {
            "mean_kv_bytes": self.mean(self.kv_bytes),
            "peak_kv_bytes": max(self.kv_bytes),
            "mean_booked_bytes": self.mean(self.booked_bytes),
            "peak_booked_bytes": max(self.booked_bytes),
        }

    def mean(self, values: list[float]) -> float:
        """Time-weighted mean: a sample counts until the next one."""
        span = self.at_s[-1] - self.at_s[0]
        if not span:
            return values[-1]
        steps = zip(pairwise(self.at_s), values, strict=False)
        return sum((end - start) * value for (start, end), value in steps) / span

    def seconds_per_request(self, run: Run) -> dict[str, float]:
        """Mean time of a request in each state, by Little's law over the whole run."""
        ended = sum(sample.error is None for sample in run.samples)
        if not self.at_s or not ended:
            return {}
        return {
            state: self.mean(counts) * run.duration_s / ended
            for state, counts in self.requests.items()
            if any(counts)
        }

    def busy_share(self) -> dict[str, float]:
        """Mean share of the time in steps, by kind of worker."""
        span = self.at_s[-1] - self.at_s[0] if self.at_s else 0.0
        if not span:
            return {}
        shares = dict[str, list[float]]()
        for worker, seconds in self.busy_s.items():
            kind = worker.rpartition("-")[0]
            shares.setdefault(kind, []).append((seconds[-1] - seconds[0]) / span)
        return {kind: fmean(found) for kind, found in shares.items()}

    def as_json(self) -> dict[str, object]:
        return {
            "at_s": self.at_s,
            "kv_bytes": self.kv_bytes,
            "booked_bytes": self.booked_bytes,
            "requests": {state: counts for state, counts in self.requests.items() if any(counts)},
        }


def read_gauges(text: str) -> GaugeValues:
    """The Triptych samples of a Prometheus page, by name and label value.

    Raises: ValueError if the text is no such page
    """
    return {
        (sample.name, next(iter(sample.labels.values()), "")): sample.value
        for family in text_string_to_metric_families(text)
        if family.name.startswith("triptych_")
        for sample in family.samples
        if len(sample.labels) <= 1
    }


@asynccontextmanager
async def watch_gauges(url: str, api_key: str | None) -> AsyncGenerator[Series]:
    """Sample ``/metrics`` while the block runs; empty for other servers."""
    series, start = Series(), perf_counter()
    async with open_client(url, 1, 5.0, api_key) as client:
        task = None
        if await _look(client, series, start):
            task = asyncio.create_task(_keep_looking(client, series, start))
        try:
            yield series
        finally:
            if task is not None:
                task.cancel()
                await asyncio.wait([task])
                await _look(client, series, start)


async def _keep_looking(client: httpx.AsyncClient, series: Series, start: float) -> None:
    while True:
        await asyncio.sleep(EVERY_S)
        await _look(client, series, start)


async def _look(client: httpx.AsyncClient, series: Series, start: float) -> bool:
    """Take one sample; False if the server has no Triptych metrics, or does not answer."""
    try:
        answer = await client.get("/metrics")
        gauges = read_gauges(answer.text)
    except (httpx.HTTPError, ValueError):
        return False
    if answer.status_code != 200 or not gauges:
        return False
    series.add(perf_counter() - start, gauges)
    return True
