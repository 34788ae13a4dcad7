"""``triptych eval``: what compression costs in quality."""

import time
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from triptych.cli.commas import integers, words
from triptych.cli.loadgen.host import host_info
from triptych.cli.output import console, make_table, notes, write_json
from triptych.cli.servefile import read_serve_file
from triptych.cli.studies import run_with_progress
from triptych.core.config import AppConfig, DType

if TYPE_CHECKING:
    from triptych.workers.quality.study import Results

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
ANSWERS = {
    "method": "method",
    "context": "context",
    "identical": "identical",
    "parted after": "first_divergence",
    "BLEU": "bleu",
    "ROUGE-L": "rouge_l",
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
    tasks: Annotated[
        str, typer.Option(help="Generated tasks, as in passkey,needles; 'none' for none.")
    ] = "passkey,needles,repetition,rare,aliasing",
    task_context: Annotated[int, typer.Option(min=1, help="Tokens of a task's prompt.")] = 1024,
    task_count: Annotated[int, typer.Option(min=1, help="Tasks of each kind.")] = 8,
    greedy_tokens: Annotated[
        int, typer.Option(min=0, help="Of greedy answers at the shortest context; 0 for none.")
    ] = 256,
    seed: Annotated[int, typer.Option(help="Of the tasks.")] = 0,
    quick: Annotated[bool, typer.Option("--quick", help="One short context, texts alone.")] = False,
    json_file: Annotated[Path | None, typer.Option("--json", help="Write the rows here.")] = None,
    plot: Annotated[
        Path | None, typer.Option(help="Draw KL against bytes: PATH.png and PATH.svg.")
    ] = None,
) -> None:
    """Compare compressed caches with the full one: KL, agreement, perplexity, bytes.

    A context is read and compressed, then the text goes on token by token through the
    engines that serve; transformers in float32 with its full cache says what is right.
    """
    from triptych.workers.quality.study import Study

    named = words(methods) or (["default"] if profile else [])
    study = Study(
        model=model,
        base=AppConfig()
        if profile in {"", "default"}
        else read_serve_file(Path(profile))[0].config,
        dtype=dtype,
        contexts=tuple(integers(QUICK_CONTEXTS if quick else contexts)),
        documents=documents,
        steps=steps,
        split="calibration" if calibration else "evaluation",
        tasks=() if quick or tasks == "none" else tuple(words(tasks)),
        task_context=task_context,
        task_count=task_count,
        greedy_tokens=0 if quick else greedy_tokens,
        seed=seed,
    )
    if named:
        study = replace(study, methods=tuple(named))
    host = host_info()
    started = time.monotonic()
    results = run_with_progress(study)
    if json_file:
        seconds = {"seconds": round(time.monotonic() - started, 1)}
        write_json({"host": host, **seconds, **results.as_json()}, json_file)
    show_results(results)
    if plot:
        _draw(results, plot)


def show_results(results: "Results") -> None:
    """Print a table of the texts, and one each of tasks and answers if there are any."""
    lines = [[row.as_json()[key] for key in COLUMNS.values()] for row in results.rows]
    console.print(make_table(tuple(COLUMNS), lines))
    if results.tasks:
        kinds = list(dict.fromkeys(row.task for row in results.tasks))
        scores = {(row.method, row.task): row.score for row in results.tasks}
        names = list(dict.fromkeys(row.method for row in results.tasks))
        table = [[name, *(scores[name, kind] for kind in kinds)] for name in names]
        title = f"share of right answers, context of {results.tasks[0].context} tokens"
        console.print(make_table(("method", *kinds), table, title))
    if results.answers:
        answers = [[getattr(row, key) for key in ANSWERS.values()] for row in results.answers]
        title = f"greedy answers of {results.answers[0].tokens} tokens next to the full cache's"
        console.print(make_table(tuple(ANSWERS), answers, title))


def _draw(results: "Results", stem: Path) -> None:
    from triptych.workers.quality.plot import draw

    for path in draw(results.rows, results.rows[-1].context, stem):
        notes.print(f"wrote {path}", markup=False, soft_wrap=True)
