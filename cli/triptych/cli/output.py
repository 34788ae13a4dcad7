"""Output of all commands: tables, JSON, progress bars and result files."""

import json
import sys
from collections.abc import Generator, Iterable, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any, TypeVar

import typer
from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TaskID,
    TextColumn,
    TimeElapsedColumn,
)
from rich.table import Table

PIPE_WIDTH = 160

console = Console(highlight=False, width=None if sys.stdout.isatty() else PIPE_WIDTH)
"""Standard output; without colours if it is not a terminal."""

notes = Console(stderr=True, highlight=False)
"""Standard error: progress, hints and errors."""

JsonFlag = Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")]


def show(data: object, table: Table, *, as_json: bool) -> None:
    """Print ``data`` as JSON, or ``table``."""
    if as_json:
        typer.echo(json.dumps(data, indent=2))
    else:
        console.print(table)


def make_table(columns: Sequence[str], rows: Iterable[Sequence[object]], title: str = "") -> Table:
    """A table without borders; numeric columns after the first are right-aligned."""
    table = Table(title=title or None, box=None, title_justify="left", header_style="bold")
    content = [list(row) for row in rows]
    for at, name in enumerate(columns):
        numeric = at > 0 and all(_is_numeric(row[at]) for row in content)
        table.add_column(name, justify="right" if numeric else "left", overflow="fold")
    for row in content:
        table.add_row(*(_text(value) for value in row))
    return table


class Lines(Progress):
    """Progress without a terminal: one line for each finished task."""

    def advance(self, task_id: TaskID, advance: float = 1) -> None:
        with self._report_finished(task_id):
            super().advance(task_id, advance)

    def update(self, task_id: TaskID, **fields: Any) -> None:
        with self._report_finished(task_id):
            super().update(task_id, **fields)

    @contextmanager
    def _report_finished(self, task_id: TaskID) -> Generator[None]:
        task = next(task for task in self.tasks if task.id == task_id)
        was_finished = task.finished
        yield
        if task.finished and not was_finished:
            line = f"{task.description}: {task.total:g} in {task.finished_time:.1f} s"
            self.console.print(line, markup=False, soft_wrap=True)


def progress_bars(name_width: int) -> Progress:
    """Progress bars with count and elapsed time; one line per task without a terminal."""
    columns = (
        TextColumn(f"{{task.description:>{name_width}}}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
    )
    if notes.is_terminal:
        return Progress(*columns, console=notes)
    return Lines(*columns, console=notes, disable=True)


def write_json(data: object, path: Path) -> None:
    """Write a result file atomically."""
    partial = path.with_name(path.name + ".partial")
    path.parent.mkdir(parents=True, exist_ok=True)
    partial.write_text(json.dumps(data, indent=1) + "\n", encoding="utf-8")
    partial.replace(path)


def _is_numeric(value: object) -> bool:
    return value is None or isinstance(value, int | float)


def _text(value: object) -> str:
    if value is None:
        return "-"
    if isinstance(value, float):
        return f"{value:.3g}" if abs(value) < 100 else f"{value:.0f}"
    return str(value)


T = TypeVar("T")


def renamed_option(old: str, given: T | None, new: str, value: T) -> T:
    """The value of a renamed option; prints a note on stderr if the old name was used."""
    if given is None:
        return value
    notes.print(f"{old} is now {new}; the old name goes with the next release", style="yellow")
    return given
