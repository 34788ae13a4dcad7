# pyright: basic
"""``python -m triptych.kernels.precompile``: compile what a server's first answers need on a CPU.

A server starts this beside Ray, so that both are done at about the same time. Arguments are what
its methods need beside what all methods do (``core.methods.kernel_needs``). A process takes a group
of functions that call the same others. What is not here, or not done yet, a worker compiles when it
first calls it; two processes never compile the same entry point.
"""

import os
import signal
import sys
import time
from collections.abc import Collection, Iterator, Mapping, Sequence
from importlib import import_module

from triptych.core.config.machine import usable_cores
from triptych.core.methods.kernel_needs import KernelNeed
from triptych.kernels.codegen.kernel_cache import CalledKernels, EntryPoint, kernel_cache_dir
from triptych.kernels.codegen.native import (
    multiplies_bfloat,
    multiplies_bytes,
    multiplies_tiles,
    multiplies_words,
)
from triptych.kernels.int8.product import LibraryProduct

COMPILED, FOUND = b"c", b"f"
Group = tuple[str, ...]
"""Functions by module and name."""


SELECTION: Group = (
    *("select.cpu_choice:CALLS", "select.cpu_choice:choose_rows"),
    *("select.cpu_summaries:CALLS", "select.cpu_summaries:summarize"),
)
CODEC: Mapping[KernelNeed, Sequence[str]] = {
    "steps_by_op": ("store", "round_trip", "load"),
    "merged_tokens": ("store",),
    "whole_pages": ("move_pages",),
    "page_selection": ("load",),  # codes of keys are made of decoded pages
}
"""Functions of the codec that are called where a server has such a need."""


def groups(needs: Collection[str] = ()) -> list[Group]:
    """Kernels of a model with the default settings on this processor, the longest group first.

    ``needs``: each a ``KernelNeed``, for which more is compiled.
    """
    codec = ["CALLS", "move", "transcode", "append", "start_append"]
    attention = ("attend", "take_runs", "record")
    parts, products = ("_work", "_start"), ["integer_product"]
    prompts: list[Group] = [("prefill.cpu_softmax:_work",)]
    if multiplies_words():
        names = "_work", "_pack", "_start"
        prompts = [tuple(f"prefill.cpu_bfloat:{name}" for name in names)]
        prompts.append(tuple(f"codec.store_prompts:{name}" for name in parts))
    else:  # layers of prompts are no programs
        codec += CODEC["steps_by_op"]
    if multiplies_bfloat():
        products = ["vector_product"]
    if multiplies_tiles():
        products = ["amx_product", "amx_levels"]
    in_8_bits = "int8.dot_product" if multiplies_bytes() else "dense.register_product"
    codec += [name for need, names in CODEC.items() if need in needs for name in names]
    codes = [tuple(f"{in_8_bits}:{name}" for name in ("_multiply", "_start"))]
    if LibraryProduct.takes_here():
        codes = []  # oneDNN's
    return [
        tuple(f"codec.codec_numba:{name}" for name in dict.fromkeys(codec)),
        *prompts,
        tuple(f"decode.flash_decoding:{name}" for name in attention),
        (
            *(f"int4.{name}:{part}" for name in products for part in ("prepare", "multiply")),
            "int4.cpu:_start",
        ),
        ("block_table_ops:CALLS", "compact.cpu:CALLS", "codegen.jobs:CALLS"),
        ("codegen.jobs:_take_rows",),
        tuple(f"pointwise.cpu_rotation:{name}" for name in parts),
        *([SELECTION] if "page_selection" in needs else ()),
        ("logits.cpu:CALLS", "logits.cpu:_work"),
        tuple(f"int8.cpu:{name}" for name in parts),
        *codes,
        tuple(f"pointwise.cpu:{name}" for name in parts),
    ]


def find(name: str) -> EntryPoint | CalledKernels:
    """An entry point, or kernels that are called, by ``module:name``."""
    module, _, function = name.partition(":")
    return getattr(import_module(f"triptych.kernels.{module}"), function)


def compile_all(every: Sequence[Group], processes: int) -> Iterator[bool]:
    """Compile groups in so many processes; yields for each function whether it was compiled."""
    for names in every:
        for name in names:
            find(name)  # imported once, by the process that forks
    waiting, fill = os.pipe()
    finished, report = os.pipe()
    os.write(fill, bytes(range(len(every))))
    parent = os.getpid()
    children = list[int]()
    for _ in range(processes):
        if not (child := os.fork()):
            os.close(fill)
            os._exit(_compile_groups(every, waiting, report, parent))
        children.append(child)
    for end in (waiting, fill, report):
        os.close(end)
    while byte := os.read(finished, 1):
        yield byte == COMPILED
    os.close(finished)
    for child in children:
        os.waitpid(child, 0)


def _compile_groups(every: Sequence[Group], waiting: int, report: int, parent: int) -> int:
    """Take groups by the bytes of a pipe until it is empty; exit status of a process."""
    while index := os.read(waiting, 1):
        for name in every[index[0]]:
            if os.getppid() != parent:
                return 1
            os.write(report, COMPILED if find(name).compile_if_free() else FOUND)
    return 0


def main() -> None:
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # the server was interrupted: end without a word
    every, began, compiled = groups(sys.argv[1:]), time.monotonic(), 0
    total = sum(map(len, every))
    for done, is_new in enumerate(compile_all(every, usable_cores()), 1):
        compiled += is_new
        if is_new:
            _tell(f"compiling kernels for this processor, {done} of {total}")
    if compiled:
        took = f"{compiled} kernels in {time.monotonic() - began:.0f} s"
        _tell(f"compiled {took}, into {kernel_cache_dir()}")


def _tell(line: str) -> None:
    sys.stderr.write(f"triptych: {line}\n")


if __name__ == "__main__":
    main()
