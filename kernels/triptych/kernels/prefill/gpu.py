# pyright: reportUnknownVariableType=false
# The arguments of kernels have no types.
"""Prefill attention on the GPU: one pass for the output, a second for significance."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise

import torch
import triton.language as tl
from torch import Tensor

from triptych.core.errors import ConfigError
from triptych.kernels.pages import Past, check_arena, check_indices
from triptych.kernels.prefill.gpu_blocks import attend_chunks, find_first, sum_columns
from triptych.kernels.triton.launch import (
    VECTOR_TYPES,
    Argument,
    Launch,
    check_device,
    dense,
    factors_of,
    is_for_amd,
    is_interpreted,
    power_of_two,
)
from triptych.kernels.triton.triton_layout import MIN_DOT, form_of, slices_of


@dataclass(frozen=True, slots=True)
class Block:
    """Size of the work of one program."""

    queries: int
    keys: int
    """Keys of one tile."""
    warps: int
    stages: int = 2

    @property
    def size(self) -> tuple[int, int]:
        return self.warps, self.stages


BLOCKS = {
    64: Block(128, 64, 8),
    96: Block(128, 32, 8),
    128: Block(128, 64, 8),
    256: Block(64, 32, 8),
    576: Block(16, 16, 8, 1),
}
"""Block by largest head size; chosen so that no format spills registers."""
AMD_BLOCKS = BLOCKS | {96: Block(64, 32, 8), 128: Block(64, 32, 8)}
"""The same on AMD's GPUs, whose compiler spills registers of larger blocks."""
EXACT_BLOCKS = {64: Block(32, 32, 4, 1), 256: Block(16, 16, 4, 1), 576: Block(16, 16, 8, 1)}
"""Blocks for float32, which tensor cores do not multiply exactly."""


def prefill_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    offsets: Sequence[int],
    *,
    scale: float,
    window: int = 0,
    softcap: float = 0.0,
    sinks: Tensor | None = None,
    past: Past | None = None,
    significance: Tensor | None = None,
    two_way: Sequence[bool] = (),
) -> Tensor:
    """See ``reference.prefill_attention``.

    16-bit inputs are multiplied in 16 bits, past keys and values too; float32 keeps its accuracy.
    A page id out of range gives NaN.

    Significance counts all queries, as on the CPU: a second pass over the products, with the
    log-sum-exps of the first.

    Source:  FlashAttention (online softmax over blocks, and log-sum-exps instead of weights)
    """
    out = torch.empty_like(query, memory_format=torch.contiguous_format)
    options = (scale, window, softcap, sinks, past, significance, two_way, out)
    for launch in plan(query, key, value, offsets, *options):
        launch.run()
    return out


def plan(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    offsets: Sequence[int],
    scale: float,
    window: int,
    softcap: float,
    sinks: Tensor | None,
    past: Past | None,
    significance: Tensor | None,
    two_way: Sequence[bool],
    out: Tensor,
) -> list[Launch]:
    """The launches of one call: output, and with ``significance`` sums over new and past keys."""
    _check(query, key, value, past, significance, sinks)
    total, heads, dim = query.shape
    sequences = len(offsets) - 1
    longest = max((end - start for start, end in pairwise(offsets)), default=0)
    query, key, value = query.contiguous(), dense(key), dense(value)
    is_exact = query.dtype == torch.float32
    block = block_of(dim, is_exact)
    starts = torch.tensor(offsets, dtype=torch.int32).to(query.device)
    flags = None
    if any(two_way):
        flags = torch.tensor(two_way, dtype=torch.int32).to(query.device)
    launches, first, lse = list[Launch](), None, None
    if past is not None and window > 0:
        first = torch.zeros(sequences, dtype=torch.int32, device=query.device)
        launches.append(_plan_first(past, first))
    if significance is not None:
        lse = query.new_empty((total, heads), dtype=torch.float32)
    shared = (*factors_of(scale, softcap), window, *_past_arguments(past))
    constants = {
        "FORM": None if past is None else form_of(past.layout),
        "G": heads // key.shape[1],
        "DIM": dim,
        "WIDE": max(MIN_DOT, power_of_two(dim)),
        "QUERIES": block.queries,
        "KEYS": block.keys,
        "CAPPED": softcap > 0,
        "WINDOWED": window > 0,
        "TYPE": _type_of(query.dtype),
        "SLICES": slices_of(dim),
    }
    arguments = (
        query, key, value, out, lse, sinks, starts, flags, first, *key.stride()[:2],
        *value.stride()[:2], *shared,
    )  # fmt: skip
    grid = (-(-longest // block.queries), heads, sequences)
    launches.append(Launch(attend_chunks, grid, arguments, constants, *block.size))
    if significance is None:
        return launches
    arguments = (
        query, key, lse, starts, flags, first, significance, *key.stride()[:2],
        *significance.stride(), *shared,
    )  # fmt: skip
    old = 0 if past is None else past.pages.shape[2] * past.layout.tokens
    for is_past, count in ((False, longest), (True, old)):
        grid = (-(-count // block.keys), heads, sequences)
        which = {**constants, "PAST": is_past}
        if count:
            launches.append(Launch(sum_columns, grid, arguments, which, *block.size))
    return launches


def _type_of(dtype: torch.dtype) -> tl.dtype:
    """The type of the products' inputs; the interpreter cannot multiply bfloat16."""
    if dtype == torch.float16:
        return tl.float16
    return tl.float32 if dtype == torch.float32 or is_interpreted() else tl.bfloat16


def block_of(dim: int, is_exact: bool) -> Block:
    """The block of a program for vectors of ``dim`` channels."""
    usual = AMD_BLOCKS if is_for_amd() else BLOCKS
    blocks = EXACT_BLOCKS if is_exact else usual
    return next(block for size, block in blocks.items() if dim <= size)


def _plan_first(past: Past, first: Tensor) -> Launch:
    """The launch that fills ``first`` with the position of each sequence's first new token."""
    constants = {"FORM": form_of(past.layout), "TILE": 128}
    arguments = (first, *_past_arguments(past))
    return Launch(find_first, (len(first), past.tokens.shape[1]), arguments, constants)


def _past_arguments(past: Past | None) -> Iterator[Argument]:
    """Arguments of past pages: arena, page count, table, width, strides, counts, strides."""
    if past is None:
        yield from (None, 0, None, 0, 0, 0, 0, None, 0, 0)
        return
    yield past.arena
    yield past.arena.shape[0]
    yield past.pages
    yield past.pages.shape[2]
    yield from past.pages.stride()
    yield past.tokens
    yield from past.tokens.stride()


def _check(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    past: Past | None,
    significance: Tensor | None,
    sinks: Tensor | None,
) -> None:
    """Raise ``ConfigError`` unless there are kernels for the inputs."""
    check_device("prefill_attention", query, key, value, significance, sinks)
    dim = query.shape[2]
    if query.dtype not in VECTOR_TYPES or {key.dtype, value.dtype} != {query.dtype}:
        raise ConfigError(
            f"prefill_attention: query {query.dtype}, key {key.dtype}, value {value.dtype}: "
            "expected float32, bfloat16 or float16 for all"
        )
    if sinks is not None and (sinks.dtype != torch.float32 or sinks.shape != query.shape[1:2]):
        raise ConfigError(
            f"prefill_attention: sinks {tuple(sinks.shape)} {sinks.dtype}: expected float32 "
            f"({query.shape[1]},)"
        )
    if dim > max(BLOCKS):
        raise ConfigError(
            f"prefill_attention: head_dim {dim}: GPU kernels take up to {max(BLOCKS)}"
        )
    if past is not None:
        check_arena(past.arena, past.layout)
        check_indices(past.pages, past.tokens)
        check_device("prefill_attention", query, past.arena, past.pages, past.tokens)
        if past.layout.head_dim != dim or past.tokens.shape[1] != key.shape[1]:
            raise ConfigError(
                f"prefill_attention: past of {past.tokens.shape[1]} KV heads, head_dim "
                f"{past.layout.head_dim}: expected {key.shape[1]}, {dim}"
            )
