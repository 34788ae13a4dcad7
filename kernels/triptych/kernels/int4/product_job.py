# pyright: basic, reportCallIssue=false, reportPrivateImportUsage=false
# numba is untyped: it passes the first argument of an intrinsic, and compiles the rest.
"""Job words, reading of inputs and writing of results of products with 4-bit weights."""

import numpy as np
from llvmlite import ir
from numba import types
from numba.extending import intrinsic

from triptych.kernels.codegen.numba_runtime import LANES, kernel
from triptych.kernels.codegen.simd import FLOAT, I64, POINTER, Emitter, vector
from triptych.kernels.floats import FLOAT as FLOAT_KIND
from triptych.kernels.floats import read_floats, store_vectors
from triptych.kernels.int4.layout import OUTPUTS
from triptych.kernels.pointwise.gate_vectors import gate_vector

WORDS = 24
COUNTER, CHUNK, TILES, ROWS, GROUPS, PIECES, PACKED, INPUTS, SUMS, OUT, OUT_KIND, WIDTH = range(12)
BIAS, GATED, SOURCE, SOURCE_KIND, STRIDE, HIDDEN, TOTAL, NORM, EPSILON, CONFIG = range(12, 22)
PREPARE, INPUT_WORDS = range(22, WORDS)
"""Words of a job. ``PREPARE`` is what the threads of a team run before they multiply.

Rows are read from ``SOURCE``, if that is not 0, ``STRIDE`` elements apart. With ``HIDDEN``, if that
is not 0, they are added to its rows, and the sum is ``TOTAL``. They are normalised if ``NORM`` is
not 0. ``INPUTS`` are these in ``INPUT_WORDS`` words of 32 bits, bfloat16, laid out as the product
of this processor reads them; ``SUMS``, their sums over groups, are for vectors alone, and
``CONFIG`` for tiles alone. ``BIAS`` has zeros if there is none.
"""

ONE = np.float32(1.0)


@kernel
def read_input(job, row, numbers):
    """Read a row of inputs, as float32, into ``numbers``.

    Returns what it is to be multiplied by, with the weights at ``NORM``, if it is normalised.
    """
    vectors, at, offset = len(numbers) // LANES, numbers.ctypes.data, 4 * row * len(numbers)
    if job[SOURCE]:
        read_floats(job[SOURCE], job[SOURCE_KIND], row * job[STRIDE], numbers)
        hidden = job[HIDDEN] + offset if job[HIDDEN] else 0
        squares = _add_and_square(at, hidden, job[TOTAL] + offset, vectors)
    else:
        read_floats(job[HIDDEN], FLOAT_KIND, row * len(numbers), numbers)
        squares = _add_and_square(at, 0, 0, vectors)
    mean = squares / np.float32(len(numbers))
    return ONE / np.sqrt(mean + np.float32(job.view(np.float64)[EPSILON]))


@intrinsic
def _add_and_square(typing_context, numbers, hidden, total, vectors):
    """Add those at ``hidden``, unless it is 0, to vectors of floats, and write them to ``total``.

    Returns the sum of their squares.
    """

    def emit(context, builder, signature, arguments):
        emitter, kind = Emitter(builder), vector(FLOAT, LANES)
        numbers, hidden, total = (builder.inttoptr(arguments[at], POINTER) for at in range(3))
        adds = builder.icmp_signed("!=", arguments[1], I64(0))
        squares = emitter.variable(ir.Constant(kind, [0.0] * LANES))
        with emitter.loop(arguments[3]) as index:
            offset = builder.mul(index, I64(4 * LANES))
            place = emitter.byte(numbers, offset)
            number = emitter.variable(emitter.load(place, kind))
            with builder.if_then(adds):
                before = emitter.load(emitter.byte(hidden, offset), kind)
                after = builder.fadd(before, builder.load(number, typ=kind))
                emitter.store(after, emitter.byte(total, offset))
                emitter.store(after, place)
                builder.store(after, number)
            after = builder.load(number, typ=kind)
            builder.store(emitter.fma(after, after, builder.load(squares, typ=kind)), squares)
        return emitter.total(builder.load(squares, typ=kind))

    word = types.int64
    return types.float32(word, word, word, word), emit


@kernel
def write_results(job, tile, row, count, results):
    """Write the results, (rows, 32) float32, of ``count`` rows from ``row`` on."""
    width = LANES if job[GATED] else OUTPUTS
    size = 4 if job[OUT_KIND] == FLOAT_KIND else 2
    at = job[OUT] + size * (row * job[WIDTH] + tile * width)
    bias = job[BIAS] + 4 * OUTPUTS * tile
    _write_rows(results.ctypes.data, count, bias, job[GATED], at, size * job[WIDTH], job[OUT_KIND])


@intrinsic
def _write_rows(typing_context, results, count, bias, gated, out, stride, kind):
    """Write rows of 32 float32 results plus a bias, gated or not, as numbers of one kind."""

    def emit(context, builder, signature, arguments):
        emitter, wide = Emitter(builder), vector(FLOAT, LANES)
        results, bias, out = (builder.inttoptr(arguments[at], POINTER) for at in (0, 2, 4))
        count, gated, stride, kind = (arguments[at] for at in (1, 3, 5, 6))
        is_gated = builder.icmp_signed("!=", gated, I64(0))
        halves = [emitter.load(emitter.byte(bias, 4 * LANES * half), wide) for half in (0, 1)]
        with emitter.loop(count) as row:
            near = emitter.byte(results, builder.mul(row, I64(4 * OUTPUTS)))
            target = emitter.byte(out, builder.mul(row, stride))
            left, right = (
                builder.fadd(emitter.load(emitter.byte(near, 4 * LANES * half), wide), halves[half])
                for half in (0, 1)
            )
            with builder.if_else(is_gated) as (then, otherwise):
                with then:
                    store_vectors(emitter, [gate_vector(emitter, left, right)], target, kind)
                with otherwise:
                    store_vectors(emitter, [left, right], target, kind)
        return context.get_dummy_value()

    word = types.int64
    return types.void(*[word] * 7), emit
