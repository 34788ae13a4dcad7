# pyright: basic, reportCallIssue=false, reportPrivateImportUsage=false, reportAttributeAccessIssue=false
# numba is untyped: it passes the first argument of an intrinsic, and compiles the rest.
"""Products of bfloat16 rows with 4-bit weights on the CPU, which expands weights in registers.

A level is an index of a table of 16-bit numbers, so a vector of levels becomes one of weights with
a shift and a permutation, for as many rows as there are registers.
"""

import numpy as np
import torch
from llvmlite import ir
from numba import carray, types
from numba.extending import intrinsic
from torch import Tensor

from triptych.core.errors import ConfigError
from triptych.kernels.codegen.numba_runtime import (
    LANES,
    fetch_add,
    kernel,
    pointer,
    run_team,
    summing_kernel,
    team_address,
    team_body,
    team_threads,
)
from triptych.kernels.codegen.simd import BFLOAT, FLOAT, I16, I32, I64, POINTER, Emitter, vector
from triptych.kernels.floats import KINDS, bfloat_pair, read_floats, round_floats, write_floats
from triptych.kernels.int4.layout import (
    GRID_BYTES,
    LEVELS,
    OUTPUTS,
    PIECE,
    ZERO_LEVEL,
    Int4Tiles,
)
from triptych.kernels.int4.layout import PAIRS as PAIRS_OF_WORD
from triptych.kernels.pointwise.cpu import gate_row, norm_row

WORDS = 14
COUNTER, CHUNK, TILES, ROWS, GROUPS, PIECES, PACKED, INPUTS, SUMS, OUT, OUT_KIND, WIDTH = range(12)
BIAS, GATED = 12, 13
"""Words of a job. Rows are in blocks of ``block_rows``, of which ``INPUTS`` has [in / 2, rows]
pairs of bfloat16, and ``SUMS`` [groups, rows] sums of the inputs of a group."""

VECTOR_BYTES = 64
PIECE_BYTES = PIECE * OUTPUTS // 2
"""Of the levels of 32 inputs of a tile."""
MOST_ROWS = 8
"""Rows of a block: for 32 outputs each has four registers, for its sums and those of a group."""
CHUNK_WEIGHTS = 1 << 15
"""Approximate weights that a thread takes at a time."""
FEW = 1 << 15
"""Up to so many weights one thread multiplies alone."""


SHORTS, PAIRS = vector(I16, 2 * LANES), vector(BFLOAT, 2 * LANES)
TABLE = [
    int(np.float32(index % LEVELS - ZERO_LEVEL).view(np.uint32)) >> 16 for index in range(2 * LANES)
]
"""Weights of levels, as bfloat16. A permutation reads five bits of a word: a level and one more."""


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
            words = [emitter.load(emitter.byte(at, VECTOR_BYTES * half), SHORTS) for half in (0, 1)]
            for place in range(PAIRS_OF_WORD):
                weights = [self._weights(half, place) for half in words]
                for row in range(self.count):
                    offset = 4 * (self.count * (PAIRS_OF_WORD * part + place) + row)
                    pair = emitter.splat_pair(emitter.byte(pairs, offset))
                    for half in (0, 1):
                        slot = self.of_group[row, half]
                        before = build.load(slot, typ=self.wide)
                        build.store(emitter.add_bfloat_pairs(before, weights[half], pair), slot)

    def _weights(self, words, place):
        """Levels at one place of each word, minus ``ZERO_LEVEL``."""
        build = self.build
        kinds = (SHORTS, SHORTS)
        permute = self.emitter.declare("llvm.x86.avx512.permvar.hi.512", SHORTS, kinds)
        index = build.lshr(words, self.emitter.constant(4 * place, words)) if place else words
        return build.bitcast(build.call(permute, [ir.Constant(SHORTS, TABLE), index]), PAIRS)

    def _add_group(self, grids, sums):
        """Add sums of a group times the step, and sums of its inputs times the middle."""
        emitter, build = self.emitter, self.build
        for half in (0, 1):
            grid = emitter.load(emitter.byte(grids, VECTOR_BYTES * half), vector(I32, LANES))
            step = build.bitcast(build.shl(grid, emitter.constant(16, grid)), self.wide)
            upper = build.and_(grid, emitter.constant(0xFFFF0000, grid))
            middle = build.bitcast(upper, self.wide)
            for row in range(self.count):
                sum_ = emitter.splat(emitter.load(emitter.byte(sums, 4 * row), FLOAT), LANES)
                products = build.load(self.of_group[row, half], typ=self.wide)
                slot = self.totals[row, half]
                total = emitter.fma(products, step, build.load(slot, typ=self.wide))
                build.store(emitter.fma(sum_, middle, total), slot)


@kernel
def block_rows(left):
    """Rows of the next block, of those that are left."""
    if left >= MOST_ROWS:
        return MOST_ROWS
    return 4 if left >= 4 else 2 if left >= 2 else 1


@kernel
def prepare_row(numbers, rows, at, groups, pairs, sums):
    """Write a row, whose numbers are in bfloat16, as row ``at`` of a block of ``rows``.

    ``pairs`` and ``sums`` are those of the block; ``numbers`` is float32.
    """
    words, group = numbers.view(np.uint32), len(numbers) // groups
    for pair in range(len(numbers) // 2):
        pairs[pair * rows + at] = bfloat_pair(words[2 * pair], words[2 * pair + 1])
    for index in range(groups):
        sums[index * rows + at] = _sum(numbers[index * group : (index + 1) * group])


@summing_kernel
def _sum(numbers):
    total = np.float32(0.0)
    for channel in range(len(numbers)):
        total += numbers[channel]
    return total


@kernel
def multiply_block(packed, groups, pieces, pairs, sums, rows, results):
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


@kernel
def _multiply_tile(job, tile, results, gated):
    groups, pieces = job[GROUPS], job[PIECES]
    width = groups * pieces * PIECE
    packed = job[PACKED] + tile * groups * (pieces * PIECE_BYTES + GRID_BYTES)
    row = 0
    while row < job[ROWS]:
        rows = block_rows(job[ROWS] - row)
        pairs, sums = job[INPUTS] + 2 * row * width, job[SUMS] + 4 * row * groups
        multiply_block(packed, groups, pieces, pairs, sums, rows, results)
        for at in range(rows):
            line = results[at]
            if job[BIAS]:
                line += carray(pointer(job[BIAS] + 4 * OUTPUTS * tile), OUTPUTS, np.float32)
            if job[GATED]:
                gate_row(line, gated)
                line = gated
            start = (row + at) * job[WIDTH] + tile * len(line)
            write_floats(line, job[OUT], job[OUT_KIND], start)
        row += rows


@team_body
def _work(address):
    """Take tiles from the shared counter until none is left."""
    job = carray(pointer(address), WORDS, np.int64)
    results = np.empty((MOST_ROWS, OUTPUTS), np.float32)
    gated = np.empty(LANES, np.float32)
    while True:
        start = fetch_add(address, job[CHUNK])
        if start >= job[TILES]:
            break
        for tile in range(start, min(job[TILES], start + job[CHUNK])):
            _multiply_tile(job, tile, results, gated)


@kernel
def _read_row(at, kind, offset, hidden, numbers):
    """Read a row, with ``hidden`` the row of the residual stream, to which it is added there."""
    if at:
        read_floats(at, kind, offset, numbers)
    if hidden:
        total = carray(pointer(hidden), len(numbers), np.float32)
        if at:
            for channel in range(len(numbers)):
                total[channel] += numbers[channel]
        numbers[:] = total


@kernel
def _start(
    body, team, threads, tiles, rows, groups, columns, packed, source, source_kind, stride, hidden,
    norm, epsilon, out, out_kind, width, bias, is_gated,
):  # fmt: skip
    pairs = np.empty(rows * columns // 2, np.uint32)
    sums = np.empty(rows * groups, np.float32)
    numbers, normed = np.empty(columns, np.float32), np.empty(columns, np.float32)
    row = 0
    while row < rows:
        count = block_rows(rows - row)
        near = pairs[row * columns // 2 :]
        for at in range(count):
            line = 4 * (row + at) * columns
            offset = (row + at) * stride
            _read_row(source, source_kind, offset, hidden + line if hidden else 0, numbers)
            if norm:
                norm_row(norm, epsilon, numbers, normed)
                numbers[:] = normed
            round_floats(numbers)
            prepare_row(numbers, count, at, groups, near, sums[row * groups :])
        row += count
    job = np.empty(WORDS, np.int64)
    job[COUNTER], job[CHUNK] = 0, max(1, CHUNK_WEIGHTS // (columns * OUTPUTS))
    job[TILES], job[ROWS], job[GROUPS] = tiles, rows, groups
    job[PIECES] = columns // groups // PIECE
    job[PACKED], job[INPUTS], job[SUMS] = packed, pairs.ctypes.data, sums.ctypes.data
    job[OUT], job[OUT_KIND], job[WIDTH], job[BIAS] = out, out_kind, width, bias
    job[GATED] = is_gated
    run_team(team, body, job, threads if tiles * OUTPUTS * columns > FEW else 1)
    return pairs[0] + sums[0]  # numba frees an array after its last use


def multiply_int4(
    rows: Tensor, weights: Int4Tiles, bias: Tensor | None, dtype: torch.dtype
) -> Tensor:
    """See ``reference.multiply_int4``."""
    return _run(rows, weights, bias, dtype)


def add_norm_multiply_int4(
    hidden: Tensor,
    delta: Tensor | None,
    norm: Tensor,
    epsilon: float,
    weights: Int4Tiles,
    bias: Tensor | None,
    dtype: torch.dtype,
) -> tuple[Tensor, Tensor]:
    """See ``reference.add_norm_multiply_int4``."""
    if not (norm.is_contiguous() and norm.dtype == hidden.dtype == torch.float32):
        raise ConfigError(f"norm {norm.dtype} of {hidden.dtype}: expected dense float32")
    if norm.shape != hidden.shape[1:] or (delta is not None and delta.shape != hidden.shape):
        raise ConfigError(f"norm of {len(norm)} numbers for rows of {tuple(hidden.shape)}")
    if delta is None:
        total = hidden.contiguous()
    else:  # rows are added in place
        total = torch.empty_like(hidden, memory_format=torch.contiguous_format).copy_(hidden)
    return total, _run(delta, weights, bias, dtype, total, norm, epsilon)


def _run(
    rows: Tensor | None,
    weights: Int4Tiles,
    bias: Tensor | None,
    dtype: torch.dtype,
    total: Tensor | None = None,
    norm: Tensor | None = None,
    epsilon: float = 0.0,
) -> Tensor:
    """Multiply rows, or the norm of ``total`` after they are added to it."""
    outputs, columns = weights.shape
    like = rows if rows is not None else total
    assert like is not None
    if like.dim() != 2 or like.shape[1] != columns or like.stride(1) != 1:
        raise ConfigError(
            f"rows {tuple(like.shape)}, strides {like.stride()}: expected dense (T, {columns})"
        )
    if like.dtype not in KINDS or dtype not in KINDS:
        raise ConfigError(f"rows of {like.dtype} to {dtype}: have {', '.join(map(str, KINDS))}")
    if bias is not None and (bias.shape != (outputs,) or bias.dtype != torch.float32):
        raise ConfigError(f"bias {tuple(bias.shape)} {bias.dtype}: expected float32 ({outputs},)")
    if bias is not None and weights.is_gated:
        raise ConfigError("gated weights take no bias")
    out = torch.empty(len(like), weights.results, dtype=dtype)
    if not len(like):
        return out
    _start(
        _work.address,
        team_address(),
        team_threads(),
        len(weights.tiles),
        len(like),
        weights.groups,
        columns,
        weights.tiles.data_ptr(),
        0 if rows is None else rows.data_ptr(),
        KINDS[like.dtype],
        like.stride(0),
        0 if total is None else total.data_ptr(),
        0 if norm is None else norm.data_ptr(),
        epsilon,
        out.data_ptr(),
        KINDS[dtype],
        out.shape[1],
        0 if bias is None else bias.data_ptr(),
        int(weights.is_gated),
    )
    return out
