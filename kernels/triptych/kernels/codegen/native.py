# pyright: basic, reportMissingTypeStubs=false
# llvmlite ships no types.
"""JIT compilation of LLVM IR for this machine; functions are called by address."""

from functools import cache

import llvmlite.binding as llvm
import torch
from llvmlite import ir

_libraries: list[llvm.ResourceTracker] = []
"""References that keep compiled code loaded, since functions are called by address."""


@cache
def _compiler() -> llvm.LLJIT:
    return llvm.create_lljit_compiler(_target_machine())


@cache
def vector_lanes() -> int:
    """Number of float32 lanes of the widest vector register of this machine."""
    features = llvm.get_host_cpu_features()
    if features.get("avx512f"):
        return 16
    return 8 if features.get("avx2") else 4


@cache
def multiplies_words() -> bool:
    """Whether this machine multiplies vectors of 8-bit and 16-bit integers and adds neighbours."""
    features = llvm.get_host_cpu_features()
    return bool(features.get("avx512bw") if vector_lanes() == 16 else features.get("ssse3"))


@cache
def multiplies_bytes() -> bool:
    """Whether this machine adds products of four bytes in 32 bits, in its widest vectors."""
    features = llvm.get_host_cpu_features()
    return bool(features.get("avx512f") and features.get("avx512vnni"))


@cache
def multiplies_bfloat() -> bool:
    """Whether this machine multiplies vectors of bfloat16, and permutes 16-bit words."""
    features = llvm.get_host_cpu_features()
    return bool(features.get("avx512bf16") and features.get("avx512bw"))


@cache
def multiplies_tiles() -> bool:
    """Whether this process may multiply tiles of bfloat16 (AMX); asks the kernel for them."""
    features = llvm.get_host_cpu_features()
    has_tiles = features.get("amx-tile") and features.get("amx-bf16") and multiplies_bfloat()
    return bool(has_tiles and torch.cpu._init_amx())


def compile_function(module: ir.Module, name: str) -> int:
    """Optimize ``module``, link it into the process and return the address of ``name``."""
    parsed = llvm.parse_assembly(str(module))
    machine = _target_machine()
    tuning = llvm.create_pipeline_tuning_options(speed_level=2)
    builder = llvm.create_pass_builder(machine, tuning)
    builder.getModulePassManager().run(parsed, builder)
    library = llvm.JITLibraryBuilder().add_ir(str(parsed)).export_symbol(name)
    linked = library.link(_compiler(), f"{name}.{len(_libraries)}")
    _libraries.append(linked)
    return linked[name]


def _target_machine() -> llvm.TargetMachine:
    llvm.initialize_native_target()
    llvm.initialize_native_asmprinter()
    return llvm.Target.from_default_triple().create_target_machine(
        cpu=llvm.get_host_cpu_name(),
        features=llvm.get_host_cpu_features().flatten(),
        opt=3,
        jit=True,
    )
