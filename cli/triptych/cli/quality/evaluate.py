"""``triptych eval``: what compression costs in quality."""

import time
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, cast

import typer

from triptych.cli.list_options import integers, words, words_or_none
from triptych.cli.output import console, make_table, notes, write_json
from triptych.cli.quality.studies import ablate_with_progress, run_with_progress
from triptych.cli.serving.serve_file import read_serve_file
from triptych.core.config import AppConfig, DType
from triptych.loadgen.report.host import host_info

if TYPE_CHECKING:
    from triptych.evals.studies.ablation import AblationResults, SeedStats
    from triptych.evals.studies.study import Results

app = typer.Typer(help="Measure what compression costs in quality.", no_args_is_help=True)

COLUMNS = {
    "method": "method",
    "context": "context",
    "data": "bytes_data_ratio",
    "all-in": "bytes_all_in_ratio",
    "hit": "attention_hit",
    "KL": "kl",
    "KL p99": "kl_p99",
    "top-1": "top1_agreement",
    "perplexity": "perplexity",
    "ratio": "perplexity_ratio",
}
INTERVALS = {
    "KL 95 %": "kl_ci95",
    "top-1 95 %": "top1_ci95",
    "KL - KL of first, 95 %": "kl_over_first_ci95",
}
"""Bootstrap intervals over documents; the last is paired with the first method besides full."""
ANSWERS = {
    "method": "method",
    "context": "context",
    "identical": "identical",
    "parted after": "first_divergence",
    "BLEU": "bleu",
    "ROUGE-L": "rouge_l",
}
QUICK_CONTEXTS = "1024"
POINTS = ("axis", "setting", "read", "hit", "KL", "+-", "95 %", "top-1", "+-", "perplexity", "+-")


@app.callback()
def options() -> None:
    """Measure what compression costs in quality."""


@app.command("quality")
def quality(
    methods: Annotated[
        str, typer.Option(help="As in default,uniform:k8v4,simulated:k4v8; all baselines if empty.")
    ] = "",
    baselines: Annotated[
        bool,
        typer.Option(
            "--baselines",
            help="Add StreamingLLM, SnapKV, H2O, Quest, ... at the bytes of the first method.",
        ),
    ] = False,
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
    seed: Annotated[
        int, typer.Option(min=0, help="Of the tasks; above 0, of where texts are cut, too.")
    ] = 0,
    intervals: Annotated[
        bool, typer.Option("--intervals", help="Show 95 % intervals over documents.")
    ] = False,
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
    from triptych.evals.methods.baselines import BASELINES
    from triptych.evals.studies.study import Study

    named = words(methods) or (["default"] if profile or baselines else [])
    named += BASELINES if baselines else ()
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
        tasks=() if quick else words_or_none(tasks),
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
    show_results(results, intervals=intervals)
    if plot:
        _draw(results, plot)


def show_results(results: "Results", *, intervals: bool = False) -> None:
    """Print a table of the texts, and one each of tasks and answers if there are any."""
    lines = [[row.as_json()[key] for key in COLUMNS.values()] for row in results.rows]
    console.print(make_table(tuple(COLUMNS), lines))
    if intervals and results.rows:
        title = f"95 % intervals, bootstrap over {results.rows[0].summary.documents} documents"
        names = ("method", "context", "KL", *INTERVALS)
        console.print(make_table(names, [_intervals(row.as_json()) for row in results.rows], title))
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


def _intervals(row: Mapping[str, object]) -> list[object]:
    return [
        row["method"],
        row["context"],
        row["kl"],
        *(_range(row[key]) for key in INTERVALS.values()),
    ]


def _range(interval: object) -> str:
    """An interval as text; empty for a single document."""
    if interval is None:
        return ""
    low, high = cast("tuple[float, float]", interval)
    return f"{low:.3g} to {high:.3g}"


def _draw(results: "Results", stem: Path) -> None:
    from triptych.evals.studies.plot import plot_quality

    for path in plot_quality(results.rows, results.rows[-1].context, stem):
        notes.print(f"wrote {path}", markup=False, soft_wrap=True)


@app.command("ablate")
def ablate_command(
    axes: Annotated[
        str, typer.Option(help="What is changed, one at a time; 'none' for the tasks alone.")
    ] = "page,keep,rank,dense,reading,compressor",
    model: Annotated[str, typer.Option(help="Name or path.")] = "",
    seeds: Annotated[int, typer.Option(help="Draws of texts and tasks.")] = 5,
    context: Annotated[int, typer.Option(min=2, help="Tokens that are compressed.")] = 1024,
    documents: Annotated[int, typer.Option(min=1, help="Texts of each draw.")] = 2,
    steps: Annotated[int, typer.Option(min=1, help="Tokens scored after each text.")] = 64,
    tasks: Annotated[
        str, typer.Option(help="Generated tasks; 'none' for none.")
    ] = "passkey,repetition,rare,aliasing",
    methods: Annotated[
        str,
        typer.Option(help="Methods that get the tasks; the default and all baselines if empty."),
    ] = "",
    task_context: Annotated[int, typer.Option(min=1, help="Tokens of a task's prompt.")] = 1024,
    task_count: Annotated[int, typer.Option(min=1, help="Tasks of each kind and draw.")] = 2,
    json_file: Annotated[
        Path | None, typer.Option("--json", help="Write the figures here.")
    ] = None,
    plot: Annotated[
        Path | None, typer.Option(help="Draw KL along each axis: PATH.png and PATH.svg.")
    ] = None,
) -> None:
    """Change one setting at a time: page size, share that is read, ranking, and parts on or off.

    Means, deviations and 95 % intervals are over the draws, which differ in texts and tasks.
    """
    from triptych.evals.studies.ablation import DIAGNOSED, Ablation

    plan = Ablation(
        model=model,
        axes=words_or_none(axes),
        seeds=seeds,
        context=context,
        documents=documents,
        steps=steps,
        tasks=words_or_none(tasks),
        methods=tuple(words(methods)) or DIAGNOSED,
        task_context=task_context,
        task_count=task_count,
    )
    host = host_info()
    started = time.monotonic()
    found = ablate_with_progress(plan)
    if json_file:
        seconds = {"seconds": round(time.monotonic() - started, 1)}
        write_json({"host": host, **seconds, **found.as_json()}, json_file)
    _show_ablated(found)
    if plot:
        from triptych.evals.studies.plot import plot_axes

        for path in plot_axes(found.points, plot):
            notes.print(f"wrote {path}", markup=False, soft_wrap=True)


def _show_ablated(found: "AblationResults") -> None:
    lines = [
        (
            point.axis,
            point.setting,
            point.bytes_read_ratio,
            point.attention_hit.mean if point.attention_hit else None,
            *(point.kl.mean, point.kl.deviation, _interval(point.kl)),
            *(point.top1_agreement.mean, point.top1_agreement.deviation),
            *(point.perplexity_ratio.mean, point.perplexity_ratio.deviation),
        )
        for point in found.points
    ]
    if lines:
        title = (
            "KL to the full cache, agreement and perplexity ratio; +- is the deviation of a draw"
        )
        console.print(make_table(POINTS, lines, title))
    if found.scores:
        kinds = list(dict.fromkeys(score.task for score in found.scores))
        by_name = {(score.method, score.task): score.score for score in found.scores}
        names = list(dict.fromkeys(score.method for score in found.scores))
        table = [[name, *(_with_reach(by_name[name, kind]) for kind in kinds)] for name in names]
        title = f"share of right answers, {found.scores[0].cases} of each, 95 % interval"
        console.print(make_table(("method", *kinds), table, title))


def _interval(stats: "SeedStats") -> str:
    return _range(stats.ci95)


def _with_reach(stats: "SeedStats") -> str:
    return f"{stats.mean:.2f} +- {stats.ci95[1] - stats.mean:.2f}"
