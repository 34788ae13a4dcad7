# pyright: basic, reportCallIssue=false, reportPrivateImportUsage=false, reportAttributeAccessIssue=false
# numba is untyped: it passes the first argument of an intrinsic, and compiles the rest.
"""Moves of queries, keys and values into the pairs of bfloat16 that tiles multiply, in vectors."""

from llvmlite import ir
from numba import types
from numba.extending import intrinsic

from triptych.kernels.codegen.numba_runtime import LANES
from triptych.kernels.codegen.simd import FLOAT, I16, I32, I64, POINTER, Emitter, vector
from triptych.kernels.floats import load_vectors, store_vectors

WORDS = vector(I32, LANES)


@intrinsic
def move(typing_context, source, source_kind, target, target_kind, vectors, factor):
    """Move vectors of 16 numbers times ``factor``, rounded to numbers of another kind.

    Returns 0, or NaN if a number is not finite.
    """

    def emit(context, builder, signature, arguments):
        emitter, kind = Emitter(builder), vector(FLOAT, LANES)
        source, target = (builder.inttoptr(arguments[at], POINTER) for at in (0, 2))
        factor = emitter.splat(arguments[5], LANES)
        checked = emitter.variable(ir.Constant(kind, [0.0] * LANES))
        builder.store(ir.Constant(kind, [0.0] * LANES), checked)
        sizes = []
        for code in (arguments[1], arguments[3]):
            is_float = builder.icmp_signed("==", code, I64(0))
            sizes.append(builder.select(is_float, I64(4 * LANES), I64(2 * LANES)))
        with emitter.loop(arguments[4]) as index:
            place = emitter.byte(source, builder.mul(index, sizes[0]))
            (numbers,) = load_vectors(emitter, place, arguments[1], 1)
            before, zero = builder.load(checked, typ=kind), emitter.constant(0.0, numbers)
            builder.store(emitter.fma(numbers, zero, before), checked)
            place = emitter.byte(target, builder.mul(index, sizes[1]))
            store_vectors(emitter, [builder.fmul(numbers, factor)], place, arguments[3])
        return emitter.total(builder.load(checked, typ=kind))

    word = types.int64
    return types.float32(word, word, word, word, word, types.float32), emit


@intrinsic
def transpose_pairs(typing_context, rows, row_bytes, target, target_bytes):
    """Transpose 16 rows of 16 pairs of 16-bit numbers."""

    def emit(context, builder, signature, arguments):
        emitter = Emitter(builder)
        rows, target = (builder.inttoptr(arguments[at], POINTER) for at in (0, 2))
        lines = [
            emitter.load(emitter.byte(rows, builder.mul(arguments[1], I64(row))), WORDS)
            for row in range(LANES)
        ]
        for row, line in enumerate(_transposed(builder, lines)):
            emitter.store(line, emitter.byte(target, builder.mul(arguments[3], I64(row))))
        return context.get_dummy_value()

    return types.void(*[types.int64] * 4), emit


def _transposed(builder, lines):
    """The columns of 16 vectors of 16 words: blocks off the diagonal swap, of 1, 2, 4 and 8."""
    step = 1
    while step < LANES:
        lower = [lane if not lane & step else LANES + lane - step for lane in range(LANES)]
        upper = [lane + step if not lane & step else LANES + lane for lane in range(LANES)]
        swapped = list(lines)
        for at in range(LANES):
            if not at & step:
                pair = lines[at], lines[at + step]
                swapped[at] = builder.shuffle_vector(*pair, ir.Constant(WORDS, lower))
                swapped[at + step] = builder.shuffle_vector(*pair, ir.Constant(WORDS, upper))
        lines, step = swapped, 2 * step
    return lines


@intrinsic
def pair_rows(typing_context, first, second, target, vectors):
    """Pairs of the 16-bit numbers of two rows, of 16 columns a vector."""

    def emit(context, builder, signature, arguments):
        emitter = Emitter(builder)
        rows = [builder.inttoptr(arguments[at], POINTER) for at in (0, 1)]
        target, order = builder.inttoptr(arguments[2], POINTER), []
        for lane in range(LANES):
            order += [lane, LANES + lane]
        order = ir.Constant(vector(I32, 2 * LANES), order)
        with emitter.loop(arguments[3]) as index:
            offset = builder.mul(index, I64(2 * LANES))
            lines = [emitter.load(emitter.byte(row, offset), vector(I16, LANES)) for row in rows]
            place = emitter.byte(target, builder.mul(index, I64(4 * LANES)))
            emitter.store(builder.shuffle_vector(*lines, order), place)
        return context.get_dummy_value()

    return types.void(*[types.int64] * 4), emit


@intrinsic
def clear(typing_context, target, vectors):
    """Write zeros to vectors of 16 words."""

    def emit(context, builder, signature, arguments):
        emitter, target = Emitter(builder), builder.inttoptr(arguments[0], POINTER)
        with emitter.loop(arguments[1]) as index:
            place = emitter.byte(target, builder.mul(index, I64(4 * LANES)))
            emitter.store(ir.Constant(WORDS, [0] * LANES), place)
        return context.get_dummy_value()

    return types.void(types.int64, types.int64), emit


@intrinsic
def total_of(typing_context, place):
    """The sum of 16 numbers."""

    def emit(context, builder, signature, arguments):
        emitter, place = Emitter(builder), builder.inttoptr(arguments[0], POINTER)
        return emitter.total(emitter.load(place, vector(FLOAT, LANES)))

    return types.float32(types.int64), emit
