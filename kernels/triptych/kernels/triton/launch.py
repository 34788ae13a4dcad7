# pyright: reportUnknownMemberType=false, reportUnknownArgumentType=false, reportAttributeAccessIssue=false
# Neither torch's device properties nor Triton's settings are typed.
"""Launches of Triton kernels, which run or are compiled ahead of time without a GPU."""

from collections.abc import Generator, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from contextvars import ContextVar
from dataclasses import dataclass, field
from functools import cache
from math import e, log2
from typing import Any, TypeAlias

import torch
import triton
from torch import Tensor
from triton.compiler import ASTSource

from triptych.core.errors import ConfigError

Scalar = Tensor | int | float | None
Argument: TypeAlias = "Scalar | tuple[Argument, ...]"
"""Tuples contain no None: Triton 3.6 cannot compile None in a tuple ahead of time."""

TYPES = {
    torch.float64: "fp64",
    torch.float32: "fp32",
    torch.float16: "fp16",
    torch.bfloat16: "bf16",
    torch.uint8: "u8",
    torch.int32: "i32",
    torch.int64: "i64",
}
VECTOR_TYPES = (torch.float32, torch.bfloat16, torch.float16)
"""Types of queries, keys and values."""
DEFAULT_PROCESSORS = 132
"""Multiprocessors assumed for tensors that are not on a GPU: those of an H100."""


@dataclass(frozen=True, slots=True)
class Launch:
    """One launch of a Triton kernel: grid, arguments and constants.

    Each GPU implementation of an op plans launches and then runs them. The plan for tensors with
    ``device="meta"`` gives the kernels to compile ahead of time, so that the checked kernels are
    those that run.
    """

    kernel: Any
    grid: tuple[int, ...]
    arguments: tuple[Argument, ...]
    """Arguments of the kernel before its constants, in order."""
    constants: Mapping[str, object] = field(default_factory=dict[str, object])
    warps: int = 4
    stages: int = 2
    registers: int = 255
    """Register limit of a thread on NVIDIA; the default is the hardware maximum. Without a limit
    the assembler may spill registers to fit more blocks."""
    spill_bytes: int = 0
    """Most bytes of registers of a thread that may spill, where that was measured to be faster."""

    @property
    def name(self) -> str:
        return self.kernel.__name__

    def run(self) -> None:
        """Queue the kernel on the current stream of the device of its tensors."""
        if 0 in self.grid:
            return
        device = next(item.device for item in self.arguments if isinstance(item, Tensor))
        backend = "hip" if torch.version.hip else "cuda"
        options = self.options(backend)
        with torch.cuda.device(device) if device.type == "cuda" else nullcontext():
            self.kernel[self.grid](*self.arguments, **self.constants, **options)

    def options(self, backend: str) -> dict[str, int]:
        """Compiler options for a backend, ``"cuda"`` or ``"hip"``."""
        options = {"num_warps": self.warps, "num_stages": self.stages}
        return options | {"maxnreg": self.registers} if backend == "cuda" else options

    def source(self) -> ASTSource:
        """The input of Triton's compiler: kernel, types and constants of this launch."""
        names = self.kernel.arg_names
        signature: dict[str, Type] = dict.fromkeys(names, "constexpr")
        constants: dict[tuple[int, ...], object] = {
            (names.index(name),): value for name, value in self.constants.items()
        }
        attributes: dict[tuple[int, ...], list[list[object]]] = {}
        for at, argument in enumerate(self.arguments):
            signature[names[at]] = _type_of(argument)
            for path, value in _leaves(argument, (at,)):
                kind, is_aligned = _specialised(value)
                if kind == "constexpr":
                    constants[path] = value
                if is_aligned:
                    attributes[path] = [["tt.divisibility", 16]]
        return ASTSource(self.kernel, signature, constants, attributes)


Type: TypeAlias = "str | tuple[Type, ...]"


def _type_of(argument: Argument) -> Type:
    if isinstance(argument, tuple):
        return tuple(_type_of(item) for item in argument)
    return _specialised(argument)[0]


def _leaves(argument: Argument, path: tuple[int, ...]) -> Iterator[tuple[tuple[int, ...], Scalar]]:
    """Scalars and tensors of an argument, each with its path of tuple indices."""
    if isinstance(argument, tuple):
        for at, item in enumerate(argument):
            yield from _leaves(item, (*path, at))
    else:
        yield path, argument


def _specialised(value: Scalar) -> tuple[str, bool]:
    """Triton type of an argument, and whether it is specialised as a multiple of 16."""
    if isinstance(value, Tensor):
        return "*" + TYPES[value.dtype], True
    if isinstance(value, float):
        return "fp32", False
    if value is None or value == 1:
        return "constexpr", False
    return "i32", value % 16 == 0


def power_of_two(number: int) -> int:
    """The smallest power of two that is at least ``number``, and at least 1."""
    return 1 << max(0, number - 1).bit_length()


def factors_of(scale: float, softcap: float) -> tuple[float, float]:
    """Factor of dot products before the cap, and cap, for logits in powers of two."""
    return (scale / softcap, softcap * log2(e)) if softcap > 0 else (scale * log2(e), 0.0)


def dense(vectors: Tensor) -> Tensor:
    """Vectors with contiguous channels; a copy if they are not."""
    return vectors if vectors.stride(-1) == 1 else vectors.contiguous()


def check_device(name: str, *tensors: Tensor | None) -> None:
    """Raise ``ConfigError`` unless all tensors are on one device."""
    devices = {str(tensor.device) for tensor in tensors if tensor is not None}
    if len(devices) > 1:
        raise ConfigError(f"{name}: tensors on {sorted(devices)}: move them to one device")


def processors(device: torch.device) -> int:
    """Number of multiprocessors of a device."""
    return _processors(device.index or 0) if device.type == "cuda" else DEFAULT_PROCESSORS


@cache
def _processors(index: int) -> int:
    return int(torch.cuda.get_device_properties(index).multi_processor_count)


_target: ContextVar[str | None] = ContextVar("target", default=None)


@contextmanager
def planned_for(target: str) -> Generator[None]:
    """Within this context, launches are planned for a GPU, such as ``"sm_90"`` or ``"gfx942"``."""
    token = _target.set(target)
    try:
        yield
    finally:
        _target.reset(token)


def has_asm() -> bool:
    """Whether the launches that are planned now may use the assembly of NVIDIA's GPUs."""
    target = _target.get()
    return _has_asm_here() if target is None else target.startswith("sm_")


@cache
def _has_asm_here() -> bool:
    return not torch.version.hip and not is_interpreted()


def is_for_amd() -> bool:
    """Whether the launches that are planned now are for a GPU of AMD."""
    target = _target.get()
    return bool(torch.version.hip) if target is None else target.startswith("gfx")


def is_interpreted() -> bool:
    """Whether kernels run in Triton's interpreter on CPU tensors (``TRITON_INTERPRET=1``)."""
    return bool(triton.knobs.runtime.interpret)
