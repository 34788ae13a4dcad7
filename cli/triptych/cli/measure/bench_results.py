"""``triptych bench compare`` and ``bench plot``: compare and plot result files."""

import json
from collections.abc import Sequence
from pathlib import Path
from statistics import median
from typing import Annotated

import typer

from triptych.cli.output import JsonFlag, make_table, show
from triptych.core.errors import ConfigError
from triptych.loadgen.report.plot import plot_all
from triptych.loadgen.report.results import Result, read_results

FIGURES = {
    "mean_ttft_ms": "TTFT ms mean",
    "p99_ttft_ms": "TTFT ms p99",
    "mean_tpot_ms": "TPOT ms mean",
    "p99_tpot_ms": "TPOT ms p99",
    "output_throughput": "out tok/s",
    "request_throughput": "req/s",
    "request_goodput": "good/s",
    "goodput_per_gb_kv": "good/s/GB KV",
    "mean_kv_bytes": "KV bytes mean",
    "peak_pss_bytes": "PSS bytes",
}

Row = dict[str, object]


def bench_compare(
    base: Annotated[Path, typer.Argument(help="Result file that is the baseline.")],
    others: Annotated[list[Path], typer.Argument(help="Result files of bench serve or simulate.")],
    as_json: JsonFlag = False,
) -> None:
    """Compare result files with a baseline: ratios of each figure, for each common level.

    If a file has several rounds of a level, the ratio is that of the medians; lowest and highest
    are over all pairs of rounds.
    """
    first = read_results(base)
    rows = [row for path in others for row in compare(first, read_results(path))]
    if not rows:
        raise ConfigError(f"{base}: no level in it that another file has too")
    columns = ("level", "figure", "base", "other", "ratio", "lowest", "highest", "file")
    show(
        rows,
        make_table(columns, [[row[name] for name in columns] for row in rows]),
        as_json=as_json,
    )


def compare(base: Sequence[Result], other: Sequence[Result]) -> list[Row]:
    """A row for each level and figure that both sides have, in the order of the baseline."""
    rows = list[Row]()
    for level in dict.fromkeys(result.level for result in base):
        ours = [result for result in base if result.level == level]
        theirs = [result for result in other if result.level == level]
        for name, title in FIGURES.items():
            before, after = _values(ours, name), _values(theirs, name)
            if not before or not after or not all(before):
                continue
            ratios = [new / old for old in before for new in after]
            rows.append(
                {
                    "level": level,
                    "figure": title,
                    "base": median(before),
                    "other": median(after),
                    "ratio": median(after) / median(before),
                    "lowest": min(ratios),
                    "highest": max(ratios),
                    "file": theirs[0].path.name,
                }
            )
    return rows


def _values(results: Sequence[Result], name: str) -> list[float]:
    return [result.figures[name] for result in results if name in result.figures]


def bench_plot(
    files: Annotated[list[Path], typer.Argument(help="Result files of bench serve or simulate.")],
    out: Annotated[Path, typer.Option(help="Folder for the plots.")] = Path(),
    name: Annotated[str, typer.Option(help="Prefix of their file names.")] = "bench",
    as_json: JsonFlag = False,
) -> None:
    """Plot latency distributions, throughput and goodput against rate, time by stage and memory.

    Needs matplotlib: pip install 'triptych[eval]'.
    """
    results = [result for path in files for result in read_results(path)]
    pictures = [str(path) for path in plot_all(results, out, name)]
    typer.echo(json.dumps(pictures, indent=2) if as_json else "\n".join(pictures))
