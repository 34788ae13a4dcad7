# matplotlib's pyplot-free interface is typed in part; nothing untyped leaves this module.
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false
# pyright: reportUnknownArgumentType=false, reportMissingImports=false
# ruff: noqa: PLC0415 - the library comes with the extra `eval` alone
"""Plots: KL against bytes with a point per method, and KL along the axes of an ablation."""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from triptych.core.errors import ConfigError
from triptych.evals.methods.baselines import PAGED
from triptych.evals.methods.eviction import EVICTIONS
from triptych.evals.studies.ablation import Point
from triptych.evals.studies.report import Context, Row

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

FAMILIES = {"kvpress": "s", "simulated": "x", "uniform": "o"}
OURS, DROPS, READS = "D", "v", "^"
"""Markers: squares for kvpress, crosses for simulated formats, diamonds for our policies,
triangles for baselines: down for eviction, up for page retrieval."""
PANELS = 3
"""Panels of an ablation side by side."""
LEAST_KL = 1e-5
"""Lower end of the logarithmic axis."""


def plot_quality(rows: Sequence[Row], context: Context, stem: Path) -> list[Path]:
    """Plot KL against bytes for one context length; returns ``stem.png`` and ``stem.svg``.

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
    axes.set_xlabel("bytes, all included, of the same in 16 bits (triangles up: bytes read)")
    axes.set_ylabel("KL(full cache || method), nats per token")
    axes.set_title(f"context of {context} tokens" if context != "all" else "all context lengths")
    figure.legend(loc="outside right upper", fontsize=8)
    axes.grid(visible=True, which="both", alpha=0.25)
    return save_figure(figure, stem)


def plot_axes(points: Sequence[Point], stem: Path) -> list[Path]:
    """Write KL along each axis of an ablation, with intervals, as ``stem.png`` and ``stem.svg``.

    Raises: ConfigError if matplotlib is not installed, or if there is no point
    """
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ConfigError("matplotlib: not installed; pip install 'triptych[eval]'") from error
    if not points:
        raise ConfigError("plot: no axis was measured; name some, as in --axes page,keep")
    names = list(dict.fromkeys(point.axis for point in points))
    rows = -(-len(names) // PANELS)
    figure = Figure(figsize=(4 * PANELS, 3.2 * rows), layout="constrained")
    for index, name in enumerate(names):
        _panel(
            figure.add_subplot(rows, PANELS, index + 1),
            name,
            [point for point in points if point.axis == name],
        )
    return save_figure(figure, stem)


def _panel(axes: "Axes", name: str, points: Sequence[Point]) -> None:
    """One axis of an ablation: a point per setting, in the order of the table."""
    middle = [max(point.kl.mean, LEAST_KL) for point in points]
    low = [max(point.kl.ci95[0], LEAST_KL) for point in points]
    down = [max(0.0, a - b) for a, b in zip(middle, low, strict=True)]
    up = [max(0.0, point.kl.ci95[1] - a) for a, point in zip(middle, points, strict=True)]
    axes.errorbar(range(len(points)), middle, yerr=[down, up], fmt="o", capsize=3)
    axes.set_xticks(range(len(points)), [point.setting for point in points], fontsize=7)
    if any(len(point.setting) > 8 for point in points):
        axes.tick_params(axis="x", rotation=25)
    axes.set_yscale("log")
    axes.set_title(name, fontsize=10)
    axes.set_ylabel("KL, nats per token", fontsize=8)
    axes.grid(visible=True, which="both", axis="y", alpha=0.25)


def save_figure(figure: "Figure", stem: Path) -> list[Path]:
    """Write a figure as ``stem.png`` and ``stem.svg``."""
    paths = [stem.with_name(f"{stem.name}.{kind}") for kind in ("png", "svg")]
    stem.parent.mkdir(parents=True, exist_ok=True)
    for path in paths:
        figure.savefig(path, dpi=150)
    return paths


def _point(axes: "Axes", row: Row, colour: str) -> None:
    kl, interval = max(row.summary.kl, LEAST_KL), row.summary.kl_ci95
    errors = None
    if interval is not None:
        low, high = max(interval[0], LEAST_KL), max(interval[1], LEAST_KL)
        errors = [[max(0.0, kl - low)], [max(0.0, high - kl)]]
    kind = row.method.partition("+")[0]
    reads = kind in PAGED
    usual = READS if reads else DROPS if kind in EVICTIONS else OURS
    marker = FAMILIES.get(row.method.partition(":")[0], usual)
    at = row.bytes_data_ratio if reads else row.bytes_all_in_ratio
    axes.errorbar(
        [at],
        [kl],
        yerr=errors,
        fmt=marker,
        color=colour,
        markersize=6,
        capsize=2,
        label=row.method,
    )
