# pyright: basic, reportCallIssue=false, reportPrivateImportUsage=false
# numba is untyped: it passes the first argument of an intrinsic, and compiles the rest.
"""Compiled reads and writes of float32, bfloat16 and float16 vectors at an address."""

import numpy as np
import torch
from numba import carray

from triptych.kernels.codegen.numba_runtime import (
    from_half,
    inlined,
    kernel,
    pointer,
    to_half,
)

KINDS = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}
FLOAT, BFLOAT, HALF = KINDS.values()


@kernel
def read_floats(address, kind, offset, numbers):
    """Read ``numbers``, a float32 vector, from ``offset`` elements after ``address``."""
    if kind == FLOAT:
        numbers[:] = carray(pointer(address + 4 * offset), len(numbers), np.float32)
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
        carray(pointer(address + 4 * offset), len(numbers), np.float32)[:] = numbers
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
