"""``triptych eval``: measure the quality of compressed caches."""

import time
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal, cast

import typer

from triptych.cli.list_options import integers, names, names_or_none
from triptych.cli.output import console, make_table, notes, write_json
from triptych.cli.quality.studies import ablate_with_progress, run_with_progress
from triptych.cli.serving.serve_file import read_serve_file
from triptych.core.config import AppConfig, DType
from triptych.loadgen.report.host import host_info

if TYPE_CHECKING:
    from triptych.evals.studies.ablation import AblationResults, SeedStats
    from triptych.evals.studies.study import Results

app = typer.Typer(help="Measure the quality of compressed caches.", no_args_is_help=True)

COLUMNS = {
    "method": "method",
    "context": "context",
    "data": "bytes_data_ratio",
    "all-in": "bytes_all_in_ratio",
    "hit": "attention_hit",
    "certain": "attention_hit_bound",
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
    "ROUGE-1": "rouge_1",
    "ROUGE-L": "rouge_l",
}
QUICK_CONTEXTS = "1024"
SplitName = Literal["calibration", "evaluation", "test"]
"""As ``evals.data.texts.Split``, which is slow to import."""
POINTS = (
    *("axis", "setting", "read", "held", "hit", "us", "KL", "+-", "95 %"),
    *("top-1", "+-", "perplexity", "+-", "neutral"),
)


@app.callback()
def options() -> None:
    """Measure the quality of compressed caches."""


@app.command("quality")
def quality(
    methods: Annotated[
        str,
        typer.Option(
            help="Methods, comma-separated, such as default,uniform:k8v4; default: standard set."
        ),
    ] = "",
    baselines: Annotated[
        bool,
        typer.Option(
            "--baselines",
            help="Add StreamingLLM, SnapKV, H2O, Quest, ... at the bytes of the first method.",
        ),
    ] = False,
    profile: Annotated[
        str,
        typer.Option(help="Evaluate only these settings: 'default', or a Ray Serve config file."),
    ] = "",
    model: Annotated[
        str, typer.Option(help="Model name or path; default: that of the settings.")
    ] = "",
    contexts: Annotated[
        str, typer.Option(help="Context lengths in tokens, comma-separated.")
    ] = "1024,2048,4096",
    documents: Annotated[int, typer.Option(min=1, help="Texts per context length.")] = 6,
    steps: Annotated[int, typer.Option(min=1, help="Tokens scored after each context.")] = 128,
    split: Annotated[
        SplitName,
        typer.Option(
            help="Texts: calibration (to choose settings), evaluation (to compare during "
            "development) or test (to report; no setting was chosen on it)."
        ),
    ] = "evaluation",
    calibration: Annotated[
        bool, typer.Option("--calibration", help="The same as --split calibration.")
    ] = False,
    dtype: Annotated[DType, typer.Option(help="Data type of the engines.")] = "float32",
    tasks: Annotated[
        str, typer.Option(help="Synthetic tasks, comma-separated; 'none': no tasks.")
    ] = "passkey,needles,repetition,rare,aliasing",
    task_context: Annotated[
        int, typer.Option(min=1, help="Prompt length of a task in tokens.")
    ] = 1024,
    task_count: Annotated[int, typer.Option(min=1, help="Number of tasks per kind.")] = 8,
    greedy_tokens: Annotated[
        int,
        typer.Option(
            min=0, help="Tokens of greedy answers at the shortest context; 0: no answers."
        ),
    ] = 256,
    seed: Annotated[
        int, typer.Option(min=0, help="Seed of the tasks; above 0 also of the text offsets.")
    ] = 0,
    intervals: Annotated[
        bool, typer.Option("--intervals", help="Show 95 % intervals over documents.")
    ] = False,
    quick: Annotated[
        bool,
        typer.Option("--quick", help="Only a context of 1,024 tokens, without tasks and answers."),
    ] = False,
    json_file: Annotated[
        Path | None, typer.Option("--json", help="Write the rows to this file.")
    ] = None,
    plot: Annotated[
        Path | None, typer.Option(help="Plot KL against bytes to PATH.png and PATH.svg.")
    ] = None,
) -> None:
    """Compare compressed caches with the full cache: KL, top-1 agreement, perplexity, bytes.

    A context is prefilled and compressed; the engines of the server then decode the rest of the
    text, teacher-forced. The reference is transformers in float32 with its full cache.
    """
    from triptych.evals.methods.baselines import BASELINES
    from triptych.evals.studies.study import Study

    named = names(methods) or (["default"] if profile or baselines else [])
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
        split="calibration" if calibration else split,
        tasks=() if quick else names_or_none(tasks),
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
    """Print tables of texts, tasks and greedy answers."""
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
        str, typer.Option(help="Settings to change, one at a time; 'none': only the tasks.")
    ] = "page,keep,rank,dense,reading,compressor",
    model: Annotated[str, typer.Option(help="Model name or path.")] = "",
    seeds: Annotated[int, typer.Option(help="Number of seeds for texts and tasks.")] = 5,
    context: Annotated[int, typer.Option(min=2, help="Context length in tokens.")] = 1024,
    documents: Annotated[int, typer.Option(min=1, help="Texts per seed.")] = 2,
    steps: Annotated[int, typer.Option(min=1, help="Tokens scored after each text.")] = 64,
    tasks: Annotated[
        str, typer.Option(help="Synthetic tasks, comma-separated; 'none': no tasks.")
    ] = "passkey,repetition,rare,aliasing",
    methods: Annotated[
        str,
        typer.Option(help="Methods for the tasks; default: our default and all baselines."),
    ] = "",
    task_context: Annotated[
        int, typer.Option(min=1, help="Prompt length of a task in tokens.")
    ] = 1024,
    task_count: Annotated[int, typer.Option(min=1, help="Tasks per kind and seed.")] = 2,
    json_file: Annotated[
        Path | None, typer.Option("--json", help="Write the figures to this file.")
    ] = None,
    plot: Annotated[
        Path | None, typer.Option(help="Plot KL along each axis to PATH.png and PATH.svg.")
    ] = None,
) -> None:
    """Ablation: change one setting at a time, such as page size, selected share or ranking.

    Means, deviations and 95 % intervals are over the seeds, which differ in texts and tasks.
    """
    from triptych.evals.studies.ablation import DIAGNOSED, Ablation

    plan = Ablation(
        model=model,
        axes=names_or_none(axes),
        seeds=seeds,
        context=context,
        documents=documents,
        steps=steps,
        tasks=names_or_none(tasks),
        methods=tuple(names(methods)) or DIAGNOSED,
        task_context=task_context,
        task_count=task_count,
    )
    host = host_info()
    started = time.monotonic()
    found = ablate_with_progress(plan)
    if json_file:
        seconds = {"seconds": round(time.monotonic() - started, 1)}
        write_json({"host": host, **seconds, **found.as_json()}, json_file)
    show_ablated(found)
    if plot:
        from triptych.evals.studies.plot import plot_axes

        for path in plot_axes(found.points, plot):
            notes.print(f"wrote {path}", markup=False, soft_wrap=True)


def show_ablated(found: "AblationResults") -> None:
    """Print a table of axes, and one of tasks."""
    lines = [
        (
            point.axis,
            point.setting,
            point.bytes_read_ratio,
            point.bytes_held_ratio,
            point.attention_hit.mean if point.attention_hit else None,
            point.attention_us,
            *(point.kl.mean, point.kl.deviation, _interval(point.kl)),
            *(point.top1_agreement.mean, point.top1_agreement.deviation),
            *(point.perplexity_ratio.mean, point.perplexity_ratio.deviation),
            "yes" if point.is_neutral else "no",
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
