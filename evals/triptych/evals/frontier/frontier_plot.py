# matplotlib's pyplot-free interface is typed in part; nothing untyped leaves this module.
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false
# pyright: reportUnknownArgumentType=false, reportMissingImports=false
# ruff: noqa: PLC0415 - the library comes with the extra `eval` alone
"""Plot of the frontier: KL against bytes, a panel for each context length."""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from triptych.core.errors import ConfigError
from triptych.evals.frontier.frontier_rows import FrontierRow, frontier_of
from triptych.evals.studies.plot import LEAST_KL, save_figure

if TYPE_CHECKING:
    from matplotlib.axes import Axes

SERVED, MASKED = "D", "v"
"""Markers: diamonds for methods that are served, triangles for baselines in transformers."""


def plot_frontier(rows: Sequence[FrontierRow], stem: Path) -> list[Path]:
    """Write ``stem.png`` and ``stem.svg``, with 95 % intervals over documents.

    Raises: ConfigError if matplotlib is not installed, or if nothing was measured
    """
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ConfigError("matplotlib: not installed; pip install 'triptych[eval]'") from error
    shown = [row for row in rows if row.summary.kl > 0]
    if not shown:
        raise ConfigError("plot of the frontier: no method was measured beside the full cache")
    contexts = list(dict.fromkeys(row.context for row in shown))
    names = list(dict.fromkeys(row.method for row in shown))
    figure = Figure(figsize=(6.5 * len(contexts) + 3, 6), layout="constrained")
    for index, context in enumerate(contexts):
        axes = figure.add_subplot(1, len(contexts), index + 1)
        _panel(axes, names, [row for row in shown if row.context == context])
        axes.set_title(f"context of {context} tokens")
    handles, labels = figure.axes[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside right upper", fontsize=7)
    return save_figure(figure, stem)


def _panel(axes: "Axes", names: Sequence[str], rows: Sequence[FrontierRow]) -> None:
    for row in rows:
        kl = max(row.summary.kl, LEAST_KL)
        low, high = row.summary.kl_ci95 or (kl, kl)
        index = names.index(row.method)
        axes.errorbar(
            [row.bytes_all_in_ratio],
            [kl],
            yerr=[[max(0.0, kl - max(low, LEAST_KL))], [max(0.0, high - kl)]],
            fmt=SERVED if row.served else MASKED,
            color=f"C{index % 10}",
            markerfacecolor="none" if index // 10 % 2 else f"C{index % 10}",
            markersize=6,
            capsize=2,
            label=row.method,
        )
    ends = frontier_of(rows)
    at = [row.bytes_all_in_ratio for row in ends]
    axes.plot(at, [max(row.summary.kl, LEAST_KL) for row in ends], "k:", linewidth=0.8)
    axes.set_yscale("log")
    axes.set_xlabel("bytes, all included, of the same in 16 bits")
    axes.set_ylabel("KL(full cache || method), nats per token")
    axes.grid(visible=True, which="both", alpha=0.25)
