"""``triptych kernels``: compile the GPU kernels ahead of time, on a machine without a GPU."""

import os
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from triptych.cli.output import console, make_table, notes, progress_bars, write_json

if TYPE_CHECKING:
    from triptych.kernels.codegen.aot import Compiled, Task

app = typer.Typer(help="Check the GPU kernels.", no_args_is_help=True)

COLUMNS = {
    "kernel": "kernel",
    "variant": "variant",
    "target": "target",
    "registers": "registers",
    "spill B": "spill_bytes",
    "shared B": "shared_bytes",
    "I2F": "i2f",
    "warps": "warps",
    "stages": "stages",
}


@app.callback()
def group() -> None:
    """Check the GPU kernels."""


@app.command("check")
def check(
    target: Annotated[
        list[str] | None, typer.Option(help="As sm_90 or gfx942; may be repeated. Default: all.")
    ] = None,
    quick: Annotated[
        bool, typer.Option("--quick", help="Compile only the most common variants of each kernel.")
    ] = False,
    jobs: Annotated[
        int, typer.Option(min=1, help="Number of compiler processes; default: one per core.")
    ] = os.cpu_count() or 1,
    json_file: Annotated[
        Path | None, typer.Option("--json", help="Write the rows to this file.")
    ] = None,
) -> None:
    """Compile all Triton kernels for several GPUs, and show registers, spills and shared memory.

    Needs no GPU. Triton caches the compiled kernels, so a second run is fast. Exit code 1 if a
    kernel spills more registers to memory than it may.
    """
    from triptych.kernels.codegen.aot import TARGETS, tasks

    made = compile_with_progress(tasks(target or list(TARGETS), quick=quick), jobs)
    rows = [asdict(row) for row in made]
    if json_file:
        write_json({"rows": rows}, json_file)
    console.print(
        make_table(tuple(COLUMNS), [[row[at] for at in COLUMNS.values()] for row in rows])
    )
    spilled = [row for row in made if row.spill_bytes > row.spill_limit]
    for row in spilled:
        notes.print(f"{row.kernel} {row.variant} spills {row.spill_bytes} B on {row.target}")
    if spilled:
        raise typer.Exit(1)


def compile_with_progress(wanted: Sequence["Task"], jobs: int) -> list["Compiled"]:
    """Compile with a bar on a terminal; sorted by kernel, variant and target."""
    from triptych.kernels.codegen.aot import compile_all

    made = list["Compiled"]()
    with progress_bars(9) as bars:
        bar = bars.add_task("compiling", total=len(wanted))
        for compiled in compile_all(wanted, jobs):
            made.append(compiled)
            bars.advance(bar)
    return sorted(made, key=lambda row: (row.kernel, row.variant, row.target))
