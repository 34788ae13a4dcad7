"""``triptych bench plot``: pictures of result files, measured or simulated."""

from pathlib import Path
from typing import Annotated

import typer

from triptych.cli.loadgen.plot import draw_all
from triptych.cli.loadgen.results import read_results
from triptych.cli.output import console


def bench_plot(
    files: Annotated[list[Path], typer.Argument(help="Result files of bench serve or simulate.")],
    out: Annotated[Path, typer.Option(help="Folder for the pictures.")] = Path(),
    name: Annotated[str, typer.Option(help="What their names begin with.")] = "bench",
) -> None:
    """Draw latency distributions, throughput and goodput against rate, time by stage and memory.

    Needs matplotlib: pip install 'triptych[eval]'.
    """
    results = [result for path in files for result in read_results(path)]
    for path in draw_all(results, out, name):
        console.print(str(path))
