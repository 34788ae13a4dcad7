"""``triptych bench attention`` and ``bench selection``: time the attention kernels."""

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, cast

import typer

from triptych.cli.list_options import integers, names, numbers, numbers_or_zero
from triptych.cli.output import console, make_table, write_json
from triptych.core.errors import ConfigError
from triptych.loadgen.report.host import host_info

if TYPE_CHECKING:
    from triptych.kernels.bench.selection import SelectionRow

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
    "page tokens": "page_tokens",
    "rule": "rule",
    "pages": "pages_read",
    "whole ms": "whole_ms",
    "selected ms": "selected_ms",
    "choice ms": "select_ms",
    "speed-up": "speedup",
    "of medians": "speedup_median",
}
MODEL_POINTS = 9
"""Fewest rows to which the latency model is fitted: six, and three that it predicts."""
CHOSEN_PAGES = 64
"""Pages of a row that are read where the best page size is computed: the 2,048 tokens that a server
reads at least, in its pages of 32."""


@dataclass(frozen=True)
class FittedModel:
    """The latency model of the rows of a backend, a ranking and a format."""

    backend: str
    method: str
    format: str
    fixed_us: float
    page_us: float
    """Of a summary that is scored."""
    token_us: float
    """Of a token that is read."""
    held_out: int
    """Rows that the model does not know."""
    error: float
    """Mean absolute error on them, relative to what was measured."""
    context: int
    """The longest that was measured."""
    best_page_tokens: float
    """Tokens of a page with which a row of this context takes the least time, if 64 pages are
    read."""


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
    page_tokens: Annotated[
        str,
        typer.Option(
            help="Tokens of a page of the first format, comma-separated; 0: as many as in pages of "
            "the server."
        ),
    ] = "0",
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
    against the reference implementation before timing. TinyServe's latency model is fitted to two
    thirds of the rows of a format, if there are nine or more, and predicts the others.
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
        [int(tokens) for tokens in numbers_or_zero(page_tokens)],
        repeats=repeats,
    )
    rows, models = [asdict(row) for row in found], [asdict(one) for one in _models(found)]
    if json_file:
        threads_used = {"threads": torch.get_num_threads()}
        write_json({"host": host, **threads_used, "rows": rows, "models": models}, json_file)
    lines = [[row[key] for key in SELECTION_COLUMNS.values()] for row in rows]
    console.print(make_table(tuple(SELECTION_COLUMNS), lines))
    if models:
        lines = [list(model.values()) for model in models]
        console.print(make_table(tuple(models[0]), lines, "Latency model"))


def _models(rows: "Sequence[SelectionRow]") -> "Iterator[FittedModel]":
    """A latency model of each backend, ranking and format with enough rows."""
    from triptych.kernels.bench.latency_model import SelectionPoint, fit_and_check

    for key in dict.fromkeys((row.backend, row.method, row.format) for row in rows):
        own = [row for row in rows if (row.backend, row.method, row.format) == key]
        if len(own) < MODEL_POINTS:
            continue
        points = [SelectionPoint(row.pages, row.tokens_read, row.selected_ms * 1e3) for row in own]
        model, error, held = fit_and_check(points)
        longest = max(row.context for row in own)
        yield FittedModel(
            *key,
            *(model.fixed_us, model.page_us, model.token_us),
            held_out=held,
            error=error,
            context=longest,
            best_page_tokens=model.best_page_tokens(longest, CHOSEN_PAGES),
        )
