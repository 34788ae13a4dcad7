# pyright: basic, reportCallIssue=false, reportPrivateImportUsage=false
# numba is untyped: it passes the first argument of an intrinsic, and compiles the rest.
"""The Hadamard rotation on the CPU: a fast Walsh-Hadamard transform in registers.

A block of 64 numbers takes 40 instructions. A row has the same bits whatever is beside it.
"""

import numpy as np
from llvmlite import ir
from numba import types
from numba.extending import intrinsic

from triptych.kernels.codegen.numba_runtime import LANES, hadamard_block, kernel
from triptych.kernels.codegen.simd import FLOAT, I64, POINTER, Emitter, vector
from triptych.kernels.floats import load_vectors, store_vectors

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


@kernel
def turn_head(source, source_kind, target, target_kind, centre, dim):
    """Read a vector at an address, turn it, subtract the one at ``centre``, and write it.

    ``centre``: an address of float32 numbers, or 0. Returns False, and does nothing, for sizes that
    are not 64, 128 or 256.
    """
    if dim == 64:
        _turn_head(source, source_kind, target, target_kind, centre, 64)
    elif dim == 128:
        _turn_head(source, source_kind, target, target_kind, centre, 128)
    elif dim == 256:
        _turn_head(source, source_kind, target, target_kind, centre, 256)
    else:
        return False
    return True


@intrinsic(prefer_literal=True)
def _turn_head(typing_context, source, source_kind, target, target_kind, centre, dim):
    size = dim.literal_value

    def emit(context, builder, signature, arguments):
        emitter, wide = Emitter(builder), vector(FLOAT, LANES)
        source, target, centre = (builder.inttoptr(arguments[at], POINTER) for at in (0, 2, 4))
        vectors = load_vectors(emitter, source, arguments[1], size // LANES)
        factor = emitter.constant(float(np.float32(1 / np.sqrt(size))), vectors[0])
        slots = []
        for part in emitter.hadamard(vectors):
            slots.append(emitter.variable(ir.Constant(wide, [0.0] * LANES)))
            builder.store(builder.fmul(part, factor), slots[-1])
        with builder.if_then(builder.icmp_signed("!=", arguments[4], I64(0))):
            for index, slot in enumerate(slots):
                middle = emitter.load(emitter.byte(centre, 4 * LANES * index), wide)
                builder.store(builder.fsub(builder.load(slot, typ=wide), middle), slot)
        turned = [builder.load(slot, typ=wide) for slot in slots]
        store_vectors(emitter, turned, target, arguments[3])
        return context.get_dummy_value()

    word = types.int64
    return types.void(word, word, word, word, word, dim), emit
