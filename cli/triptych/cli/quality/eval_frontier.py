"""``triptych eval frontier``: all compression methods on one plane of bytes and fidelity."""

from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal, cast

import typer

from triptych.cli.list_options import integers, names
from triptych.cli.output import console, make_table, notes, progress_bars, write_json
from triptych.core.config import AppConfig, ModelConfig
from triptych.loadgen.report.host import host_info

if TYPE_CHECKING:
    from triptych.evals.frontier.frontier_rows import FrontierRow, OverlapRow, TimeRow
    from triptych.evals.frontier.frontier_study import Part, PreparedFrontier
    from triptych.evals.frontier.record_file import RecordFile

PLANE = ("method", "context", "all-in", "KL", "95 %", "top-1", "perplexity ratio", "pass keys")
OVERLAP = ("method", "identical", "BLEU", "ROUGE-1", "ROUGE-L")


def frontier(
    methods: Annotated[
        str,
        typer.Option(
            help="Methods as in `eval quality`, comma-separated; baselines with +keep=; default: "
            "all that are served, and baselines at two shares."
        ),
    ] = "",
    model: Annotated[str, typer.Option(help="Model name or path.")] = ModelConfig().name,
    contexts: Annotated[
        str, typer.Option(help="Context lengths in tokens, comma-separated.")
    ] = "1024,4096",
    documents: Annotated[int, typer.Option(min=1, help="Texts per context length.")] = 8,
    steps: Annotated[int, typer.Option(min=1, help="Tokens scored after each context.")] = 64,
    answer_tokens: Annotated[
        int, typer.Option(min=2, help="Tokens of greedy answers at the shortest context.")
    ] = 128,
    parts: Annotated[
        str,
        typer.Option(
            help="What is measured: texts (with pass keys), answers (BLEU and ROUGE), times (of "
            "the compressor, on an idle machine)."
        ),
    ] = "texts,answers,times",
    split: Annotated[
        Literal["evaluation", "test"],
        typer.Option(help="Texts; no setting was chosen on those of test."),
    ] = "test",
    seed: Annotated[int, typer.Option(min=0, help="Seed of pass keys and text offsets.")] = 0,
    records: Annotated[
        Path,
        typer.Option(
            help="File to which each result is added as it comes; a study that is stopped goes on."
        ),
    ] = Path("frontier.jsonl"),
    json_file: Annotated[
        Path | None, typer.Option("--json", help="Write the rows to this file.")
    ] = None,
    plot: Annotated[
        Path | None, typer.Option(help="Plot KL against bytes to PATH.png and PATH.svg.")
    ] = None,
) -> None:
    """Compare all compression methods at their bytes: fidelity, pass keys, answers and times.

    Each document has a pass key in its context, which is asked for after its continuation. The
    same command with the same --records goes on where it was stopped; more --methods are added.
    """
    from triptych.evals.frontier.frontier_rows import frontier_rows, overlap_rows, time_rows
    from triptych.evals.frontier.frontier_study import FRONTIER, FrontierStudy, prepare_frontier
    from triptych.evals.frontier.record_file import RecordFile

    study = FrontierStudy(
        model=model,
        methods=tuple(names(methods)) or FRONTIER,
        base=AppConfig(),
        parts=cast("tuple[Part, ...]", tuple(names(parts))),  # checked by the study
        contexts=tuple(integers(contexts)),
        documents=documents,
        steps=steps,
        answer_tokens=answer_tokens,
        split=split,
        seed=seed,
    )
    host, file = host_info(), RecordFile(records)
    prepared = prepare_frontier(study)
    _run(prepared, file)
    rows = frontier_rows(prepared, file.probes())
    overlaps = overlap_rows(prepared, file.probes())
    times = time_rows(prepared, file.times())
    if json_file:
        body = {
            "host": host,
            "conditions": prepared.conditions,
            "rows": [row.as_json() for row in rows],
            "answers": [asdict(row) for row in overlaps],
            "times": [row.as_json() for row in times],
        }
        write_json(body, json_file)
    _show(rows, overlaps, times)
    if plot:
        from triptych.evals.frontier.frontier_plot import plot_frontier

        for path in plot_frontier(rows, plot):
            notes.print(f"wrote {path}", markup=False, soft_wrap=True)


def _run(prepared: "PreparedFrontier", file: "RecordFile") -> None:
    from triptych.evals.frontier.frontier_study import run_frontier

    bars = progress_bars(24)
    ids = {name: bars.add_task(name, total=total) for name, total in prepared.units().items()}
    with bars:
        run_frontier(prepared, file, lambda name: bars.advance(ids[name]))


def _show(
    rows: "Sequence[FrontierRow]",
    overlaps: "Sequence[OverlapRow]",
    times: "Sequence[TimeRow]",
) -> None:
    console.print(make_table(PLANE, [_plane(row) for row in rows]))
    if overlaps:
        title = f"greedy answers of {overlaps[0].tokens} tokens next to the full cache's"
        lines = [(r.method, r.identical, r.bleu, r.rouge_1, r.rouge_l) for r in overlaps]
        console.print(make_table(OVERLAP, lines, title))
    if times:
        batches = sorted(times[0].us_per_token)
        head = ("method", *(f"batch {batch}" for batch in batches), "share of prefill")
        title = f"microseconds per token to compress prompts of {times[0].context} tokens"
        lines = [
            (row.method, *(row.us_per_token[batch] for batch in batches), row.share_of_prefill)
            for row in times
        ]
        console.print(make_table(head, lines, title))


def _plane(row: "FrontierRow") -> tuple[object, ...]:
    summary = row.summary
    interval = "" if summary.kl_ci95 is None else "{:.2g} to {:.2g}".format(*summary.kl_ci95)
    return (
        row.method,
        row.context,
        row.bytes_all_in_ratio,
        summary.kl,
        interval,
        summary.top1_agreement,
        summary.perplexity_ratio,
        row.passkeys,
    )
