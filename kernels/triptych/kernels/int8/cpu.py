# pyright: basic, reportCallIssue=false, reportPrivateImportUsage=false, reportAttributeAccessIssue=false
# numba is untyped: it passes the first argument of an intrinsic, and compiles the rest.
"""Ops before products in 8 bits on the CPU: one pass over each row, codes included."""

from struct import Struct

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
    LANES,
    fetch_add,
    float_of_bits,
    kernel,
    line_address,
    pointer,
    run_team,
    team_body,
)
from triptych.kernels.codegen.simd import FLOAT, I8, I32, I64, POINTER, SHIFT, Emitter, vector
from triptych.kernels.floats import FLOAT as FLOAT_KIND
from triptych.kernels.floats import KINDS, read_floats, write_floats
from triptych.kernels.hadamard_cpu import turn
from triptych.kernels.int8.rows import LARGEST_CODE, ZERO_CODE, QuantizedRows, input_block
from triptych.kernels.pointwise.cpu import mean_square

WORDS = 14
COUNTER, CHUNK, ROWS, WIDTH, BLOCK, SOURCE, SOURCE_KIND, STRIDE, HIDDEN, TOTAL = range(10)
WEIGHT, CODES, CODE_SCALES, CODE_STRIDE = range(10, WORDS)
EPSILON = WORDS
"""Words of a job, and a float64. Rows are ``SOURCE``, if that is not 0, of ``STRIDE`` elements.
With ``HIDDEN``, if that is not 0, they are added to its rows, and the sum is ``TOTAL``. They are
normalised if ``WEIGHT`` is not 0."""

NUMBERS = 1 << 13
"""Approximate numbers that a thread takes at a time; for fewer one thread runs alone."""
ONE = np.float32(1.0)
ZERO = np.float32(0.0)
INVERSE_LARGEST = np.float32(1 / LARGEST_CODE)
INFINITE = np.int32(0x7F800000)
NAN = np.float32(np.nan)
SIZE = 0x7FFFFFFF
"""Bits of a float without its sign. Those of positive floats are in order, and NaN is above them.
"""


def quantize_rows(rows: Tensor) -> QuantizedRows:
    """See ``reference.quantize_rows``."""
    out = _empty(*rows.shape) if rows.dim() == 2 else _empty(0, 0)
    quantize_job(rows, out).run()
    return out


def add_norm_quantize(
    hidden: Tensor, delta: Tensor | None, weight: Tensor, epsilon: float
) -> tuple[Tensor, QuantizedRows]:
    """See ``reference.add_norm_quantize``."""
    hidden, out = hidden.contiguous(), _empty(*hidden.shape)
    total = hidden if delta is None else torch.empty_like(hidden)
    add_norm_quantize_job(hidden, delta, total, weight, epsilon, out).run()
    return total, out


def quantize_job(rows: Tensor, out: QuantizedRows) -> Job:
    """The job of ``quantize_rows``, with its result in ``out``."""
    return _job("quantize_rows", rows, out)


def add_norm_quantize_job(
    hidden: Tensor,
    delta: Tensor | None,
    total: Tensor,
    weight: Tensor,
    epsilon: float,
    out: QuantizedRows,
) -> Job:
    """The job of ``add_norm_quantize``, with its results in ``total`` and ``out``."""
    if not (weight.is_contiguous() and weight.dtype == hidden.dtype == torch.float32):
        raise ConfigError(f"add_norm_quantize: {weight.dtype}, {hidden.dtype}: expected float32")
    if weight.shape != hidden.shape[1:]:
        raise ConfigError(f"add_norm_quantize: {len(weight)} weights for rows of {hidden.shape[1]}")
    if delta is not None and delta.shape != hidden.shape:
        raise ConfigError(f"add_norm_quantize: {tuple(delta.shape)} to {tuple(hidden.shape)}")
    normed = hidden, total, weight, epsilon
    return _job("add_norm_quantize", delta, out, normed)


def _empty(count: int, width: int) -> QuantizedRows:
    return QuantizedRows(torch.empty(count, width, dtype=torch.uint8), torch.empty(count))


def _job(
    op: str,
    rows: Tensor | None,
    out: QuantizedRows,
    normed: tuple[Tensor, Tensor, Tensor, float] | None = None,
) -> Job:
    """Over all rows [T, E], or the norm of their sum with a residual stream.

    ``normed``: the stream, the sum, and weights and epsilon of the norm.
    """
    hidden, total, weight, epsilon = normed or (None, None, None, 0.0)
    like = rows if rows is not None else hidden
    assert like is not None
    if like.dim() != 2 or like.stride(1) != 1 or like.dtype not in KINDS:
        raise ConfigError(
            f"rows {tuple(like.shape)} {like.dtype}, strides {like.stride()}: expected dense "
            f"[T, E] in {', '.join(map(str, KINDS))}"
        )
    if out.codes.shape != like.shape or out.scales.shape != like.shape[:1]:
        raise ConfigError(f"{op}: {tuple(out.codes.shape)} codes for rows {tuple(like.shape)}")
    count, width = like.shape
    words = np.empty(WORDS + 1, np.int64)
    STATIC.pack_into(
        words.data,
        0,
        0,
        max(1, NUMBERS // max(1, width)),
        count,
        width,
        input_block(width),
        0 if rows is None else rows.data_ptr(),
        KINDS[like.dtype],
        like.stride(0),
        0 if hidden is None else hidden.data_ptr(),
        0 if total is None else total.data_ptr(),
        0 if weight is None else weight.data_ptr(),
        out.codes.data_ptr(),
        out.scales.data_ptr(),
        out.codes.stride(0),
        epsilon,
    )
    return Job(op, _start.address, words, _work.address, (rows, normed, out))


STATIC = Struct(f"{WORDS}q d")
"""The words of a job in order."""


@job_start
def _start(words, body, team, threads):
    job = carray(pointer(words), WORDS, np.int64)
    job[COUNTER] = 0
    run_team(team, body, job, threads if job[ROWS] > job[CHUNK] else 1)
    return 0


@kernel
def _read_row(job, row, numbers):
    """Read a row into ``numbers``, float32, plus that of the residual stream."""
    offset = 4 * row * len(numbers)
    if not job[SOURCE]:
        read_floats(job[HIDDEN] + offset, FLOAT_KIND, 0, numbers)
        return
    read_floats(job[SOURCE], job[SOURCE_KIND], row * job[STRIDE], numbers)
    if job[HIDDEN]:
        hidden = carray(pointer(job[HIDDEN] + offset), len(numbers), np.float32)
        for channel in range(len(numbers)):
            numbers[channel] += hidden[channel]
        write_floats(numbers, job[TOTAL] + offset, FLOAT_KIND, 0)


@kernel
def _normalise(numbers, weights, epsilon):
    """RMS norm of a float32 vector in place; ``weights``: their address."""
    weight = carray(pointer(weights), len(numbers), np.float32)
    factor = ONE / np.sqrt(mean_square(numbers) + epsilon)
    for channel in range(len(numbers)):
        numbers[channel] = numbers[channel] * factor * weight[channel]


@kernel
def _largest(numbers):
    """The bits of the largest absolute number of a vector."""
    bits, most = numbers.view(np.int32), np.int32(0)
    for channel in range(len(bits)):
        size = bits[channel] & np.int32(SIZE)
        most = size if size > most else most
    return most


@kernel
def _turn(numbers, block):
    """Rotate a row; the bits of its largest number, and what its numbers are to be divided by."""
    at, blocks = numbers.ctypes.data, len(numbers) // block
    if block == 64:
        return _turn_blocks(at, blocks, 64), np.float32(1 / 8)
    if block == 512:
        return _turn_blocks(at, blocks, 512), np.float32(1 / np.sqrt(512))
    turn(numbers, block)
    return _largest(numbers), ONE


@intrinsic(prefer_literal=True)
def _turn_blocks(typing_context, numbers, blocks, size):
    """Multiply blocks of ``size`` floats, a literal, by 1 and -1; bits of the largest number."""
    count = size.literal_value

    def emit(context, builder, signature, arguments):
        emitter, wide, words = Emitter(builder), vector(FLOAT, LANES), vector(I32, LANES)
        numbers = builder.inttoptr(arguments[0], POINTER)
        most = emitter.variable(ir.Constant(words, [0] * LANES))
        builder.store(ir.Constant(words, [0] * LANES), most)
        with emitter.loop(arguments[1]) as block:
            first = emitter.byte(numbers, builder.mul(block, I64(4 * count)))
            places = [emitter.byte(first, 4 * LANES * at) for at in range(count // LANES)]
            parts = emitter.hadamard([emitter.load(place, wide) for place in places])
            largest = builder.load(most, typ=words)
            for part, place in zip(parts, places, strict=True):
                emitter.store(part, place)
                bits = builder.bitcast(part, words)
                bits = builder.and_(bits, emitter.constant(SIZE, bits))
                is_larger = builder.icmp_signed(">", bits, largest)
                largest = builder.select(is_larger, bits, largest)
            builder.store(largest, most)
        name = f"llvm.vector.reduce.smax.v{LANES}i32"
        pick = emitter.declare(name, I32, (words,))
        return builder.call(pick, [builder.load(most, typ=words)])

    return types.int32(types.int64, types.int64, size), emit


@intrinsic
def _write_vectors(typing_context, numbers, inverse, codes, count):
    """Write ``count`` vectors of 16 floats, times ``inverse``, as codes."""

    def emit(context, builder, signature, arguments):
        emitter, wide, words = Emitter(builder), vector(FLOAT, LANES), vector(I32, LANES)
        numbers, codes = (builder.inttoptr(arguments[at], POINTER) for at in (0, 2))
        inverse = emitter.splat(arguments[1], LANES)
        shift = ir.Constant(wide, [SHIFT] * LANES)
        zero = builder.sub(builder.bitcast(shift, words), ir.Constant(words, [ZERO_CODE] * LANES))
        with emitter.loop(arguments[3]) as at:
            near = emitter.byte(numbers, builder.mul(at, I64(4 * LANES)))
            scaled = builder.fmul(emitter.load(near, wide), inverse)
            # The sum has the nearest integer in its lowest bits.
            whole = builder.bitcast(builder.fadd(scaled, shift), words)
            code = builder.trunc(builder.sub(whole, zero), vector(I8, LANES))
            emitter.store(code, emitter.byte(codes, builder.mul(at, I64(LANES))))
        return context.get_dummy_value()

    word = types.int64
    return types.void(word, types.float32, word, word), emit


@kernel
def _write_codes(job, row, numbers):
    most, factor = _turn(numbers, job[BLOCK])
    largest = float_of_bits(most) * factor if most < INFINITE else NAN
    scale = largest * INVERSE_LARGEST
    carray(pointer(job[CODE_SCALES] + 4 * row), 1, np.float32)[0] = scale
    inverse = factor / scale if scale > ZERO else ZERO
    place, whole = job[CODES] + row * job[CODE_STRIDE], len(numbers) // LANES
    _write_vectors(numbers.ctypes.data, inverse, place, whole)
    if whole * LANES < len(numbers):
        codes = carray(pointer(place), len(numbers), np.uint8)
        for channel in range(whole * LANES, len(numbers)):
            rounded = (numbers[channel] * inverse + np.float32(SHIFT)) - np.float32(SHIFT)
            codes[channel] = np.uint8(np.int32(rounded) + np.int32(ZERO_CODE))


@team_body
def _work(address):
    """Take rows from the shared counter until none is left."""
    job = carray(pointer(address), WORDS, np.int64)
    epsilon = carray(pointer(address), WORDS + 1, np.float64)[EPSILON]
    memory = np.empty(job[WIDTH] + CACHE_LINE // 4, np.float32)
    numbers = carray(pointer(line_address(memory)), job[WIDTH], np.float32)
    while True:
        start = fetch_add(address, job[CHUNK])
        if start >= job[ROWS]:
            break
        for row in range(start, min(job[ROWS], start + job[CHUNK])):
            _read_row(job, row, numbers)
            if job[WEIGHT]:
                _normalise(numbers, job[WEIGHT], np.float32(epsilon))
            _write_codes(job, row, numbers)
    memory[0] = 0  # numba frees an array after its last use
