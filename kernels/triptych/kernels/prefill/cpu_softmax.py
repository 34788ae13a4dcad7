# pyright: basic, reportCallIssue=false, reportPrivateImportUsage=false, reportAttributeAccessIssue=false
# numba is untyped: it passes the first argument of an intrinsic, and compiles the rest.
"""Softmax of a block of logits on the CPU, with the causal mask, sinks and column sums in one pass.

A row's weights do not depend on the other rows, and the sums of a head are added row after row, so
neither depends on how queries are divided into blocks.
"""

from math import e, log2

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
    largest_of,
    pointer,
    run_team,
    team_address,
    team_body,
    team_threads,
)
from triptych.kernels.codegen.simd import POINTER, Emitter, vector

COUNTER, LOGITS, HEADS, HEAD_ROWS, ROWS, SEEN, FIRST, SUMS, SUMS_STRIDE, SUMMED, SINKS = range(11)
WORDS = 11
"""Words of a job: ``HEAD_ROWS`` rows of a head are in memory, of which ``ROWS`` are computed."""

FEW = 1 << 13
"""Up to so many logits one thread computes alone."""
HIDDEN = -(2.0**127)
"""Logit of a hidden column. An infinite one would make the weights of a row NaN, as a NaN does."""
ZERO, ONE = np.float32(0.0), np.float32(1.0)
LOG2_E = np.float32(log2(e))


def softmax_(
    logits: Tensor, rows: int, first: int | None, sums: Tensor | None, sinks: Tensor | None
) -> None:
    """Softmax over the last axis, in place.

    ``rows``: how many rows of a head are computed. ``first``: how many logits the first of them
    sees, and each next row one more; None: all.
    ``sums``: weights of each column are added there. ``sinks``: a logit of each head without a
    column.

    Shapes:  logits [H, R, N] dense, N a multiple of 16; sums [H, S], of which a row may have fewer
        columns than N; sinks [H]
    Dtypes:  float32
    """
    heads, head_rows, seen = logits.shape
    if sums is not None and (sums.stride(1) != 1 or sums.dtype != torch.float32):
        raise ConfigError(
            f"sums {sums.dtype}, strides {sums.stride()}: expected dense float32 rows"
        )
    sinks = None if sinks is None else sinks.float().contiguous()
    _start(
        _work.address,
        team_address(),
        team_threads() if heads * rows * seen > FEW else 1,
        logits.data_ptr(),
        heads,
        head_rows,
        rows,
        seen,
        -1 if first is None else first,
        0 if sums is None else sums.data_ptr(),
        0 if sums is None else sums.stride(0),
        0 if sums is None else min(seen, sums.shape[1]),
        0 if sinks is None else sinks.data_ptr(),
    )


@kernel
def _start(
    body, team, threads, logits, heads, head_rows, rows, seen, first, sums, sums_stride,
    summed, sinks,
):  # fmt: skip
    job = np.empty(WORDS, np.int64)
    job[COUNTER], job[LOGITS], job[HEADS], job[HEAD_ROWS] = 0, logits, heads, head_rows
    job[ROWS], job[SEEN], job[FIRST] = rows, seen, first
    job[SUMS], job[SUMS_STRIDE], job[SUMMED], job[SINKS] = sums, sums_stride, summed, sinks
    run_team(team, body, job, threads)


@intrinsic
def _exponentiate(typing_context, row, vectors, factor, shift):
    """2**(number * factor - shift) in place, 0 where a number is ``HIDDEN``.

    Returns the sum, NaN if a number is not finite.
    """

    def emit(context, builder, signature, arguments):
        emitter, kind = Emitter(builder), vector(ir.FloatType(), LANES)
        first = builder.inttoptr(arguments[0], POINTER)
        factor = emitter.splat(arguments[2], LANES)
        shift = emitter.splat(builder.fneg(arguments[3]), LANES)
        total = emitter.variable(ir.Constant(kind, [0.0] * LANES))
        with emitter.loop(arguments[1]) as index:
            place = emitter.byte(first, builder.mul(index, ir.IntType(64)(4 * LANES)))
            number = emitter.load(place, kind)
            power = emitter.exp2(emitter.fma(number, factor, shift))
            is_hidden = builder.fcmp_ordered("==", number, emitter.constant(HIDDEN, number))
            power = builder.select(is_hidden, emitter.constant(0.0, number), power)
            emitter.store(power, place)
            whole = emitter.fma(number, emitter.constant(0.0, number), power)
            builder.store(builder.fadd(builder.load(total, typ=kind), whole), total)
        return emitter.total(builder.load(total, typ=kind))

    word = types.int64
    return types.float32(word, word, types.float32, types.float32), emit


@kernel
def exponentiate_row(numbers, limit, scale, sink):
    """Exponentiate the first ``limit`` logits of a row times ``scale``, less the largest, in place.

    Returns what the row is to be multiplied by. ``sink``: the address of one more logit, not
    scaled; 0: none. A row is whole vectors; the rest of the last one becomes 0.
    """
    vectors, at = (limit + LANES - 1) // LANES, numbers.ctypes.data
    for column in range(limit, vectors * LANES):
        numbers[column] = np.float32(HIDDEN)
    factor = scale * LOG2_E
    most, rest = largest_of(at, vectors) * factor, ZERO
    if sink:
        number = carray(pointer(sink), 1, np.float32)[0] * LOG2_E
        most = max(most, number)
        rest = np.exp2(number - most)
    return ONE / (_exponentiate(at, vectors, factor, most) + rest)


@kernel
def _finish_row(numbers, limit, sink, sums):
    """Softmax of the first ``limit`` logits of a row, in place; the rest are 0.

    Weights are added to ``sums`` as far as it goes.
    """
    inverse = exponentiate_row(numbers, limit, ONE, sink)
    for column in range(limit):
        numbers[column] *= inverse
    for column in range(limit, len(numbers)):
        numbers[column] = ZERO
    for column in range(min(limit, len(sums))):
        sums[column] += numbers[column]


@kernel
def _finish(job, head, row):
    width = job[SEEN]
    at = job[LOGITS] + 4 * width * (head * job[HEAD_ROWS] + row)
    limit = width if job[FIRST] < 0 else job[FIRST] + row
    sink = job[SINKS] + 4 * head if job[SINKS] else 0
    place = job[SUMS] + 4 * head * job[SUMS_STRIDE]
    sums = carray(pointer(place), job[SUMMED] if job[SUMS] else 0, np.float32)
    _finish_row(carray(pointer(at), width, np.float32), limit, sink, sums)


@team_body
def _work(address):
    """Take heads from the shared counter until none is left."""
    job = carray(pointer(address), WORDS, np.int64)
    while True:
        head = fetch_add(address, 1)
        if head >= job[HEADS]:
            break
        for row in range(job[ROWS]):
            _finish(job, head, row)
