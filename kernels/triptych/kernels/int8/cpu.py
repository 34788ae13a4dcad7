# pyright: basic, reportCallIssue=false, reportPrivateImportUsage=false
# numba is untyped: it passes the first argument of an intrinsic, and compiles the rest.
"""Ops around products in 8 bits on the CPU: one pass over each row, codes included."""

import numpy as np
import torch
from numba import carray
from torch import Tensor

from triptych.core.errors import ConfigError
from triptych.kernels.codegen.numba_runtime import (
    fetch_add,
    float_of_bits,
    kernel,
    pointer,
    run_team,
    team_address,
    team_body,
    team_threads,
)
from triptych.kernels.floats import KINDS, copy_floats, read_floats, write_floats
from triptych.kernels.hadamard_cpu import turn
from triptych.kernels.int8.rows import QuantizedRows, ScaledRows, input_block
from triptych.kernels.pointwise.cpu import gate_row, norm_row

NORM, GATE, PLAIN = range(3)

WORDS = 16
COUNTER, CHUNK, ROWS, WHAT, WIDTH, OUT_WIDTH, BLOCK, SOURCE, SOURCE_KIND, STRIDE = range(10)
SCALES, HIDDEN, WEIGHT, EPSILON, CODES, CODE_SCALES = range(10, WORDS)
"""Words of a job. Rows are ``SOURCE``, of ``STRIDE`` elements, times ``SCALES`` unless that is 0.
Those of a norm are added to ``HIDDEN``, and their sum is stored there."""

NUMBERS = 1 << 13
"""Approximate numbers that a thread takes at a time; for fewer one thread runs alone."""
ONE = np.float32(1.0)
ZERO = np.float32(0.0)
ZERO_CODE = np.int32(128)
INVERSE_LARGEST = np.float32(1 / 127)
INFINITE = np.int32(0x7F800000)
NAN = np.float32(np.nan)
SHIFT = np.float32(1.5 * 2**23)
"""Adding and subtracting it rounds to the nearest integer."""


def quantize_rows(rows: Tensor) -> QuantizedRows:
    """See ``reference.quantize_rows``."""
    return _run(PLAIN, rows, None, rows.shape[1])


def gate_quantize(gate_up: Tensor, scales: Tensor) -> QuantizedRows:
    """See ``reference.gate_quantize``."""
    return _run(GATE, gate_up, scales, gate_up.shape[1] // 2)


def add_norm_quantize(
    hidden: Tensor, delta: ScaledRows | None, weight: Tensor, epsilon: float
) -> tuple[Tensor, QuantizedRows]:
    """See ``reference.add_norm_quantize``."""
    if not (weight.is_contiguous() and weight.dtype == hidden.dtype == torch.float32):
        raise ConfigError(f"add_norm_quantize: {weight.dtype}, {hidden.dtype}: expected float32")
    if weight.shape != hidden.shape[1:]:
        raise ConfigError(f"add_norm_quantize: {len(weight)} weights for rows of {hidden.shape[1]}")
    total = torch.empty_like(hidden, memory_format=torch.contiguous_format).copy_(hidden)
    source = total if delta is None else delta.numbers
    if source.shape != total.shape:
        raise ConfigError(f"add_norm_quantize: {tuple(source.shape)} to {tuple(total.shape)}")
    scales = None if delta is None else delta.scales
    sum_at = 0 if delta is None else total.data_ptr()
    rows = _run(NORM, source, scales, total.shape[1], sum_at, weight.data_ptr(), epsilon)
    return total, rows


def _run(
    what: int,
    source: Tensor,
    scales: Tensor | None,
    width: int,
    hidden: int = 0,
    weight: int = 0,
    epsilon: float = 0.0,
) -> QuantizedRows:
    """Run a job over all rows of ``source`` [T, E], which must be dense."""
    count = len(source)
    if source.dim() != 2 or source.stride(1) != 1 or source.dtype not in KINDS:
        raise ConfigError(
            f"rows {tuple(source.shape)} {source.dtype}, strides {source.stride()}: expected dense "
            f"[T, E] in {', '.join(map(str, KINDS))}"
        )
    if scales is not None and (scales.shape != (count,) or scales.dtype != torch.float32):
        raise ConfigError(f"scales {tuple(scales.shape)} {scales.dtype}: expected {(count,)}")
    scales = None if scales is None else scales.contiguous()
    codes, found = torch.empty(count, width, dtype=torch.uint8), torch.empty(count)
    _start(
        _work.address,
        team_address(),
        team_threads(),
        count,
        what,
        source.shape[1],
        width,
        input_block(width),
        source.data_ptr(),
        KINDS[source.dtype],
        source.stride(0),
        0 if scales is None else scales.data_ptr(),
        hidden,
        weight,
        epsilon,
        codes.data_ptr(),
        found.data_ptr(),
    )
    return QuantizedRows(codes, found)


@kernel
def _start(
    body, team, threads, rows, what, width, out_width, block, source, source_kind, stride, scales,
    hidden, weight, epsilon, codes, code_scales,
):  # fmt: skip
    job = np.empty(WORDS, np.int64)
    job[COUNTER], job[CHUNK], job[ROWS], job[WHAT] = 0, max(1, NUMBERS // width), rows, what
    job[WIDTH], job[OUT_WIDTH], job[BLOCK] = width, out_width, block
    job[SOURCE], job[SOURCE_KIND], job[STRIDE] = source, source_kind, stride
    job[SCALES], job[HIDDEN], job[WEIGHT] = scales, hidden, weight
    job.view(np.float64)[EPSILON] = epsilon
    job[CODES], job[CODE_SCALES] = codes, code_scales
    run_team(team, body, job, threads if rows > job[CHUNK] else 1)


@kernel
def _read_row(job, row, numbers):
    read_floats(job[SOURCE], job[SOURCE_KIND], row * job[STRIDE], numbers)
    if job[SCALES]:
        scale = carray(pointer(job[SCALES] + 4 * row), 1, np.float32)[0]
        for channel in range(len(numbers)):
            numbers[channel] *= scale
    if job[HIDDEN]:
        at = job[HIDDEN] + 4 * row * len(numbers)
        hidden = carray(pointer(at), len(numbers), np.float32)
        for channel in range(len(numbers)):
            numbers[channel] += hidden[channel]
        write_floats(numbers, job[HIDDEN], 0, row * len(numbers))


@kernel
def _largest(numbers):
    """The largest absolute number of a vector; NaN if one of them is not finite.

    By their bits, since those of positive floats are in order, and NaN is above them.
    """
    bits, most = numbers.view(np.int32), np.int32(0)
    for channel in range(len(bits)):
        size = bits[channel] & np.int32(0x7FFFFFFF)
        most = size if size > most else most
    return float_of_bits(most) if most < INFINITE else NAN


@kernel
def _write_codes(job, row, numbers):
    turn(numbers, job[BLOCK])
    scale = _largest(numbers) * INVERSE_LARGEST
    carray(pointer(job[CODE_SCALES] + 4 * row), 1, np.float32)[0] = scale
    inverse = ONE / scale if scale > ZERO else ZERO
    codes = carray(pointer(job[CODES] + row * len(numbers)), len(numbers), np.uint8)
    for channel in range(len(numbers)):
        rounded = (numbers[channel] * inverse + SHIFT) - SHIFT
        codes[channel] = np.uint8(np.int32(rounded) + ZERO_CODE)


@team_body
def _work(address):
    """Take rows from the shared counter until none is left."""
    job = carray(pointer(address), WORDS, np.int64)
    numbers = np.empty(job[WIDTH], np.float32)
    result = np.empty(job[OUT_WIDTH], np.float32)
    while True:
        start = fetch_add(address, job[CHUNK])
        if start >= job[ROWS]:
            break
        for row in range(start, min(job[ROWS], start + job[CHUNK])):
            _read_row(job, row, numbers)
            if job[WHAT] == NORM:
                norm_row(job[WEIGHT], job.view(np.float64)[EPSILON], numbers, result)
            elif job[WHAT] == GATE:
                gate_row(numbers, result)
            else:
                copy_floats(numbers, result)
            _write_codes(job, row, result)
