# pyright: reportUnknownVariableType=false
# The arguments of kernels have no types.
"""The pointwise ops on the GPU: one launch each, computed in float32 and rounded once."""

import math

import torch
from torch import Tensor

from triptych.core.errors import ConfigError
from triptych.kernels.hadamard import block_size
from triptych.kernels.pointwise.gpu_vectors import (
    gate_rows,
    norm_rows,
    rotate_all,
    rotate_outputs,
    rotate_pairs,
)
from triptych.kernels.triton.launch import (
    VECTOR_TYPES,
    Launch,
    check_device,
    dense,
    power_of_two,
)

HEADS_AT_ONCE = 8
"""Heads of a token that a program rotates."""
GATES_AT_ONCE = 1024
"""Channels that a program of ``gate`` computes."""
NUMBERS_PER_WARP = 512
"""Numbers of a row for each warp of a norm; at most 16 warps."""


def rms_norm(rows: Tensor, weight: Tensor, epsilon: float, dtype: torch.dtype) -> Tensor:
    """See ``reference.rms_norm``."""
    out = torch.empty_like(rows, dtype=dtype, memory_format=torch.contiguous_format)
    plan_norm(rows, None, weight, epsilon, None, out).run()
    return out


def add_norm(
    hidden: Tensor, delta: Tensor, weight: Tensor, epsilon: float, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """See ``reference.add_norm``."""
    total = torch.empty_like(hidden, memory_format=torch.contiguous_format)
    out = torch.empty_like(total, dtype=dtype)
    plan_norm(hidden, delta, weight, epsilon, total, out).run()
    return total, out


def rotate(heads: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """See ``reference.rotate``."""
    out = torch.empty_like(heads, memory_format=torch.contiguous_format)
    plan_rotate(heads, cos, sin, out).run()
    return out


def gate(gate_up: Tensor) -> Tensor:
    """See ``reference.gate``."""
    out = gate_up.new_empty(len(gate_up), gate_up.shape[1] // 2)
    plan_gate(gate_up, out).run()
    return out


def rotate_kv(
    query: Tensor, key: Tensor, value: Tensor, centre: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """See ``reference.rotate_kv``."""
    empty = [
        torch.empty_like(given, dtype=torch.float32, memory_format=torch.contiguous_format)
        for given in (query, key, value)
    ]
    plan_rotate_kv(query, key, value, centre, *empty).run()
    return empty[0], empty[1], empty[2]


def rotate_back(mixed: Tensor, dtype: torch.dtype) -> Tensor:
    """See ``reference.rotate_back``."""
    out = torch.empty_like(mixed, dtype=dtype, memory_format=torch.contiguous_format)
    plan_rotate_back(mixed, out).run()
    return out


def plan_norm(
    rows: Tensor,
    delta: Tensor | None,
    weight: Tensor,
    epsilon: float,
    total: Tensor | None,
    out: Tensor,
) -> Launch:
    """The launch of ``rms_norm``, and of ``add_norm`` with ``delta`` and ``total``."""
    check_device("rms_norm", rows, weight, *(() if delta is None else (delta,)))
    _check_vectors("rms_norm", rows, *(() if delta is None else (delta,)))
    width = rows.shape[-1]
    if weight.shape != (width,) or weight.dtype != torch.float32 or not weight.is_contiguous():
        raise ConfigError(
            f"rms_norm: weight {tuple(weight.shape)} {weight.dtype}: expected dense float32 "
            f"({width},)"
        )
    if delta is not None and (delta.shape != rows.shape or rows.dim() != 2):
        raise ConfigError(
            f"add_norm: hidden {tuple(rows.shape)}, delta {tuple(delta.shape)}: expected [T, E]"
        )
    rows, heads = dense(rows), rows.shape[1] if rows.dim() == 3 else 1
    delta = None if delta is None else dense(delta)
    arguments = (
        rows, rows.stride(0), rows.stride(1) if rows.dim() == 3 else 0, delta,
        0 if delta is None else delta.stride(0), weight, epsilon, total, out,
    )  # fmt: skip
    block = power_of_two(width)
    constants = {"HEADS": heads, "WIDTH": width, "BLOCK": block}
    warps = min(16, max(1, block // NUMBERS_PER_WARP))
    return Launch(norm_rows, (rows.numel() // max(1, width),), arguments, constants, warps)


def plan_rotate(heads: Tensor, cos: Tensor, sin: Tensor, out: Tensor) -> Launch:
    """The launch of ``rotate``."""
    check_device("rotate", heads, cos, sin)
    _check_vectors("rotate", heads)
    tokens, count, dim = heads.shape
    for angles in (cos, sin):
        if angles.shape != (tokens, dim // 2) or angles.dtype != torch.float32:
            raise ConfigError(
                f"rotate: angles {tuple(angles.shape)} {angles.dtype}: expected float32 "
                f"{(tokens, dim // 2)}"
            )
    heads, cos, sin = dense(heads), cos.contiguous(), sin.contiguous()
    arguments = heads, *heads.stride()[:2], cos, sin, cos.stride(0), out
    constants = {
        "HEADS": count,
        "HALF": dim // 2,
        "BLOCK": HEADS_AT_ONCE,
        "WIDE": power_of_two(dim // 2),
    }
    return Launch(rotate_pairs, (tokens, -(-count // HEADS_AT_ONCE)), arguments, constants, 2)


def plan_gate(gate_up: Tensor, out: Tensor) -> Launch:
    """The launch of ``gate``."""
    _check_vectors("gate", gate_up)
    gate_up, width = dense(gate_up), out.shape[1]
    arguments = gate_up, gate_up.stride(0), out, width
    grid = len(gate_up), -(-width // GATES_AT_ONCE)
    return Launch(gate_rows, grid, arguments, {"BLOCK": GATES_AT_ONCE})


def plan_rotate_kv(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    centre: Tensor,
    out_query: Tensor,
    out_key: Tensor,
    out_value: Tensor,
) -> Launch:
    """The launch of ``rotate_kv``."""
    check_device("rotate_kv", query, key, value, centre)
    _check_vectors("rotate_kv", query, key, value)
    (tokens, heads, dim), kv_heads = query.shape, key.shape[1]
    if (
        key.shape != value.shape
        or key.shape != (tokens, kv_heads, dim)
        or centre.shape != (kv_heads, dim)
        or centre.dtype != torch.float32
    ):
        raise ConfigError(
            f"rotate_kv: query {tuple(query.shape)}, key {tuple(key.shape)}, value "
            f"{tuple(value.shape)}, centre {tuple(centre.shape)} {centre.dtype}: expected "
            "[T, H, d], [T, KH, d] twice and float32 [KH, d]"
        )
    query, key, value = dense(query), dense(key), dense(value)
    arguments = (
        query, *query.stride()[:2], key, *key.stride()[:2], value, *value.stride()[:2],
        centre.contiguous(), out_query, out_key, out_value, _factor(dim),
    )  # fmt: skip
    constants = {"HEADS": heads, "KV_HEADS": kv_heads, **_sizes(dim)}
    blocks = -(-heads // HEADS_AT_ONCE) + 2 * -(-kv_heads // HEADS_AT_ONCE)
    return Launch(rotate_all, (tokens, blocks), arguments, constants)


def plan_rotate_back(mixed: Tensor, out: Tensor) -> Launch:
    """The launch of ``rotate_back``."""
    _check_vectors("rotate_back", mixed)
    mixed, (tokens, heads, dim) = dense(mixed), mixed.shape
    arguments = mixed, *mixed.stride()[:2], out, _factor(dim)
    grid = tokens, -(-heads // HEADS_AT_ONCE)
    return Launch(rotate_outputs, grid, arguments, {"HEADS": heads, **_sizes(dim)})


def _factor(dim: int) -> float:
    """Factor that makes the Hadamard matrix orthogonal: 1 / sqrt(block size)."""
    return 1.0 / math.sqrt(block_size(dim))


def _sizes(dim: int) -> dict[str, object]:
    return {
        "DIM": dim,
        "WIDE": power_of_two(dim),
        "STAGES": block_size(dim).bit_length() - 1,
        "BLOCK": HEADS_AT_ONCE,
    }


def _check_vectors(name: str, *vectors: Tensor) -> None:
    for given in vectors:
        if given.dtype not in VECTOR_TYPES or given.dim() not in (2, 3):
            raise ConfigError(
                f"{name}: {tuple(given.shape)} {given.dtype}: expected [T, E] or [T, H, E] of "
                f"{', '.join(map(str, VECTOR_TYPES))}"
            )
