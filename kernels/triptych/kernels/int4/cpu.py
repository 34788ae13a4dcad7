# pyright: basic, reportCallIssue=false, reportPrivateImportUsage=false
# numba is untyped.
"""Products of bfloat16 rows with 4-bit weights on the CPU, in tile or in vector registers."""

from functools import cache, lru_cache
from importlib import import_module
from types import ModuleType

import numpy as np
import torch
from torch import Tensor

from triptych.core.errors import ConfigError
from triptych.kernels.codegen.native import multiplies_tiles
from triptych.kernels.codegen.numba_runtime import kernel, run_team, team_address, team_threads
from triptych.kernels.floats import KINDS
from triptych.kernels.int4.layout import OUTPUTS, PIECE, Int4Tiles
from triptych.kernels.int4.product_job import (
    BIAS,
    CHUNK,
    CONFIG,
    COUNTER,
    EPSILON,
    GATED,
    GROUPS,
    HIDDEN,
    INPUTS,
    NORM,
    OUT,
    OUT_KIND,
    PACKED,
    PIECES,
    ROWS,
    SOURCE,
    SOURCE_KIND,
    STRIDE,
    SUMS,
    TILES,
    TOTAL,
    WIDTH,
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
def _product() -> ModuleType:
    """The product of this processor; a module compiles its functions when it is imported."""
    name = "amx_product" if multiplies_tiles() else "vector_product"
    return import_module(f"triptych.kernels.int4.{name}")


@kernel
def _start(
    prepare, multiply, team, threads, tiles, rows, groups, columns, packed, source, source_kind,
    stride, hidden, total, norm, epsilon, out, out_kind, width, bias, is_gated, config, input_words,
):  # fmt: skip
    inputs = np.empty(input_words, np.uint32)
    sums = np.empty(rows * groups, np.float32)
    job = np.empty(WORDS, np.int64)
    job[COUNTER], job[CHUNK] = 0, max(FEWEST_TILES, CHUNK_WEIGHTS // (columns * OUTPUTS))
    job[TILES], job[ROWS], job[GROUPS] = tiles, rows, groups
    job[PIECES] = columns // groups // PIECE
    job[PACKED], job[INPUTS], job[SUMS] = packed, inputs.ctypes.data, sums.ctypes.data
    job[OUT], job[OUT_KIND], job[WIDTH], job[BIAS] = out, out_kind, width, bias
    job[GATED], job[CONFIG] = is_gated, config
    job[SOURCE], job[SOURCE_KIND], job[STRIDE] = source, source_kind, stride
    job[HIDDEN], job[TOTAL], job[NORM] = hidden, total, norm
    job.view(np.float64)[EPSILON] = epsilon
    run_team(team, prepare, job, threads if rows > FEW_ROWS else 1)
    job[COUNTER] = 0
    run_team(team, multiply, job, threads if tiles * OUTPUTS * columns > FEW else 1)
    return inputs[0] + sums[0]  # numba frees an array after its last use


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
    hidden = hidden.contiguous()
    total = hidden if delta is None else torch.empty_like(hidden)
    return total, _run(delta, weights, bias, dtype, hidden, total, norm, epsilon)


def _run(
    rows: Tensor | None,
    weights: Int4Tiles,
    bias: Tensor | None,
    dtype: torch.dtype,
    hidden: Tensor | None = None,
    total: Tensor | None = None,
    norm: Tensor | None = None,
    epsilon: float = 0.0,
) -> Tensor:
    """Multiply rows, or the norm of ``total``, their sum with ``hidden``."""
    outputs, columns = weights.shape
    like = rows if rows is not None else hidden
    assert like is not None
    count, width = like.shape if like.dim() == 2 else (0, 0)
    if width != columns or like.stride(1) != 1:
        raise ConfigError(
            f"rows {tuple(like.shape)}, strides {like.stride()}: expected dense (T, {columns})"
        )
    if like.dtype not in KINDS or dtype not in KINDS:
        raise ConfigError(f"rows of {like.dtype} to {dtype}: have {', '.join(map(str, KINDS))}")
    if bias is not None and (bias.shape != (outputs,) or bias.dtype != torch.float32):
        raise ConfigError(f"bias {tuple(bias.shape)} {bias.dtype}: expected float32 ({outputs},)")
    if bias is not None and weights.is_gated:
        raise ConfigError("gated weights take no bias")
    bias = _zeros(outputs) if bias is None else bias.contiguous()
    out = torch.empty(count, weights.results, dtype=dtype)
    if not count:
        return out
    product = _product()
    _start(
        product.prepare.address,
        product.multiply.address,
        team_address(),
        team_threads(),
        outputs // OUTPUTS,
        count,
        weights.groups,
        columns,
        weights.tiles.data_ptr(),
        0 if rows is None else rows.data_ptr(),
        KINDS[like.dtype],
        like.stride(0),
        0 if hidden is None else hidden.data_ptr(),
        0 if total is None else total.data_ptr(),
        0 if norm is None else norm.data_ptr(),
        epsilon,
        out.data_ptr(),
        KINDS[dtype],
        weights.results,
        bias.data_ptr(),
        int(weights.is_gated),
        product.config_address(count),
        product.input_words(count, columns),
    )
    return out


@lru_cache(maxsize=64)
def _zeros(count: int) -> Tensor:
    return torch.zeros(count)
