# pyright: basic, reportCallIssue=false, reportPrivateImportUsage=false, reportAttributeAccessIssue=false
# numba is untyped: it passes the first argument of an intrinsic, and compiles the rest.
"""Products with weights in 8 bits or in bfloat16 in vector registers.

They are for processors whose instructions for these are missing, so that libraries fall back to
code that is several times slower. Weights are expanded in registers for as many rows as there are
registers for: codes to integers of 16 bits, whose products are added in 32 bits, and bfloat16 to
float32. The order of additions is the same for any number of rows.
"""

from dataclasses import dataclass

import numpy as np
import torch
from llvmlite import ir
from numba import carray, types
from numba.extending import intrinsic
from torch import Tensor

from triptych.core.errors import ConfigError
from triptych.kernels.codegen.jobs import Job, job_start
from triptych.kernels.codegen.native import vector_lanes
from triptych.kernels.codegen.numba_runtime import (
    fetch_add,
    kernel,
    pointer,
    run_team,
    team_body,
)
from triptych.kernels.codegen.simd import FLOAT, I8, I16, I32, I64, LANES, POINTER, Emitter, vector
from triptych.kernels.floats import KINDS, read_floats, write_floats

OUTPUTS = LANES
"""Outputs of a tile, in one vector of floats."""
MOST_ROWS = 8 if vector_lanes() == LANES else 4
"""Rows of a block: their sums are in half of the registers."""
ZERO_CODE = 128
CODES = -1
"""Kind of rows that are codes of 8 bits."""
CHUNK_WEIGHTS = 1 << 15
"""Approximate weights that a thread takes at a time."""
FEW = 1 << 15
"""Up to so many weights one thread multiplies alone."""

WORDS = 16
COUNTER, CHUNK, TILES, ROWS, PAIRS, PACKED, INPUTS, SCALES, BIAS, OUT, OUT_KIND, WIDTH = range(12)
SOURCE, SOURCE_KIND, STRIDE, COLUMNS = range(12, WORDS)
"""Words of a job. Rows are read from ``SOURCE``, ``STRIDE`` elements apart. ``INPUTS`` has them in
words of 32 bits: two integers of 16 bits, or a float32 for each of a pair. ``WIDTH``: outputs."""


@intrinsic(prefer_literal=True)
def _tile(typing_context, weights, pairs, inputs, input_bytes, out, rows, is_codes):
    """Products of a block of ``rows`` rows with a tile, to ``out`` [rows, 16] float32.

    ``rows``, ``is_codes``: literals.
    """
    count, add = rows.literal_value, _add_codes if is_codes.literal_value else _add_bfloats
    kind = vector(I32 if is_codes.literal_value else FLOAT, LANES)

    def emit(context, builder, signature, arguments):
        emitter = Emitter(builder)
        weights, inputs, out = (builder.inttoptr(arguments[at], POINTER) for at in (0, 2, 4))
        starts = [emitter.byte(inputs, builder.mul(arguments[3], I64(row))) for row in range(count)]
        zero = ir.Constant(kind, [0] * LANES)
        sums = [emitter.variable(zero) for _ in starts]
        for slot in sums:
            builder.store(zero, slot)
        with emitter.loop(arguments[1]) as pair:
            before = [builder.load(slot, typ=kind) for slot in sums]
            for slot, after in zip(sums, add(emitter, weights, starts, pair, before), strict=True):
                builder.store(after, slot)
        for row, slot in enumerate(sums):
            total = builder.load(slot, typ=kind)
            if is_codes.literal_value:
                total = builder.sitofp(total, vector(FLOAT, LANES))
            emitter.store(total, emitter.byte(out, 4 * LANES * row))
        return context.get_dummy_value()

    word = types.int64
    return types.void(*[word] * 5, rows, is_codes), emit


def _add_codes(emitter, weights, starts, pair, sums):
    """Add products of a pair of inputs, integers of 16 bits, with codes of 8 bits."""
    build, shorts = emitter.build, vector(I16, 2 * LANES)
    place = emitter.byte(weights, build.mul(pair, I64(2 * LANES)))
    codes = build.sext(emitter.load(place, vector(I8, 2 * LANES)), shorts)
    results = []
    for start, before in zip(starts, sums, strict=True):
        word = emitter.load(emitter.byte(start, build.mul(pair, I64(4))), I32)
        word = build.bitcast(emitter.splat(word, LANES), shorts)
        results.append(emitter.add_word_pairs(before, codes, word))
    return results


def _add_bfloats(emitter, weights, starts, pair, sums):
    """Add products of a pair of inputs, float32, with those of bfloat16."""
    build = emitter.build
    place = emitter.byte(weights, build.mul(pair, I64(4 * LANES)))
    parts = emitter.halves(emitter.load(place, vector(I32, LANES)))
    results = []
    for start, total in zip(starts, sums, strict=True):
        near = emitter.byte(start, build.mul(pair, I64(8)))
        for at, part in enumerate(parts):
            number = emitter.splat(emitter.load(emitter.byte(near, 4 * at), FLOAT), LANES)
            total = emitter.fma(part, number, total)
        results.append(total)
    return results


@kernel
def _prepare(job):
    """Write the inputs of all rows; what is behind an odd last one is 0."""
    columns, words = job[COLUMNS], job[PAIRS] if job[SOURCE_KIND] == CODES else 2 * job[PAIRS]
    for row in range(job[ROWS]):
        target = job[INPUTS] + 4 * words * row
        if job[SOURCE_KIND] == CODES:
            integers = carray(pointer(target), 2 * words, np.int16)
            codes = carray(pointer(job[SOURCE] + row * job[STRIDE]), columns, np.uint8)
            integers[2 * words - 1] = 0
            for column in range(columns):
                integers[column] = np.int16(codes[column]) - np.int16(ZERO_CODE)
        else:
            numbers = carray(pointer(target), words, np.float32)
            numbers[words - 1] = 0
            read_floats(job[SOURCE], job[SOURCE_KIND], row * job[STRIDE], numbers[:columns])


@kernel
def _multiply_block(weights, pairs, inputs, size, rows, out, is_codes):
    if is_codes:
        if rows == 8:
            _tile(weights, pairs, inputs, size, out, 8, True)
        elif rows == 4:
            _tile(weights, pairs, inputs, size, out, 4, True)
        elif rows == 2:
            _tile(weights, pairs, inputs, size, out, 2, True)
        else:
            _tile(weights, pairs, inputs, size, out, 1, True)
    elif rows == 8:
        _tile(weights, pairs, inputs, size, out, 8, False)
    elif rows == 4:
        _tile(weights, pairs, inputs, size, out, 4, False)
    elif rows == 2:
        _tile(weights, pairs, inputs, size, out, 2, False)
    else:
        _tile(weights, pairs, inputs, size, out, 1, False)


@kernel
def _block_rows(left):
    """Rows of the next block, of those that are left."""
    if left >= MOST_ROWS:
        return MOST_ROWS
    return 4 if left >= 4 else 2 if left >= 2 else 1


@kernel
def _write(job, tile, row, rows, results):
    """Write the results of a block, times their scales, plus a bias."""
    first = tile * OUTPUTS
    count = min(OUTPUTS, job[WIDTH] - first)
    scales = carray(pointer(job[SCALES]), job[TILES] * OUTPUTS, np.float32)
    biases = carray(pointer(job[BIAS]), job[TILES] * OUTPUTS, np.float32)
    for at in range(rows):
        line = results[at]
        for output in range(OUTPUTS):
            line[output] = line[output] * scales[first + output] + biases[first + output]
        place = (row + at) * job[WIDTH] + first
        write_floats(line[:count], job[OUT], job[OUT_KIND], place)


@kernel
def _multiply_tile(job, tile, results):
    is_codes = job[SOURCE_KIND] == CODES
    size = 4 * job[PAIRS] if is_codes else 8 * job[PAIRS]
    weights = job[PACKED] + tile * job[PAIRS] * OUTPUTS * (2 if is_codes else 4)
    row = 0
    while row < job[ROWS]:
        rows = _block_rows(job[ROWS] - row)
        near = job[INPUTS] + size * row
        _multiply_block(weights, job[PAIRS], near, size, rows, results.ctypes.data, is_codes)
        _write(job, tile, row, rows, results)
        row += rows


@team_body
def _multiply(address):
    """Take tiles of weights from the shared counter until none is left."""
    job = carray(pointer(address), WORDS, np.int64)
    results = np.empty((MOST_ROWS, OUTPUTS), np.float32)
    while True:
        start = fetch_add(address, job[CHUNK])
        if start >= job[TILES]:
            break
        for tile in range(start, min(job[TILES], start + job[CHUNK])):
            _multiply_tile(job, tile, results)


@job_start
def _start(words, body, team, threads):
    job = carray(pointer(words), WORDS, np.int64)
    size = job[PAIRS] if job[SOURCE_KIND] == CODES else 2 * job[PAIRS]
    inputs = np.empty(job[ROWS] * size, np.uint32)
    job[INPUTS], job[COUNTER] = inputs.ctypes.data, 0
    _prepare(job)
    run_team(team, body, job, threads if job[TILES] * OUTPUTS * job[COLUMNS] > FEW else 1)
    return 0 if inputs.size else 1  # numba frees an array after its last use


@dataclass(frozen=True, slots=True)
class RegisterProduct:
    """A product with constant weights in 8 bits, or in bfloat16."""

    packed: Tensor
    """(tiles, pairs of inputs, 16 outputs, 2)"""
    outputs: int
    columns: int

    @classmethod
    def of(cls, weight: Tensor) -> "RegisterProduct":
        """Shapes:  weight (out, in)
        Dtypes:  int8 or bfloat16
        """
        outputs, columns = weight.shape
        tiles, pairs = -(-outputs // OUTPUTS), -(-columns // 2)
        whole = weight
        if (outputs, columns) != (tiles * OUTPUTS, 2 * pairs):
            whole = weight.new_zeros(tiles * OUTPUTS, 2 * pairs)
            whole[:outputs, :columns] = weight
        packed = whole.view(tiles, OUTPUTS, pairs, 2).transpose(1, 2).contiguous()
        return cls(packed, outputs, columns)

    def __call__(
        self,
        rows: Tensor,
        dtype: torch.dtype,
        scales: Tensor | None = None,
        bias: Tensor | None = None,
    ) -> Tensor:
        """The product, times ``scales`` of outputs, plus ``bias``.

        Shapes:  rows (T, in) -> (T, out); scales, bias (out) float32
        Dtypes:  rows of codes uint8, which are more by ``ZERO_CODE``, else of any float; ``dtype``
            any float
        """
        out = torch.empty(len(rows), self.outputs, dtype=dtype)
        if not len(rows):
            return out
        is_codes = self.packed.dtype == torch.int8
        if rows.dim() != 2 or rows.shape[1] != self.columns or rows.stride(1) != 1:
            raise ConfigError(f"rows {tuple(rows.shape)}: expected dense (T, {self.columns})")
        if (rows.dtype == torch.uint8) != is_codes or (not is_codes and rows.dtype not in KINDS):
            raise ConfigError(f"rows of {rows.dtype} with weights of {self.packed.dtype}")
        tiles, pairs = self.packed.shape[:2]
        scales, bias = self._whole(scales, 1.0), self._whole(bias, 0.0)
        words = np.zeros(WORDS, np.int64)
        words[CHUNK] = max(1, CHUNK_WEIGHTS // (OUTPUTS * self.columns))
        words[TILES], words[ROWS] = tiles, len(rows)
        words[PAIRS], words[COLUMNS] = pairs, self.columns
        words[PACKED], words[SCALES], words[BIAS] = (
            part.data_ptr() for part in (self.packed, scales, bias)
        )
        words[OUT], words[OUT_KIND], words[WIDTH] = out.data_ptr(), KINDS[dtype], self.outputs
        kind = CODES if is_codes else KINDS[rows.dtype]
        words[SOURCE], words[SOURCE_KIND], words[STRIDE] = rows.data_ptr(), kind, rows.stride(0)
        Job(
            "register_product", _start.address, words, _multiply.address, (rows, scales, bias)
        ).run()
        return out

    def _whole(self, numbers: Tensor | None, default: float) -> Tensor:
        """Numbers of all outputs of tiles."""
        size = len(self.packed) * OUTPUTS
        if numbers is not None and len(numbers) == size:
            return numbers.float().contiguous()
        whole = torch.full((size,), default)
        if numbers is not None:
            whole[: self.outputs] = numbers
        return whole
