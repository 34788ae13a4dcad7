"""Tables of the comparison."""

from collections.abc import Mapping, Sequence

from rich.table import Table

from benchmarks.peers.summary import Ratio, ServerSummary, Spread
from triptych.cli.output import make_table

COLUMNS = {
    "req/s": ("request_throughput", 1.0),
    "tok/s": ("output_throughput", 1.0),
    "TTFT p50 s": ("p50_ttft_ms", 1e-3),
    "p99": ("p99_ttft_ms", 1e-3),
    "TPOT p50 ms": ("p50_tpot_ms", 1.0),
    "p99 ms": ("p99_tpot_ms", 1.0),
    "PSS GB": ("peak_pss_bytes", 1e-9),
    "CPU s/req": ("cpu_s_per_request", 1.0),
}
"""Title, figure and factor. Ratios have no unit."""


def summary_table(rows: Sequence[ServerSummary]) -> Table:
    lines = [
        [
            row.workload,
            row.server,
            row.rounds,
            row.disturbed,
            row.failed,
            *cells(row.figures, [scale for _, scale in COLUMNS.values()]),
            _median(row.figures, "other_cores", 1.0),
        ]
        for row in rows
    ]
    names = ("workload", "server", "used", "disturbed", "failed", *COLUMNS, "other")
    return make_table(names, lines, "Medians of the rounds")


def ratio_table(rows: Sequence[Ratio]) -> Table:
    lines = [
        [
            row.workload,
            f"{row.triptych} / {row.peer}",
            row.rounds,
            *cells(row.figures, [1.0] * len(COLUMNS)),
        ]
        for row in rows
    ]
    names = ("workload", "ratio", "rounds", *COLUMNS)
    return make_table(names, lines, "Triptych over a peer in the same rounds")


def cells(figures: Mapping[str, Spread], scales: Sequence[float]) -> list[object]:
    """A median for each column; of the first also the lowest and the highest round.

    >>> cells({"request_throughput": Spread(2.0, 1.0, 4.0)}, [1.0] * len(COLUMNS))[:2]
    ['2 (1 to 4)', None]
    """
    (first, _), *more = COLUMNS.values()
    names = [name for name, _ in more]
    medians = [_median(figures, name, scale) for name, scale in zip(names, scales[1:], strict=True)]
    return [_range(figures, first, scales[0]), *medians]


def _range(figures: Mapping[str, Spread], name: str, scale: float) -> str | None:
    if name not in figures:
        return None
    found = figures[name]
    median, low, high = (f"{value * scale:.3g}" for value in (found.median, found.low, found.high))
    return f"{median} ({low} to {high})"


def _median(figures: Mapping[str, Spread], name: str, scale: float) -> float | None:
    return figures[name].median * scale if name in figures else None
