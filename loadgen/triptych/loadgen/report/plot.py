# matplotlib's pyplot-free interface is typed in part; nothing untyped leaves this module.
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false
# pyright: reportUnknownArgumentType=false, reportMissingImports=false

"""Plots of result files: latency, rates, time by stage, memory, goodput per byte."""

from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING

from triptych.core.errors import ConfigError
from triptych.loadgen.report.results import Result

if TYPE_CHECKING:
    from matplotlib.axes import Axes

GB = 1e9
QUEUES = ("waiting", "prefilled", "planned", "compressed")
"""States in which a request waits for the router; in the others a worker has it."""
STAGES = (
    *("waiting", "prefilling", "prefilled", "compressing"),
    *("planned", "encoding", "compressed", "decoding"),
)

Draw = Callable[["Axes", Sequence[Result]], None]


def plot_all(results: Sequence[Result], folder: Path, name: str) -> list[Path]:
    """Write each plot for which the results have data as PNG; return the paths.

    Raises: ConfigError if matplotlib is not installed, or if there is nothing to draw
    """
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ConfigError("matplotlib: not installed; pip install 'triptych[eval]'") from error
    paths = list[Path]()
    for kind, (panels, usable) in PICTURES.items():
        shown = [result for result in results if usable(result)]
        if not shown:
            continue
        figure = Figure(figsize=(5.2 * len(panels), 4.2), layout="constrained")
        for axes, panel in zip(
            figure.subplots(1, len(panels), squeeze=False)[0], panels, strict=True
        ):
            panel(axes, shown)
            axes.grid(visible=True, which="both", alpha=0.25)
        if any(result.simulated for result in shown):
            figure.suptitle("simulator")
        path = folder / f"{name}-{kind}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        figure.savefig(path, dpi=80)
        paths.append(path)
    if not paths:
        raise ConfigError("nothing to draw: the results have neither requests nor rates")
    return paths


def curve(
    results: Sequence[Result], figure: str
) -> dict[str, tuple[list[float], list[float], list[float], list[float]]]:
    """By label: rates, and median, minimum and maximum over runs of the same rate."""
    found = dict[str, dict[float, list[float]]]()
    for result in results:
        if result.rate_per_s is not None and figure in result.figures:
            rates = found.setdefault(result.label, {})
            rates.setdefault(result.rate_per_s, []).append(result.figures[figure])
    return {
        label: (
            sorted(rates),
            [median(rates[rate]) for rate in sorted(rates)],
            [min(rates[rate]) for rate in sorted(rates)],
            [max(rates[rate]) for rate in sorted(rates)],
        )
        for label, rates in found.items()
    }


def _against_rate(figure: str, title: str, scale: float = 1.0, *, log: bool = False) -> Draw:
    def plot_panel(axes: "Axes", results: Sequence[Result]) -> None:
        for label, (rates, middle, low, high) in curve(results, figure).items():
            axes.plot(rates, [v * scale for v in middle], marker="o", markersize=3, label=label)
            axes.fill_between(
                rates, [v * scale for v in low], [v * scale for v in high], alpha=0.15
            )
        axes.set_xlabel("requests per second that arrive")
        axes.set_ylabel(title)
        if log:
            axes.set_yscale("log")
        if axes.lines:
            axes.legend(fontsize=7)

    return plot_panel


def _distribution(pick: Callable[[Result], Sequence[float]], title: str) -> Draw:
    def plot_panel(axes: "Axes", results: Sequence[Result]) -> None:
        for result in results:
            values = sorted(pick(result))
            shares = [(place + 1) / len(values) for place in range(len(values))]
            axes.step(values, shares, where="post", label=result.name)
        axes.set_xlabel(title)
        axes.set_ylabel("share of requests")
        axes.set_xscale("log")
        axes.legend(fontsize=7)

    return plot_panel


def _ttfts(result: Result) -> Sequence[float]:
    return result.requests.ttft_s if result.requests else []


def _tpots(result: Result) -> Sequence[float]:
    gaps = result.requests.gaps_s if result.requests else []
    return [sum(each) / len(each) for each in gaps if each]


def _stages(axes: "Axes", results: Sequence[Result]) -> None:
    """Stacked bars of medians over runs of one name; hatched: waits for the router."""
    names = list(dict.fromkeys(result.name for result in results))
    bottom = [0.0] * len(names)
    for index, stage in enumerate(STAGES):
        heights = [
            median(one.stage_seconds.get(stage, 0.0) for one in results if one.name == name)
            for name in names
        ]
        hatch = "//" if stage in QUEUES else None
        axes.bar(names, heights, bottom=bottom, color=f"C{index}", hatch=hatch, label=stage)
        bottom = [low + height for low, height in zip(bottom, heights, strict=True)]
    axes.set_ylabel("seconds of a request in each state")
    axes.tick_params(axis="x", rotation=80, labelsize=6)
    axes.legend(fontsize=7)


def _memory(axes: "Axes", results: Sequence[Result]) -> None:
    for index, result in enumerate(results):
        at_s, held = result.series["at_s"], result.series["kv_bytes"]
        axes.step(at_s, [v / GB for v in held], where="post", color=f"C{index}", label=result.name)
        booked = [value / GB for value in result.series.get("booked_bytes", [])]
        if len(booked) == len(at_s):
            axes.step(at_s, booked, where="post", color=f"C{index}", linestyle=":", linewidth=0.8)
    axes.set_xlabel("seconds")
    axes.set_ylabel("GB of keys and values: held, and booked (dotted)")
    axes.legend(fontsize=7)


def _has_rate(result: Result) -> bool:
    return result.rate_per_s is not None


PICTURES: dict[str, tuple[tuple[Draw, ...], Callable[[Result], bool]]] = {
    "latency": (
        (_distribution(_ttfts, "TTFT, s"), _distribution(_tpots, "time per output token, s")),
        lambda result: bool(_ttfts(result)) and bool(_tpots(result)),
    ),
    "rates": (
        (
            _against_rate("mean_ttft_ms", "mean TTFT, s", 1e-3, log=True),
            _against_rate("mean_tpot_ms", "mean time per output token, s", 1e-3, log=True),
            _against_rate("request_throughput", "requests per second that are answered"),
            _against_rate("request_goodput", "requests per second inside all limits"),
            _against_rate("goodput_per_gb_kv", "goodput per GB of keys and values"),
        ),
        _has_rate,
    ),
    "stages": ((_stages,), lambda result: bool(result.stage_seconds)),
    "memory": ((_memory,), lambda result: bool(result.series.get("at_s"))),
}
"""Panels of each plot, and the results that have data for it."""
