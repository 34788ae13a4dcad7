# matplotlib's pyplot-free interface is typed in part; nothing untyped leaves this module.
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false
# pyright: reportUnknownArgumentType=false, reportMissingImports=false
# ruff: noqa: PLC0415 - the library comes with the extra `eval` alone
"""The picture of accuracy against memory: every method a point, lower left is better."""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from triptych.core.errors import ConfigError
from triptych.workers.quality.report import Context, Row

if TYPE_CHECKING:
    from matplotlib.axes import Axes

FAMILIES = {"kvpress": "s", "simulated": "x", "uniform": "o"}
OURS = "D"
"""Markers: squares for kvpress, crosses for simulated formats, diamonds for our policies."""
LEAST_KL = 1e-5
"""Where the logarithmic axis ends."""


def draw(rows: Sequence[Row], context: Context, stem: Path) -> list[Path]:
    """Write ``stem.png`` and ``stem.svg`` for one context length, and say where they are.

    Raises: ConfigError if matplotlib is not installed, or if no row has that context
    """
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ConfigError("matplotlib: not installed; pip install 'triptych[eval]'") from error
    shown = [row for row in rows if row.context == context and row.summary.kl > 0]
    if not shown:
        raise ConfigError(f"plot of context {context}: there is no method with that context")
    figure = Figure(figsize=(10, 5.5), layout="constrained")
    axes = figure.add_subplot()
    for index, row in enumerate(sorted(shown, key=lambda row: -row.summary.kl)):
        _point(axes, row, f"C{index % 10}")
    axes.set_yscale("log")
    axes.set_xlabel("bytes, all included, of the same in 16 bits")
    axes.set_ylabel("KL(full cache || method), nats per token")
    axes.set_title(f"context of {context} tokens" if context != "all" else "all context lengths")
    figure.legend(loc="outside right upper", fontsize=8)
    axes.grid(visible=True, which="both", alpha=0.25)
    paths = [stem.with_name(f"{stem.name}.{kind}") for kind in ("png", "svg")]
    stem.parent.mkdir(parents=True, exist_ok=True)
    for path in paths:
        figure.savefig(path, dpi=150)
    return paths


def _point(axes: "Axes", row: Row, colour: str) -> None:
    kl, interval = max(row.summary.kl, LEAST_KL), row.summary.kl_ci95
    spread = None
    if interval is not None:
        low, high = max(interval[0], LEAST_KL), max(interval[1], LEAST_KL)
        spread = [[max(0.0, kl - low)], [max(0.0, high - kl)]]
    marker = FAMILIES.get(row.method.partition(":")[0], OURS)
    at = row.bytes_all_in_ratio
    axes.errorbar(
        [at], [kl], yerr=spread, fmt=marker, color=colour, markersize=6, capsize=2, label=row.method
    )
