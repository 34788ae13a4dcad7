"""Runs a study of quality with a bar for every method."""

from typing import TYPE_CHECKING

from rich.progress import TaskID

from triptych.cli.output import progress_bars

if TYPE_CHECKING:
    from triptych.evals.studies.ablation import Ablation, AblationResults
    from triptych.evals.studies.study import Results, Study


def run_with_progress(study: "Study") -> "Results":
    """Run, with a bar for every method on a terminal."""
    from triptych.evals.studies.study import measure, prepare, report

    bars = progress_bars(24)
    ids = dict[str, TaskID]()

    def announce(name: str, cases: int) -> None:
        ids[name] = bars.add_task(name, total=cases)

    prepared = prepare(study)
    with bars:
        records = measure(prepared, lambda name, count: bars.advance(ids[name], count), announce)
    return report(prepared, records)


def ablate_with_progress(plan: "Ablation") -> "AblationResults":
    """Run, with a bar for the texts and one for the tasks of every draw on a terminal."""
    from triptych.evals.studies.ablation import ablate

    bars = progress_bars(24)
    ids = dict[str, TaskID]()

    def begin(name: str, cases: int) -> None:
        ids[name] = bars.add_task(name, total=cases)

    with bars:
        return ablate(plan, begin, lambda name, count: bars.advance(ids[name], count))
