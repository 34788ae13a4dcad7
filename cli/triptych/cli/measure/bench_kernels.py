"""``triptych bench attention`` and ``bench selection``: time the attention kernels."""

from dataclasses import asdict
from pathlib import Path
from typing import Annotated, cast

import typer

from triptych.cli.list_options import integers, names, numbers
from triptych.cli.output import console, make_table, write_json
from triptych.core.errors import ConfigError
from triptych.loadgen.report.host import host_info

ATTENTION_COLUMNS = {
    "backend": "backend",
    "format": "format",
    "batch": "batch",
    "context": "context",
    "ms": "time_ms",
    "ms median": "median_ms",
    "GB/s": "gb_per_s",
    "of read": "share_of_read",
    "SDPA ms": "sdpa_ms",
    "speed-up": "speedup_vs_sdpa_fp32",
}

SELECTION_COLUMNS = {
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


def bench_attention(
    backend: Annotated[
        str, typer.Option(help="Implementations, comma-separated: cpu, reference.")
    ] = "cpu",
    formats: Annotated[
        str,
        typer.Option(
            help="Page formats, comma-separated; k8v4+fp16 mixes both in a request. Tokens that do "
            "not fill a page of kivi4, kivi2 or kvarn are in K8V8 pages."
        ),
    ] = "fp16,k8v8,k8v4,k4v4,k4v2,diffkv",
    batch: Annotated[str, typer.Option(help="Batch sizes, comma-separated.")] = "1,4,16",
    context: Annotated[
        str, typer.Option(help="Context lengths in tokens, comma-separated.")
    ] = "512,2048",
    repeats: Annotated[int, typer.Option(min=1, help="Number of timed calls.")] = 30,
    threads: Annotated[
        int | None, typer.Option(min=1, help="Torch threads; default: all cores.")
    ] = None,
    json_file: Annotated[
        Path | None, typer.Option("--json", help="Write the rows to this file.")
    ] = None,
) -> None:
    """Time decode attention over pages, alternating with torch's SDPA on contiguous float32.

    Keys and values are random, in the shape of one layer of SmolLM2-135M. Results are checked
    against the reference implementation before timing.
    """
    import torch

    from triptych.kernels.bench.attention_cpu import run

    host = host_info()
    if threads:
        torch.set_num_threads(threads)
    rows = [
        asdict(row)
        for row in run(
            names(backend), names(formats), integers(batch), integers(context), repeats=repeats
        )
    ]
    if json_file:
        write_json({"host": host, "threads": torch.get_num_threads(), "rows": rows}, json_file)
    lines = [[row[key] for key in ATTENTION_COLUMNS.values()] for row in rows]
    console.print(make_table(tuple(ATTENTION_COLUMNS), lines))


def bench_selection(
    backend: Annotated[
        str, typer.Option(help="Implementations, comma-separated: cpu, reference.")
    ] = "cpu",
    method: Annotated[
        str, typer.Option(help="Page ranking, comma-separated: moments, box.")
    ] = "moments",
    formats: Annotated[
        str,
        typer.Option(
            help="Page formats, comma-separated; k8v4+fp16 mixes both in a request. Tokens that do "
            "not fill a page of kivi4, kivi2 or kvarn are in K8V8 pages."
        ),
    ] = "k8v4,k8v4+k4v2",
    batch: Annotated[str, typer.Option(help="Batch sizes, comma-separated.")] = "1,4",
    context: Annotated[
        str, typer.Option(help="Context lengths in tokens, comma-separated.")
    ] = "4096,8192,16384,32768",
    keep: Annotated[
        str, typer.Option(help="Selected shares of the pages, comma-separated.")
    ] = "0.3",
    budget: Annotated[str, typer.Option(help="Selected tokens, comma-separated.")] = "2048",
    repeats: Annotated[int, typer.Option(min=1, help="Number of timed calls.")] = 30,
    threads: Annotated[
        int | None, typer.Option(min=1, help="Torch threads; default: all cores.")
    ] = None,
    json_file: Annotated[
        Path | None, typer.Option("--json", help="Write the rows to this file.")
    ] = None,
) -> None:
    """Time page selection plus sparse attention, alternating with attention over all pages.

    Keys and values are random, in the shape of one layer of SmolLM2-135M. Results are checked
    against the reference implementation before timing.
    """
    import torch

    from triptych.kernels.bench.selection import run_selection
    from triptych.kernels.select import KINDS, Kind

    kinds = names(method)
    for name in kinds:
        if name not in KINDS:
            raise ConfigError(f"--method {name!r}: expected some of {', '.join(KINDS)}")
    host = host_info()
    if threads:
        torch.set_num_threads(threads)
    found = run_selection(
        names(backend),
        cast("list[Kind]", kinds),
        names(formats),
        integers(batch),
        integers(context),
        numbers(keep),
        integers(budget),
        repeats=repeats,
    )
    rows = [asdict(row) for row in found]
    if json_file:
        write_json({"host": host, "threads": torch.get_num_threads(), "rows": rows}, json_file)
    lines = [[row[key] for key in SELECTION_COLUMNS.values()] for row in rows]
    console.print(make_table(tuple(SELECTION_COLUMNS), lines))
