# pyright: basic, reportCallIssue=false, reportAttributeAccessIssue=false, reportPrivateImportUsage=false
# numba is untyped: it passes the first argument of an intrinsic, and compiles the rest.
"""Extensions of numba for kernels: raw memory, float16, calls by address, torch's threads.

numba checks and unpacks each argument of a compiled function, which for a dozen arrays takes longer
than a small kernel. Kernels therefore take addresses as integers; their callers in Python check
shapes and types.
"""

import ctypes
from collections.abc import Callable
from functools import cache
from typing import Any

import torch
from llvmlite import ir
from numba import njit, types
from numba.extending import intrinsic

from triptych.kernels.codegen.kernel_cache import EntryPoint, cache_of_these_sources
from triptych.kernels.codegen.simd import LANES, POINTER, Emitter, vector

CACHE_LINE = 64
"""Bytes."""


def kernel(function: Callable[..., Any]) -> Any:
    """Compile a function on first use; it runs without the GIL and is cached on disk."""
    with cache_of_these_sources():
        return njit(nogil=True, cache=True, error_model="numpy")(function)


def inlined(function: Callable[..., Any]) -> Any:
    """``kernel`` that is inlined into its callers, for functions shorter than their call."""
    with cache_of_these_sources():
        return njit(nogil=True, cache=True, error_model="numpy", forceinline=True)(function)


def summing_kernel(function: Callable[..., Any]) -> Any:
    """``kernel`` that may reorder sums and extremes of finite numbers, so that they vectorize."""
    with cache_of_these_sources():
        flags = {"reassoc", "nnan", "ninf", "nsz"}
        return njit(nogil=True, cache=True, error_model="numpy", fastmath=flags)(function)


def team_body(function: Callable[..., Any]) -> EntryPoint:
    """The function that each thread of a team runs; its argument is the job's address."""
    return EntryPoint(function, types.void(types.int64))


@cache
def team_address() -> int:
    """Address of ``GOMP_parallel`` of torch's OpenMP runtime, for ``run_team``; 0 if missing.

    Kernels run in torch's threads, since the idle threads of a second pool would spin against
    those of the first. The GNU, Intel and LLVM runtimes have this function on Linux. Without it a
    kernel runs in the calling thread.
    """
    entry = getattr(ctypes.CDLL(None), "GOMP_parallel", None)
    return ctypes.cast(entry, ctypes.c_void_p).value or 0 if entry else 0


def team_threads() -> int:
    """Number of threads for ``run_team``: ``torch.get_num_threads``, or 1 without OpenMP."""
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
    """Run ``body`` in each of ``threads`` threads of torch, and wait until all return.

    ``job`` is an array, of which each thread gets the address. It is no address here, since numba
    frees a local array after the last statement that uses it: an address does not keep it.
    """
    if threads > 1:
        _enter_team(team, body, job.ctypes.data, threads)
    else:
        _call_body(body, job.ctypes.data)


@kernel
def line_address(array):
    """The first address in an array at which a cache line begins.

    numba aligns arrays to half a line, and a tile or a vector that lies across two lines takes
    twice as long to load. So an array is made ``CACHE_LINE`` bytes longer than what is in it.
    """
    return (array.ctypes.data + CACHE_LINE - 1) // CACHE_LINE * CACHE_LINE


@intrinsic
def pointer(typing_context, address):
    """An address as a pointer for ``numba.carray``."""

    def emit(context, builder, signature, arguments):
        return builder.inttoptr(arguments[0], context.get_value_type(signature.return_type))

    return types.voidptr(types.int64), emit


@intrinsic
def from_half(typing_context, bits):
    """Convert float16 bits in a uint16 to float32."""

    def emit(context, builder, signature, arguments):
        return builder.fpext(builder.bitcast(arguments[0], ir.HalfType()), ir.FloatType())

    return types.float32(types.uint16), emit


@intrinsic
def to_half(typing_context, number):
    """Round float32 to float16, ties to even; returns the bits as uint16."""

    def emit(context, builder, signature, arguments):
        return builder.bitcast(builder.fptrunc(arguments[0], ir.HalfType()), ir.IntType(16))

    return types.uint16(types.float32), emit


@intrinsic
def float_of_bits(typing_context, bits):
    """Reinterpret int32 bits as float32."""

    def emit(context, builder, signature, arguments):
        return builder.bitcast(arguments[0], ir.FloatType())

    return types.float32(types.int32), emit


@intrinsic
def bits_of_float(typing_context, number):
    """The bits of a float32 as int32."""

    def emit(context, builder, signature, arguments):
        return builder.bitcast(arguments[0], ir.IntType(32))

    return types.int32(types.float32), emit


@intrinsic
def prefetch(typing_context, address):
    """Prefetch the cache line at ``address``; any address is safe."""

    def emit(context, builder, signature, arguments):
        Emitter(builder).prefetch(builder.inttoptr(arguments[0], POINTER))
        return context.get_dummy_value()

    return types.void(types.int64), emit


@intrinsic
def largest_of(typing_context, address, vectors):
    """The largest number of whole vectors of floats; NaN counts as none."""

    def emit(context, builder, signature, arguments):
        emitter = Emitter(builder)
        found = _fold(emitter, arguments, float("-inf"), emitter.maximum)
        return emitter.largest(found)

    return types.float32(types.int64, types.int64), emit


@intrinsic
def smallest_of(typing_context, address, vectors):
    """The smallest number of whole vectors of floats; NaN counts as none."""

    def emit(context, builder, signature, arguments):
        emitter = Emitter(builder)
        found = _fold(emitter, arguments, float("inf"), emitter.minimum)
        return emitter.smallest(found)

    return types.float32(types.int64, types.int64), emit


def _fold(emitter, arguments, start, pick):
    """``pick`` of all vectors from an address on, lane by lane."""
    kind, build = vector(ir.FloatType(), LANES), emitter.build
    first = build.inttoptr(arguments[0], POINTER)
    found = emitter.variable(ir.Constant(kind, [start] * LANES))
    with emitter.loop(arguments[1]) as index:
        place = emitter.byte(first, build.mul(index, ir.IntType(64)(4 * LANES)))
        build.store(pick(emitter.load(place, kind), build.load(found, typ=kind)), found)
    return build.load(found, typ=kind)


@intrinsic(prefer_literal=True)
def hadamard_block(typing_context, address, size):
    """Multiply ``size`` floats at an address, a literal power of two, by 1 and -1 in place."""
    count = size.literal_value
    lanes = min(LANES, count)

    def emit(context, builder, signature, arguments):
        emitter, kind = Emitter(builder), vector(ir.FloatType(), lanes)
        first = builder.inttoptr(arguments[0], POINTER)
        places = [emitter.byte(first, 4 * lanes * part) for part in range(count // lanes)]
        parts = emitter.hadamard([emitter.load(place, kind) for place in places])
        for part, place in zip(parts, places, strict=True):
            emitter.store(part, place)
        return context.get_dummy_value()

    return types.void(types.int64, size), emit


@intrinsic
def fetch_add(typing_context, address, amount):
    """Add atomically to the int64 at ``address``; returns the value before."""

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
