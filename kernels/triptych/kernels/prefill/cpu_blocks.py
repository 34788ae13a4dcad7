# pyright: basic, reportCallIssue=false, reportPrivateImportUsage=false, reportAttributeAccessIssue=false
# numba is untyped: it passes the first argument of an intrinsic, and compiles the rest.
"""Products and powers of a block of queries of prefill attention, in tiles and vectors."""

import numpy as np
from llvmlite import ir
from numba import carray, types
from numba.extending import intrinsic

from triptych.kernels.codegen.amx import add_bfloat_products, load_tile, store_tile, zero_tile
from triptych.kernels.codegen.native import multiplies_tiles
from triptych.kernels.codegen.numba_runtime import LANES, kernel, pointer
from triptych.kernels.codegen.simd import BFLOAT, FLOAT, I64, POINTER, Emitter, vector
from triptych.kernels.prefill.cpu_softmax import HIDDEN

ROWS = 16 if multiplies_tiles() else 8
"""Queries of a block: as many as a tile has rows, or as there are registers for."""
COLUMNS = 2 * LANES
"""Columns of a product that are computed together, by one or two times so many."""
WIDE = vector(FLOAT, LANES)


@intrinsic(prefer_literal=True)
def multiply(
    typing_context, rows, row_bytes, columns, pair_bytes, pairs, out, out_bytes, next_bytes, blocks
):
    """Product of a block of rows with 32 columns, or twice 32: float32 to ``out``.

    Both sides are pairs of bfloat16: a row has ``pairs`` of them, a multiple of 16, and each column
    one at a time. ``next_bytes``: from 32 columns to the next; ``blocks``: a literal, 1 or 2.
    """
    product = _tile_product if multiplies_tiles() else _vector_product
    count = blocks.literal_value

    def emit(context, builder, signature, arguments):
        pointers = [builder.inttoptr(arguments[at], POINTER) for at in (0, 2, 5)]
        sizes = (arguments[at] for at in (1, 3, 4, 6, 7))
        product(Emitter(builder), *pointers, *sizes, count)
        return context.get_dummy_value()

    word = types.int64
    return types.void(*[word] * 8, blocks), emit


def _vector_product(
    emitter, rows, columns, out, row_bytes, pair_bytes, pairs, out_bytes, next_bytes, blocks
):
    builder = emitter.build
    for block in range(blocks):
        near = emitter.byte(columns, builder.mul(next_bytes, I64(block)))
        target = emitter.byte(out, 4 * COLUMNS * block)
        _vector_block(emitter, rows, near, target, row_bytes, pair_bytes, pairs, out_bytes)


def _vector_block(emitter, rows, columns, out, row_bytes, pair_bytes, pairs, out_bytes):
    builder = emitter.build
    places = [(row, half) for row in range(ROWS) for half in range(2)]
    zero = ir.Constant(WIDE, [0.0] * LANES)
    sums = {place: emitter.variable(zero) for place in places}
    starts = [emitter.byte(rows, builder.mul(row_bytes, I64(row))) for row in range(ROWS)]
    with emitter.loop(pairs) as index:
        near = emitter.byte(columns, builder.mul(index, pair_bytes))
        kind = vector(BFLOAT, 2 * LANES)
        halves = [emitter.load(emitter.byte(near, 64 * half), kind) for half in range(2)]
        offset = builder.mul(index, I64(4))
        for row in range(ROWS):
            pair = emitter.splat_pair(emitter.byte(starts[row], offset))
            for half in range(2):
                slot = sums[row, half]
                before = builder.load(slot, typ=WIDE)
                builder.store(emitter.add_bfloat_pairs(before, halves[half], pair), slot)
    for (row, half), slot in sums.items():
        at = emitter.byte(out, builder.mul(out_bytes, I64(row)))
        emitter.store(builder.load(slot, typ=WIDE), emitter.byte(at, 64 * half))


def _tile_product(
    emitter, rows, columns, out, row_bytes, pair_bytes, pairs, out_bytes, next_bytes, blocks
):
    """Four sums take as long as a product of tiles, so that none waits for the one before."""
    builder, left, right = emitter.build, 4, (5, 6)
    places = [(block, half) for block in range(blocks) for half in range(2)]
    for index in range(len(places)):
        zero_tile(emitter, index)
    with emitter.loop(builder.udiv(pairs, I64(LANES))) as step:
        load_tile(emitter, left, emitter.byte(rows, builder.mul(step, I64(64))), row_bytes)
        near = emitter.byte(columns, builder.mul(step, builder.mul(pair_bytes, I64(LANES))))
        for index, (block, half) in enumerate(places):
            place = emitter.byte(near, builder.mul(next_bytes, I64(block)))
            load_tile(emitter, right[half], emitter.byte(place, 64 * half), pair_bytes)
            add_bfloat_products(emitter, index, left, right[half])
    for index in range(len(places)):
        store_tile(emitter, index, emitter.byte(out, 64 * index), out_bytes)


@kernel
def hide(row, first, end):
    """Hide the logits of a row, at an address, from ``first`` to ``end``."""
    line = carray(pointer(row), end, np.float32)
    for column in range(first, end):
        line[column] = np.float32(HIDDEN)


@intrinsic
def largest(typing_context, row, first, end):
    """The largest logit of the vectors ``first`` to ``end`` of a row; NaN counts as none."""

    def emit(context, builder, signature, arguments):
        emitter, apart = Emitter(builder), 4
        start = emitter.byte(
            builder.inttoptr(arguments[0], POINTER), builder.mul(arguments[1], I64(4 * LANES))
        )
        count = builder.sub(arguments[2], arguments[1])
        least = ir.Constant(WIDE, [float("-inf")] * LANES)
        found = [emitter.variable(least) for _ in range(apart)]

        def note(slot, index):
            number = emitter.load(emitter.byte(start, builder.mul(index, I64(4 * LANES))), WIDE)
            builder.store(emitter.maximum(number, builder.load(slot, typ=WIDE)), slot)

        rounds = builder.udiv(count, I64(apart))
        with emitter.loop(rounds) as index:
            for at, slot in enumerate(found):
                note(slot, builder.add(builder.mul(index, I64(apart)), I64(at)))
        done = builder.mul(rounds, I64(apart))
        with emitter.loop(builder.sub(count, done)) as index:
            note(found[0], builder.add(done, index))
        parts = [builder.load(slot, typ=WIDE) for slot in found]
        pairs = [emitter.maximum(parts[0], parts[1]), emitter.maximum(parts[2], parts[3])]
        return emitter.largest(emitter.maximum(*pairs))

    word = types.int64
    return types.float32(word, word, word), emit


@intrinsic
def exponentiate(typing_context, row, weights, ranges, factor, shift):
    """Write 2**(logit * factor - shift) of a row as bfloat16.

    ``ranges``: vectors at four borders. Behind the second one powers take the place of logits too;
    behind the third one there are hidden logits, whose powers are 0. Returns the sum, NaN if a
    logit is not finite.
    """

    def emit(context, builder, signature, arguments):
        emitter = Emitter(builder)
        row, weights = (builder.inttoptr(arguments[at], POINTER) for at in (0, 1))
        borders = builder.extract_value
        edges = [borders(arguments[2], at) for at in range(4)]
        factor = emitter.splat(arguments[3], LANES)
        shift = emitter.splat(builder.fneg(arguments[4]), LANES)
        total = emitter.variable(ir.Constant(WIDE, [0.0] * LANES))
        for part, (is_kept, is_masked) in enumerate(((False, False), (True, False), (True, True))):
            with emitter.loop(builder.sub(edges[part + 1], edges[part])) as count:
                index = builder.add(edges[part], count)
                place = emitter.byte(row, builder.mul(index, I64(4 * LANES)))
                number = emitter.load(place, WIDE)
                power = emitter.exp2(emitter.fma(number, factor, shift))
                if is_masked:
                    is_hidden = builder.fcmp_ordered("==", number, emitter.constant(HIDDEN, number))
                    power = builder.select(is_hidden, emitter.constant(0.0, number), power)
                if is_kept:
                    emitter.store(power, place)
                target = emitter.byte(weights, builder.mul(index, I64(2 * LANES)))
                emitter.store(emitter.to_bfloats(power), target)
                whole = emitter.fma(number, emitter.constant(0.0, number), power)
                builder.store(builder.fadd(builder.load(total, typ=WIDE), whole), total)
        return emitter.total(builder.load(total, typ=WIDE))

    word = types.int64
    edges = types.UniTuple(word, 4)
    return types.float32(word, word, edges, types.float32, types.float32), emit


@intrinsic
def add_weights(typing_context, row, factor, sums, first, end):
    """Add the powers of a row in the vectors ``first`` to ``end``, times ``factor``, to sums."""

    def emit(context, builder, signature, arguments):
        emitter = Emitter(builder)
        row, sums = (builder.inttoptr(arguments[at], POINTER) for at in (0, 2))
        factor = emitter.splat(arguments[1], LANES)
        with emitter.loop(builder.sub(arguments[4], arguments[3])) as count:
            offset = builder.mul(builder.add(arguments[3], count), I64(4 * LANES))
            power, slot = emitter.load(emitter.byte(row, offset), WIDE), emitter.byte(sums, offset)
            emitter.store(emitter.fma(power, factor, emitter.load(slot, WIDE)), slot)
        return context.get_dummy_value()

    word = types.int64
    return types.void(word, types.float32, word, word, word), emit
