# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false
# Triton's compiler is not typed.
"""Ahead-of-time compilation of all Triton kernels, for GPUs that need not be present.

It finds kernels that do not compile for a target, register spills, and slow conversions of
integers.
"""

import re
import subprocess
import tempfile
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import dataclass
from functools import cache
from multiprocessing import get_context
from pathlib import Path
from typing import NamedTuple

import triton
from triton.backends.compiler import GPUTarget
from triton.errors import TritonError

from triptych.core.errors import ConfigError, TriptychError
from triptych.kernels.codegen.variants import all_variants, usual_variants
from triptych.kernels.triton.launch import Launch, is_interpreted, planned_for

TARGETS = {
    "sm_80": GPUTarget("cuda", 80, 32),
    "sm_90": GPUTarget("cuda", 90, 32),
    "sm_100": GPUTarget("cuda", 100, 32),
    "gfx942": GPUTarget("hip", "gfx942", 64),
}


class Task(NamedTuple):
    """One kernel to compile, by name, since kernels cannot be pickled."""

    kernel: str
    variant: str
    """Formats, head size and other parameters of the specialisation."""
    target: str


@dataclass(frozen=True, slots=True)
class Compiled:
    """Resources of a compiled kernel."""

    kernel: str
    variant: str
    target: str
    registers: int
    """Registers of a thread; for AMD vector registers."""
    spill_bytes: int
    """Spilled bytes of a thread."""
    spill_limit: int
    """How many may spill."""
    shared_bytes: int
    """Shared memory of a block."""
    i2f: int | None
    """Conversions of integers to floats in the machine code; None for AMD."""
    warps: int
    stages: int


def tasks(targets: Sequence[str], *, quick: bool = False) -> list[Task]:
    """All kernels for all targets; ``quick``: only the usual variant of each kernel.

    Raises:  ConfigError for an unknown target, or where kernels are interpreted
    """
    if is_interpreted():
        raise ConfigError("kernels are interpreted, not compiled: unset TRITON_INTERPRET")
    for target in targets:
        if target not in TARGETS:
            raise ConfigError(f"no target {target!r} (have {', '.join(TARGETS)})")
    variants = usual_variants() if quick else all_variants()
    return [Task(*name, target) for target in targets for name in variants]


def compile_all(wanted: Sequence[Task], jobs: int = 1) -> Iterator[Compiled]:
    """Compile in ``jobs`` processes, in any order; Triton caches the results.

    Raises:  TriptychError if a kernel does not compile
    """
    if jobs == 1:
        yield from map(compile_one, wanted)
        return
    with ProcessPoolExecutor(jobs, get_context("spawn")) as pool:
        for done in as_completed([pool.submit(compile_one, task) for task in wanted]):
            yield done.result()


def compile_one(task: Task) -> Compiled:
    """Compile one task in this process."""
    variants = _variants(TARGETS[task.target].backend)
    return compile_launch(variants[task.kernel, task.variant], task)


@cache
def _variants(backend: str) -> dict[tuple[str, str], Launch]:
    with planned_for(backend):
        return all_variants()


def compile_launch(launch: Launch, task: Task) -> Compiled:
    """Compile one kernel for one target, and read its resources from the binary."""
    machine = TARGETS[task.target]
    options = launch.options(machine.backend)
    try:
        made = triton.compile(launch.source(), target=machine, options=options)
    except (TritonError, RuntimeError) as error:
        raise TriptychError(f"{' '.join(task)} does not compile: {error}") from error
    is_nvidia = machine.backend == "cuda"
    use = _read_cubin(made.asm["cubin"]) if is_nvidia else _read_amd(made.asm["amdgcn"])
    return Compiled(
        *task,
        registers=use[0],
        spill_bytes=use[1],
        spill_limit=launch.spill_bytes,
        shared_bytes=int(made.metadata.shared),
        i2f=use[2],
        warps=launch.warps,
        stages=launch.stages,
    )


def _read_cubin(cubin: bytes) -> tuple[int, int, int]:
    """Registers, stack bytes (all spilled, as kernels have no arrays), conversions of integers."""
    tools = Path(triton.__file__).parent / "backends" / "nvidia" / "bin"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        usage = _output(str(tools / "cuobjdump"), "--dump-resource-usage", file.name)
        code = _output(str(tools / "nvdisasm"), file.name)
    found = re.search(r"REG:(\d+) STACK:(\d+)", usage)
    if found is None:
        raise TriptychError(f"cuobjdump names no registers: {usage[-200:]!r}")
    return int(found[1]), int(found[2]), len(re.findall(r"\bI2F", code))


def _output(*command: str) -> str:
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout


def _read_amd(assembly: str) -> tuple[int, int, None]:
    """Registers and bytes of spilled vector registers, from the metadata of the assembly."""
    registers = re.search(r"\.vgpr_count:\s*(\d+)", assembly)
    spilled = re.search(r"\.vgpr_spill_count:\s*(\d+)", assembly)
    if registers is None or spilled is None:
        raise TriptychError("the assembly of an AMD kernel names no registers")
    return int(registers[1]), 4 * int(spilled[1]), None
