# matplotlib's pyplot-free interface is typed in part; nothing untyped leaves this module.
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false
# pyright: reportUnknownArgumentType=false, reportMissingImports=false

"""The pictures of a profile: reuse of pages over time, bytes against the limit, and the parts."""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from triptych.core.errors import ConfigError
from triptych.workers.profiling.report import PartRow, ProfileReport, StepRow

if TYPE_CHECKING:
    from matplotlib.axes import Axes

COLOURS = [f"C{index}" for index in range(10)] + ["black", "gold", "navy", "lime", "lightgrey"]
SMALL = 0.01
"""Parts with less than this share of a stage are drawn as one."""


def plot_profile(report: ProfileReport, limit: float | None, stem: Path) -> list[Path]:
    """Write ``stem.png`` and ``stem.svg``, and say where they are.

    Raises: ConfigError if matplotlib is not installed
    """
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ConfigError("matplotlib: not installed; pip install 'triptych[eval]'") from error
    figure = Figure(figsize=(15, 4.5), layout="constrained")
    reuse, speed, parts = figure.subplots(1, 3)
    decode = [row for row in report.steps if row.stage == "decode" and row.tokens]
    _reuse(reuse, decode)
    _speed(speed, decode, limit)
    _parts(parts, report.parts)
    paths = [stem.with_name(f"{stem.name}.{kind}") for kind in ("png", "svg")]
    stem.parent.mkdir(parents=True, exist_ok=True)
    for path in paths:
        figure.savefig(path, dpi=120)
    return paths


def _reuse(axes: "Axes", decode: Sequence[StepRow]) -> None:
    known = [(at, row.reused) for at, row in enumerate(decode) if row.reused is not None]
    axes.plot([at for at, _ in known], [share for _, share in known], label="read before as well")
    axes.plot([row.pages_read / row.pages for row in decode], label="read")
    axes.set(xlabel="decode step", ylabel="share of pages", ylim=(0, 1.05), title="pages")
    axes.legend(loc="lower right")
    axes.grid(visible=True, alpha=0.25)


def _speed(axes: "Axes", decode: Sequence[StepRow], limit: float | None) -> None:
    seconds = [row.seconds for row in decode]
    weights = [row.weight_bytes / s / 1e9 for row, s in zip(decode, seconds, strict=True)]
    pages = [row.page_bytes / s / 1e9 for row, s in zip(decode, seconds, strict=True)]
    axes.stackplot(range(len(decode)), weights, pages, labels=("weights", "pages"), alpha=0.7)
    if limit is not None:
        axes.axhline(limit, color="black", linestyle="--", label="what memory gives")
    axes.set(xlabel="decode step", ylabel="GB/s", title="bytes read")
    axes.legend(loc="upper right")


def _parts(axes: "Axes", rows: Sequence[PartRow]) -> None:
    stages = list(dict.fromkeys(row.stage for row in rows))
    names = list(dict.fromkeys(row.part for row in rows if row.share >= SMALL))
    for index, name in enumerate([*names, "the rest"]):
        heights, bottoms = list[float](), list[float]()
        for stage in stages:
            own = {row.part: row.share for row in rows if row.stage == stage}
            shares = [own.get(each, 0.0) for each in names]
            shares.append(max(0.0, 1.0 - sum(shares)))
            heights.append(100 * shares[index])
            bottoms.append(100 * sum(shares[:index]))
        axes.bar(stages, heights, bottom=bottoms, label=name, color=COLOURS[index % len(COLOURS)])
    axes.set(ylabel="% of the stage's time", title="where the time goes")
    axes.legend(fontsize=7, loc="center left", bbox_to_anchor=(1.0, 0.5))
