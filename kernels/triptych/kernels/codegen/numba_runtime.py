# pyright: basic, reportCallIssue=false, reportAttributeAccessIssue=false, reportPrivateImportUsage=false
# numba is untyped: it passes the first argument of an intrinsic, and compiles the rest.
"""What numba lacks for kernels: raw memory, float16, calls by address, torch's threads.

Arguments of a compiled function are checked and unpacked one by one, which for a dozen
arrays takes longer than a small kernel. So kernels take addresses, which are plain
integers; the callers in Python check shapes and types first.
"""

import ctypes
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from hashlib import sha256
from pathlib import Path
from typing import Any

import numba
import torch
from llvmlite import ir
from numba import cfunc, njit, types
from numba.extending import intrinsic

from triptych.core.config.cache_dirs import can_write, writable_cache_dir
from triptych.kernels.codegen.simd import POINTER, Emitter

_KERNELS = Path(__file__).parents[1]


def kernel(function: Callable[..., Any]) -> Any:
    """Compile on first use, without the GIL; later processes load the machine code."""
    with _cache_of_these_sources():
        return njit(nogil=True, cache=True, error_model="numpy")(function)


def inlined(function: Callable[..., Any]) -> Any:
    """As ``kernel``, but part of what calls it: for what takes less time than its arguments."""
    with _cache_of_these_sources():
        return njit(nogil=True, cache=True, error_model="numpy", inline="always")(function)


def summing_kernel(function: Callable[..., Any]) -> Any:
    """As ``kernel``, but sums and extremes of finite numbers may be taken in any order.

    Only then are they taken many at a time.
    """
    with _cache_of_these_sources():
        flags = {"reassoc", "nnan", "ninf", "nsz"}
        return njit(nogil=True, cache=True, error_model="numpy", fastmath=flags)(function)


def team_body(function: Callable[..., Any]) -> Any:
    """Compile what every thread of a team runs; it gets the address of the team's job."""
    with _cache_of_these_sources():
        return cfunc(types.void(types.int64), cache=True, error_model="numpy")(function)


@contextmanager
def _cache_of_these_sources() -> Iterator[None]:
    """Keep machine code apart by the text of all kernels.

    numba sees a change of a function's own file, but not of the functions it calls.
    """
    before = numba.config.CACHE_DIR
    numba.config.CACHE_DIR = str(_cache_parent(before) / _digest())
    try:
        yield
    finally:
        numba.config.CACHE_DIR = before


@cache
def _cache_parent(named: str) -> Path:
    """``NUMBA_CACHE_DIR``, or beside the kernels; where neither can be written, our own cache."""
    places = [Path(named)] if named else [_KERNELS / "__pycache__"]
    return next(filter(can_write, places), writable_cache_dir())


@cache
def _digest() -> str:
    """A name for the text of all kernels; numba adds its version and the processor."""
    texts = [path.read_bytes() for path in sorted(_KERNELS.rglob("*.py"))]
    return f"kernels-{sha256(b''.join(texts)).hexdigest()[:16]}"


@cache
def team_address() -> int:
    """Address of the entry to torch's OpenMP runtime, for ``run_team``.

    Kernels run in torch's own threads, since a second pool would spin against the first
    between calls. The runtimes of GNU, Intel and LLVM all have this entry on Linux; 0
    where it is missing, and then a kernel runs in the thread that calls it.
    """
    entry = getattr(ctypes.CDLL(None), "GOMP_parallel", None)
    return ctypes.cast(entry, ctypes.c_void_p).value or 0 if entry else 0


def team_threads() -> int:
    """Threads that ``run_team`` may use: those that the caller has given to torch."""
    return torch.get_num_threads() if team_address() else 1


@intrinsic
def _enter_team(typing_context, team, body, job, threads):

    def emit(context, builder, signature, arguments):
        byte, number = ir.IntType(8).as_pointer(), ir.IntType(32)
        kind = ir.FunctionType(ir.VoidType(), (byte, byte, number, number))
        entry = builder.inttoptr(arguments[0], kind.as_pointer())
        near = [builder.inttoptr(item, byte) for item in arguments[1:3]]
        builder.call(entry, [*near, builder.trunc(arguments[3], number), number(0)])
        return context.get_dummy_value()

    word = types.int64
    return types.void(word, word, word, word), emit


@intrinsic
def _call_body(typing_context, body, job):
    def emit(context, builder, signature, arguments):
        kind = ir.FunctionType(ir.VoidType(), (ir.IntType(64),))
        builder.call(builder.inttoptr(arguments[0], kind.as_pointer()), [arguments[1]])
        return context.get_dummy_value()

    return types.void(types.int64, types.int64), emit


@kernel
def run_team(team, body, job, threads):
    """Run ``body(job)`` in each of ``threads`` threads of torch, and wait for all."""
    if threads > 1:
        _enter_team(team, body, job, threads)
    else:
        _call_body(body, job)


@intrinsic
def pointer(typing_context, address):
    """An address as a pointer that ``numba.carray`` takes."""

    def emit(context, builder, signature, arguments):
        return builder.inttoptr(arguments[0], context.get_value_type(signature.return_type))

    return types.voidptr(types.int64), emit


@intrinsic
def from_half(typing_context, bits):
    """float32 of a float16 number given as uint16."""

    def emit(context, builder, signature, arguments):
        return builder.fpext(builder.bitcast(arguments[0], ir.HalfType()), ir.FloatType())

    return types.float32(types.uint16), emit


@intrinsic
def to_half(typing_context, number):
    """uint16 of the float16 number nearest to a float32, ties to even."""

    def emit(context, builder, signature, arguments):
        return builder.bitcast(builder.fptrunc(arguments[0], ir.HalfType()), ir.IntType(16))

    return types.uint16(types.float32), emit


@intrinsic
def float_of_bits(typing_context, bits):
    """The float32 number that an int32 is the bits of."""

    def emit(context, builder, signature, arguments):
        return builder.bitcast(arguments[0], ir.FloatType())

    return types.float32(types.int32), emit


@intrinsic
def prefetch(typing_context, address):
    """Ask for the cache line at ``address``; any address is harmless."""

    def emit(context, builder, signature, arguments):
        Emitter(builder).prefetch(builder.inttoptr(arguments[0], POINTER))
        return context.get_dummy_value()

    return types.void(types.int64), emit


@intrinsic
def fetch_add(typing_context, address, amount):
    """Add to the int64 at ``address`` as one step of all threads; returns the value before."""

    def emit(context, builder, signature, arguments):
        at = builder.inttoptr(arguments[0], ir.IntType(64).as_pointer())
        return builder.atomic_rmw("add", at, arguments[1], "monotonic")

    return types.int64(types.int64, types.int64), emit


@intrinsic
def call_page_step(
    typing_context, function, page, upcoming, live, query, state, scratch, oldest, cap
):
    """Call the machine code of ``decode.page_step`` by address."""

    def emit(context, builder, signature, arguments):
        byte = ir.IntType(8).as_pointer()
        word = ir.IntType(64)
        kind = ir.FunctionType(
            ir.VoidType(), (byte, byte, word, byte, byte, byte, ir.IntType(32), ir.FloatType())
        )
        target, page, upcoming, live, query, state, scratch, oldest, cap = arguments
        near = [builder.inttoptr(item, byte) for item in (page, upcoming, query, state, scratch)]
        callee = builder.inttoptr(target, kind.as_pointer())
        builder.call(callee, [*near[:2], live, *near[2:], oldest, cap])
        return context.get_dummy_value()

    word = types.int64
    return types.void(word, word, word, word, word, word, word, types.int32, types.float32), emit


@intrinsic
def call_score_tile(typing_context, function, tile, query, scores, means):
    """Call the machine code of ``select.score_tile`` by address."""

    def emit(context, builder, signature, arguments):
        byte = ir.IntType(8).as_pointer()
        kind = ir.FunctionType(ir.VoidType(), (byte, byte, byte, byte))
        near = [builder.inttoptr(item, byte) for item in arguments[1:]]
        builder.call(builder.inttoptr(arguments[0], kind.as_pointer()), near)
        return context.get_dummy_value()

    word = types.int64
    return types.void(word, word, word, word, word), emit
