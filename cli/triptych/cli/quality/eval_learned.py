"""``triptych eval learned``: learned networks beside pruning, quantization and attention sums."""

import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from triptych.cli.list_options import names
from triptych.cli.output import console, make_table, progress_bars, write_json
from triptych.core.config import ModelConfig
from triptych.loadgen.report.host import host_info

if TYPE_CHECKING:
    from triptych.evals.studies.learned_study import LearnedResults

DEFAULT_MODEL = ModelConfig().name
COLUMNS = ("method", "data", "all-in", "output error", "KL", "95 %", "KL p99", "top-1")


def learned(
    scorer: Annotated[
        Path | None, typer.Option(help="File of a scorer (triptych train scorer).")
    ] = None,
    compressors: Annotated[
        str, typer.Option(help="Files of compressors, comma-separated (triptych train compressor).")
    ] = "",
    model: Annotated[str, typer.Option(help="Model name or path.")] = DEFAULT_MODEL,
    context: Annotated[int, typer.Option(min=128, help="Tokens that are compressed.")] = 1024,
    documents: Annotated[int, typer.Option(min=1, help="Number of texts.")] = 6,
    steps: Annotated[int, typer.Option(min=1, help="Tokens scored after each context.")] = 128,
    split: Annotated[
        Literal["evaluation", "test"],
        typer.Option(help="Texts; networks are trained on those of calibration."),
    ] = "evaluation",
    json_file: Annotated[
        Path | None, typer.Option("--json", help="Write all rows to this file.")
    ] = None,
) -> None:
    """Compare learned networks with pruning, quantization and attention sums at equal bytes.

    A scorer alone is compared with attention sums. Compressors are compared with mean pooling,
    pruning and quantization; with a scorer as well, they also run without attention sums.
    """
    from triptych.evals.studies.learned_study import LearnedStudy, run_learned_study

    study = LearnedStudy(
        model=model,
        scorer=scorer,
        mergers=tuple(Path(name) for name in names(compressors)),
        context=context,
        documents=documents,
        steps=steps,
        split=split,
    )
    host, started = host_info(), time.monotonic()
    bars = progress_bars(24)
    with bars:
        bar = bars.add_task("methods and documents", total=None)
        found = run_learned_study(
            study, lambda count: bars.update(bar, total=count), lambda: bars.advance(bar)
        )
    if json_file:
        seconds = {"seconds": round(time.monotonic() - started, 1)}
        write_json({"host": host, **seconds, **found.as_json()}, json_file)
    _show(found)


def _show(found: "LearnedResults") -> None:
    lines = [
        (
            row.method,
            row.bytes_data_ratio,
            row.bytes_all_in_ratio,
            row.output_error,
            row.summary.kl,
            "-".join(f"{end:.2g}" for end in row.summary.kl_ci95 or ()),
            row.summary.kl_p99,
            row.summary.top1_agreement,
        )
        for row in found.rows
    ]
    console.print(make_table(COLUMNS, lines))
