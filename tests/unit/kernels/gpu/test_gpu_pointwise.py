"""Pointwise kernels of a GPU against float64, with poisoned outputs."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from triptych.core.errors import ConfigError
from triptych.kernels import add_norm, gate, rms_norm, rotate, rotate_back, rotate_kv
from triptych.kernels.hadamard import hadamard
from triptych.kernels.pointwise import gpu

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
each = pytest.mark.parametrize


def check(found: Tensor, exact: Tensor, dtype: torch.dtype) -> None:
    """Each number is the exact one rounded, within errors of float32 arithmetic."""
    assert found.dtype == dtype
    assert found.shape == exact.shape
    assert found.is_contiguous()
    near = (torch.finfo(dtype).eps / 2 + 4e-6) * exact.abs() + 4e-6
    assert bool(((found.cpu().double() - exact).abs() <= near).all())


def norm_of(rows: Tensor, weight: Tensor) -> Tensor:
    return rows / (rows.square().mean(-1, keepdim=True) + 1e-5).sqrt() * weight


@each("dtype", DTYPES)
@each(("tokens", "width"), [(0, 64), (1, 100), (3, 576), (2, 4096)])
def test_norms_are_those_of_float64(
    dtype: torch.dtype, tokens: int, width: int, device: Any
) -> None:
    wide, weight = torch.randn(tokens, 2 * width).to(dtype), torch.randn(width)
    rows, hidden = wide[:, :width], torch.randn(tokens, width)
    exact = norm_of(rows.double(), weight.double())
    moved, scales, stream, delta = device.take(wide, weight, hidden, wide)
    check(rms_norm.on("cuda")(moved[:, :width], scales, 1e-5, dtype), exact, dtype)
    total, normed = add_norm.on("cuda")(stream, delta[:, :width], scales, 1e-5, torch.bfloat16)
    check(total, hidden.double() + rows.double(), torch.float32)
    exact = norm_of((hidden + rows.float()).double(), weight.double())
    check(normed, exact, torch.bfloat16)


def test_heads_are_normalised_one_by_one(device: Any) -> None:
    heads, weight = torch.randn(5, 4, 96).bfloat16(), torch.randn(96)
    moved, scales = device.take(heads, weight)
    found = rms_norm.on("cuda")(moved[:, 1:], scales, 1e-5, torch.bfloat16)
    check(found, norm_of(heads[:, 1:].double(), weight.double()), torch.bfloat16)


@each("dtype", DTYPES)
@each(("tokens", "heads", "dim"), [(0, 3, 64), (3, 3, 64), (2, 40, 128), (1, 9, 96)])
def test_rope_is_that_of_float64(
    dtype: torch.dtype, tokens: int, heads: int, dim: int, device: Any
) -> None:
    given = torch.randn(tokens, heads + 2, dim).to(dtype)
    angles = torch.rand(tokens, dim // 2, dtype=torch.float64) * 6
    cos, sin = angles.cos().float(), angles.sin().float()
    pairs = torch.complex(*given[:, :heads].double().chunk(2, -1))
    turned = pairs * torch.complex(cos.double(), sin.double())[:, None]
    moved, *rest = device.take(given, cos, sin)
    found = rotate.on("cuda")(moved[:, :heads], *rest)
    check(found, torch.cat((turned.real, turned.imag), -1), dtype)


@each("dtype", DTYPES)
@each(("tokens", "width"), [(0, 100), (1, 100), (3, 1536)])
def test_a_gate_is_that_of_float64(
    dtype: torch.dtype, tokens: int, width: int, device: Any
) -> None:
    both = (torch.randn(tokens, 2 * width) * 8).to(dtype)
    left, right = both.double().chunk(2, -1)
    (moved,) = device.take(both)
    check(gate.on("cuda")(moved), left * right / (1 + (-left).exp()), dtype)


def test_a_gate_accepts_numbers_of_any_size(device: Any) -> None:
    left = torch.tensor([-60000.0, -100.0, 0.0, 100.0, 60000.0, float("nan")])
    (moved,) = device.take(torch.cat((left, torch.ones(6)))[None])
    found = gate.on("cuda")(moved)[0].cpu()
    assert found[:3].abs().max() < 1e-30
    assert found[5].isnan()
    assert found[3:5].equal(left[3:5])


@each("dtype", DTYPES)
@each(("heads", "kv_heads", "dim"), [(9, 3, 64), (32, 8, 128), (4, 2, 96), (2, 1, 80)])
def test_the_hadamard_rotation_is_the_matrix_product(
    dtype: torch.dtype, heads: int, kv_heads: int, dim: int, device: Any
) -> None:
    qkv = torch.randn(3, heads + 2 * kv_heads, dim).to(dtype)
    centre = torch.randn(kv_heads, dim)
    ends = heads, heads + kv_heads
    matrix = hadamard(dim).double()
    query, key, value = (part.double() @ matrix for part in qkv.tensor_split(ends, 1))
    moved, middle = device.take(qkv, centre)
    found = rotate_kv.on("cuda")(*moved.tensor_split(ends, 1), middle)
    for mine, exact in zip(found, (query, key - centre.double(), value), strict=True):
        check(mine, exact, torch.float32)
    back = rotate_back.on("cuda")(found[0], dtype)
    check(back, found[0].cpu().double() @ matrix, dtype)


def poisoned(launch: Callable[..., Any], inputs: list[Tensor], outputs: list[Tensor]) -> None:
    for out in outputs:
        out.fill_(float("nan"))
    launch(*inputs, *outputs).run()
    assert not any(out.isnan().any() for out in outputs)


def test_every_number_of_an_output_is_written(device: Any) -> None:
    hidden, query, key, centre = device.take(
        torch.randn(3, 300), torch.randn(3, 9, 96), torch.randn(3, 3, 96), torch.randn(3, 96)
    )
    weight, cos, gates = device.take(torch.randn(300), torch.randn(3, 48), torch.randn(3, 600))
    like = torch.empty_like

    def norm(rows: Tensor, scales: Tensor, total: Tensor, out: Tensor) -> Any:
        return gpu.plan_norm(rows, rows, scales, 1e-5, total, out)

    poisoned(norm, [hidden, weight], [like(hidden), like(hidden)])
    poisoned(gpu.plan_rotate, [query, cos, cos], [like(query)])
    poisoned(gpu.plan_gate, [gates], [like(hidden)])
    parts = [query, key, key]
    poisoned(gpu.plan_rotate_kv, [*parts, centre], [like(part) for part in parts])
    poisoned(gpu.plan_rotate_back, [query], [like(query)])


def test_mismatched_inputs_are_an_error(device: Any) -> None:
    rows, weight = device.take(torch.randn(2, 8), torch.ones(7))
    with pytest.raises(ConfigError, match=r"expected dense float32 \(8,\)"):
        rms_norm.on("cuda")(rows, weight, 1e-5, torch.float32)
    with pytest.raises(ConfigError, match="delta"):
        add_norm.on("cuda")(rows, rows[:1], weight.new_ones(8), 1e-5, torch.float32)
    with pytest.raises(ConfigError, match=r"expected float32 \(2, 4\)"):
        rotate.on("cuda")(rows[:, None], rows, rows)
    with pytest.raises(ConfigError, match="centre"):
        rotate_kv.on("cuda")(rows[:, None], rows[:, None], rows[:, None], rows)
    with pytest.raises(ConfigError, match="float64"):
        gate.on("cuda")(rows.double())
