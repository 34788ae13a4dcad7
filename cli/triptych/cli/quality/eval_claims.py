"""``triptych eval claims``: what LeanKV and DiffKV claim, measured on a model."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer
from rich.progress import TaskID

from triptych.cli.list_options import names
from triptych.cli.output import console, make_table, progress_bars
from triptych.cli.quality.evaluate import show_ablated
from triptych.core.config import ModelConfig

if TYPE_CHECKING:
    from triptych.evals.claims.claims_results import ClaimsResults

DEFAULT_MODEL = ModelConfig().name
COLUMNS = ("part", "figure", "mean", "+-", "95 %")


def claims(
    parts: Annotated[
        str,
        typer.Option(
            help="Parts, comma-separated: ranges, critical, sparsity, classes, four_levels, "
            "memory, drift, products, ablation; empty: all."
        ),
    ] = "",
    model: Annotated[str, typer.Option(help="Model name or path.")] = DEFAULT_MODEL,
    seeds: Annotated[int, typer.Option(help="Number of draws of texts.")] = 5,
    context: Annotated[int, typer.Option(min=128, help="Context length in tokens.")] = 1024,
    documents: Annotated[int, typer.Option(min=1, help="Texts per seed.")] = 4,
    steps: Annotated[int, typer.Option(min=2, help="Tokens measured after each text.")] = 64,
    answer_tokens: Annotated[
        int, typer.Option(min=8, help="Tokens of the long answers (drift).")
    ] = 1024,
    scorer_tokens: Annotated[
        int, typer.Option(min=128, help="Tokens of the prompt whose memory is measured.")
    ] = 2048,
    split: Annotated[
        Literal["calibration", "evaluation", "test"], typer.Option(help="Texts.")
    ] = "evaluation",
    ablation_documents: Annotated[
        int, typer.Option(min=1, help="Texts per seed in the ablation, which runs most methods.")
    ] = 1,
    quick: Annotated[
        bool,
        typer.Option(
            "--quick",
            help="Three draws of two texts, answers of 256 tokens and prompts of 1,024 tokens.",
        ),
    ] = False,
    json_file: Annotated[
        Path | None,
        typer.Option(
            "--json",
            help="Write the figures to this file, after each part of each draw; a run that was "
            "stopped continues with the same options.",
        ),
    ] = None,
) -> None:
    """Measure what LeanKV and DiffKV claim about attention, tokens, bytes and long answers.

    Means, deviations and 95 % intervals are over the seeds, which differ in texts.
    """
    from triptych.cli.quality.claims_file import ClaimsFile
    from triptych.evals.claims.claims_study import ClaimsStudy, measure_claims

    study = ClaimsStudy(
        model=model,
        parts=tuple(names(parts)),
        seeds=seeds,
        context=context,
        documents=documents,
        steps=steps,
        answer_tokens=answer_tokens,
        scorer_tokens=scorer_tokens,
        ablation_documents=ablation_documents,
        split=split,
    )
    study = study.quick() if quick else study
    file = ClaimsFile.open(json_file, study.conditions)
    bars = progress_bars(24)
    ids = dict[str, TaskID]()

    def begin(name: str, count: int) -> None:
        ids[name] = bars.add_task(name, total=count)

    with bars:
        found = measure_claims(
            study,
            file.known,
            begin,
            lambda name, count: bars.advance(ids[name], count),
            file.write,
        )
    _show(found)


def _show(found: "ClaimsResults") -> None:
    lines = [
        (
            figure.part,
            figure.name,
            figure.stats.mean,
            figure.stats.deviation,
            "{:.3g} to {:.3g}".format(*figure.stats.ci95),
        )
        for figure in found.figures
    ]
    if lines:
        console.print(make_table(COLUMNS, lines, "+- is the deviation of a draw"))
    if found.ablation is not None:
        show_ablated(found.ablation)
