"""``triptych bench selection``: attention over chosen pages beside the same pages read whole."""

from dataclasses import asdict
from pathlib import Path
from typing import Annotated, cast

import typer

from triptych.cli.list_options import integers, numbers, words
from triptych.cli.output import console, make_table, write_json
from triptych.core.errors import ConfigError
from triptych.loadgen.report.host import host_info

COLUMNS = {
    "method": "method",
    "format": "format",
    "batch": "batch",
    "context": "context",
    "rule": "rule",
    "pages": "pages_read",
    "whole ms": "whole_ms",
    "selected ms": "selected_ms",
    "choice ms": "select_ms",
    "speed-up": "speedup",
    "of medians": "speedup_median",
}


def bench_selection(
    backend: Annotated[str, typer.Option(help="Which versions, as in cpu,reference.")] = "cpu",
    method: Annotated[str, typer.Option(help="How pages are ranked: moments,box.")] = "moments",
    formats: Annotated[
        str, typer.Option(help="Page formats; k8v4+fp16: both in one request.")
    ] = "k8v4,k8v4+k4v2",
    batch: Annotated[str, typer.Option(help="Requests at once.")] = "1,4",
    context: Annotated[str, typer.Option(help="Tokens of each request.")] = "4096,8192,16384,32768",
    keep: Annotated[str, typer.Option(help="Shares of the pages that are read.")] = "0.3",
    budget: Annotated[str, typer.Option(help="Tokens whose pages are read.")] = "2048",
    repeats: Annotated[int, typer.Option(min=1, help="Calls; the fastest counts.")] = 30,
    threads: Annotated[int | None, typer.Option(min=1, help="Default: all cores.")] = None,
    json_file: Annotated[Path | None, typer.Option("--json", help="Write the rows here.")] = None,
) -> None:
    """Time choosing pages and reading them, in turns with reading all of the same pages.

    Keys and values are random, in the shape of one layer of SmolLM2-135M. A version that
    disagrees with the reference over the chosen pages gets no time.
    """
    import torch

    from triptych.kernels.bench.selection import run_selection
    from triptych.kernels.select import KINDS, Kind

    kinds = words(method)
    for name in kinds:
        if name not in KINDS:
            raise ConfigError(f"--method {name!r}: expected some of {', '.join(KINDS)}")
    host = host_info()
    if threads:
        torch.set_num_threads(threads)
    found = run_selection(
        words(backend),
        cast("list[Kind]", kinds),
        words(formats),
        integers(batch),
        integers(context),
        numbers(keep),
        integers(budget),
        repeats=repeats,
    )
    rows = [asdict(row) for row in found]
    if json_file:
        write_json({"host": host, "threads": torch.get_num_threads(), "rows": rows}, json_file)
    lines = [[row[key] for key in COLUMNS.values()] for row in rows]
    console.print(make_table(tuple(COLUMNS), lines))
