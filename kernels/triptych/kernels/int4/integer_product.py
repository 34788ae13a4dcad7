# pyright: basic, reportCallIssue=false, reportPrivateImportUsage=false, reportAttributeAccessIssue=false
# numba is untyped: it passes the first argument of an intrinsic, and compiles the rest.
"""Products with 4-bit weights in integers, for processors that do not multiply bfloat16.

Inputs become integers of 16 or of 8 bits, with a scale for each 32 of them. Those of 16 keep more
than a bfloat16 has; one instruction multiplies twice as many as one of floats does, and four times
as many of 8 bits. Products with the levels of 32 inputs are added up exactly, then multiplied by
scale and step; the order of additions is the same for any number of rows.

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
from triptych.kernels.codegen.simd import FLOAT, I8, I16, I32, I64, POINTER, Emitter, vector
from triptych.kernels.int4.expansion import FLOATS, SHORTS, grid_at
from triptych.kernels.int4.layout import GRID_BYTES, LEVELS, OUTPUTS, PIECE, PIECE_BYTES, ZERO_LEVEL
from triptych.kernels.int4.layout import PAIRS as PAIRS_OF_WORD
from triptych.kernels.int4.product_job import (
    CHUNK,
    CONFIG,
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
HALF_BYTES = 64
"""Of the levels that a word has of 16 outputs, or of their grid."""
FACTS = 4
"""A block of inputs has for each piece the integers of its rows, then four words for each row: what
takes ``ZERO_LEVEL`` from each level of a sum; the scale; the sum of the inputs; and nothing."""
WIDE = vector(I32, LANES)
HALVES = [(0, 1)] if vector_lanes() == LANES else [(0,), (1,)]
"""Halves of the outputs that are computed together, as registers are wide."""
BYTES, WORDS_OF_16 = 8, 16
"""Bits of inputs: ``CONFIG`` of a job."""
BYTE_ORDER = [8 * part + at for part in range(PIECE // 8) for at in (0, 4, 1, 5, 2, 6, 3, 7)]
"""Inputs of 8 bits in the order of levels: those in the lower halves of the bytes of two words,
then those in the upper halves."""
SHIFT = 1.5 * 2**23
"""Adding and subtracting it rounds to the nearest integer."""


def input_words(bits: int, rows: int, columns: int) -> int:
    """Size of the memory for inputs, in words of 32 bits."""
    return rows * columns // PIECE * (bits * PIECE // 32 + FACTS)


@intrinsic(prefer_literal=True)
def _tile(typing_context, packed, groups, pieces, inputs, out, rows, bits):
    """Products of a block of ``rows`` rows with a tile, to ``out`` [rows, 32] float32.

    ``pieces``: of a group. ``rows``, ``bits`` of an input: literals. The order of additions is that
    of one row.
    """
    count, kind = rows.literal_value, _Bytes if bits.literal_value == BYTES else _Words

    def emit(context, builder, signature, arguments):
        packed, inputs, out = (builder.inttoptr(arguments[at], POINTER) for at in (0, 3, 4))
        for halves in HALVES:
            kind(Emitter(builder), count, halves).multiply(packed, inputs, out, *arguments[1:3])
        return context.get_dummy_value()

    word = types.int64
    return types.void(*[word] * 5, rows, bits), emit


class _Tile:
    """Emits ``_tile`` for some halves of its outputs.

    Each vector of levels is expanded once for all rows.
    """

    bits: int
    """Of an input."""

    def __init__(self, emitter, count, halves):
        self.emitter, self.build, self.count, self.halves = emitter, emitter.build, count, halves
        self.places = [(row, half) for row in range(count) for half in halves]
        self.totals = self._variables(ir.Constant(FLOATS, [0.0] * LANES))
        self.code_bytes = self.bits * PIECE // 8

    def multiply(self, packed, inputs, out, groups, pieces):
        emitter, build = self.emitter, self.build
        for slot in self.totals.values():
            build.store(ir.Constant(FLOATS, [0.0] * LANES), slot)
        group_bytes = build.add(build.mul(pieces, I64(PIECE_BYTES)), I64(GRID_BYTES))
        input_bytes = (self.code_bytes + 4 * FACTS) * self.count
        with emitter.loop(groups) as group:
            grids = emitter.byte(packed, build.mul(group, group_bytes))
            near = {half: emitter.byte(grids, HALF_BYTES * half) for half in self.halves}
            grid = {half: grid_at(emitter, place) for half, place in near.items()}
            first = build.mul(group, pieces)
            with emitter.loop(pieces) as piece:
                codes = emitter.byte(grids, build.mul(piece, I64(PIECE_BYTES)))
                at = build.mul(build.add(first, piece), I64(input_bytes))
                near = emitter.byte(inputs, at)
                facts = emitter.byte(near, self.code_bytes * self.count)
                sums = self.sums(emitter.byte(codes, GRID_BYTES), near, facts)
                self._end_piece(sums, grid, facts)
        for (row, half), slot in self.totals.items():
            offset = 4 * (OUTPUTS * row + LANES * half)
            emitter.store(build.load(slot, typ=FLOATS), emitter.byte(out, offset))

    def sums(self, codes, inputs, facts):
        """Products of 32 inputs with their levels, less ``ZERO_LEVEL``, of each row and half."""
        raise NotImplementedError

    def fact(self, facts, row, at, kind):
        """A fact of a row, in all lanes."""
        place = self.emitter.byte(facts, 4 * (FACTS * row + at))
        return self.emitter.splat(self.emitter.load(place, kind), LANES)

    def words_at(self, codes, group, kind):
        """The words of a group of 8 inputs, for each half."""
        at = self.emitter.byte(codes, 2 * HALF_BYTES * group)
        near = {half: self.emitter.byte(at, HALF_BYTES * half) for half in self.halves}
        return {half: self.emitter.load(place, kind) for half, place in near.items()}

    def inputs_at(self, inputs, row, word, kind):
        """A word of the inputs of a row, in all lanes."""
        near = self.emitter.byte(inputs, self.code_bytes * row + 4 * word)
        return self.build.bitcast(self.emitter.splat(self.emitter.load(near, I32), LANES), kind)

    def fields(self, words, place):
        """The levels at a place, of 4 bits, of vectors of words."""
        build, bits = self.build, words.type.element.width
        if place:
            words = build.lshr(words, self.emitter.constant(4 * place, words))
        if 4 * (place + 1) == bits:
            return words
        return build.and_(words, self.emitter.constant(LEVELS - 1, words))

    def _variables(self, zero):
        return {place: self.emitter.variable(zero) for place in self.places}

    def _end_piece(self, sums, grid, facts):
        """Add sums times scale and step, and the sum of the inputs times the middle."""
        emitter, build = self.emitter, self.build
        for (row, half), slot in self.totals.items():
            scale, sum_ = (self.fact(facts, row, at, FLOAT) for at in (1, 2))
            step, middle = grid[half]
            products = build.fmul(build.sitofp(sums[row, half], FLOATS), scale)
            total = emitter.fma(products, step, build.load(slot, typ=FLOATS))
            build.store(emitter.fma(sum_, middle, total), slot)


class _Words(_Tile):
    """Inputs of 16 bits: products of pairs are added in 32 bits."""

    bits = WORDS_OF_16

    def sums(self, codes, inputs, facts):
        emitter = self.emitter
        found = {(row, half): self.fact(facts, row, 0, I32) for row, half in self.places}
        for group in range(PIECE // (2 * PAIRS_OF_WORD)):
            words = self.words_at(codes, group, SHORTS)
            for place in range(PAIRS_OF_WORD):
                levels = {half: self.fields(part, place) for half, part in words.items()}
                for row in range(self.count):
                    pair = self.inputs_at(inputs, row, PAIRS_OF_WORD * group + place, SHORTS)
                    for half in self.halves:
                        before = found[row, half]
                        found[row, half] = emitter.add_word_pairs(before, levels[half], pair)
        return found


class _Bytes(_Tile):
    """Inputs of 8 bits: products of pairs are added in 16 bits, in which those of a piece fit."""

    bits = BYTES

    def sums(self, codes, inputs, facts):
        emitter, octets = self.emitter, vector(I8, 4 * LANES)
        zero = ir.Constant(SHORTS, [0] * 2 * LANES)
        found = dict.fromkeys(self.places, zero)
        for group in range(PIECE // 8):
            words = self.words_at(codes, group, octets)
            for place in range(2):
                levels = {half: self.fields(part, place) for half, part in words.items()}
                for row in range(self.count):
                    four = self.inputs_at(inputs, row, 2 * group + place, octets)
                    for half in self.halves:
                        before = found[row, half]
                        found[row, half] = emitter.add_byte_pairs(before, levels[half], four)
        ones = ir.Constant(SHORTS, [1] * 2 * LANES)
        return {
            (row, half): emitter.add_word_pairs(self.fact(facts, row, 0, I32), sums, ones)
            for (row, half), sums in found.items()
        }


@kernel
def _block_rows(left):
    """Rows of the next block, of those that are left."""
    if left >= MOST_ROWS:
        return MOST_ROWS
    return 2 if left >= 2 else 1


@intrinsic(prefer_literal=True)
def _write_row(typing_context, numbers, norm, factor, pieces, target, facts, piece_bytes, bits):
    """Write a row of numbers as integers of ``bits`` bits, a literal.

    They are multiplied by ``factor`` and the weights at ``norm``, unless that is 0. The integers of
    a piece, and its facts, are ``piece_bytes`` behind those of the piece before.
    """
    is_bytes = bits.literal_value == BYTES

    def emit(context, builder, signature, arguments):
        emitter, kind = Emitter(builder), vector(FLOAT, PIECE)
        numbers, norm, target, facts = (
            builder.inttoptr(arguments[at], POINTER) for at in (0, 1, 4, 5)
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
            codes, *found = _quantize(emitter, builder.load(slot, typ=kind), bits.literal_value)
            codes = builder.trunc(codes, vector(I8 if is_bytes else I16, PIECE))
            if is_bytes:
                order = ir.Constant(vector(I32, PIECE), BYTE_ORDER)
                codes = builder.shuffle_vector(codes, codes, order)
            offset = builder.mul(piece, arguments[6])
            emitter.store(codes, emitter.byte(target, offset))
            for at, fact in enumerate(found):
                emitter.store(fact, emitter.byte(emitter.byte(facts, offset), 4 * at))
        return context.get_dummy_value()

    word = types.int64
    return types.void(word, word, types.float32, word, word, word, word, bits), emit


def _quantize(emitter, numbers, bits):
    """The integers of a piece; what their sums begin with; the scale; and their sum times it.

    The scale of a piece with a NaN or an infinity is NaN.
    """
    build = emitter.build
    checked = emitter.total(build.fmul(numbers, emitter.constant(0.0, numbers)))
    largest = build.fadd(emitter.largest(emitter.absolute(numbers)), checked)
    scale = build.fmul(largest, FLOAT(1 / (2 ** (bits - 1) - 1)))
    is_zero = build.fcmp_unordered("ule", scale, FLOAT(2.0**-120))
    inverse = build.select(is_zero, FLOAT(0.0), build.fdiv(FLOAT(1.0), scale))
    scaled = build.fmul(numbers, emitter.splat(inverse, PIECE))
    shift = emitter.constant(SHIFT, scaled)
    kind = vector(I32, PIECE)
    shifted = build.bitcast(build.fadd(scaled, shift), kind)
    codes = build.sub(shifted, build.bitcast(shift, kind))
    total = emitter.total_word(codes)
    sum_ = build.fmul(build.sitofp(total, FLOAT), scale)
    return codes, build.mul(total, I32(-ZERO_LEVEL)), scale, sum_


@kernel
def _multiply_block(packed, groups, pieces, inputs, rows, bits, out):
    """Products of a block with a tile; all but ``rows`` and ``bits`` are addresses or sizes."""
    if bits == BYTES:
        if rows == MOST_ROWS:
            _tile(packed, groups, pieces, inputs, out, MOST_ROWS, BYTES)
        elif rows == 2:
            _tile(packed, groups, pieces, inputs, out, 2, BYTES)
        else:
            _tile(packed, groups, pieces, inputs, out, 1, BYTES)
    elif rows == MOST_ROWS:
        _tile(packed, groups, pieces, inputs, out, MOST_ROWS, WORDS_OF_16)
    elif rows == 2:
        _tile(packed, groups, pieces, inputs, out, 2, WORDS_OF_16)
    else:
        _tile(packed, groups, pieces, inputs, out, 1, WORDS_OF_16)


@kernel
def _write_block(job, row, rows, numbers):
    """Write the inputs of the rows of a block."""
    pieces, codes = job[GROUPS] * job[PIECES], job[CONFIG] * PIECE // 8
    size = (codes + 4 * FACTS) * rows
    block = job[INPUTS] + (codes + 4 * FACTS) * pieces * row
    near = numbers.ctypes.data
    for at in range(rows):
        factor = read_input(job, row + at, numbers)
        place, facts = block + codes * at, block + codes * rows + 4 * FACTS * at
        if job[CONFIG] == BYTES:
            _write_row(near, job[NORM], factor, pieces, place, facts, size, BYTES)
        else:
            _write_row(near, job[NORM], factor, pieces, place, facts, size, WORDS_OF_16)


@team_body
def prepare(address):
    """Write the inputs of the rows that the shared counter gives."""
    job = carray(pointer(address), WORDS, np.int64)
    numbers = np.empty(job[GROUPS] * job[PIECES] * PIECE, np.float32)
    while True:
        row = fetch_add(address, MOST_ROWS)
        if row >= job[ROWS]:
            break
        end = min(job[ROWS], row + MOST_ROWS)
        while row < end:
            rows = _block_rows(end - row)
            _write_block(job, row, rows, numbers)
            row += rows
    numbers[0] = 0  # numba frees an array after its last use


@kernel
def _multiply_tile(job, tile, results):
    groups, pieces = job[GROUPS], job[PIECES]
    packed = job[PACKED] + tile * groups * (pieces * PIECE_BYTES + GRID_BYTES)
    size = (job[CONFIG] * PIECE // 8 + 4 * FACTS) * groups * pieces
    row = 0
    while row < job[ROWS]:
        rows, inputs = _block_rows(job[ROWS] - row), job[INPUTS] + size * row
        out = results.ctypes.data
        _multiply_block(packed, groups, pieces, inputs, rows, job[CONFIG], out)
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
