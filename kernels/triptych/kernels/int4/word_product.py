# pyright: basic, reportCallIssue=false, reportPrivateImportUsage=false, reportAttributeAccessIssue=false
# numba is untyped: it passes the first argument of an intrinsic, and compiles the rest.
"""Products with 4-bit weights in integers, for processors that do not multiply bfloat16.

Inputs become integers of 16 bits, with a scale for each 32 of them, so they keep more than a
bfloat16 has. Their products with levels are added in 32 bits: one instruction multiplies twice as
many numbers as one of floats does. A sum of 32 is multiplied by its scale and step; the order of
additions is the same for any number of rows.

Source: Q8_1 of ggml, whose inputs have 8 bits
"""

import numpy as np
from llvmlite import ir
from numba import carray, types
from numba.extending import intrinsic

from triptych.kernels.codegen.native import vector_lanes
from triptych.kernels.codegen.numba_runtime import (
    LANES,
    fetch_add,
    kernel,
    pointer,
    team_body,
)
from triptych.kernels.codegen.simd import FLOAT, I16, I32, I64, POINTER, Emitter, vector
from triptych.kernels.int4.expansion import FLOATS, SHORTS, grid_at
from triptych.kernels.int4.layout import GRID_BYTES, LEVELS, OUTPUTS, PIECE, PIECE_BYTES, ZERO_LEVEL
from triptych.kernels.int4.layout import PAIRS as PAIRS_OF_WORD
from triptych.kernels.int4.product_job import (
    CHUNK,
    GROUPS,
    INPUTS,
    NORM,
    PACKED,
    PIECES,
    ROWS,
    TILES,
    WORDS,
    read_input,
    write_results,
)

MOST_ROWS = 4
"""Rows of a block: their sums of 16 outputs are in half of the registers of AVX2."""
LARGEST = 32767
"""Integer of the largest input of a piece."""
HALF_BYTES = 64
"""Of the levels that a word has of 16 outputs, or of their grid."""
CODE_BYTES, FACTS = 2 * PIECE, 4
"""A block of inputs has for each piece the integers of its rows, then four words for each row:
what sums begin with, which takes ``ZERO_LEVEL`` from each level; the scale; the sum of the inputs;
and nothing."""
WIDE = vector(I32, LANES)
HALVES = [(0, 1)] if vector_lanes() == LANES else [(0,), (1,)]
"""Halves of the outputs that are computed together, as registers are wide."""
PIECE_WORDS = CODE_BYTES // 4 + FACTS
"""Of a row."""
SHIFT = 1.5 * 2**23
"""Adding and subtracting it rounds to the nearest integer."""


def input_words(rows: int, columns: int) -> int:
    """Size of the memory for inputs, in words of 32 bits."""
    return rows * columns // PIECE * PIECE_WORDS


def config_address(rows: int) -> int:
    """There is none."""
    return 0


@intrinsic(prefer_literal=True)
def _tile(typing_context, packed, groups, pieces, inputs, out, rows):
    """Products of a block of ``rows`` rows, a literal, with a tile, to ``out`` [rows, 32] float32.

    ``pieces``: of a group. The order of additions is that of one row.
    """
    count = rows.literal_value

    def emit(context, builder, signature, arguments):
        packed, inputs, out = (builder.inttoptr(arguments[at], POINTER) for at in (0, 3, 4))
        for halves in HALVES:
            _Tile(Emitter(builder), count, halves).multiply(packed, inputs, out, *arguments[1:3])
        return context.get_dummy_value()

    word = types.int64
    return types.void(*[word] * 5, rows), emit


class _Tile:
    """Emits ``_tile`` for some halves of its outputs.

    Each vector of levels is expanded once for all rows.
    """

    def __init__(self, emitter, count, halves):
        self.emitter, self.build, self.count, self.halves = emitter, emitter.build, count, halves
        self.places = [(row, half) for row in range(count) for half in halves]
        self.totals = self._variables(ir.Constant(FLOATS, [0.0] * LANES))
        self.sums = self._variables(ir.Constant(WIDE, [0] * LANES))

    def multiply(self, packed, inputs, out, groups, pieces):
        emitter, build = self.emitter, self.build
        for slot in self.totals.values():
            build.store(ir.Constant(FLOATS, [0.0] * LANES), slot)
        group_bytes = build.add(build.mul(pieces, I64(PIECE_BYTES)), I64(GRID_BYTES))
        input_bytes = 4 * PIECE_WORDS * self.count
        with emitter.loop(groups) as group:
            grids = emitter.byte(packed, build.mul(group, group_bytes))
            grid = {
                half: grid_at(emitter, emitter.byte(grids, HALF_BYTES * half))
                for half in self.halves
            }
            first = build.mul(group, pieces)
            with emitter.loop(pieces) as piece:
                codes = emitter.byte(grids, build.mul(piece, I64(PIECE_BYTES)))
                at = build.mul(build.add(first, piece), I64(input_bytes))
                near = emitter.byte(inputs, at)
                facts = emitter.byte(near, CODE_BYTES * self.count)
                self._begin_piece(facts)
                self._add_piece(emitter.byte(codes, GRID_BYTES), near)
                self._end_piece(grid, facts)
        for (row, half), slot in self.totals.items():
            offset = 4 * (OUTPUTS * row + LANES * half)
            emitter.store(build.load(slot, typ=FLOATS), emitter.byte(out, offset))

    def _variables(self, zero):
        return {place: self.emitter.variable(zero) for place in self.places}

    def _fact(self, facts, row, at, kind):
        """A fact of a row, in all lanes."""
        place = self.emitter.byte(facts, 4 * (FACTS * row + at))
        return self.emitter.splat(self.emitter.load(place, kind), LANES)

    def _begin_piece(self, facts):
        for (row, _), slot in self.sums.items():
            self.build.store(self._fact(facts, row, 0, I32), slot)

    def _add_piece(self, codes, inputs):
        """Add products of 32 inputs to the sums."""
        emitter, build = self.emitter, self.build
        for group in range(PIECE // (2 * PAIRS_OF_WORD)):
            at = emitter.byte(codes, 2 * HALF_BYTES * group)
            words = {
                half: emitter.load(emitter.byte(at, HALF_BYTES * half), SHORTS)
                for half in self.halves
            }
            for place in range(PAIRS_OF_WORD):
                levels = {half: self._levels(part, place) for half, part in words.items()}
                for row in range(self.count):
                    offset = CODE_BYTES * row + 4 * (PAIRS_OF_WORD * group + place)
                    pair = emitter.load(emitter.byte(inputs, offset), I32)
                    pair = build.bitcast(emitter.splat(pair, LANES), SHORTS)
                    for half in self.halves:
                        slot = self.sums[row, half]
                        before = build.load(slot, typ=WIDE)
                        build.store(emitter.add_word_pairs(before, levels[half], pair), slot)

    def _levels(self, words, place):
        build, like = self.build, words
        if place:
            words = build.lshr(words, self.emitter.constant(4 * place, like))
        if place == PAIRS_OF_WORD - 1:
            return words
        return build.and_(words, self.emitter.constant(LEVELS - 1, like))

    def _end_piece(self, grid, facts):
        """Add sums times scale and step, and the sum of the inputs times the middle."""
        emitter, build = self.emitter, self.build
        for (row, half), slot in self.totals.items():
            scale, sum_ = (self._fact(facts, row, at, FLOAT) for at in (1, 2))
            step, middle = grid[half]
            products = build.sitofp(build.load(self.sums[row, half], typ=WIDE), FLOATS)
            total = emitter.fma(build.fmul(products, scale), step, build.load(slot, typ=FLOATS))
            build.store(emitter.fma(sum_, middle, total), slot)


@kernel
def _block_rows(left):
    """Rows of the next block, of those that are left."""
    if left >= MOST_ROWS:
        return MOST_ROWS
    return 2 if left >= 2 else 1


@intrinsic
def _write_input(
    typing_context, numbers, norm, factor, pieces, target, piece_bytes, facts, fact_bytes
):
    """Write a row of numbers as integers, one piece ``piece_bytes`` after another.

    Numbers are multiplied by ``factor`` and the weights at ``norm``, unless that is 0.
    ``facts``: where those of the row are, ``fact_bytes`` apart.
    """

    def emit(context, builder, signature, arguments):
        emitter, kind = Emitter(builder), vector(FLOAT, PIECE)
        numbers, norm, target, facts = (
            builder.inttoptr(arguments[at], POINTER) for at in (0, 1, 4, 6)
        )
        factor = emitter.splat(arguments[2], PIECE)
        is_normed = builder.icmp_signed("!=", arguments[1], I64(0))
        slot = emitter.variable(ir.Constant(kind, [0.0] * PIECE))
        with emitter.loop(arguments[3]) as piece:
            offset = builder.mul(piece, I64(4 * PIECE))
            builder.store(emitter.load(emitter.byte(numbers, offset), kind), slot)
            with builder.if_then(is_normed):
                number = builder.fmul(builder.load(slot, typ=kind), factor)
                weights = emitter.load(emitter.byte(norm, offset), kind)
                builder.store(builder.fmul(number, weights), slot)
            codes, *found = _quantize(emitter, builder.load(slot, typ=kind))
            place = emitter.byte(target, builder.mul(piece, arguments[5]))
            emitter.store(builder.trunc(codes, vector(I16, PIECE)), place)
            place = emitter.byte(facts, builder.mul(piece, arguments[7]))
            for at, fact in enumerate(found):
                emitter.store(fact, emitter.byte(place, 4 * at))
        return context.get_dummy_value()

    word = types.int64
    return types.void(word, word, types.float32, word, word, word, word, word), emit


def _quantize(emitter, numbers):
    """The integers of a piece; what sums begin with; the scale; and the sum of the numbers.

    The scale of a piece with a NaN or an infinity is NaN.
    """
    build = emitter.build
    sizes = emitter.absolute(numbers)
    checked = emitter.total(build.fmul(numbers, emitter.constant(0.0, numbers)))
    largest = build.fadd(emitter.largest(sizes), checked)
    scale = build.fmul(largest, FLOAT(1 / LARGEST))
    is_zero = build.fcmp_unordered("ule", scale, FLOAT(2.0**-120))
    inverse = build.select(is_zero, FLOAT(0.0), build.fdiv(FLOAT(1.0), scale))
    scaled = build.fmul(numbers, emitter.splat(inverse, PIECE))
    shifted = build.fadd(scaled, emitter.constant(SHIFT, scaled))
    bits = build.bitcast(shifted, vector(I32, PIECE))
    codes = build.sub(bits, build.bitcast(emitter.constant(SHIFT, scaled), vector(I32, PIECE)))
    total = emitter.total_word(codes)
    sum_ = build.fmul(build.sitofp(total, FLOAT), scale)
    return codes, build.mul(total, I32(-ZERO_LEVEL)), scale, sum_


@kernel
def _multiply_block(packed, groups, pieces, inputs, rows, results):
    """Products of a block with a tile; all but ``rows`` and ``results`` are addresses or sizes."""
    out = results.ctypes.data
    if rows == MOST_ROWS:
        _tile(packed, groups, pieces, inputs, out, MOST_ROWS)
    elif rows == 2:
        _tile(packed, groups, pieces, inputs, out, 2)
    else:
        _tile(packed, groups, pieces, inputs, out, 1)


@team_body
def prepare(address):
    """Write the inputs of the rows that the shared counter gives."""
    job = carray(pointer(address), WORDS, np.int64)
    pieces = job[GROUPS] * job[PIECES]
    numbers = np.empty(pieces * PIECE, np.float32)
    while True:
        start = fetch_add(address, MOST_ROWS)
        if start >= job[ROWS]:
            break
        row, end = start, min(job[ROWS], start + MOST_ROWS)
        while row < end:
            rows = _block_rows(end - row)
            block = job[INPUTS] + 4 * PIECE_WORDS * row * pieces
            for at in range(rows):
                factor = read_input(job, row + at, numbers)
                _write_input(
                    numbers.ctypes.data,
                    job[NORM],
                    factor,
                    pieces,
                    block + CODE_BYTES * at,
                    4 * PIECE_WORDS * rows,
                    block + CODE_BYTES * rows + 4 * FACTS * at,
                    4 * PIECE_WORDS * rows,
                )
            row += rows
    numbers[0] = 0  # numba frees an array after its last use


@kernel
def _multiply_tile(job, tile, results):
    groups, pieces = job[GROUPS], job[PIECES]
    packed = job[PACKED] + tile * groups * (pieces * PIECE_BYTES + GRID_BYTES)
    row = 0
    while row < job[ROWS]:
        rows = _block_rows(job[ROWS] - row)
        inputs = job[INPUTS] + 4 * PIECE_WORDS * row * groups * pieces
        _multiply_block(packed, groups, pieces, inputs, rows, results)
        write_results(job, tile, row, rows, results)
        row += rows


@team_body
def multiply(address):
    """Take tiles of weights from the shared counter until none is left."""
    job = carray(pointer(address), WORDS, np.int64)
    results = np.empty((MOST_ROWS, OUTPUTS), np.float32)
    while True:
        start = fetch_add(address, job[CHUNK])
        if start >= job[TILES]:
            break
        for tile in range(start, min(job[TILES], start + job[CHUNK])):
            _multiply_tile(job, tile, results)
