"""Medians and spread of each server, and Triptych next to each peer in the same rounds."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import median

from benchmarks.peers.rounds import Measured, Place, Plan, used
from benchmarks.peers.triptych_server import PREFIX

FIGURES = (
    "request_throughput",
    "output_throughput",
    "p50_ttft_ms",
    "p99_ttft_ms",
    "p50_tpot_ms",
    "p99_tpot_ms",
    "peak_pss_bytes",
    "cpu_s_per_request",
    "other_cores",
)
COMPARED = FIGURES[:-1]


@dataclass(frozen=True, slots=True)
class Spread:
    """Of one figure over the rounds."""

    median: float
    low: float
    high: float

    @classmethod
    def of(cls, values: Sequence[float]) -> "Spread":
        return cls(median(values), min(values), max(values))


@dataclass(frozen=True, slots=True)
class ServerSummary:
    """One server under one workload."""

    workload: str
    server: str
    rounds: int
    """That count."""
    disturbed: int
    """Turns that do not count since other processes were in the way."""
    failed: int
    """Turns with errors."""
    figures: Mapping[str, Spread]


@dataclass(frozen=True, slots=True)
class Ratio:
    """A topology of Triptych over a peer, from the rounds in which both count."""

    workload: str
    triptych: str
    peer: str
    rounds: int
    figures: Mapping[str, Spread]


def summarize(plan: Plan, rows: Sequence[Measured]) -> list[ServerSummary]:
    """A summary of each server and workload that was measured."""
    good, found = used(plan, rows), list[ServerSummary]()
    for workload, server in _pairs(rows):
        mine = [row for row in rows if (row.workload, row.server) == (workload, server)]
        kept = [row for row in good.values() if (row.workload, row.server) == (workload, server)]
        disturbed = sum(plan.is_disturbed(row) for row in mine)
        failed = sum(bool(row.errors) for row in mine)
        figures = _spreads([row.figures for row in kept], FIGURES)
        found.append(ServerSummary(workload, server, len(kept), disturbed, failed, figures))
    return found


def ratios(plan: Plan, rows: Sequence[Measured]) -> list[Ratio]:
    """Triptych over each peer: in each round by itself, then the median of the rounds."""
    good, names = used(plan, rows), dict.fromkeys(row.server for row in rows)
    peers = [name for name in names if not name.startswith(PREFIX)]
    ours = [(workload, name) for workload, name in _pairs(rows) if name not in peers]
    found = [_ratio(good, workload, mine, peer) for workload, mine in ours for peer in peers]
    return [one for one in found if one.rounds]


def _ratio(good: Mapping[Place, Measured], workload: str, mine: str, peer: str) -> Ratio:
    each = [
        _over(row.figures, good[workload, number, peer].figures)
        for (where, number, server), row in good.items()
        if (where, server) == (workload, mine) and (workload, number, peer) in good
    ]
    return Ratio(workload, mine, peer, len(each), _spreads(each, COMPARED))


def _over(mine: Mapping[str, float], theirs: Mapping[str, float]) -> dict[str, float]:
    return {
        name: mine[name] / theirs[name] for name in COMPARED if name in mine and theirs.get(name)
    }


def _spreads(each: Sequence[Mapping[str, float]], names: Sequence[str]) -> dict[str, Spread]:
    """Of each figure that all have."""
    return {
        name: Spread.of([one[name] for one in each])
        for name in names
        if each and all(name in one for one in each)
    }


def _pairs(rows: Sequence[Measured]) -> list[tuple[str, str]]:
    """Workloads and servers, in the order of their first turns."""
    found = dict.fromkeys((row.workload, row.server) for row in rows)
    workloads = list(dict.fromkeys(row.workload for row in rows))
    return sorted(found, key=lambda pair: workloads.index(pair[0]))
