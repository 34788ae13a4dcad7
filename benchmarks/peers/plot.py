# matplotlib's interface is typed in part; nothing untyped leaves this module.
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false
# pyright: reportUnknownArgumentType=false
"""A plot of the comparison: one panel for each figure, one group of bars for each workload."""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from benchmarks.peers.summary import ServerSummary
from triptych.core.errors import ConfigError

if TYPE_CHECKING:
    from matplotlib.axes import Axes

PANELS = {
    "request_throughput": ("requests per second", 1.0),
    "p50_ttft_ms": ("median TTFT, s", 1e-3),
    "p50_tpot_ms": ("median time per output token, ms", 1.0),
    "peak_pss_bytes": ("memory (PSS), GB", 1e-9),
    "cpu_s_per_request": ("CPU seconds per request", 1.0),
}
WIDTH = 0.8
"""Of a group of bars."""


def plot(rows: Sequence[ServerSummary], path: Path) -> None:
    """Write a PNG: medians as bars, lowest and highest round as lines.

    Raises: ConfigError if matplotlib is not installed
    """
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ConfigError("matplotlib: not installed; pip install 'triptych[eval]'") from error
    figure = Figure(figsize=(5.2 * len(PANELS), 4.2), layout="constrained")
    panels = figure.subplots(1, len(PANELS))
    for axes, (name, (title, scale)) in zip(panels, PANELS.items(), strict=True):
        _bars(axes, [row for row in rows if name in row.figures], name, scale)
        axes.set_ylabel(title)
        axes.grid(visible=True, axis="y", alpha=0.25)
    handles, labels = panels[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside upper center", ncols=max(1, len(labels)))
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=80)


def _bars(axes: "Axes", rows: Sequence[ServerSummary], name: str, scale: float) -> None:
    workloads = list(dict.fromkeys(row.workload for row in rows))
    servers = list(dict.fromkeys(row.server for row in rows))
    each = WIDTH / max(1, len(servers))
    for at, server in enumerate(servers):
        mine = [row for row in rows if row.server == server]
        places = [workloads.index(row.workload) + at * each for row in mine]
        spreads = [row.figures[name] for row in mine]
        middle = [one.median * scale for one in spreads]
        errors = [
            [(one.median - one.low) * scale for one in spreads],
            [(one.high - one.median) * scale for one in spreads],
        ]
        axes.bar(places, middle, each, yerr=errors, capsize=2, label=server)
    middles = [number + (WIDTH - each) / 2 for number in range(len(workloads))]
    axes.set_xticks(middles, workloads, rotation=30, fontsize=7)
