"""What a Triptych server says of itself while it is measured: pages held, requests by stage."""

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
"""Values by name and by the one label that the server's gauges have, if they have one."""


@dataclass
class Series:
    """One value of each quantity for each look, oldest first."""

    at_s: list[float] = field(default_factory=list[float])
    """Seconds from the first look."""
    kv_bytes: list[float] = field(default_factory=list[float])
    """Pages that requests hold."""
    booked_bytes: list[float] = field(default_factory=list[float])
    """What the router has promised them."""
    requests: dict[str, list[float]] = field(default_factory=dict[str, list[float]])
    """Requests in each state of the router."""
    busy_s: dict[str, list[float]] = field(default_factory=dict[str, list[float]])
    """Seconds that each worker has spent in steps since it began."""

    def add(self, at_s: float, gauges: GaugeValues) -> None:
        """Take one look."""
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
        """Mean over time and peak; nothing if the server said nothing."""
        if not self.at_s:
            return {}
        return {
            "mean_kv_bytes": self.mean(self.kv_bytes),
            "peak_kv_bytes": max(self.kv_bytes),
            "mean_booked_bytes": self.mean(self.booked_bytes),
            "peak_booked_bytes": max(self.booked_bytes),
        }

    def mean(self, values: list[float]) -> float:
        """Mean over time: a look counts for as long as it was the latest."""
        span = self.at_s[-1] - self.at_s[0]
        if not span:
            return values[-1]
        steps = zip(pairwise(self.at_s), values, strict=False)
        return sum((end - start) * value for (start, end), value in steps) / span

    def seconds_per_request(self, run: Run) -> dict[str, float]:
        """Mean time that a request spent in each state: Little's law, over the whole run."""
        ended = sum(sample.error is None for sample in run.samples)
        if not self.at_s or not ended:
            return {}
        return {
            state: self.mean(counts) * run.duration_s / ended
            for state, counts in self.requests.items()
            if any(counts)
        }

    def busy_share(self) -> dict[str, float]:
        """Share of the time that workers spent in steps: mean over those of a kind."""
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
    """The samples of a Prometheus page that are ours, by name and the value of their label.

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
    """Look at ``/metrics`` for as long as the block runs; empty if it is not one of ours."""
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
    """Take one sample; False if the server has none of our gauges, or does not answer."""
    try:
        answer = await client.get("/metrics")
        gauges = read_gauges(answer.text)
    except (httpx.HTTPError, ValueError):
        return False
    if answer.status_code != 200 or not gauges:
        return False
    series.add(perf_counter() - start, gauges)
    return True
