"""``triptych kernels``: compile the GPU kernels ahead of time, on a machine without a GPU."""

import os
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from triptych.cli.output import console, make_table, notes, progress_bars, write_json
from triptych.loadgen.report.host import host_info

if TYPE_CHECKING:
    from triptych.kernels.codegen.aot import Compiled, Task

app = typer.Typer(help="Check the GPU kernels.", no_args_is_help=True)

COLUMNS = (
    *("kernel", "variant", "target", "registers", "spill B", "shared B", "warps", "stages"),
    *("load B", "instructions per token", "TB/s"),
)


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
    every: Annotated[
        bool, typer.Option("--all", help="Compile every variant, six times as many.")
    ] = False,
    jobs: Annotated[
        int, typer.Option(min=1, help="Number of compiler processes; default: one per core.")
    ] = os.cpu_count() or 1,
    json_file: Annotated[
        Path | None, typer.Option("--json", help="Write the rows to this file.")
    ] = None,
) -> None:
    """Compile all Triton kernels for several GPUs, and show registers, spills and instructions.

    By default in the variants that engines run for the default methods: heads of 128 channels, four
    query heads for each KV head. Needs no GPU. Triton caches the compiled kernels, so a second run
    is fast. For loops of attention: the narrowest load of a lane, the instructions of warps for
    each token of a KV head (and query of a prompt), and the TB/s that the loop would read if every
    issue slot were used. For each of NVIDIA's targets: instructions of prefill attention beside
    FlashAttention-2. Exit code 1 if a kernel exceeds a limit on these, or spills more registers to
    memory than it may.
    """
    from triptych.kernels.codegen.aot import TARGETS, tasks
    from triptych.kernels.codegen.gates import failed_gates, over_flash

    if quick and every:
        raise typer.BadParameter("--quick and --all exclude each other: give one of them")
    host = host_info()
    extent = "quick" if quick else "all" if every else "served"

    def write(rows: Sequence["Compiled"]) -> None:
        if json_file:
            write_json({"host": host, "rows": [row.as_json() for row in rows]}, json_file)

    made = compile_with_progress(tasks(target or list(TARGETS), extent), jobs, write)
    console.print(make_table(COLUMNS, [_cells(row) for row in made]))
    for one in over_flash(made):
        console.print(str(one), markup=False)
    failed = list(failed_gates(made))
    for sentence in failed:
        notes.print(sentence, markup=False)
    if failed:
        raise typer.Exit(1)


def _cells(row: "Compiled") -> tuple[object, ...]:
    reading = [one for one in row.passes if one.per_token is not None]
    return (
        *(row.kernel, row.variant, row.target, row.registers, row.spill_bytes, row.shared_bytes),
        *(row.warps, row.stages, row.narrowest_load or "-"),
        ", ".join(f"{one.reads} {one.per_token:.3g}" for one in reading),
        ", ".join(f"{one.bytes_per_s(row.target) / 1e12:.1f}" for one in reading),
    )


def compile_with_progress(
    wanted: Sequence["Task"],
    jobs: int,
    on_target: "Callable[[list[Compiled]], object]" = lambda _rows: None,
) -> list["Compiled"]:
    """Compile with a bar for each target, or a line without a terminal; sorted by kernel.

    ``on_target``: called with all rows so far when those of a target are complete.
    """
    from triptych.kernels.codegen.aot import compile_all

    made, left = list["Compiled"](), Counter(task.target for task in wanted)
    with progress_bars(9) as bars:
        names = {name: bars.add_task(name, total=count) for name, count in left.items()}
        for compiled in compile_all(wanted, jobs):
            made.append(compiled)
            bars.advance(names[compiled.target])
            left[compiled.target] -= 1
            if not left[compiled.target]:
                made.sort(key=lambda row: (row.kernel, row.variant, row.target))
                on_target(made)
    return made
