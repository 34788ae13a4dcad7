# pyright: basic, reportCallIssue=false, reportPrivateImportUsage=false, reportAttributeAccessIssue=false
# numba is untyped: it passes the first argument of an intrinsic, and compiles the rest.
"""Products with 4-bit weights in vector registers.

A level is an index of a table of 16-bit numbers, so a vector of levels becomes one of weights with
a shift and a permutation, for as many rows as there are registers. Sums of a group are multiplied
by its step. The order of additions is the same for any number of rows.
"""

import numpy as np
from llvmlite import ir
from numba import carray, types
from numba.extending import intrinsic

from triptych.kernels.codegen.numba_runtime import (
    LANES,
    fetch_add,
    kernel,
    pointer,
    team_body,
)
from triptych.kernels.codegen.simd import BFLOAT, FLOAT, I64, POINTER, Emitter, vector
from triptych.kernels.floats import bfloat_pair, round_floats
from triptych.kernels.int4.expansion import PREFETCHED, SHORTS, grid_at, levels_at, sum_of
from triptych.kernels.int4.layout import GRID_BYTES, OUTPUTS, PIECE, PIECE_BYTES
from triptych.kernels.int4.layout import PAIRS as PAIRS_OF_WORD
from triptych.kernels.int4.product_job import (
    CHUNK,
    GROUPS,
    INPUTS,
    NORM,
    PACKED,
    PIECES,
    ROWS,
    SUMS,
    TILES,
    WORDS,
    read_input,
    write_results,
)

VECTOR_BYTES = 64
MOST_ROWS = 8
"""Rows of a block: for 32 outputs each has four registers, for its sums and those of a group.
``INPUTS`` has [in / 2, rows] pairs of bfloat16 of a block, and ``SUMS`` [groups, rows] sums of the
inputs of a group."""

PAIRS = vector(BFLOAT, 2 * LANES)


def input_words(rows: int, columns: int) -> int:
    """Size of the memory for inputs, in words of 32 bits."""
    return rows * columns // 2


def config_address(rows: int) -> int:
    """There is none."""
    return 0


@intrinsic(prefer_literal=True)
def _tile(typing_context, packed, groups, pieces, pairs, sums, out, rows):
    """Products of a block of ``rows`` rows, a literal, with a tile, to ``out`` [rows, 32] float32.

    ``pieces``: of a group. The order of additions is that of one row.
    """
    count = rows.literal_value

    def emit(context, builder, signature, arguments):
        tile = _Tile(Emitter(builder), count)
        addresses = [builder.inttoptr(arguments[index], POINTER) for index in (0, 3, 4, 5)]
        tile.multiply(*addresses, groups=arguments[1], pieces=arguments[2])
        return context.get_dummy_value()

    word = types.int64
    return types.void(*[word] * 6, rows), emit


class _Tile:
    """Emits ``_tile``: each vector of weights is expanded once for all rows."""

    def __init__(self, emitter, count):
        self.emitter, self.build, self.count = emitter, emitter.build, count
        self.wide = vector(FLOAT, LANES)
        self.places = [(row, half) for row in range(count) for half in range(2)]
        self.totals = self._zeros()
        self.of_group = self._zeros()

    def multiply(self, packed, pairs, sums, out, groups, pieces):
        emitter, build = self.emitter, self.build
        zero = emitter.constant(0.0, build.load(self.totals[0, 0], typ=self.wide))
        group_bytes = build.add(build.mul(pieces, I64(PIECE_BYTES)), I64(GRID_BYTES))
        pair_bytes = I64(2 * PIECE * self.count)
        with emitter.loop(groups) as group:
            grids = emitter.byte(packed, build.mul(group, group_bytes))
            near = emitter.byte(pairs, build.mul(group, build.mul(pieces, pair_bytes)))
            for slot in self.of_group.values():
                build.store(zero, slot)
            with emitter.loop(pieces) as piece:
                codes = emitter.byte(grids, build.mul(piece, I64(PIECE_BYTES)))
                codes = emitter.byte(codes, GRID_BYTES)
                self._add_piece(codes, emitter.byte(near, build.mul(piece, pair_bytes)))
            self._add_group(grids, emitter.byte(sums, build.mul(group, I64(4 * self.count))))
        for (row, half), slot in self.totals.items():
            total = build.load(slot, typ=self.wide)
            emitter.store(total, emitter.byte(out, 4 * LANES * (2 * row + half)))

    def _zeros(self):
        zero = ir.Constant(self.wide, [0.0] * LANES)
        return {place: self.emitter.variable(zero) for place in self.places}

    def _add_piece(self, codes, pairs):
        """Add products of 32 inputs to the sums of the group."""
        emitter, build = self.emitter, self.build
        for part in range(PIECE // (2 * PAIRS_OF_WORD)):
            at = emitter.byte(codes, 2 * VECTOR_BYTES * part)
            for line in range(2):
                emitter.prefetch(emitter.byte(at, PREFETCHED + VECTOR_BYTES * line))
            words = [emitter.load(emitter.byte(at, VECTOR_BYTES * half), SHORTS) for half in (0, 1)]
            for place in range(PAIRS_OF_WORD):
                levels = (levels_at(emitter, half, place) for half in words)
                weights = [build.bitcast(each, PAIRS) for each in levels]
                for row in range(self.count):
                    offset = 4 * (self.count * (PAIRS_OF_WORD * part + place) + row)
                    pair = emitter.splat_pair(emitter.byte(pairs, offset))
                    for half in (0, 1):
                        slot = self.of_group[row, half]
                        before = build.load(slot, typ=self.wide)
                        build.store(emitter.add_bfloat_pairs(before, weights[half], pair), slot)

    def _add_group(self, grids, sums):
        """Add sums of a group times the step, and sums of its inputs times the middle."""
        emitter, build = self.emitter, self.build
        for half in (0, 1):
            step, middle = grid_at(emitter, emitter.byte(grids, VECTOR_BYTES * half))
            for row in range(self.count):
                sum_ = emitter.splat(emitter.load(emitter.byte(sums, 4 * row), FLOAT), LANES)
                products = build.load(self.of_group[row, half], typ=self.wide)
                slot = self.totals[row, half]
                total = emitter.fma(products, step, build.load(slot, typ=self.wide))
                build.store(emitter.fma(sum_, middle, total), slot)


@kernel
def _block_rows(left):
    """Rows of the next block, of those that are left."""
    if left >= MOST_ROWS:
        return MOST_ROWS
    return 4 if left >= 4 else 2 if left >= 2 else 1


@kernel
def _write_input(numbers, rows, at, groups, pairs, sums):
    """Write a row, whose numbers are in bfloat16, as row ``at`` of a block of ``rows``.

    ``pairs`` and ``sums`` are those of the block; ``numbers`` is float32.
    """
    words, group = numbers.view(np.uint32), len(numbers) // groups
    for pair in range(len(numbers) // 2):
        pairs[pair * rows + at] = bfloat_pair(words[2 * pair], words[2 * pair + 1])
    for index in range(groups):
        sums[index * rows + at] = sum_of(numbers[index * group : (index + 1) * group])


@kernel
def _multiply_block(packed, groups, pieces, pairs, sums, rows, results):
    """Products of a block with a tile; all but ``rows`` and ``results`` are addresses or sizes."""
    out = results.ctypes.data
    if rows == MOST_ROWS:
        _tile(packed, groups, pieces, pairs, sums, out, 8)
    elif rows == 4:
        _tile(packed, groups, pieces, pairs, sums, out, 4)
    elif rows == 2:
        _tile(packed, groups, pieces, pairs, sums, out, 2)
    else:
        _tile(packed, groups, pieces, pairs, sums, out, 1)


@team_body
def prepare(address):
    """Write the inputs of the rows that the shared counter gives."""
    job = carray(pointer(address), WORDS, np.int64)
    groups, columns = job[GROUPS], job[GROUPS] * job[PIECES] * PIECE
    numbers = np.empty(columns, np.float32)
    while True:
        start = fetch_add(address, MOST_ROWS)
        if start >= job[ROWS]:
            break
        row, end = start, min(job[ROWS], start + MOST_ROWS)
        while row < end:
            rows = _block_rows(end - row)
            pairs = carray(pointer(job[INPUTS] + 2 * row * columns), rows * columns // 2, np.uint32)
            sums = carray(pointer(job[SUMS] + 4 * row * groups), rows * groups, np.float32)
            for at in range(rows):
                factor = read_input(job, row + at, numbers)
                if job[NORM]:
                    weights = carray(pointer(job[NORM]), columns, np.float32)
                    for channel in range(columns):
                        numbers[channel] = numbers[channel] * factor * weights[channel]
                round_floats(numbers)
                _write_input(numbers, rows, at, groups, pairs, sums)
            row += rows


@kernel
def _multiply_tile(job, tile, results):
    groups, pieces = job[GROUPS], job[PIECES]
    columns = groups * pieces * PIECE
    packed = job[PACKED] + tile * groups * (pieces * PIECE_BYTES + GRID_BYTES)
    row = 0
    while row < job[ROWS]:
        rows = _block_rows(job[ROWS] - row)
        pairs, sums = job[INPUTS] + 2 * row * columns, job[SUMS] + 4 * row * groups
        _multiply_block(packed, groups, pieces, pairs, sums, rows, results)
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
