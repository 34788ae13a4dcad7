# pyright: basic, reportCallIssue=false, reportPrivateImportUsage=false, reportAttributeAccessIssue=false
# numba is untyped: it passes the first argument of an intrinsic, and compiles the rest.
"""Products and powers of a block of queries of prefill attention, in tiles and vectors."""

import numpy as np
from llvmlite import ir
from numba import carray, types
from numba.extending import intrinsic

from triptych.kernels.codegen.amx import ROWS as TILE_ROWS
from triptych.kernels.codegen.amx import add_bfloat_products, load_tile, store_tile, zero_tile
from triptych.kernels.codegen.native import multiplies_tiles, vector_lanes
from triptych.kernels.codegen.numba_runtime import LANES, kernel, pointer
from triptych.kernels.codegen.simd import BFLOAT, FLOAT, I16, I64, POINTER, Emitter, vector
from triptych.kernels.prefill.cpu_softmax import HIDDEN

ROWS = 32 if multiplies_tiles() else 8
"""Queries of a block: as many as two tiles have rows, or as there are registers for."""
COLUMNS = 2 * LANES
"""Columns of a product that are computed together."""
WIDE = vector(FLOAT, LANES)
STEPS, BIAS = 128, 127
"""Fractions of a power of two that a bfloat16 has, and the bias of its exponent."""
BFLOAT_ONE = 0x3F80


@intrinsic(prefer_literal=True)
def multiply(typing_context, rows, row_bytes, columns, pair_bytes, pairs, out, out_bytes, adds):
    """Product of a block of rows with 32 columns: float32 to ``out``.

    Both sides are pairs of bfloat16: a row has ``pairs`` of them, a multiple of 16, and each column
    one at a time. ``adds``: a literal, whether it is added to what is there.
    """
    product = _tile_product if multiplies_tiles() else _vector_product
    is_added = bool(adds.literal_value)

    def emit(context, builder, signature, arguments):
        pointers = [builder.inttoptr(arguments[at], POINTER) for at in (0, 2, 5)]
        sizes = (arguments[at] for at in (1, 3, 4, 6))
        product(Emitter(builder), *pointers, *sizes, is_added)
        return context.get_dummy_value()

    return types.void(*[types.int64] * 7, adds), emit


def _vector_product(emitter, rows, columns, out, row_bytes, pair_bytes, pairs, out_bytes, is_added):
    """In blocks of as many sums as fit in the registers."""
    builder = emitter.build
    count, halves = (ROWS, 2) if vector_lanes() == LANES else (ROWS // 2, 1)
    with (
        emitter.loop(I64(ROWS // count)) as block,
        emitter.loop(I64(2 // halves)) as half,
    ):
        first, offset = builder.mul(block, I64(count)), builder.mul(half, I64(64))
        places = [
            emitter.byte(near, builder.mul(size, first))
            for near, size in ((rows, row_bytes), (out, out_bytes))
        ]
        near, target = places[0], emitter.byte(places[1], offset)
        sizes = row_bytes, pair_bytes, pairs, out_bytes
        part = emitter.byte(columns, offset)
        _block_product(emitter, (count, halves), near, part, target, *sizes, is_added)


def _block_product(
    emitter, shape, rows, columns, out, row_bytes, pair_bytes, pairs, out_bytes, is_added
):
    """Products of some rows with 16 or 32 columns; ``shape``: the rows, and halves of columns."""
    builder = emitter.build
    count, halves = shape
    places = {
        (row, half): emitter.byte(
            out, builder.add(builder.mul(out_bytes, I64(row)), I64(64 * half))
        )
        for row in range(count)
        for half in range(halves)
    }
    zero = ir.Constant(WIDE, [0.0] * LANES)
    sums = {
        at: _variable(emitter, emitter.load(place, WIDE) if is_added else zero)
        for at, place in places.items()
    }
    starts = [emitter.byte(rows, builder.mul(row_bytes, I64(row))) for row in range(count)]
    with emitter.loop(pairs) as index:
        near = emitter.byte(columns, builder.mul(index, pair_bytes))
        kind = vector(BFLOAT, 2 * LANES)
        parts = [emitter.load(emitter.byte(near, 64 * half), kind) for half in range(halves)]
        offset = builder.mul(index, I64(4))
        for row, start in enumerate(starts):
            pair = emitter.splat_pair(emitter.byte(start, offset))
            for half, part in enumerate(parts):
                slot = sums[row, half]
                before = builder.load(slot, typ=WIDE)
                builder.store(emitter.add_bfloat_pairs(before, part, pair), slot)
    for at, slot in sums.items():
        emitter.store(builder.load(slot, typ=WIDE), places[at])


def _variable(emitter, value):
    """A variable with a value that is computed here, and not a constant."""
    slot = emitter.variable(ir.Constant(value.type, None))
    emitter.build.store(value, slot)
    return slot


def _tile_product(emitter, rows, columns, out, row_bytes, pair_bytes, pairs, out_bytes, is_added):
    """Two tiles of rows and two of columns: each tile that is loaded is multiplied twice."""
    builder, left, right = emitter.build, (4, 5), (6, 7)
    parts = [(part, half) for part in range(2) for half in range(2)]
    below = builder.mul(out_bytes, I64(TILE_ROWS))
    places = [
        emitter.byte(emitter.byte(out, below) if part else out, 64 * half) for part, half in parts
    ]
    for index, place in enumerate(places):
        if is_added:
            load_tile(emitter, index, place, out_bytes)
        else:
            zero_tile(emitter, index)
    below = builder.mul(row_bytes, I64(TILE_ROWS))
    with emitter.loop(builder.udiv(pairs, I64(LANES))) as step:
        near = emitter.byte(rows, builder.mul(step, I64(64)))
        load_tile(emitter, left[0], near, row_bytes)
        load_tile(emitter, left[1], emitter.byte(near, below), row_bytes)
        near = emitter.byte(columns, builder.mul(step, builder.mul(pair_bytes, I64(LANES))))
        for half in range(2):
            load_tile(emitter, right[half], emitter.byte(near, 64 * half), pair_bytes)
        for index, (part, half) in enumerate(parts):
            add_bfloat_products(emitter, index, left[part], right[half])
    for index, place in enumerate(places):
        store_tile(emitter, index, place, out_bytes)


@kernel
def hide(row, first, end):
    """Hide the logits of a row, at an address, from ``first`` to ``end``."""
    line = carray(pointer(row), end, np.float32)
    for column in range(first, end):
        line[column] = np.float32(HIDDEN)


@intrinsic
def soften(
    typing_context,
    logits,
    logit_bytes,
    weights,
    weight_bytes,
    size,
    factor,
    most,
    totals,
    mixed,
    wide,
):
    """Replace the logits of some rows by weights, powers of 2 that are added to what rows have.

    Rows begin at ``logits`` and ``weights``, ``logit_bytes`` and ``weight_bytes`` apart. ``size``:
    how many rows there are, and vectors of 32 keys. A weight is 2**(logit * factor - most) as
    bfloat16, within 0.5 %, and 0 below 2**-127, where a logit is hidden, and for NaN.
    ``most`` of a row grows to its largest logit, rounded up to 1 / 128; its 16 ``totals``, to which
    its weights are added, and its ``wide`` vectors ``mixed`` get smaller then.
    """

    def emit(context, builder, signature, arguments):
        emitter = Emitter(builder)
        logits, weights, most, totals, mixed = (
            builder.inttoptr(arguments[at], POINTER) for at in (0, 2, 6, 7, 8)
        )
        rows, vectors = (builder.extract_value(arguments[4], at) for at in range(2))
        factor, wide = arguments[5], arguments[9]
        with emitter.loop(rows) as row:
            near = emitter.byte(logits, builder.mul(row, arguments[1]))
            total = emitter.byte(totals, builder.mul(row, I64(4 * LANES)))
            place = emitter.byte(most, builder.mul(row, I64(4)))
            before = emitter.load(place, FLOAT)
            found = builder.fmul(
                _largest(emitter, near, vectors), builder.fmul(factor, FLOAT(STEPS))
            )
            found = builder.fmul(_ceil(emitter, found), FLOAT(1 / STEPS))
            with builder.if_then(builder.fcmp_ordered(">", found, before), likely=False):
                less = emitter.splat(emitter.exp2(builder.fsub(before, found)), LANES)
                emitter.store(found, place)
                emitter.store(builder.fmul(emitter.load(total, WIDE), less), total)
                line = emitter.byte(mixed, builder.mul(row, builder.mul(wide, I64(4 * LANES))))
                with emitter.loop(wide) as index:
                    slot = emitter.byte(line, builder.mul(index, I64(4 * LANES)))
                    emitter.store(builder.fmul(emitter.load(slot, WIDE), less), slot)
            target = emitter.byte(weights, builder.mul(row, arguments[3]))
            _exponentiate(emitter, near, target, vectors, factor, emitter.load(place, FLOAT), total)
        return context.get_dummy_value()

    word, size = types.int64, types.UniTuple(types.int64, 2)
    return types.void(word, word, word, word, size, types.float32, word, word, word, word), emit


def _largest(emitter, row, vectors):
    """The largest of the logits in vectors of 32; NaN counts as none."""
    builder, apart = emitter.build, 4
    least = ir.Constant(WIDE, [float("-inf")] * LANES)
    found = [emitter.variable(least) for _ in range(apart)]
    for slot in found:
        builder.store(least, slot)

    def note(slot, offset):
        number = emitter.load(emitter.byte(row, offset), WIDE)
        builder.store(emitter.maximum(number, builder.load(slot, typ=WIDE)), slot)

    pairs = builder.udiv(vectors, I64(2))
    with emitter.loop(pairs) as index:
        start = builder.mul(index, I64(4 * apart * LANES))
        for at, slot in enumerate(found):
            note(slot, builder.add(start, I64(4 * LANES * at)))
    with builder.if_then(builder.trunc(vectors, ir.IntType(1))):
        start = builder.mul(pairs, I64(4 * apart * LANES))
        for at, slot in enumerate(found[:2]):
            note(slot, builder.add(start, I64(4 * LANES * at)))
    parts = [builder.load(slot, typ=WIDE) for slot in found]
    pairs = [emitter.maximum(parts[0], parts[1]), emitter.maximum(parts[2], parts[3])]
    return emitter.largest(emitter.maximum(*pairs))


def _ceil(emitter, value):
    return emitter.build.call(emitter.declare("llvm.ceil.f32", FLOAT, (FLOAT,)), [value])


def _exponentiate(emitter, row, weights, vectors, factor, most, totals):
    """Write the weights of a row, and add them to its 16 totals."""
    builder, words = emitter.build, vector(I16, COLUMNS)
    factor = emitter.splat(builder.fmul(factor, FLOAT(STEPS)), LANES)
    shift = builder.fmul(most, FLOAT(-STEPS))
    shift = emitter.splat(builder.fadd(shift, FLOAT(STEPS * BIAS)), LANES)
    total = _variable(emitter, emitter.load(totals, WIDE))
    ones = builder.bitcast(ir.Constant(words, [BFLOAT_ONE] * COLUMNS), vector(BFLOAT, COLUMNS))
    with emitter.loop(vectors) as index:
        place = emitter.byte(row, builder.mul(index, I64(4 * COLUMNS)))
        numbers = [emitter.load(emitter.byte(place, at), WIDE) for at in (0, 4 * LANES)]
        power = emitter.bfloat_power(*(emitter.fma(number, factor, shift) for number in numbers))
        emitter.store(power, emitter.byte(weights, builder.mul(index, I64(2 * COLUMNS))))
        pairs = builder.bitcast(power, vector(BFLOAT, COLUMNS))
        builder.store(emitter.add_bfloat_pairs(builder.load(total, typ=WIDE), pairs, ones), total)
    emitter.store(builder.load(total, typ=WIDE), totals)


@intrinsic
def add_weights(typing_context, weights, factor, sums, count):
    """Add vectors of 32 weights of a row, times ``factor``, to sums of keys."""

    def emit(context, builder, signature, arguments):
        emitter = Emitter(builder)
        weights, sums = (builder.inttoptr(arguments[at], POINTER) for at in (0, 2))
        factor = emitter.splat(arguments[1], LANES)
        with emitter.loop(arguments[3]) as index:
            place = emitter.byte(weights, builder.mul(index, I64(2 * COLUMNS)))
            words = emitter.load(place, vector(I16, COLUMNS))
            for half in range(2):
                offset = builder.add(builder.mul(index, I64(4 * COLUMNS)), I64(64 * half))
                slot, weight = emitter.byte(sums, offset), emitter.from_bfloats(words, half)
                emitter.store(emitter.fma(weight, factor, emitter.load(slot, WIDE)), slot)
        return context.get_dummy_value()

    word = types.int64
    return types.void(word, types.float32, word, word), emit
