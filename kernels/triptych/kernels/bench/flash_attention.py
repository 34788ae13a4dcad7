# pyright: basic, reportPrivateImportUsage=false, reportArgumentType=false, reportAttributeAccessIssue=false
# Triton's language is not Python: the checker takes tiles for integers.
"""FlashAttention-2's forward pass in Triton, compiled beside our prefill attention for comparison.

Sequences of one length in tensors [heads, tokens, dim], a whole number of blocks, no pages, no
groups: what a kernel without our features issues for a pair of a query and a key.

Source: Dao 2023 (FlashAttention-2), as in Triton's tutorial "Fused Attention"
"""

import torch
import triton
import triton.language as tl

from triptych.kernels.triton.launch import Launch

QUERIES, KEYS, WARPS, STAGES = 128, 64, 8, 3
"""The tutorial's choice for 128 channels on an H100 among those that it tries."""
MAY_SPILL = 128
"""Bytes of registers that may spill: these are no blocks for AMD's GPUs."""


@triton.jit
def attend_blocks(
    mixed, mass, peak, tile, key, value, first, last, query_index, scale,
    DIM: tl.constexpr, KEYS: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    """Blocks ``first`` to ``last`` of keys; ``MASKED``: those on the diagonal."""
    column, channel = tl.arange(0, KEYS), tl.arange(0, DIM)
    for at in range(first, last, KEYS):
        at = tl.multiple_of(at, KEYS)
        keys = tl.load(key + (at + column)[None, :] * DIM + channel[:, None])
        logits = tl.dot(tile, keys)
        if MASKED:
            visible = query_index[:, None] >= (at + column)[None, :]
            logits = logits * scale + tl.where(visible, 0, -1.0e6)
            largest = tl.maximum(peak, tl.max(logits, 1))
            logits -= largest[:, None]
        else:
            largest = tl.maximum(peak, tl.max(logits, 1) * scale)
            logits = logits * scale - largest[:, None]
        weights = tl.math.exp2(logits)
        rescale = tl.math.exp2(peak - largest)
        mixed = mixed * rescale[:, None]
        values = tl.load(value + (at + column)[:, None] * DIM + channel[None, :])
        mixed = tl.dot(weights.to(values.dtype), values, mixed)
        mass = mass * rescale + tl.sum(weights, 1)
        peak = largest
    return mixed, mass, peak


@triton.jit
def flash_attention(
    query, key, value, out, tokens, scale,
    DIM: tl.constexpr, QUERIES: tl.constexpr, KEYS: tl.constexpr,
):  # fmt: skip
    """Causal attention of a block of queries of a head. Grid: blocks of queries, heads."""
    head = tl.program_id(1).to(tl.int64) * tokens * DIM
    first = tl.program_id(0) * QUERIES
    query_index, channel = first + tl.arange(0, QUERIES), tl.arange(0, DIM)
    at = head + query_index[:, None] * DIM + channel[None, :]
    tile = tl.load(query + at)
    mixed = tl.zeros([QUERIES, DIM], tl.float32)
    peak = tl.full([QUERIES], float("-inf"), tl.float32)
    mass = tl.full([QUERIES], 1.0, tl.float32)
    key += head
    value += head
    mixed, mass, peak = attend_blocks(
        mixed, mass, peak, tile, key, value, 0, first, query_index, scale, DIM, KEYS, False
    )
    mixed, mass, peak = attend_blocks(
        mixed, mass, peak, tile, key, value, first, first + QUERIES, query_index, scale, DIM, KEYS,
        True,
    )  # fmt: skip
    tl.store(out + at, (mixed / mass[:, None]).to(out.dtype.element_ty))


def plan(dim: int = 128, dtype: torch.dtype = torch.bfloat16) -> Launch:
    """A launch for tensors on the meta device, to be compiled."""
    vectors = torch.empty(32, 4096, dim, dtype=dtype, device="meta")
    constants = {"DIM": dim, "QUERIES": QUERIES, "KEYS": KEYS}
    arguments = (vectors, vectors, vectors, vectors, 4096, 0.1)
    grid = 4096 // QUERIES, 32
    return Launch(flash_attention, grid, arguments, constants, WARPS, STAGES, spill_bytes=MAY_SPILL)
