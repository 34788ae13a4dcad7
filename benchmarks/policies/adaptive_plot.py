# ruff: noqa: PLC0415 - the library comes with the extra `eval` alone
"""Plot of ``benchmarks/policies/adaptive.py``: job times, and which methods were chosen."""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import mean
from typing import Any

from triptych.evals.studies.plot import save_figure

ADAPTIVE = "adaptive"
Row = Mapping[str, Any]


def plot(rows: Sequence[Row], names: Sequence[str], stem: Path) -> list[Path]:
    """Write ``stem.png`` and ``stem.svg``. ``rows``: of ``links``; ``names``: of the methods."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(11, 4.2), layout="constrained")
    times, shares = figure.subplots(1, 2)
    speeds = {row["phase"]: row["mbit_s"] for row in rows}
    for name in (*names, ADAPTIVE):
        by_phase = _mean_by_phase(rows, name)
        is_ours = name == ADAPTIVE
        times.plot(
            list(by_phase), list(by_phase.values()), label=name, marker="o" if is_ours else ".",
            linewidth=2.5 if is_ours else 1, color="black" if is_ours else None,
        )  # fmt: skip
    times.set_yscale("log")
    times.set_ylabel("mean job time over that of the best fixed method")
    times.legend(fontsize=7)
    bottom = dict.fromkeys(speeds, 0.0)
    for name in names:
        share = _shares(rows, name)
        shares.bar(
            list(speeds), [share[at] for at in speeds], bottom=list(bottom.values()), label=name
        )
        bottom = {at: bottom[at] + share[at] for at in speeds}
    shares.set_ylabel("share of requests, adaptive")
    for axes in (times, shares):
        axes.set_xticks(list(speeds), [f"{speed:,}" for speed in speeds.values()])
        axes.set_xlabel("speed of the link, Mbit/s, in the order of time")
    return save_figure(figure, stem)


def _mean_by_phase(rows: Sequence[Row], method: str) -> dict[int, float]:
    found = defaultdict[int, list[float]](list)
    for row in rows:
        if row["method"] == method:
            found[row["phase"]].append(row["to_best"])
    return {phase: mean(values) for phase, values in found.items()}


def _shares(rows: Sequence[Row], method: str) -> dict[int, float]:
    found = defaultdict[int, list[float]](list)
    for row in rows:
        if row["method"] == ADAPTIVE:
            found[row["phase"]].append(row["methods"].get(method, 0.0))
    return {phase: mean(values) for phase, values in found.items()}
