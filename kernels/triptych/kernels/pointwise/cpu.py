# pyright: basic, reportCallIssue=false, reportPrivateImportUsage=false
# numba is untyped: it passes the first argument of an intrinsic, and compiles the rest.
"""Pointwise ops on the CPU: one pass over each row."""

from math import e, log2
from struct import Struct

import numpy as np
import torch
from numba import carray, types
from numba.extending import intrinsic
from torch import Tensor

from triptych.core.errors import ConfigError
from triptych.kernels.codegen.jobs import Job, job_start
from triptych.kernels.codegen.numba_runtime import (
    LANES,
    fetch_add,
    float_of_bits,
    kernel,
    pointer,
    run_team,
    summing_kernel,
    team_body,
)
from triptych.kernels.codegen.simd import EXP2, POINTER, Emitter
from triptych.kernels.floats import FLOAT as FLOAT_KIND
from triptych.kernels.floats import (
    KINDS,
    load_vectors,
    read_floats,
    store_vectors,
    write_floats,
)

NORM, ROTATE, GATE = range(3)

WORDS = 17
COUNTER, WHAT, ROWS, CHUNK, WIDTH, SOURCE, SOURCE_KIND, TARGET, TARGET_KIND, TARGET_WIDTH = range(
    10
)
HEADS, TOKEN_STRIDE, HEAD_STRIDE, FIRST, SECOND, ANGLE_STRIDE, EPSILON = range(10, WORDS)
"""Words of a job. A row is a head of a token, strides are in elements; ``FIRST`` and ``SECOND`` are
addresses of weights, or of cosines and sines."""

NUMBERS = 1 << 14
"""Approximate numbers that a thread takes at a time; for fewer one thread runs alone."""

SHIFT = np.float32(1.5 * 2**23)
"""Adding and subtracting it rounds to the nearest integer."""
LOG2_E = np.float32(log2(e))
C0, C1, C2, C3, C4, C5, C6 = (np.float32(factor) for factor in EXP2)
MOST = np.float32(126.0)
ONE = np.float32(1.0)


def rms_norm(rows: Tensor, weight: Tensor, epsilon: float, dtype: torch.dtype) -> Tensor:
    """See ``reference.rms_norm``."""
    out = torch.empty_like(rows, dtype=dtype, memory_format=torch.contiguous_format)
    norm_job(rows, weight, epsilon, out).run()
    return out


def norm_job(rows: Tensor, weight: Tensor, epsilon: float, out: Tensor) -> Job:
    """The job of ``rms_norm``, with its result in ``out``."""
    if not (weight.is_contiguous() and weight.dtype == torch.float32):
        raise ConfigError(f"rms_norm: weight {weight.dtype}: expected dense float32")
    if weight.shape != rows.shape[-1:]:
        raise ConfigError(f"rms_norm: {len(weight)} weights for rows of {rows.shape[-1]}")
    return _job("rms_norm", NORM, rows, out, (weight, weight), 0, epsilon)


def add_norm(
    hidden: Tensor, delta: Tensor, weight: Tensor, epsilon: float, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """See ``reference.add_norm``."""
    total = hidden + delta
    return total, rms_norm(total, weight, epsilon, dtype)


def rotate(heads: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """See ``reference.rotate``."""
    out = torch.empty_like(heads, memory_format=torch.contiguous_format)
    rotate_job(heads, cos, sin, out).run()
    return out


def rotate_job(heads: Tensor, cos: Tensor, sin: Tensor, out: Tensor) -> Job:
    """The job of ``rotate``, with its result in ``out``."""
    expected = len(heads), heads.shape[2] // 2
    for angles in (cos, sin):
        if angles.shape != expected or angles.dtype != torch.float32 or angles.stride(1) != 1:
            raise ConfigError(
                f"rotate: angles {tuple(angles.shape)} {angles.dtype}: expected float32 {expected}"
            )
    if cos.stride(0) != sin.stride(0):
        raise ConfigError("rotate: cosines and sines have different strides")
    return _job("rotate", ROTATE, heads, out, (cos, sin), cos.stride(0), 0.0)


def gate(gate_up: Tensor) -> Tensor:
    """See ``reference.gate``."""
    out = torch.empty(len(gate_up), gate_up.shape[1] // 2, dtype=gate_up.dtype)
    _job("gate", GATE, gate_up, out, (gate_up, gate_up), 0, 0.0).run()
    return out


def _job(
    op: str,
    what: int,
    source: Tensor,
    out: Tensor,
    pair: tuple[Tensor, Tensor],
    stride: int,
    epsilon: float,
) -> Job:
    """Over all rows of ``source`` [T, E] or [T, H, E]; each row must be dense.

    ``pair``: what ``FIRST`` and ``SECOND`` are; ``stride``: of its rows.
    """
    shape, strides = source.shape, source.stride()
    width, is_headed = shape[-1], len(shape) == 3
    if strides[-1] != 1 or len(shape) not in (2, 3):
        raise ConfigError(
            f"rows {tuple(shape)}, strides {strides}: expected dense [T, E], [T, H, E]"
        )
    if source.dtype not in KINDS or out.dtype not in KINDS:
        raise ConfigError(
            f"rows of {source.dtype} to {out.dtype}: have {', '.join(map(str, KINDS))}"
        )
    words = np.empty(WORDS, np.int64)
    STATIC.pack_into(
        words.data,
        0,
        0,
        what,
        source.numel() // max(1, width),
        max(1, NUMBERS // width),
        width,
        source.data_ptr(),
        KINDS[source.dtype],
        out.data_ptr(),
        KINDS[out.dtype],
        out.shape[-1],
        shape[1] if is_headed else 1,
        strides[0],
        strides[1] if is_headed else 0,
        pair[0].data_ptr(),
        pair[1].data_ptr(),
        stride,
        epsilon,
    )
    return Job(op, _start.address, words, _work.address, (source, out, pair))


STATIC = Struct("16q d")
"""The words of a job in order."""


@job_start
def _start(words, body, team, threads):
    job = carray(pointer(words), WORDS, np.int64)
    job[COUNTER] = 0
    run_team(team, body, job, threads if job[ROWS] > job[CHUNK] else 1)
    return 0


@kernel
def norm_row(weights, epsilon, numbers, normed):
    """RMS norm of a float32 vector; ``weights``: their address."""
    weight = carray(pointer(weights), len(numbers), np.float32)
    factor = ONE / np.sqrt(mean_square(numbers) + np.float32(epsilon))
    for channel in range(len(numbers)):
        normed[channel] = numbers[channel] * factor * weight[channel]


@summing_kernel
def mean_square(numbers):
    """The mean of the squares of a float32 vector."""
    total = np.float32(0.0)
    for channel in range(len(numbers)):
        total += numbers[channel] * numbers[channel]
    return total / np.float32(len(numbers))


@kernel
def _rotate(job, token, numbers, turned):
    half, angles = len(numbers) // 2, 4 * token * job[ANGLE_STRIDE]
    cos = carray(pointer(job[FIRST] + angles), half, np.float32)
    sin = carray(pointer(job[SECOND] + angles), half, np.float32)
    for channel in range(half):
        left, right = numbers[channel], numbers[half + channel]
        turned[channel] = left * cos[channel] - right * sin[channel]
        turned[half + channel] = right * cos[channel] + left * sin[channel]


@kernel
def _rotate_whole(job, token, offset, row, width):
    """``_rotate`` from memory to memory; False, and nothing is done, for most widths."""
    angles = 4 * token * job[ANGLE_STRIDE]
    cos, sin, kind = job[FIRST] + angles, job[SECOND] + angles, job[SOURCE_KIND]
    size = 4 if kind == FLOAT_KIND else 2
    source, target = job[SOURCE] + size * offset, job[TARGET] + size * row * width
    if width == 64:
        _rotate_halves(source, target, kind, cos, sin, 64)
    elif width == 128:
        _rotate_halves(source, target, kind, cos, sin, 128)
    elif width == 256:
        _rotate_halves(source, target, kind, cos, sin, 256)
    else:
        return False
    return True


@intrinsic(prefer_literal=True)
def _rotate_halves(typing_context, source, target, kind, cos, sin, width):
    count = width.literal_value // LANES

    def emit(context, builder, signature, arguments):
        emitter = Emitter(builder)
        source, target, cos, sin = (builder.inttoptr(arguments[at], POINTER) for at in (0, 1, 3, 4))
        numbers = load_vectors(emitter, source, arguments[2], count)
        lefts, rights = [], []
        for index in range(count // 2):
            left, right = numbers[index], numbers[count // 2 + index]
            near = emitter.byte(cos, 4 * LANES * index), emitter.byte(sin, 4 * LANES * index)
            cosine, sine = (emitter.load(place, left.type) for place in near)
            lefts.append(builder.fsub(builder.fmul(left, cosine), builder.fmul(right, sine)))
            rights.append(builder.fadd(builder.fmul(right, cosine), builder.fmul(left, sine)))
        store_vectors(emitter, [*lefts, *rights], target, arguments[2])
        return context.get_dummy_value()

    word = types.int64
    return types.void(word, word, word, word, word, width), emit


@kernel
def gate_row(numbers, gated):
    """``silu`` of the first half of a float32 vector, times the second."""
    half = len(gated)
    for channel in range(half):
        opened = numbers[channel]
        gated[channel] = opened / (ONE + _exp2(-opened * LOG2_E)) * numbers[half + channel]


@kernel
def _exp2(power):
    """``simd.Emitter.exp2`` for powers of any size; the result for NaN is not NaN."""
    power = power if power < MOST else MOST
    power = power if power > -MOST else -MOST
    whole = (power + SHIFT) - SHIFT
    part = power - whole
    result = (((((C0 * part + C1) * part + C2) * part + C3) * part + C4) * part + C5) * part + C6
    return result * float_of_bits(np.int32((np.int32(whole) + np.int32(127)) << np.int32(23)))


@team_body
def _work(address):
    """Take rows from the shared counter until none is left."""
    job = carray(pointer(address), WORDS, np.int64)
    numbers = np.empty(job[WIDTH], np.float32)
    result = np.empty(job[TARGET_WIDTH], np.float32)
    while True:
        start = fetch_add(address, job[CHUNK])
        if start >= job[ROWS]:
            break
        for row in range(start, min(job[ROWS], start + job[CHUNK])):
            token, head = row // job[HEADS], row % job[HEADS]
            offset = token * job[TOKEN_STRIDE] + head * job[HEAD_STRIDE]
            if job[WHAT] == ROTATE and _rotate_whole(job, token, offset, row, job[WIDTH]):
                continue
            read_floats(job[SOURCE], job[SOURCE_KIND], offset, numbers)
            if job[WHAT] == NORM:
                norm_row(job[FIRST], job.view(np.float64)[EPSILON], numbers, result)
            elif job[WHAT] == ROTATE:
                _rotate(job, token, numbers, result)
            else:
                gate_row(numbers, result)
            write_floats(result, job[TARGET], job[TARGET_KIND], row * len(result))
