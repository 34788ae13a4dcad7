"""Runs a study of quality with a bar for every method."""

from typing import TYPE_CHECKING

from rich.progress import TaskID

from triptych.cli.output import progress_bars

if TYPE_CHECKING:
    from triptych.workers.quality.study import Results, Study


def run_with_progress(study: "Study") -> "Results":
    """Run, with a bar for every method on a terminal."""
    from triptych.workers.quality.study import measure, prepare, report

    bars = progress_bars(24)
    ids = dict[str, TaskID]()

    def announce(name: str, cases: int) -> None:
        ids[name] = bars.add_task(name, total=cases)

    prepared = prepare(study)
    with bars:
        records = measure(prepared, lambda name, count: bars.advance(ids[name], count), announce)
    return report(prepared, records)
