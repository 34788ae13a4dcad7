"""Medians and spread of each server, and Triptych next to each peer in the same rounds."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from statistics import median

from benchmarks.peers.rounds import Measured, Plan, used
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
    for workload, server in _pairs(plan.workloads, plan.servers):
        mine = [row for row in rows if (row.workload, row.server) == (workload, server)]
        kept = [row for row in good.values() if (row.workload, row.server) == (workload, server)]
        disturbed = sum(plan.is_disturbed(row) for row in mine)
        failed = sum(bool(row.errors) for row in mine)
        figures = _spreads([row.figures for row in kept], FIGURES)
        if mine:
            found.append(ServerSummary(workload, server, len(kept), disturbed, failed, figures))
    return found


def ratios(plan: Plan, rows: Sequence[Measured]) -> list[Ratio]:
    """Triptych over each peer: in each round by itself, then the median of the rounds."""
    good, found = used(plan, rows), list[Ratio]()
    ours = [name for name in plan.servers if name.startswith(PREFIX)]
    peers = [name for name in plan.servers if name not in ours]
    for workload, mine in _pairs(plan.workloads, ours):
        for peer in peers:
            each = [
                _over(good[workload, number, mine].figures, good[workload, number, peer].figures)
                for number in range(1, plan.rounds + 1)
                if (workload, number, mine) in good and (workload, number, peer) in good
            ]
            if each:
                found.append(Ratio(workload, mine, peer, len(each), _spreads(each, COMPARED)))
    return found


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


def _pairs(left: Sequence[str], right: Sequence[str]) -> Iterator[tuple[str, str]]:
    return ((one, other) for one in left for other in right)
