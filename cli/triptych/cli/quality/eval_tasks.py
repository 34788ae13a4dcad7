"""``triptych eval tasks``: scores of methods in a task file of the user."""

import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer
from rich.progress import TaskID

from triptych.cli.list_options import names
from triptych.cli.output import console, make_table, progress_bars, write_json
from triptych.cli.serving.serve_file import read_serve_file
from triptych.core.config import AppConfig, DType
from triptych.loadgen.report.host import host_info

if TYPE_CHECKING:
    from triptych.evals.metrics.fidelity import Interval
    from triptych.evals.studies.file_tasks import FileResults, FileStudy

Metric = Literal["exact_match", "contains", "starts_with", "f1", "number", "rouge_l"]
COLUMNS = (
    *("method", "task", "metric", "lines", "all-in", "score", "95 %"),
    *("full cache", "over full, 95 %", "same answers"),
)


def tasks(
    file: Annotated[
        Path,
        typer.Argument(
            help="JSON lines with prompt, answer or answers, and optionally metric, max_tokens, "
            "stop and task."
        ),
    ],
    methods: Annotated[
        str, typer.Option(help="Methods, comma-separated, as in triptych eval quality.")
    ] = "default,uniform:k8v4",
    template: Annotated[
        str,
        typer.Option(
            help="Prompt with fields of the line in braces, for files of other harnesses, as in "
            "'{context} Question: {input} Answer:'; \\n is a new line. Default: the field prompt."
        ),
    ] = "",
    metric: Annotated[Metric, typer.Option(help="Metric of lines that name none.")] = "f1",
    max_tokens: Annotated[
        int, typer.Option(min=1, help="Tokens of an answer, of lines that do not say it.")
    ] = 64,
    stop: Annotated[
        str,
        typer.Option(help="Text at which an answer ends, of lines that have none; \\n: new line."),
    ] = "",
    limit: Annotated[int, typer.Option(min=0, help="Read only the first lines; 0: all.")] = 0,
    chat: Annotated[
        bool, typer.Option("--chat", help="A prompt is a message in the model's chat template.")
    ] = False,
    profile: Annotated[
        str, typer.Option(help="Settings of the method default: a Ray Serve config file.")
    ] = "",
    model: Annotated[
        str, typer.Option(help="Model name or path; default: that of the settings.")
    ] = "",
    dtype: Annotated[DType, typer.Option(help="Data type of the engines.")] = "float32",
    json_file: Annotated[
        Path | None, typer.Option("--json", help="Write rows and all answers to this file.")
    ] = None,
) -> None:
    """Score compressed caches in the tasks of a file, beside the full cache.

    All methods answer greedily. Intervals are bootstraps over the lines; the difference to the full
    cache is paired line by line.
    """
    from triptych.evals.data.task_file import FileOptions
    from triptych.evals.studies.file_tasks import FileStudy

    study = FileStudy(
        file=file,
        options=FileOptions(
            template=_with_newlines(template),
            metric=metric,
            max_tokens=max_tokens,
            stop=(_with_newlines(stop),) if stop else (),
            limit=limit,
        ),
        model=model,
        methods=tuple(names(methods)),
        base=read_serve_file(Path(profile))[0].config if profile else AppConfig(),
        dtype=dtype,
        is_chat=chat,
    )
    host, started = host_info(), time.monotonic()
    found = _run(study)
    if json_file:
        seconds = {"seconds": round(time.monotonic() - started, 1)}
        write_json({"host": host, **seconds, **found.as_json()}, json_file)
    _show(found)


def _with_newlines(text: str) -> str:
    return text.replace("\\n", "\n")


def _run(study: "FileStudy") -> "FileResults":
    from triptych.evals.studies.file_tasks import prepare_file, run_file

    prepared = prepare_file(study)
    bars = progress_bars(24)
    ids = dict[str, TaskID]()

    def announce(name: str, lines: int) -> None:
        ids[name] = bars.add_task(name, total=lines)

    with bars:
        return run_file(prepared, lambda name, count: bars.advance(ids[name], count), announce)


def _show(found: "FileResults") -> None:
    lines = [
        (
            *(row.method, row.task, row.metric, row.lines, row.bytes_all_in_ratio),
            *(row.score, _range(row.score_ci95), row.full_score),
            *(_range(row.over_full_ci95), row.same_answers),
        )
        for row in found.rows
    ]
    title = "mean score; intervals are bootstraps over lines"
    console.print(make_table(COLUMNS, lines, title))


def _range(interval: "Interval | None") -> str:
    return "" if interval is None else "{:.3g} to {:.3g}".format(*interval)
