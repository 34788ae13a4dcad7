# pyright: basic, reportCallIssue=false, reportPrivateImportUsage=false, reportAttributeAccessIssue=false
# numba is untyped: it passes the first argument of an intrinsic, and compiles the rest.
"""Products of 8-bit codes on a processor that adds products of four bytes in 32 bits (VNNI).

Sums of 64 outputs for six rows are in registers until they are done. Then they are multiplied by
the scales of rows and outputs, so that no other op has to. As a job it can be part of a program.
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
from triptych.kernels.codegen.numba_runtime import (
    CACHE_LINE,
    fetch_add,
    kernel,
    line_address,
    pointer,
    run_team,
    team_body,
)
from triptych.kernels.codegen.simd import FLOAT, I8, I32, I64, LANES, POINTER, Emitter, vector
from triptych.kernels.floats import FLOAT as FLOAT_KIND
from triptych.kernels.floats import KINDS, store_vectors, write_floats
from triptych.kernels.int8.rows import ZERO_CODE, QuantizedRows
from triptych.kernels.pointwise.gate_vectors import gate_vector

OUTPUTS = 64
"""Outputs of a panel of weights, in four vectors."""
VECTORS = OUTPUTS // LANES
MOST_ROWS = 6
"""Rows of a block: with 64 outputs their sums take 24 of 32 registers."""
ROWS_AT_A_TIME = 96
"""Rows for which a thread multiplies a panel before it takes another one."""
QUAD = 4
"""Inputs of a word."""
PREFETCHED = 4096
"""Bytes from weights that are multiplied to those that are prefetched."""
FEW = 1 << 15
"""Up to so many products one thread adds alone."""

WORDS = 15
COUNTER, PANELS, ROWS, QUADS, CODES, STRIDE, ROW_SCALES, PACKED, SCALES, FIRST, BIAS = range(11)
OUT, OUT_KIND, WIDTH, GATED = range(11, WORDS)
"""Words of a job. ``CODES``: rows of bytes, ``STRIDE`` of them apart. ``SCALES``, ``FIRST`` (what a
sum begins with) and ``BIAS`` are of all outputs of panels, ``WIDTH`` is the number of results of a
row. ``GATED``: whether the first half of a panel's outputs is to be gates of the second one."""


@intrinsic(prefer_literal=True)
def _tile(typing_context, weights, quads, codes, stride, first, sums, rows):
    """Sums of a block of ``rows`` rows, a literal, with a panel: to ``sums`` [rows, 64] int32."""
    count = rows.literal_value

    def emit(context, builder, signature, arguments):
        emitter, wide, octets = Emitter(builder), vector(I32, LANES), vector(I8, QUAD * LANES)
        weights, codes, first, sums = (
            builder.inttoptr(arguments[at], POINTER) for at in (0, 2, 4, 5)
        )
        starts = [emitter.byte(codes, builder.mul(arguments[3], I64(row))) for row in range(count)]
        begin = [emitter.load(emitter.byte(first, 4 * LANES * at), wide) for at in range(VECTORS)]
        slots = {
            (row, at): emitter.variable(ir.Constant(wide, [0] * LANES))
            for row in range(count)
            for at in range(VECTORS)
        }
        for (_, at), slot in slots.items():
            builder.store(begin[at], slot)
        with emitter.loop(arguments[1]) as quad:
            place = emitter.byte(weights, builder.mul(quad, I64(QUAD * OUTPUTS)))
            near = [emitter.byte(place, QUAD * LANES * at) for at in range(VECTORS)]
            parts = [emitter.load(each, octets) for each in near]
            for each in near if count > 1 else ():
                emitter.prefetch(emitter.byte(each, PREFETCHED))
            offset = builder.mul(quad, I64(QUAD))
            for row, start in enumerate(starts):
                word = emitter.splat(emitter.load(emitter.byte(start, offset), I32), LANES)
                word = builder.bitcast(word, octets)
                for at, part in enumerate(parts):
                    slot = slots[row, at]
                    after = emitter.add_byte_quads(builder.load(slot, typ=wide), word, part)
                    builder.store(after, slot)
        for (row, at), slot in slots.items():
            near = emitter.byte(sums, 4 * (OUTPUTS * row + LANES * at))
            emitter.store(builder.load(slot, typ=wide), near)
        return context.get_dummy_value()

    word = types.int64
    return types.void(*[word] * 6, rows), emit


@intrinsic(prefer_literal=True)
def _finish(
    typing_context, sums, count, row_scales, scales, bias, out, stride, kind, is_gated
):  # fmt: skip
    """Multiply sums [count, 64] int32 by their scales, add a bias, and write numbers of a kind.

    ``stride``: bytes from one row of ``out`` to the next; ``is_gated``: a literal.
    """
    gates = is_gated.literal_value

    def emit(context, builder, signature, arguments):
        emitter, wide = Emitter(builder), vector(FLOAT, LANES)
        sums, row_scales, scales, bias, out = (
            builder.inttoptr(arguments[at], POINTER) for at in (0, 2, 3, 4, 5)
        )
        places = [4 * LANES * at for at in range(VECTORS)]
        of_outputs = [emitter.load(emitter.byte(scales, place), wide) for place in places]
        biases = [emitter.load(emitter.byte(bias, place), wide) for place in places]
        with emitter.loop(arguments[1]) as row:
            near = emitter.byte(sums, builder.mul(row, I64(4 * OUTPUTS)))
            scale = emitter.load(emitter.byte(row_scales, builder.mul(row, I64(4))), FLOAT)
            of_row, numbers = emitter.splat(scale, LANES), []
            for place, of_output, part in zip(places, of_outputs, biases, strict=True):
                sum_ = emitter.load(emitter.byte(near, place), vector(I32, LANES))
                number = builder.fmul(builder.sitofp(sum_, wide), of_output)
                numbers.append(emitter.fma(number, of_row, part))
            if gates:
                half = VECTORS // 2
                pairs = zip(numbers[:half], numbers[half:], strict=True)
                numbers = [gate_vector(emitter, *pair) for pair in pairs]
            target = emitter.byte(out, builder.mul(row, arguments[6]))
            store_vectors(emitter, numbers, target, arguments[7])
        return context.get_dummy_value()

    word = types.int64
    return types.void(*[word] * 8, is_gated), emit


@kernel
def _block_rows(left):
    """Rows of the next block, of those that are left."""
    if left >= MOST_ROWS:
        return MOST_ROWS
    return 4 if left >= 4 else 2 if left >= 2 else 1


@kernel
def _add_block(job, panel, row, rows, sums):
    weights = job[PACKED] + panel * job[QUADS] * QUAD * OUTPUTS
    codes, first = job[CODES] + row * job[STRIDE], job[FIRST] + 4 * OUTPUTS * panel
    if rows == MOST_ROWS:
        _tile(weights, job[QUADS], codes, job[STRIDE], first, sums, MOST_ROWS)
    elif rows == 4:
        _tile(weights, job[QUADS], codes, job[STRIDE], first, sums, 4)
    elif rows == 2:
        _tile(weights, job[QUADS], codes, job[STRIDE], first, sums, 2)
    else:
        _tile(weights, job[QUADS], codes, job[STRIDE], first, sums, 1)


@kernel
def _write_block(job, panel, row, rows, sums, results):
    """Write the results of a block; those of an incomplete panel by way of ``results``."""
    width, kind = OUTPUTS // 2 if job[GATED] else OUTPUTS, job[OUT_KIND]
    first, size = panel * width, 4 if kind == FLOAT_KIND else 2
    out, stride = job[OUT] + size * (row * job[WIDTH] + first), size * job[WIDTH]
    is_whole = first + width <= job[WIDTH]
    if not is_whole:
        out, stride, kind = results.ctypes.data, 4 * OUTPUTS, FLOAT_KIND
    of_rows = job[ROW_SCALES] + 4 * row
    scales, bias = job[SCALES] + 4 * OUTPUTS * panel, job[BIAS] + 4 * OUTPUTS * panel
    if job[GATED]:
        _finish(sums, rows, of_rows, scales, bias, out, stride, kind, True)
    else:
        _finish(sums, rows, of_rows, scales, bias, out, stride, kind, False)
    if not is_whole:
        for at in range(rows):
            line = results[at, : job[WIDTH] - first]
            write_floats(line, job[OUT], job[OUT_KIND], (row + at) * job[WIDTH] + first)


@team_body
def _multiply(address):
    """Take panels of weights, for some rows each, from the shared counter until none is left."""
    job = carray(pointer(address), WORDS, np.int64)
    memory = np.empty(MOST_ROWS * OUTPUTS + CACHE_LINE // 4, np.int32)
    results = np.empty((MOST_ROWS, OUTPUTS), np.float32)
    sums, chunks = line_address(memory), -(-job[ROWS] // ROWS_AT_A_TIME)
    while True:
        item = fetch_add(address, 1)
        if item >= job[PANELS] * chunks:
            break
        panel, row = item // chunks, item % chunks * ROWS_AT_A_TIME
        end = min(job[ROWS], row + ROWS_AT_A_TIME)
        while row < end:
            rows = _block_rows(end - row)
            _add_block(job, panel, row, rows, sums)
            _write_block(job, panel, row, rows, sums, results)
            row += rows
    memory[0] = 0  # numba frees an array after its last use


@job_start
def _start(words, body, team, threads):
    job = carray(pointer(words), WORDS, np.int64)
    job[COUNTER] = 0
    products = job[ROWS] * job[PANELS] * OUTPUTS * job[QUADS] * QUAD
    run_team(team, body, job, threads if products > FEW else 1)
    return 0


@dataclass(frozen=True, slots=True)
class DotProduct:
    """A product with constant weights in 8 bits, one scale for each output."""

    packed: Tensor
    """(panels, inputs / 4, 64 outputs, 4) int8."""
    scales: Tensor
    """Of all outputs of panels, float32, as the next two."""
    first: Tensor
    """What sums begin with, int32: codes are more by ``ZERO_CODE`` than what they stand for."""
    bias: Tensor
    results: int
    """Numbers of a row of results."""
    is_gated: bool

    @classmethod
    def of(
        cls,
        codes: Tensor,
        scales: Tensor,
        bias: Tensor | None = None,
        *,
        is_gated: bool = False,
    ) -> "DotProduct":
        """``is_gated``: results are ``silu`` of the first half of the outputs, times the others.

        Shapes:  codes (out, in) int8, in a multiple of 4; scales, bias (out,) float32
        """
        outputs, inputs = codes.shape
        order = _gated_order(outputs) if is_gated else torch.arange(outputs)
        panels = -(-len(order) // OUTPUTS)
        whole = codes.new_zeros(panels * OUTPUTS, inputs)
        of_outputs, biases = torch.ones(len(whole)), torch.zeros(len(whole))
        is_real = order < outputs
        places = is_real.nonzero()[:, 0]
        whole[places], of_outputs[places] = codes[order[places]], scales[order[places]].float()
        if bias is not None:
            biases[places] = bias[order[places]].float()
        packed = whole.view(panels, OUTPUTS, inputs // QUAD, QUAD).transpose(1, 2).contiguous()
        first = -ZERO_CODE * whole.sum(1, dtype=torch.int32)
        results = outputs // 2 if is_gated else outputs
        return cls(packed, of_outputs, first, biases, results, is_gated)

    @property
    def inputs(self) -> int:
        return self.packed.shape[1] * QUAD

    def __call__(self, rows: QuantizedRows, dtype: torch.dtype) -> Tensor:
        """Shapes:  of (T, in) -> (T, results)"""
        out = torch.empty(len(rows.codes), self.results, dtype=dtype)
        if len(out):
            dot_job(rows, self, out).run()
        return out


def dot_job(rows: QuantizedRows, product: DotProduct, out: Tensor) -> Job:
    """The job of a product of at least one row, with its result in ``out``."""
    codes, scales = rows.codes, rows.scales
    if codes.dim() != 2 or codes.shape[1] != product.inputs or codes.stride(1) != 1:
        raise ConfigError(
            f"codes {tuple(codes.shape)}, strides {codes.stride()}: expected dense "
            f"(T, {product.inputs})"
        )
    if scales.shape != (len(codes),) or not scales.is_contiguous():
        raise ConfigError(f"scales {tuple(scales.shape)}: expected dense ({len(codes)},)")
    if out.shape != (len(codes), product.results) or not out.is_contiguous():
        raise ConfigError(
            f"results {tuple(out.shape)}: expected dense {(len(codes), product.results)}"
        )
    words = np.zeros(WORDS, np.int64)
    words[PANELS], words[QUADS] = product.packed.shape[:2]
    words[ROWS], words[CODES], words[STRIDE] = len(codes), codes.data_ptr(), codes.stride(0)
    words[ROW_SCALES], words[PACKED] = scales.data_ptr(), product.packed.data_ptr()
    facts = product.scales, product.first, product.bias
    words[SCALES], words[FIRST], words[BIAS] = (part.data_ptr() for part in facts)
    words[OUT], words[OUT_KIND], words[WIDTH] = out.data_ptr(), KINDS[out.dtype], product.results
    words[GATED] = product.is_gated
    return Job("dot_product", _start.address, words, _multiply.address, (rows, product, out))


def _gated_order(outputs: int) -> Tensor:
    """Outputs in the order of panels, whose first halves are gates; ``outputs`` stands for none."""
    half, width = outputs // 2, OUTPUTS // 2
    gates = torch.full((-(-half // width), width), outputs)
    gates.view(-1)[:half] = torch.arange(half)
    others = torch.where(gates < outputs, gates + half, outputs)
    return torch.cat((gates, others), 1).flatten()
