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
CLAIMS = ("part", "paper", "claim", "holds", "number, and where it holds", "mean", "95 %", "draws")
FIGURES = ("part", "figure", "mean", "+-", "95 %")


def claims(
    parts: Annotated[
        str,
        typer.Option(
            help="Parts, comma-separated: ranges (orders of magnitude of attention and of values), "
            "critical (tokens with 95 % of the attention), sparsity (tokens by head or over all "
            "heads), classes (high, low and dropped tokens, waste of pages), four_levels, memory "
            "(of scorers), drift (errors in long answers), products (of integers), ablation; "
            "empty: all."
        ),
    ] = "",
    model: Annotated[str, typer.Option(help="Model name or path.")] = DEFAULT_MODEL,
    seeds: Annotated[int, typer.Option(min=2, max=20, help="Number of draws of texts.")] = 5,
    context: Annotated[int, typer.Option(min=128, help="Context length in tokens.")] = 1024,
    documents: Annotated[int, typer.Option(min=1, help="Texts of each draw.")] = 4,
    steps: Annotated[int, typer.Option(min=2, help="Tokens measured after each text.")] = 64,
    answer_tokens: Annotated[
        int, typer.Option(min=8, help="Tokens of the answers of drift.")
    ] = 1024,
    scorer_tokens: Annotated[
        int, typer.Option(min=128, help="Tokens of the prompts of memory.")
    ] = 2048,
    split: Annotated[
        Literal["calibration", "evaluation", "test"],
        typer.Option(help="Texts to draw from."),
    ] = "evaluation",
    ablation_documents: Annotated[
        int, typer.Option(min=1, help="Texts of each draw in the ablation (41 methods).")
    ] = 1,
    quick: Annotated[
        bool,
        typer.Option(
            "--quick",
            help="Instead of the sizes above: 3 seeds, 2 documents, 32 steps, 256 answer tokens "
            "and 1,024 scorer tokens.",
        ),
    ] = False,
    json_file: Annotated[
        Path | None,
        typer.Option(
            "--json",
            help="Write claims and figures to this file, after each part of each draw. If the file "
            "is there, only what it lacks is measured; it has to be of the same options.",
        ),
    ] = None,
) -> None:
    """Measure what LeanKV and DiffKV claim about attention, tokens, bytes and long answers.

    The first table has each claim with its paper and one number. A claim holds (yes) if the 95 %
    interval of its number is on the claimed side of a bound, does not (no) if it is on the other
    side, and is open otherwise. The second table has all figures. Means, deviations and intervals
    are over the seeds, which differ in texts.
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
    from triptych.evals.claims.verdicts import verdicts

    claimed = [
        (
            *(one.part, one.paper, one.claim, one.holds, one.number),
            *(one.mean, _interval(one.ci95), one.draws),
        )
        for one in verdicts(found)
    ]
    if claimed:
        console.print(make_table(CLAIMS, claimed, "What the papers claim, on this model"))
    lines = [
        (
            *(figure.part, figure.name),
            *(figure.stats.mean, figure.stats.deviation),
            _interval(figure.stats.ci95),
        )
        for figure in found.figures
    ]
    if lines:
        console.print(make_table(FIGURES, lines, "+- is the deviation of a draw"))
    if found.ablation is not None:
        show_ablated(found.ablation)


def _interval(ci95: tuple[float, float]) -> str:
    return "{:.3g} to {:.3g}".format(*ci95)
