# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false
# Triton's compiler is not typed.
"""Compile every Triton kernel for GPUs that this machine need not have.

Plans are made from tensors without memory, so what is compiled is what would run. Found this
way: what a target cannot compile, registers that spill, and slow conversions of integers.
"""

import re
import subprocess
import tempfile
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import dataclass
from functools import cache
from itertools import product
from multiprocessing import get_context
from pathlib import Path

import torch
import triton
from torch import Tensor
from triton.backends.compiler import GPUTarget

from triptych.core.errors import ConfigError
from triptych.core.layout import FORMATS, PageLayout, default_page_bytes
from triptych.kernels.codec import gpu as codec
from triptych.kernels.decode import gpu as decode
from triptych.kernels.launch import Launch
from triptych.kernels.pages import Section

TARGETS = {
    "sm_80": GPUTarget("cuda", 80, 32),
    "sm_90": GPUTarget("cuda", 90, 32),
    "sm_100": GPUTarget("cuda", 100, 32),
    "gfx942": GPUTarget("hip", "gfx942", 64),
}
HEAD_DIMS = (64, 96, 128, 256)
GROUPS = (1, 4, 32)
"""Query heads of a KV head; all up to 16 take one tile of the tensor cores, 32 take two."""
MIXES = (("k8v4", "k4v2", "fp16"), ("k8v4", "fp16"))
"""Formats that the sections of one request have together."""


@dataclass(frozen=True, slots=True)
class Case:
    """One kernel, specialised."""

    variant: str
    """Formats, head size, and what else it is compiled for."""
    launch: Launch

    @property
    def kernel(self) -> str:
        return self.launch.name


@dataclass(frozen=True, slots=True)
class Compiled:
    """What a compiler made of a case."""

    kernel: str
    variant: str
    target: str
    registers: int
    """Of a thread; for AMD the vector registers."""
    spill_bytes: int
    """Memory of a thread that holds what registers could not."""
    shared_bytes: int
    """Shared memory of a block."""
    i2f: int | None
    """Conversions of integers to floats in the machine code; None for AMD."""
    warps: int
    stages: int


def check(
    targets: Sequence[str], jobs: int = 1, wanted: Sequence[Case] | None = None
) -> Iterator[Compiled]:
    """Compile cases for targets, in any order; all cases of ``cases()`` by default.

    Raises:  ConfigError for an unknown target
    """
    for target in targets:
        if target not in TARGETS:
            raise ConfigError(f"no target {target!r} (have {', '.join(TARGETS)})")
    names = [(case.kernel, case.variant) for case in wanted or cases()]
    work = [(*name, target) for name, target in product(names, targets)]
    if jobs == 1:
        yield from (_compile_named(*item) for item in work)
        return
    with ProcessPoolExecutor(jobs, get_context("spawn")) as pool:
        futures = [pool.submit(_compile_named, *item) for item in work]
        for done in as_completed(futures):
            yield done.result()


def _compile_named(kernel: str, variant: str, target: str) -> Compiled:
    """Compile in this process; kernels do not travel, their names do."""
    return compile_case(_cases_by_name()[kernel, variant], target)


@cache
def _cases_by_name() -> dict[tuple[str, str], Case]:
    return {(case.kernel, case.variant): case for case in cases()}


def compile_case(case: Case, target: str) -> Compiled:
    """Compile one kernel for one target, and read what came out."""
    launch = case.launch
    machine = TARGETS[target]
    options = launch.options(machine.backend)
    compiled = triton.compile(launch.source(), target=machine, options=options)
    if "cubin" in compiled.asm:
        registers, spilled, i2f = _read_cubin(compiled.asm["cubin"])
    else:
        registers, spilled, i2f = _read_amd(compiled.asm["amdgcn"])
    return Compiled(
        case.kernel,
        case.variant,
        target,
        registers,
        spilled,
        int(compiled.metadata.shared),
        i2f,
        launch.warps,
        launch.stages,
    )


def _read_cubin(cubin: bytes) -> tuple[int, int, int]:
    """Registers, bytes of stack (kernels have no arrays: all of it is spilled), conversions."""
    tools = Path(triton.__file__).parent / "backends" / "nvidia" / "bin"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        usage = _output(str(tools / "cuobjdump"), "--dump-resource-usage", file.name)
        code = _output(str(tools / "nvdisasm"), file.name)
    found = re.search(r"REG:(\d+) STACK:(\d+)", usage)
    if found is None:
        raise ConfigError(f"cuobjdump names no registers: {usage[-200:]!r}")
    return int(found[1]), int(found[2]), len(re.findall(r"\bI2F", code))


def _output(*command: str) -> str:
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout


def _read_amd(assembly: str) -> tuple[int, int, None]:
    """Registers and bytes of spilled vector registers, from the metadata of the assembly."""
    registers = re.search(r"\.vgpr_count:\s*(\d+)", assembly)
    spilled = re.search(r"\.vgpr_spill_count:\s*(\d+)", assembly)
    if registers is None or spilled is None:
        raise ConfigError("the assembly of an AMD kernel names no registers")
    return int(registers[1]), 4 * int(spilled[1]), None


def cases() -> list[Case]:
    """All specialisations that a server with the built-in formats may start."""
    return [
        *_named("", decode_cases()),
        *_named("", codec_cases()),
    ]


def quick_cases() -> list[Case]:
    """Those of the usual head size in the usual formats: what every commit compiles."""
    return [case for case in cases() if case.variant in QUICK]


QUICK = {
    "k8v4+k4v2+fp16 d128 g4 bf16",
    "k8v4 d64 g4 bf16",
    "k4v2 d64 g4 bf16",
    "k8v4 d128 bf16",
    "fp16>k8v4 d128",
    "k8v4>k4v2 d128",
}


def _named(prefix: str, launches: Iterable[tuple[str, list[Launch]]]) -> Iterator[Case]:
    """Launches as cases, equal ones once."""
    seen = set[str]()
    for variant, made in launches:
        for launch in made:
            source = launch.source()
            key = f"{launch.name} {source.signature} {source.constants}"
            if key not in seen:
                seen.add(key)
                yield Case(prefix + variant, launch)


def decode_cases() -> Iterator[tuple[str, list[Launch]]]:
    """Decode attention: each format alone and in mixes, head sizes, groups, and options."""
    for dim, name in product(HEAD_DIMS, FORMATS):
        yield _decode_case([name], dim, 4, torch.bfloat16)
    for dim, mix, group in product(HEAD_DIMS, MIXES, GROUPS):
        yield _decode_case(mix, dim, group, torch.bfloat16)
    for dim, mix in product(HEAD_DIMS, MIXES):
        yield _decode_case(mix, dim, 4, torch.float32)
        yield _decode_case(mix, dim, 4, torch.bfloat16, backward=True, window=100, softcap=30.0)


def _decode_case(
    mix: Sequence[str],
    dim: int,
    group: int,
    dtype: torch.dtype,
    *,
    backward: bool = False,
    window: int = 0,
    softcap: float = 0.0,
) -> tuple[str, list[Launch]]:
    query = _meta(4, 8 * group, dim, dtype=dtype)
    launches = decode.plan(
        query,
        _arena(dim),
        [_section(name, dim, backward=backward) for name in mix],
        _meta(4),
        0.1,
        window,
        softcap,
        _meta(4),
        _meta(4, 8 * group, dtype=torch.float32),
        _meta(*query.shape, dtype=torch.float32),
    )
    words = [f"{'+'.join(mix)} d{dim} g{group}", _short(dtype)]
    words += ["backward window cap"] if backward else []
    return " ".join(words), launches


def codec_cases() -> Iterator[tuple[str, list[Launch]]]:
    """Storing, loading, and every conversion between two formats."""
    for dim, name in product(HEAD_DIMS, FORMATS):
        layout, vectors = _layout(name, dim), _meta(100, 8, dim, dtype=torch.float32)
        cells, table = (_meta(100, 8), _meta(100, 8), _meta(100)), (_meta(7, 9), _meta(7))
        for dtype in (torch.bfloat16, torch.float32):
            given = vectors.to(dtype)
            scores = _meta(100, 8, dtype=torch.float32)
            made = codec.plan_store(_arena(dim), layout, given, given, *cells, scores)
            yield f"{name} d{dim} {_short(dtype)}", made
        out = _meta(7, 50, dim, dtype=torch.float32)
        yield f"{name} d{dim}", codec.plan_load(_arena(dim), layout, *table, out, out, _meta(7, 50))
    for dim, source, target in product((64, 128), FORMATS, FORMATS):
        cells = [_meta(100) for _ in range(4)]
        layouts = _layout(source, dim), _layout(target, dim)
        yield f"{source}>{target} d{dim}", codec.plan_transcode(_arena(dim), *layouts, *cells)


def _meta(*shape: int, dtype: torch.dtype = torch.int32) -> Tensor:
    return torch.empty(*shape, dtype=dtype, device="meta")


def _arena(dim: int) -> Tensor:
    return _meta(1000, default_page_bytes(dim), dtype=torch.uint8)


def _layout(name: str, dim: int) -> PageLayout:
    return PageLayout(FORMATS[name], dim, default_page_bytes(dim), "token")


def _section(name: str, dim: int, *, backward: bool = False) -> Section:
    return Section(_layout(name, dim), _meta(4, 8, 300), _meta(4, 8), backward)


def _short(dtype: torch.dtype) -> str:
    return {torch.bfloat16: "bf16", torch.float32: "fp32"}[dtype]
