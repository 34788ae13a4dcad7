"""``triptych eval``: what compression costs in quality."""

import time
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TaskID,
    TextColumn,
    TimeElapsedColumn,
)

from triptych.cli.commas import integers, words
from triptych.cli.loadgen.host import host_info
from triptych.cli.output import console, make_table, notes, write_json
from triptych.cli.servefile import read_serve_file
from triptych.core.config import AppConfig, DType

if TYPE_CHECKING:
    from triptych.workers.quality.report import Row
    from triptych.workers.quality.study import Results, Study

app = typer.Typer(help="Measure what compression costs in quality.", no_args_is_help=True)

COLUMNS = {
    "method": "method",
    "context": "context",
    "data": "bytes_data_ratio",
    "all-in": "bytes_all_in_ratio",
    "KL": "kl",
    "KL p99": "kl_p99",
    "top-1": "top1_agreement",
    "perplexity": "perplexity",
    "ratio": "perplexity_ratio",
}
QUICK_CONTEXTS = "1024"


@app.callback()
def options() -> None:
    """Measure what compression costs in quality."""


@app.command("quality")
def quality(
    methods: Annotated[
        str, typer.Option(help="As in default,uniform:k8v4,simulated:k4v8; all baselines if empty.")
    ] = "",
    profile: Annotated[
        str, typer.Option(help="Evaluate only these settings: 'default', or a Serve file.")
    ] = "",
    model: Annotated[str, typer.Option(help="Name or path; that of the profile if empty.")] = "",
    contexts: Annotated[str, typer.Option(help="Tokens that are compressed.")] = "1024,2048,4096",
    documents: Annotated[int, typer.Option(min=1, help="Texts per context length.")] = 6,
    steps: Annotated[int, typer.Option(min=1, help="Tokens scored after each context.")] = 128,
    calibration: Annotated[
        bool, typer.Option("--calibration", help="Use the texts that settings are tuned on.")
    ] = False,
    dtype: Annotated[DType, typer.Option(help="In which our engines compute.")] = "float32",
    quick: Annotated[bool, typer.Option("--quick", help="One short context, texts alone.")] = False,
    json_file: Annotated[Path | None, typer.Option("--json", help="Write the rows here.")] = None,
) -> None:
    """Compare compressed caches with the full one: KL, agreement, perplexity, bytes.

    A context is read and compressed, then the text goes on token by token through the
    engines that serve; transformers in float32 with its full cache says what is right.
    """
    from triptych.workers.quality.study import Study

    base = _profile(profile)
    named = words(methods) or (["default"] if profile else [])
    study = Study(
        model=model,
        base=base,
        dtype=dtype,
        contexts=tuple(integers(QUICK_CONTEXTS if quick else contexts)),
        documents=documents,
        steps=steps,
        split="calibration" if calibration else "evaluation",
    )
    if named:
        study = replace(study, methods=tuple(named))
    host = host_info()
    started = time.monotonic()
    results = _with_progress(study)
    if json_file:
        seconds = {"seconds": round(time.monotonic() - started, 1)}
        write_json({"host": host, **seconds, **results.as_json()}, json_file)
    console.print(make_table(tuple(COLUMNS), [_line(row) for row in results.rows]))


def _profile(name: str) -> AppConfig:
    if name in {"", "default"}:
        return AppConfig()
    return read_serve_file(Path(name))[0].config


def _with_progress(study: "Study") -> "Results":
    """Run, with a bar for every method on a terminal."""
    from triptych.workers.quality.study import run

    bars = Progress(
        TextColumn("{task.description:>24}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        console=notes,
        disable=not notes.is_terminal,
    )
    tasks = dict[str, TaskID]()

    def announce(name: str, cases: int) -> None:
        tasks[name] = bars.add_task(name, total=cases)

    with bars:
        return run(study, lambda name, count: bars.advance(tasks[name], count), announce)


def _line(row: "Row") -> list[object]:
    figures = row.as_json()
    return [figures[key] for key in COLUMNS.values()]
