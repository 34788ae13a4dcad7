"""``triptych bench attention``: decode attention over pages beside torch's own."""

from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from triptych.cli.list_options import integers, words
from triptych.cli.output import console, make_table, write_json
from triptych.loadgen.report.host import host_info

COLUMNS = {
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


def bench_attention(
    backend: Annotated[str, typer.Option(help="Which versions, as in cpu,reference.")] = "cpu",
    formats: Annotated[
        str, typer.Option(help="Page formats; k8v4+fp16: both in one request.")
    ] = "fp16,k8v8,k8v4,k4v4,k4v2,k8v4+k4v2+fp16",
    batch: Annotated[str, typer.Option(help="Requests at once.")] = "1,4,16",
    context: Annotated[str, typer.Option(help="Tokens of each request.")] = "512,2048",
    repeats: Annotated[int, typer.Option(min=1, help="Calls; the fastest counts.")] = 30,
    threads: Annotated[int | None, typer.Option(min=1, help="Default: all cores.")] = None,
    json_file: Annotated[Path | None, typer.Option("--json", help="Write the rows here.")] = None,
) -> None:
    """Time decode attention over pages, in turns with torch's SDPA on contiguous float32.

    Keys and values are random, in the shape of one layer of SmolLM2-135M. A version that
    disagrees with the reference gets no time.
    """
    import torch

    from triptych.kernels.bench.attention_cpu import run

    host = host_info()
    if threads:
        torch.set_num_threads(threads)
    rows = [
        asdict(row)
        for row in run(
            words(backend), words(formats), integers(batch), integers(context), repeats=repeats
        )
    ]
    if json_file:
        write_json({"host": host, "threads": torch.get_num_threads(), "rows": rows}, json_file)
    lines = [[row[key] for key in COLUMNS.values()] for row in rows]
    console.print(make_table(tuple(COLUMNS), lines))
