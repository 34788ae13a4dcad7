# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false
# Triton's compiler is not typed.
"""Ahead-of-time compilation of all Triton kernels, for GPUs that need not be present.

It finds kernels that do not compile for a target, register spills, and what loops issue for each
token that they read.
"""

import re
import subprocess
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import asdict, dataclass
from functools import cache
from multiprocessing import get_context
from pathlib import Path
from typing import Any, Literal, NamedTuple, cast

import triton
from triton.backends.compiler import GPUTarget
from triton.errors import TritonError

from triptych.core.errors import ConfigError, TriptychError
from triptych.kernels.codegen.machine_code import Loop, loads_of, loops_of
from triptych.kernels.codegen.variants import all_variants, served_variants, usual_variants
from triptych.kernels.triton.launch import Launch, is_interpreted, planned_for
from triptych.kernels.triton.triton_layout import Form

TARGETS = {
    "sm_80": GPUTarget("cuda", 80, 32),
    "sm_90": GPUTarget("cuda", 90, 32),
    "sm_100": GPUTarget("cuda", 100, 32),
    "gfx942": GPUTarget("hip", "gfx942", 64),
}


ISSUED_PER_S = {
    "sm_80": 108 * 4 * 1.41e9,
    "sm_90": 132 * 4 * 1.7e9,
    "sm_100": 148 * 4 * 1.85e9,
}
"""Most instructions of warps that a GPU issues in a second: multiprocessors of an A100, H100 and
B200, four schedulers in each, and the clock under load."""


COUNTS, LISTS = "token counts", "page lists"
"""What decode attention reads to find the work of a program, before it reads pages."""
BEFORE, DIAGONAL = "keys before the block", "keys of the block"
"""New keys of a prompt that all queries of a block see, and those that some see."""
DECODE, FLASH, PREFILL = "attend_sections", "flash_attention", "attend_chunks"


class Task(NamedTuple):
    """One kernel to compile, by name, since kernels cannot be pickled."""

    kernel: str
    variant: str
    """Formats, head size and other parameters of the specialisation."""
    target: str


@dataclass(frozen=True, slots=True)
class Pass:
    """One pass of an innermost loop of a block of a kernel."""

    loop: Loop
    """In each warp."""
    warps: int
    reads: str = ""
    """What it reads: the format of pages, or new keys of a prompt; empty: neither, or compilers cut
    the loops otherwise than the kernel has them."""
    tokens: int = 0
    """Tokens of a KV head that a block reads in a pass."""
    queries: int = 1
    """Queries of a head that attend to them; one stands for the whole group in decode."""

    @property
    def per_token(self) -> float | None:
        """Instructions of warps for each token of a KV head and query of a prompt."""
        pairs = self.tokens * self.queries
        return None if not pairs else self.loop.instructions * self.warps / pairs

    def bytes_per_s(self, target: str) -> float:
        """Bytes that the loop would load in a second if every issue slot of a GPU were used."""
        return ISSUED_PER_S[target] * self.loop.loaded_bytes / self.loop.instructions

    def as_json(self, target: str) -> dict[str, object]:
        rate = round(self.bytes_per_s(target) / 1e12, 2)
        return {
            **asdict(self.loop),
            "reads": self.reads,
            "tokens": self.tokens,
            "queries": self.queries,
            "instructions_per_token": self.per_token and round(self.per_token, 3),
            "tb_per_s_if_all_slots_issue": rate,
        }


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
    warps: int
    stages: int
    loads: Mapping[int, int]
    """Loads of global memory by the bytes of a lane; empty for AMD."""
    passes: tuple[Pass, ...]
    """Innermost loops, in the order of the code; empty for AMD."""

    @property
    def narrowest_load(self) -> int | None:
        """Bytes of a lane; None if it loads nothing, and for AMD."""
        return min(self.loads, default=None)

    def as_json(self) -> dict[str, object]:
        passes = [one.as_json(self.target) for one in self.passes]
        return {**asdict(self), "narrowest_load": self.narrowest_load, "passes": passes}


Extent = Literal["quick", "served", "all"]
"""Which variants: the usual one of each kernel, those of default methods (``SERVED``), or all."""


def tasks(targets: Sequence[str], extent: Extent = "served") -> list[Task]:
    """Kernels to compile for some targets.

    Raises:  ConfigError for an unknown target, or where kernels are interpreted
    """
    if is_interpreted():
        raise ConfigError("kernels are interpreted, not compiled: unset TRITON_INTERPRET")
    for target in targets:
        if target not in TARGETS:
            raise ConfigError(f"no target {target!r} (have {', '.join(TARGETS)})")
    variants = {"quick": usual_variants, "served": served_variants, "all": all_variants}[extent]()
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
    variants = _variants(task.target)
    return compile_launch(variants[task.kernel, task.variant], task)


@cache
def _variants(target: str) -> dict[tuple[str, str], Launch]:
    with planned_for(target):
        return all_variants()


def compile_launch(launch: Launch, task: Task) -> Compiled:
    """Compile one kernel for one target, and read its resources from the binary."""
    machine = TARGETS[task.target]
    options = launch.options(machine.backend)
    try:
        made = triton.compile(launch.source(), target=machine, options=options)
    except (TritonError, RuntimeError) as error:
        raise TriptychError(f"{' '.join(task)} does not compile: {error}") from error
    if machine.backend == "cuda":
        registers, spilled, code = _read_cubin(made.asm["cubin"])
    else:
        registers, spilled, code = *_read_amd(made.asm["amdgcn"]), ""
    # Other loops only wait.
    loops = [one for one in loops_of(code) if one.loads or "matrix" in one.kinds]
    found = _work_of_passes(launch)
    if launch.name == FLASH:  # compilers may unroll the loop over its own block, which is short
        found = found[: len(loops)]
    known = found if len(found) == len(loops) else [("", 0, 1)] * len(loops)
    pairs = zip(loops, known, strict=True)
    return Compiled(
        *task,
        registers=registers,
        spill_bytes=spilled,
        spill_limit=launch.spill_bytes,
        shared_bytes=int(made.metadata.shared),
        warps=launch.warps,
        stages=launch.stages,
        loads=loads_of(code),
        passes=tuple(Pass(loop, launch.warps, *work) for loop, work in pairs),
    )


def _work_of_passes(launch: Launch) -> list[tuple[str, int, int]]:
    """For each loop of an attention kernel: what it reads, tokens of a pass, queries of a pass.

    Decode attention has two for its work list and one for each section, prefill one for past pages
    and two for new keys.
    """
    constants = cast("dict[str, Any]", launch.constants)
    if launch.name == DECODE:
        forms, tile = cast("Sequence[Form]", constants["FORMS"]), constants["TILE"]
        found = [(COUNTS, 0, 1)] * 2
        for form in forms:
            found += [(LISTS, 0, 1)] * (constants["CHUNK"] > 0)
            found.append((form.name, tile if form.by_tile else form.tokens, 1))
        return found
    if launch.name not in (PREFILL, FLASH):
        return []
    size = constants["KEYS"], constants["QUERIES"]
    form = cast("Form | None", constants.get("FORM"))
    past = [] if form is None else [form.name]
    new = [BEFORE] * (not constants.get("WINDOWED"))
    return [(name, *size) for name in (*past, *new, DIAGONAL)]


def _read_cubin(cubin: bytes) -> tuple[int, int, str]:
    """Registers, stack bytes (all spilled, as kernels have no arrays), and the assembly."""
    tools = Path(triton.__file__).parent / "backends" / "nvidia" / "bin"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        usage = _output(str(tools / "cuobjdump"), "--dump-resource-usage", file.name)
        code = _output(str(tools / "nvdisasm"), "-c", file.name)
    found = re.search(r"REG:(\d+) STACK:(\d+)", usage)
    if found is None:
        raise TriptychError(f"cuobjdump names no registers: {usage[-200:]!r}")
    return int(found[1]), int(found[2]), code


def _output(*command: str) -> str:
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout


def _read_amd(assembly: str) -> tuple[int, int]:
    """Registers and bytes of spilled vector registers, from the metadata of the assembly."""
    registers = re.search(r"\.vgpr_count:\s*(\d+)", assembly)
    spilled = re.search(r"\.vgpr_spill_count:\s*(\d+)", assembly)
    if registers is None or spilled is None:
        raise TriptychError("the assembly of an AMD kernel names no registers")
    return int(registers[1]), 4 * int(spilled[1])
