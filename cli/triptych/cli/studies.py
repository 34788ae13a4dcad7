"""Runs a study of quality with a bar for every method."""

from typing import TYPE_CHECKING

from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TaskID,
    TextColumn,
    TimeElapsedColumn,
)

from triptych.cli.output import notes

if TYPE_CHECKING:
    from triptych.workers.quality.study import Results, Study


def run_with_progress(study: "Study") -> "Results":
    """Run, with a bar for every method on a terminal."""
    from triptych.workers.quality.study import measure, prepare, report

    bars = Progress(
        TextColumn("{task.description:>24}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        console=notes,
        disable=not notes.is_terminal,
    )
    ids = dict[str, TaskID]()

    def announce(name: str, cases: int) -> None:
        ids[name] = bars.add_task(name, total=cases)

    prepared = prepare(study)
    with bars:
        records = measure(prepared, lambda name, count: bars.advance(ids[name], count), announce)
    return report(prepared, records)
