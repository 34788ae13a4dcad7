# pyright: basic, reportCallIssue=false, reportPrivateImportUsage=false
# numba is untyped: it passes the first argument of an intrinsic, and compiles the rest.
"""Products with 4-bit weights in tile registers, for few rows.

Expanding weights takes most of the time of few rows. Here levels alone are expanded, in two
instructions for 32 of them; tiles add up the products of a group, and these sums are multiplied by
its steps, and the sum of its inputs by its middles, in float32. So weights are not rounded. The
order of additions is the same for any number of rows.
"""

import numpy as np
from numba import carray, types
from numba.extending import intrinsic

from triptych.kernels.codegen.amx import (
    ROW_BYTES,
    TILE_BYTES,
    add_bfloat_products,
    end_tiles,
    load_tile,
    store_tile,
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
from triptych.kernels.codegen.simd import FLOAT, I64, POINTER, Emitter
from triptych.kernels.floats import round_floats
from triptych.kernels.int4 import amx_product
from triptych.kernels.int4.expansion import (
    FLOATS,
    PREFETCHED,
    grid_at,
    levels_of_piece,
    sum_of,
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
    SUMS,
    TILES,
    WORDS,
    read_input,
    write_results,
)

input_words, config_address = amx_product.input_words, amx_product.config_address

PANEL_BYTES = 2 * TILE_BYTES
"""Of the levels, or of the sums, of a group: tiles for 16 outputs each."""
BLOCK_ROWS = 8
"""Rows whose results are in registers: 16 of them for 32 outputs."""
MOST_PIECES = 4
"""Pieces of which the levels, and the sums, are in the first-level cache."""


@intrinsic
def _expand(typing_context, codes, pieces, panel):
    """Expand the levels of 32 outputs and ``pieces`` pieces of inputs to bfloat16."""

    def emit(context, builder, signature, arguments):
        emitter = Emitter(builder)
        codes, panel = (builder.inttoptr(arguments[at], POINTER) for at in (0, 2))
        with emitter.loop(arguments[1]) as piece:
            source = emitter.byte(codes, builder.mul(piece, I64(PIECE_BYTES)))
            target = emitter.byte(panel, builder.mul(piece, I64(PANEL_BYTES)))
            for line in range(0, PIECE_BYTES, CACHE_LINE):
                emitter.prefetch(emitter.byte(source, PREFETCHED + line))
            for _, offset, levels in levels_of_piece(emitter, source):
                emitter.store(levels, emitter.byte(target, offset))
        return context.get_dummy_value()

    word = types.int64
    return types.void(word, word, word), emit


@intrinsic
def _multiply(typing_context, inputs, panel, pieces, out):
    """Sums of a group over inputs in ``pieces`` tiles, times expanded levels: two tiles to ``out``,
    of 16 outputs each."""

    def emit(context, builder, signature, arguments):
        emitter, line = Emitter(builder), I64(ROW_BYTES)
        inputs, panel, out = (builder.inttoptr(arguments[at], POINTER) for at in (0, 1, 3))
        for half in range(2):
            zero_tile(emitter, half)
        with emitter.loop(arguments[2]) as piece:
            near = emitter.byte(inputs, builder.mul(piece, I64(TILE_BYTES)))
            load_tile(emitter, 4, near, line)
            levels = emitter.byte(panel, builder.mul(piece, I64(PANEL_BYTES)))
            for half in range(2):
                load_tile(emitter, 6 + half, emitter.byte(levels, TILE_BYTES * half), line)
                add_bfloat_products(emitter, half, 4, 6 + half)
        for half in range(2):
            store_tile(emitter, half, emitter.byte(out, TILE_BYTES * half), line)
        return context.get_dummy_value()

    word = types.int64
    return types.void(word, word, word, word), emit


@intrinsic(prefer_literal=True)
def _scale(typing_context, grids, group_bytes, groups, partial, sums, sums_bytes, results, rows):
    """Add the sums of groups times their steps, and the sums of inputs times their middles.

    ``grids``: of the first group, ``group_bytes`` before the next; ``partial``: what ``_multiply``
    wrote for each group; ``sums``: of the inputs of each group, ``sums_bytes`` from row to row;
    ``results``: [rows, 32] float32, which are added to; ``rows``: a literal.
    """
    places = [(row, half) for row in range(rows.literal_value) for half in range(2)]

    def emit(context, builder, signature, arguments):
        emitter = Emitter(builder)
        grids, partial, sums, results = (
            builder.inttoptr(arguments[at], POINTER) for at in (0, 3, 4, 6)
        )
        targets = [emitter.byte(results, 4 * (OUTPUTS * row + LANES * at)) for row, at in places]
        found = [emitter.variable(emitter.load(target, FLOATS)) for target in targets]
        with emitter.loop(arguments[2]) as group:
            grid = emitter.byte(grids, builder.mul(group, arguments[1]))
            near = emitter.byte(partial, builder.mul(group, I64(PANEL_BYTES)))
            of_inputs = emitter.byte(sums, builder.mul(group, I64(4)))
            lines = [grid_at(emitter, emitter.byte(grid, ROW_BYTES * half)) for half in range(2)]
            for (row, half), slot in zip(places, found, strict=True):
                step, middle = lines[half]
                part = emitter.load(emitter.byte(near, TILE_BYTES * half + ROW_BYTES * row), FLOATS)
                at = emitter.byte(of_inputs, builder.mul(arguments[5], I64(row)))
                total = emitter.splat(emitter.load(at, FLOAT), LANES)
                before = emitter.fma(part, step, builder.load(slot, typ=FLOATS))
                builder.store(emitter.fma(total, middle, before), slot)
        for slot, target in zip(found, targets, strict=True):
            emitter.store(builder.load(slot, typ=FLOATS), target)
        return context.get_dummy_value()

    word = types.int64
    return types.void(*[word] * 7, rows), emit


@kernel
def _scale_rows(grids, group_bytes, groups, partial, sums, sums_bytes, results, rows):
    """``_scale`` for up to 16 rows."""
    row = 0
    while row < rows:
        near, own = partial + ROW_BYTES * row, sums + sums_bytes * row
        out = results + 4 * OUTPUTS * row
        if rows - row >= BLOCK_ROWS:
            _scale(grids, group_bytes, groups, near, own, sums_bytes, out, 8)
            row += 8
        elif rows - row >= 4:
            _scale(grids, group_bytes, groups, near, own, sums_bytes, out, 4)
            row += 4
        elif rows - row >= 2:
            _scale(grids, group_bytes, groups, near, own, sums_bytes, out, 2)
            row += 2
        else:
            _scale(grids, group_bytes, groups, near, own, sums_bytes, out, 1)
            row += 1


@team_body
def prepare(address):
    """Write the inputs of the rows that the shared counter gives, and the sums of their groups."""
    job = carray(pointer(address), WORDS, np.int64)
    groups, pieces = job[GROUPS], job[PIECES]
    columns, group = groups * pieces * PIECE, pieces * PIECE
    memory = np.empty(columns + CACHE_LINE // 4, np.float32)
    numbers = carray(pointer(line_address(memory)), columns, np.float32)
    while True:
        start = fetch_add(address, TILE_ROWS)
        if start >= job[ROWS]:
            break
        for row in range(start, min(job[ROWS], start + TILE_ROWS)):
            factor = read_input(job, row, numbers)
            if job[NORM]:
                weights = carray(pointer(job[NORM]), columns, np.float32)
                for channel in range(columns):
                    numbers[channel] = numbers[channel] * factor * weights[channel]
            round_floats(numbers)
            inputs = job[INPUTS] + row // TILE_ROWS * (columns // PIECE) * TILE_BYTES
            inputs += row % TILE_ROWS * ROW_BYTES
            amx_product.write_input(numbers.ctypes.data, 0, factor, inputs, columns // PIECE)
            sums = carray(pointer(job[SUMS] + 4 * row * groups), groups, np.float32)
            for index in range(groups):
                sums[index] = sum_of(numbers[index * group : (index + 1) * group])
    memory[0] = np.float32(0.0)  # numba frees an array after its last use


@kernel
def _multiply_tile(job, tile, panel, partial, results):
    """``panel``, ``partial``, ``results``: addresses of memory for levels, sums and results."""
    groups, pieces, rows = job[GROUPS], job[PIECES], job[ROWS]
    group_bytes = pieces * PIECE_BYTES + GRID_BYTES
    packed = job[PACKED] + tile * groups * group_bytes
    each, tile_inputs = max(1, MOST_PIECES // pieces), groups * pieces * TILE_BYTES
    carray(pointer(results), rows * OUTPUTS, np.float32)[:] = np.float32(0.0)
    for group in range(0, groups, each):
        count, grids = min(each, groups - group), packed + group * group_bytes
        for index in range(count):
            codes = grids + index * group_bytes + GRID_BYTES
            _expand(codes, pieces, panel + index * pieces * PANEL_BYTES)
        for row in range(0, rows, TILE_ROWS):
            near = job[INPUTS] + row // TILE_ROWS * tile_inputs + group * pieces * TILE_BYTES
            for index in range(count):
                levels = panel + index * pieces * PANEL_BYTES
                inputs = near + index * pieces * TILE_BYTES
                _multiply(inputs, levels, pieces, partial + index * PANEL_BYTES)
            sums = job[SUMS] + 4 * (row * groups + group)
            out = results + 4 * OUTPUTS * row
            left = min(TILE_ROWS, rows - row)
            _scale_rows(grids, group_bytes, count, partial, sums, 4 * groups, out, left)
    write_results(job, tile, 0, rows, carray(pointer(results), (rows, OUTPUTS), np.float32))


@team_body
def multiply(address):
    """Take tiles of weights from the shared counter until none is left."""
    job = carray(pointer(address), WORDS, np.int64)
    size = max(MOST_PIECES, job[PIECES]) * PANEL_BYTES
    memory = np.empty(2 * size + 4 * OUTPUTS * job[ROWS] + CACHE_LINE, np.uint8)
    panel = line_address(memory)
    use_tiles(job[CONFIG])
    while True:
        start = fetch_add(address, job[CHUNK])
        if start >= job[TILES]:
            break
        for tile in range(start, min(job[TILES], start + job[CHUNK])):
            _multiply_tile(job, tile, panel, panel + size, panel + 2 * size)
    end_tiles()
    memory[0] = 0  # numba frees an array after its last use
