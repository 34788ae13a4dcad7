# pyright: basic, reportCallIssue=false, reportPrivateImportUsage=false
# numba is untyped: it passes the first argument of an intrinsic, and compiles the rest.
"""Compiled reads and writes of float32, bfloat16 and float16 vectors at an address."""

import numpy as np
import torch
from llvmlite import ir
from numba import carray

from triptych.kernels.codegen.native import multiplies_bfloat
from triptych.kernels.codegen.numba_runtime import (
    LANES,
    from_half,
    inlined,
    kernel,
    pointer,
    to_half,
)
from triptych.kernels.codegen.simd import FLOAT as FLOAT32
from triptych.kernels.codegen.simd import HALF as FLOAT16
from triptych.kernels.codegen.simd import I16, I32, I64, vector

KINDS = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}
FLOAT, BFLOAT, HALF = KINDS.values()


@inlined
def copy_floats(source, target):
    """Copy a vector; ``target[:] = source`` would compile the words of numba's error message too.

    That takes 2 s, for each function that has it.
    """
    for channel in range(len(target)):
        target[channel] = source[channel]


@kernel
def nth_largest(numbers, count):
    """The number that ``count - 1`` others are not smaller than, NaN being the largest.

    ``np.partition`` takes 4 s to compile. For few of many numbers: each that is among the largest
    until then costs a pass over ``count`` of them.
    """
    kept = np.empty(count, np.float32)
    for place in range(count):
        kept[place] = np.float32(-np.inf)
    least = 0
    for number in numbers:
        if number > kept[least] or (number != number and kept[least] == kept[least]):
            kept[least] = number
            for place in range(count):
                if kept[place] < kept[least] or kept[least] != kept[least]:
                    least = place
    return kept[least]


@kernel
def read_floats(address, kind, offset, numbers):
    """Read ``numbers``, a float32 vector, from ``offset`` elements after ``address``."""
    if kind == FLOAT:
        copy_floats(carray(pointer(address + 4 * offset), len(numbers), np.float32), numbers)
        return
    halves = carray(pointer(address + 2 * offset), len(numbers), np.uint16)
    if kind == BFLOAT:
        bits = numbers.view(np.uint32)
        for channel in range(len(numbers)):
            bits[channel] = np.uint32(halves[channel]) << np.uint32(16)
    else:
        for channel in range(len(numbers)):
            numbers[channel] = from_half(halves[channel])


@inlined
def _rounded(word):
    """Bits of a float32, rounded to those of a bfloat16 number in the upper half."""
    odd = (word >> np.uint32(16)) & np.uint32(1)
    is_nan = (word & np.uint32(0x7FFFFFFF)) > np.uint32(0x7F800000)
    rounded = (word + np.uint32(0x7FFF) + odd) & np.uint32(0xFFFF0000)
    return np.uint32(0x7FC00000) if is_nan else rounded


@kernel
def write_floats(numbers, address, kind, offset):
    """Write a float32 vector, rounded to the nearest number, ties to even; NaN stays NaN."""
    if kind == FLOAT:
        copy_floats(numbers, carray(pointer(address + 4 * offset), len(numbers), np.float32))
        return
    halves = carray(pointer(address + 2 * offset), len(numbers), np.uint16)
    if kind == BFLOAT:
        bits = numbers.view(np.uint32)
        for channel in range(len(numbers)):
            halves[channel] = np.uint16(_rounded(bits[channel]) >> np.uint32(16))
    else:
        for channel in range(len(numbers)):
            halves[channel] = to_half(numbers[channel])


@kernel
def round_floats(numbers):
    """Round a float32 vector to bfloat16 in place, ties to even; NaN stays NaN."""
    bits = numbers.view(np.uint32)
    for channel in range(len(numbers)):
        bits[channel] = _rounded(bits[channel])


@inlined
def bfloat_pair(lower, upper):
    """Two bfloat16 numbers in a word; both are given as the bits of a float32."""
    return lower >> np.uint32(16) | upper & np.uint32(0xFFFF0000)


def load_vectors(emitter, pointer, kind, count):
    """Emit loads of ``count`` neighbouring vectors of 16 numbers of a kind, as float32."""
    build, wide = emitter.build, vector(FLOAT32, LANES)
    slots = [emitter.variable(ir.Constant(wide, [0.0] * LANES)) for _ in range(count)]
    for which, load in ((FLOAT, _load_floats), (BFLOAT, _load_bfloats), (HALF, _load_halves)):
        with build.if_then(build.icmp_signed("==", kind, I64(which))):
            for index, slot in enumerate(slots):
                build.store(load(emitter, pointer, index), slot)
    return [build.load(slot, typ=wide) for slot in slots]


def _load_floats(emitter, pointer, index):
    return emitter.load(emitter.byte(pointer, 4 * LANES * index), vector(FLOAT32, LANES))


def _load_bfloats(emitter, pointer, index):
    build = emitter.build
    halves = emitter.load(emitter.byte(pointer, 2 * LANES * index), vector(I16, LANES))
    words = build.zext(halves, vector(I32, LANES))
    return build.bitcast(build.shl(words, emitter.constant(16, words)), vector(FLOAT32, LANES))


def _load_halves(emitter, pointer, index):
    halves = emitter.load(emitter.byte(pointer, 2 * LANES * index), vector(FLOAT16, LANES))
    return emitter.build.fpext(halves, vector(FLOAT32, LANES))


def store_vectors(emitter, vectors, pointer, kind):
    """Emit stores of neighbouring vectors, rounded to numbers of a kind: see ``write_floats``."""
    build = emitter.build
    for which, round_to in ((FLOAT, None), (BFLOAT, _bfloats), (HALF, _halves)):
        with build.if_then(build.icmp_signed("==", kind, I64(which))):
            for index, numbers in enumerate(vectors):
                size = 2 if round_to else 4
                rounded = round_to(emitter, numbers) if round_to else numbers
                emitter.store(rounded, emitter.byte(pointer, size * LANES * index))


def _bfloats(emitter, numbers):
    if multiplies_bfloat():
        return emitter.to_bfloats(numbers)
    build = emitter.build
    words = build.bitcast(numbers, vector(I32, numbers.type.count))
    shift = emitter.constant(16, words)
    odd = build.and_(build.lshr(words, shift), emitter.constant(1, words))
    rounded = build.add(build.add(words, emitter.constant(0x7FFF, words)), odd)
    is_nan = build.fcmp_unordered("uno", numbers, numbers)
    rounded = build.select(is_nan, emitter.constant(0x7FC00000, words), rounded)
    return build.trunc(build.lshr(rounded, shift), vector(I16, numbers.type.count))


def _halves(emitter, numbers):
    return emitter.build.fptrunc(numbers, vector(FLOAT16, numbers.type.count))
