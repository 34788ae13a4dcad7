# pyright: basic, reportCallIssue=false, reportPrivateImportUsage=false
# numba and llvmlite are untyped.
"""Levels and grids of 4-bit weights in vector registers, for all products."""

import numpy as np
from llvmlite import ir

from triptych.kernels.codegen.amx import ROW_BYTES, TILE_BYTES
from triptych.kernels.codegen.numba_runtime import LANES, summing_kernel
from triptych.kernels.codegen.simd import FLOAT, I16, I32, vector
from triptych.kernels.int4.layout import PAIRS, PIECE, TABLE

SHORTS, FLOATS = vector(I16, 2 * LANES), vector(FLOAT, LANES)
PREFETCHED = 4096
"""Bytes from levels that are expanded to those that are prefetched."""


def levels_at(emitter, words, place):
    """Levels at one place of each word, minus ``ZERO_LEVEL``: 16 pairs of bfloat16."""
    build = emitter.build
    permute = emitter.declare("llvm.x86.avx512.permvar.hi.512", SHORTS, (SHORTS, SHORTS))
    index = build.lshr(words, emitter.constant(4 * place, words)) if place else words
    return build.call(permute, [ir.Constant(SHORTS, TABLE), index])


def levels_of_piece(emitter, codes):
    """For each row of the two tiles of a piece: which half of the outputs it is of, its offset in
    bytes, and its levels."""
    for part in range(PIECE // (2 * PAIRS)):
        for half in (0, 1):
            place = emitter.byte(codes, ROW_BYTES * (2 * part + half))
            words = emitter.load(place, SHORTS)
            for pair in range(PAIRS):
                offset = TILE_BYTES * half + ROW_BYTES * (PAIRS * part + pair)
                yield half, offset, levels_at(emitter, words, pair)


def grid_at(emitter, pointer):
    """Steps and middles of a group for 16 outputs, as float32."""
    return emitter.halves(emitter.load(pointer, vector(I32, LANES)))


@summing_kernel
def sum_of(numbers):
    """The sum of a vector of floats."""
    total = np.float32(0.0)
    for channel in range(len(numbers)):
        total += numbers[channel]
    return total
