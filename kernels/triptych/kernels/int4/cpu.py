# pyright: basic, reportCallIssue=false, reportPrivateImportUsage=false
# numba is untyped.
"""Products of bfloat16 rows with 4-bit weights on the CPU, in tile or in vector registers."""

from functools import cache, lru_cache
from importlib import import_module
from struct import Struct
from types import ModuleType

import numpy as np
import torch
from numba import carray
from torch import Tensor

from triptych.core.errors import ConfigError
from triptych.kernels.codegen.jobs import Job, job_start
from triptych.kernels.codegen.native import multiplies_bfloat, multiplies_tiles
from triptych.kernels.codegen.numba_runtime import CACHE_LINE, line_address, pointer, run_team
from triptych.kernels.floats import KINDS
from triptych.kernels.int4.layout import OUTPUTS, PIECE, Int4Tiles
from triptych.kernels.int4.product_job import (
    COUNTER,
    GROUPS,
    INPUT_WORDS,
    INPUTS,
    PIECES,
    PREPARE,
    ROWS,
    SUMS,
    TILES,
    WORDS,
)

CHUNK_WEIGHTS = 1 << 15
"""Approximate weights that a thread takes at a time."""
FEWEST_TILES = 2
"""Tiles that a thread takes at least, so that two threads do not write to the same cache line."""
FEW = 1 << 15
"""Up to so many weights one thread multiplies alone."""
FEW_ROWS = 16
"""Up to so many rows one thread prepares alone."""


@cache
def _product(*, is_for_few_rows: bool, rounds_inputs: bool) -> ModuleType:
    """The product of this processor."""
    name = "byte_product" if rounds_inputs else "word_product"
    if multiplies_bfloat():
        name = "vector_product"
    if multiplies_tiles():
        name = "amx_levels" if is_for_few_rows else "amx_product"
    return import_module(f"triptych.kernels.int4.{name}")


@job_start
def _start(words, body, team, threads):
    job = carray(pointer(words), WORDS, np.int64)
    inputs = np.empty(job[INPUT_WORDS] + CACHE_LINE // 4, np.uint32)
    sums = np.empty(job[ROWS] * job[GROUPS], np.float32)
    job[INPUTS], job[SUMS] = line_address(inputs), sums.ctypes.data
    job[COUNTER] = 0
    run_team(team, job[PREPARE], job, threads if job[ROWS] > FEW_ROWS else 1)
    job[COUNTER] = 0
    weights = job[TILES] * OUTPUTS * job[GROUPS] * job[PIECES] * PIECE
    run_team(team, body, job, threads if weights > FEW else 1)
    return 0 if inputs.size + sums.size else 1  # numba frees an array after its last use


def multiply_int4(
    rows: Tensor, weights: Int4Tiles, bias: Tensor | None, dtype: torch.dtype
) -> Tensor:
    """See ``reference.multiply_int4``."""
    out = torch.empty(len(rows), weights.results, dtype=dtype)
    if len(rows):
        multiply_job(rows, weights, bias, out).run()
    return out


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
    hidden = hidden.contiguous()
    total = hidden if delta is None else torch.empty_like(hidden)
    out = torch.empty(len(hidden), weights.results, dtype=dtype)
    if len(hidden):
        add_norm_multiply_job(hidden, delta, total, norm, epsilon, weights, bias, out).run()
    return total, out


def multiply_job(rows: Tensor, weights: Int4Tiles, bias: Tensor | None, out: Tensor) -> Job:
    """The job of ``multiply_int4`` for at least one row, with its result in ``out``."""
    return _job("multiply_int4", rows, weights, bias, out)


def add_norm_multiply_job(
    hidden: Tensor,
    delta: Tensor | None,
    total: Tensor,
    norm: Tensor,
    epsilon: float,
    weights: Int4Tiles,
    bias: Tensor | None,
    out: Tensor,
) -> Job:
    """The job of ``add_norm_multiply_int4`` for at least one row, with its results in ``total``
    and ``out``."""
    if not (norm.is_contiguous() and norm.dtype == hidden.dtype == torch.float32):
        raise ConfigError(f"norm {norm.dtype} of {hidden.dtype}: expected dense float32")
    if norm.shape != hidden.shape[1:] or (delta is not None and delta.shape != hidden.shape):
        raise ConfigError(f"norm of {len(norm)} numbers for rows of {tuple(hidden.shape)}")
    normed = hidden, total, norm, epsilon
    return _job("add_norm_multiply_int4", delta, weights, bias, out, normed)


def _job(
    op: str,
    rows: Tensor | None,
    weights: Int4Tiles,
    bias: Tensor | None,
    out: Tensor,
    normed: tuple[Tensor, Tensor, Tensor, float] | None = None,
) -> Job:
    """Multiply rows, or the norm of their sum with a residual stream.

    ``normed``: the stream, the sum, and weights and epsilon of the norm.
    """
    hidden, total, norm, epsilon = normed or (None, None, None, 0.0)
    outputs, columns = weights.shape
    like = rows if rows is not None else hidden
    assert like is not None
    width = like.shape[1] if like.dim() == 2 else 0
    if width != columns or like.stride(1) != 1:
        raise ConfigError(
            f"rows {tuple(like.shape)}, strides {like.stride()}: expected dense (T, {columns})"
        )
    if like.dtype not in KINDS or out.dtype not in KINDS:
        raise ConfigError(f"rows of {like.dtype} to {out.dtype}: have {', '.join(map(str, KINDS))}")
    if bias is not None and (bias.shape != (outputs,) or bias.dtype != torch.float32):
        raise ConfigError(f"bias {tuple(bias.shape)} {bias.dtype}: expected float32 ({outputs},)")
    if bias is not None and weights.is_gated:
        raise ConfigError("gated weights take no bias")
    bias = _zeros(outputs) if bias is None else bias.contiguous()
    product, count = (
        _product(is_for_few_rows=weights.is_for_few_rows, rounds_inputs=weights.rounds_inputs),
        len(like),
    )
    words = np.empty(WORDS, np.int64)
    STATIC.pack_into(
        words.data,
        0,
        0,
        max(FEWEST_TILES, CHUNK_WEIGHTS // (columns * OUTPUTS)),
        outputs // OUTPUTS,
        count,
        weights.groups,
        columns // weights.groups // PIECE,
        weights.tiles.data_ptr(),
        0,
        0,
        out.data_ptr(),
        KINDS[out.dtype],
        weights.results,
        bias.data_ptr(),
        int(weights.is_gated),
        0 if rows is None else rows.data_ptr(),
        KINDS[like.dtype],
        like.stride(0),
        0 if hidden is None else hidden.data_ptr(),
        0 if total is None else total.data_ptr(),
        0 if norm is None else norm.data_ptr(),
        epsilon,
        product.config_address(count),
        product.prepare.address,
        product.input_words(count, columns),
    )
    kept = rows, weights, bias, out, hidden, total, norm
    return Job(op, _start.address, words, product.multiply.address, kept)


STATIC = Struct("20q d 3q")
"""The words of a job in order; those that are set when it runs are 0."""


@lru_cache(maxsize=64)
def _zeros(count: int) -> Tensor:
    return torch.zeros(count)
