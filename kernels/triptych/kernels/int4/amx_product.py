# pyright: basic, reportCallIssue=false, reportPrivateImportUsage=false
# numba is untyped: it passes the first argument of an intrinsic, and compiles the rest.
"""Products with 4-bit weights in the tile registers of a processor.

The weights of 32 outputs are expanded to bfloat16 in the cache, once for all rows. A result is a
sum in float32 over the inputs in order, with the same bits for any number of rows.
"""

import numpy as np
from llvmlite import ir
from numba import carray, types
from numba.extending import intrinsic

from triptych.kernels.codegen.amx import (
    ROW_BYTES,
    TILE_BYTES,
    add_bfloat_products,
    end_tiles,
    load_tile,
    store_tile,
    tile_config,
    use_tiles,
    zero_tile,
)
from triptych.kernels.codegen.amx import ROWS as TILE_ROWS
from triptych.kernels.codegen.numba_runtime import (
    CACHE_LINE,
    LANES,
    fetch_add,
    kernel,
    line_address,
    pointer,
    team_body,
)
from triptych.kernels.codegen.simd import BFLOAT, I32, I64, POINTER, Emitter, vector
from triptych.kernels.int4.expansion import (
    FLOATS,
    PREFETCHED,
    SHORTS,
    grid_at,
    levels_of_piece,
)
from triptych.kernels.int4.layout import GRID_BYTES, OUTPUTS, PIECE, PIECE_BYTES
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

BLOCK_ROWS = 2 * TILE_ROWS
"""Rows that are multiplied at a time: two tiles, by two of weights, to four of results."""
PANEL_BYTES = 2 * TILE_BYTES
"""Of the weights of 32 inputs and outputs: two tiles, for 16 outputs each."""
SUMS, FIRST_INPUTS, FIRST_WEIGHTS = 0, 4, 6
"""Tiles."""
FEW_PIECES = 4
"""Pieces that are expanded together for a single tile of rows, which does not read them again."""

INTERLEAVED = [lane // 2 + LANES * (lane % 2) for lane in range(2 * LANES)]
_CONFIGS = [tile_config(rows or TILE_ROWS, SUMS, 6) for rows in range(TILE_ROWS)]
_ADDRESSES = [config.ctypes.data for config in _CONFIGS]


def input_words(rows: int, columns: int) -> int:
    """Size of the memory for inputs, in words of 32 bits."""
    return -(-rows // TILE_ROWS) * TILE_ROWS * columns // 2


def config_address(rows: int) -> int:
    """Of the shapes of tiles: those of inputs and results have as many rows as there are."""
    return _ADDRESSES[rows if rows < TILE_ROWS else 0]


@intrinsic
def _expand(typing_context, packed, groups, pieces, panel):
    """Expand the weights of 32 outputs, for each 32 inputs two tiles; ``pieces``: of a group."""

    def emit(context, builder, signature, arguments):
        expansion = _Expansion(Emitter(builder))
        packed, panel = (builder.inttoptr(arguments[at], POINTER) for at in (0, 3))
        expansion.emit(packed, arguments[1], arguments[2], panel)
        return context.get_dummy_value()

    word = types.int64
    return types.void(word, word, word, word), emit


class _Expansion:
    """Emits ``_expand``."""

    def __init__(self, emitter):
        self.emitter, self.build = emitter, emitter.build
        name, kinds = "llvm.x86.avx512.permvar.hi.512", (SHORTS, SHORTS)
        self.permute = emitter.declare(name, SHORTS, kinds)
        name = "llvm.x86.avx512bf16.cvtne2ps2bf16.512"
        self.round = emitter.declare(name, vector(BFLOAT, 2 * LANES), (FLOATS, FLOATS))

    def emit(self, packed, groups, pieces, panel):
        emitter, build = self.emitter, self.build
        group_bytes = build.add(build.mul(pieces, I64(PIECE_BYTES)), I64(GRID_BYTES))
        panel_bytes = build.mul(pieces, I64(PANEL_BYTES))
        with emitter.loop(groups) as group:
            grids = emitter.byte(packed, build.mul(group, group_bytes))
            near = emitter.byte(panel, build.mul(group, panel_bytes))
            lines = [grid_at(emitter, emitter.byte(grids, ROW_BYTES * half)) for half in (0, 1)]
            with emitter.loop(pieces) as piece:
                codes = emitter.byte(grids, build.mul(piece, I64(PIECE_BYTES)))
                target = emitter.byte(near, build.mul(piece, I64(PANEL_BYTES)))
                for line in range(0, PIECE_BYTES, CACHE_LINE):
                    emitter.prefetch(emitter.byte(codes, GRID_BYTES + PREFETCHED + line))
                self._expand_piece(emitter.byte(codes, GRID_BYTES), lines, target)

    def _expand_piece(self, codes, lines, target):
        emitter, build = self.emitter, self.build
        order = ir.Constant(SHORTS, INTERLEAVED)
        for half, offset, levels in levels_of_piece(emitter, codes):
            step, middle = lines[half]
            first, second = (
                emitter.fma(level, step, middle)
                for level in emitter.halves(build.bitcast(levels, vector(I32, LANES)))
            )
            apart = build.bitcast(build.call(self.round, [second, first]), SHORTS)
            pairs = build.call(self.permute, [apart, order])
            emitter.store(pairs, emitter.byte(target, offset))


@intrinsic(prefer_literal=True)
def _zero_sums(typing_context, tiles):
    """Begin the sums of ``tiles`` tiles of rows, a literal: one or two."""
    places = _places(tiles)

    def emit(context, builder, signature, arguments):
        for row, half in places:
            zero_tile(Emitter(builder), SUMS + 2 * row + half)
        return context.get_dummy_value()

    return types.void(tiles), emit


@intrinsic(prefer_literal=True)
def _store_sums(typing_context, sums, tiles):
    """Store sums as [rows, 32] float32."""
    places = _places(tiles)

    def emit(context, builder, signature, arguments):
        emitter, sums = Emitter(builder), builder.inttoptr(arguments[0], POINTER)
        for row, half in places:
            place = emitter.byte(sums, 4 * (OUTPUTS * TILE_ROWS * row + LANES * half))
            store_tile(emitter, SUMS + 2 * row + half, place, I64(4 * OUTPUTS))
        return context.get_dummy_value()

    return types.void(types.int64, tiles), emit


@intrinsic(prefer_literal=True)
def _add_products(typing_context, inputs, panel, pieces, input_bytes, tiles):
    """Add products of ``tiles`` tiles of rows with the weights of 32 outputs to their sums.

    ``input_bytes``: from one tile of rows to the next.
    """
    places = _places(tiles)

    def emit(context, builder, signature, arguments):
        emitter, line = Emitter(builder), I64(ROW_BYTES)
        inputs, panel = (builder.inttoptr(arguments[at], POINTER) for at in (0, 1))
        with emitter.loop(arguments[2]) as piece:
            weights = emitter.byte(panel, builder.mul(piece, I64(PANEL_BYTES)))
            near = emitter.byte(inputs, builder.mul(piece, I64(TILE_BYTES)))
            for half in (0, 1):
                place = emitter.byte(weights, TILE_BYTES * half)
                load_tile(emitter, FIRST_WEIGHTS + half, place, line)
            for row, half in places:
                if half == 0:
                    place = emitter.byte(near, builder.mul(arguments[3], I64(row)))
                    load_tile(emitter, FIRST_INPUTS + row, place, line)
                sums = SUMS + 2 * row + half
                add_bfloat_products(emitter, sums, FIRST_INPUTS + row, FIRST_WEIGHTS + half)
        return context.get_dummy_value()

    word = types.int64
    return types.void(word, word, word, word, tiles), emit


def _places(tiles):
    return [(row, half) for row in range(tiles.literal_value) for half in (0, 1)]


@intrinsic
def write_input(typing_context, numbers, norm, factor, inputs, pieces):
    """Write a row in bfloat16, times ``factor`` and the weights at ``norm`` unless that is 0."""

    def emit(context, builder, signature, arguments):
        emitter = Emitter(builder)
        numbers, norm, inputs = (builder.inttoptr(arguments[at], POINTER) for at in (0, 1, 3))
        factor = emitter.splat(arguments[2], LANES)
        is_normed = builder.icmp_signed("!=", arguments[1], I64(0))
        with emitter.loop(builder.mul(arguments[4], I64(2))) as index:
            offset = builder.mul(index, I64(4 * LANES))
            number = emitter.variable(emitter.load(emitter.byte(numbers, offset), FLOATS))
            with builder.if_then(is_normed):
                scaled = builder.fmul(builder.load(number, typ=FLOATS), factor)
                weight = emitter.load(emitter.byte(norm, offset), FLOATS)
                builder.store(builder.fmul(scaled, weight), number)
            piece = builder.mul(builder.lshr(index, I64(1)), I64(TILE_BYTES))
            half = builder.mul(builder.and_(index, I64(1)), I64(ROW_BYTES // 2))
            rounded = emitter.to_bfloats(builder.load(number, typ=FLOATS))
            emitter.store(rounded, emitter.byte(inputs, builder.add(piece, half)))
        return context.get_dummy_value()

    word = types.int64
    return types.void(word, word, types.float32, word, word), emit


@team_body
def prepare(address):
    """Write the inputs of the rows that the shared counter gives."""
    job = carray(pointer(address), WORDS, np.int64)
    pieces = job[GROUPS] * job[PIECES]
    memory = np.empty(pieces * PIECE + CACHE_LINE // 4, np.float32)
    numbers = carray(pointer(line_address(memory)), pieces * PIECE, np.float32)
    while True:
        start = fetch_add(address, TILE_ROWS)
        if start >= job[ROWS]:
            break
        for row in range(start, min(job[ROWS], start + TILE_ROWS)):
            factor = read_input(job, row, numbers)
            inputs = job[INPUTS] + row // TILE_ROWS * pieces * TILE_BYTES
            inputs += row % TILE_ROWS * ROW_BYTES
            write_input(numbers.ctypes.data, job[NORM], factor, inputs, pieces)
    memory[0] = np.float32(0.0)  # numba frees an array after its last use


@kernel
def _multiply_block(inputs, panel, pieces, input_bytes, sums, rows):
    """Products of one or two tiles of rows with expanded weights."""
    if rows > TILE_ROWS:
        _zero_sums(2)
        _add_products(inputs, panel, pieces, input_bytes, 2)
        _store_sums(sums, 2)
    else:
        _zero_sums(1)
        _add_products(inputs, panel, pieces, input_bytes, 1)
        _store_sums(sums, 1)


@kernel
def _multiply_tile(job, tile, panel, results):
    """``panel``: memory for the expanded weights; ``results``: for the sums of a block."""
    groups, pieces = job[GROUPS], job[PIECES]
    group_bytes = pieces * PIECE_BYTES + GRID_BYTES
    packed = job[PACKED] + tile * groups * group_bytes
    input_bytes, sums = groups * pieces * TILE_BYTES, results.ctypes.data
    if job[ROWS] <= TILE_ROWS:
        each = max(1, FEW_PIECES // pieces)
        _zero_sums(1)
        for group in range(0, groups, each):
            count = min(each, groups - group)
            _expand(packed + group * group_bytes, count, pieces, panel)
            near = job[INPUTS] + group * pieces * TILE_BYTES
            _add_products(near, panel, count * pieces, input_bytes, 1)
        _store_sums(sums, 1)
        write_results(job, tile, 0, job[ROWS], results)
        return
    _expand(packed, groups, pieces, panel)
    for row in range(0, job[ROWS], BLOCK_ROWS):
        count = min(BLOCK_ROWS, job[ROWS] - row)
        near = job[INPUTS] + row // TILE_ROWS * input_bytes
        _multiply_block(near, panel, groups * pieces, input_bytes, sums, count)
        write_results(job, tile, row, count, results)


@team_body
def multiply(address):
    """Take tiles of weights from the shared counter until none is left."""
    job = carray(pointer(address), WORDS, np.int64)
    size = 4 * BLOCK_ROWS * OUTPUTS
    memory = np.empty(job[GROUPS] * job[PIECES] * PANEL_BYTES + size + CACHE_LINE, np.uint8)
    results = carray(pointer(line_address(memory)), (BLOCK_ROWS, OUTPUTS), np.float32)
    panel = line_address(memory) + size
    use_tiles(job[CONFIG])
    while True:
        start = fetch_add(address, job[CHUNK])
        if start >= job[TILES]:
            break
        for tile in range(start, min(job[TILES], start + job[CHUNK])):
            _multiply_tile(job, tile, panel, results)
    end_tiles()
    memory[0] = 0  # numba frees an array after its last use
