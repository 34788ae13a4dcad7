"""``triptych bench plot``: pictures of result files, measured or simulated."""

import json
from pathlib import Path
from typing import Annotated

import typer

from triptych.cli.output import JsonFlag
from triptych.loadgen.report.plot import draw_all
from triptych.loadgen.report.results import read_results


def bench_plot(
    files: Annotated[list[Path], typer.Argument(help="Result files of bench serve or simulate.")],
    out: Annotated[Path, typer.Option(help="Folder for the pictures.")] = Path(),
    name: Annotated[str, typer.Option(help="What their names begin with.")] = "bench",
    as_json: JsonFlag = False,
) -> None:
    """Draw latency distributions, throughput and goodput against rate, time by stage and memory.

    Needs matplotlib: pip install 'triptych[eval]'.
    """
    results = [result for path in files for result in read_results(path)]
    pictures = [str(path) for path in draw_all(results, out, name)]
    typer.echo(json.dumps(pictures, indent=2) if as_json else "\n".join(pictures))
