# pyright: basic, reportCallIssue=false, reportPrivateImportUsage=false
# numba is untyped: it passes the first argument of an intrinsic, and compiles the rest.
"""The Hadamard rotation on the CPU: a fast Walsh-Hadamard transform in registers.

A block of 64 numbers takes 40 instructions. A row has the same bits whatever is beside it.
"""

import numpy as np

from triptych.kernels.codegen.numba_runtime import hadamard_block, kernel

LARGEST_BLOCK = 512
"""Numbers of float32 that fit in the vector registers of AVX-512."""


@kernel
def _turn_block(at, block):
    if block == 2:
        hadamard_block(at, 2)
    elif block == 4:
        hadamard_block(at, 4)
    elif block == 8:
        hadamard_block(at, 8)
    elif block == 16:
        hadamard_block(at, 16)
    elif block == 32:
        hadamard_block(at, 32)
    elif block == 64:
        hadamard_block(at, 64)
    elif block == 128:
        hadamard_block(at, 128)
    elif block == 256:
        hadamard_block(at, 256)
    elif block == 512:
        hadamard_block(at, 512)


@kernel
def turn(numbers, block):
    """Multiply a float32 vector by the block-diagonal matrix of ``hadamard``, in place.

    ``block``: numbers that are mixed, a power of two up to ``LARGEST_BLOCK`` that divides the
    length.
    """
    first, end = numbers.ctypes.data, 4 * len(numbers)
    for start in range(0, end, 4 * block):
        _turn_block(first + start, block)
    factor = np.float32(1.0 / np.sqrt(block))
    for at in range(len(numbers)):
        numbers[at] *= factor
