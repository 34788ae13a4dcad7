"""Tests of the pointwise ops, every backend against float64."""

import pytest
import torch
from torch import Tensor

from triptych.core.errors import ConfigError
from triptych.kernels import gate, rms_norm, rotate, rotate_back, rotate_kv
from triptych.kernels.hadamard import hadamard

BACKENDS = ["reference", "cpu"]
DTYPES = [torch.float32, torch.bfloat16, torch.float16]
each = pytest.mark.parametrize
MANY = 700
"""Number of rows for which more than one thread is used."""


def is_rounded(found: Tensor, exact: Tensor, dtype: torch.dtype) -> bool:
    """Whether each number is the exact one rounded, within errors of float32 arithmetic."""
    assert found.dtype == dtype
    assert found.is_contiguous()
    near = (torch.finfo(dtype).eps + 4e-6) * exact.abs() + 1e-6
    return bool(((found.double() - exact).abs() <= near).all())


@each("backend", BACKENDS)
@each("dtype", DTYPES)
@each("rows", [0, 1, 3, MANY])
def test_a_norm_divides_by_the_root_mean_square(
    backend: str, dtype: torch.dtype, rows: int
) -> None:
    wide = torch.randn(rows, 2, 100).to(dtype)[:, 0]  # not dense, and no whole vector registers
    weight = torch.randn(100)
    exact = wide.double() / (wide.double().square().mean(-1, keepdim=True) + 1e-5).sqrt() * weight
    found = rms_norm.on(backend)(wide, weight, 1e-5, torch.bfloat16)
    assert is_rounded(found, exact, torch.bfloat16)
    found = rms_norm.on(backend)(wide, weight, 1e-5, torch.float32)
    assert is_rounded(found, exact, torch.float32)


@each("backend", BACKENDS)
def test_each_head_is_normalised_separately(backend: str) -> None:
    heads = torch.randn(5, 4, 64).bfloat16()[:, 1:]
    weight = torch.randn(64)
    found = rms_norm.on(backend)(heads, weight, 1e-6, torch.bfloat16)
    one_by_one = [
        rms_norm.on(backend)(heads[:, head], weight, 1e-6, torch.bfloat16) for head in range(3)
    ]
    assert found.equal(torch.stack(one_by_one, 1))


@each("backend", BACKENDS)
@each("dtype", DTYPES)
@each("rows", [0, 1, 3, MANY])
def test_rope_rotates_pairs_of_channels(backend: str, dtype: torch.dtype, rows: int) -> None:
    heads = torch.randn(rows, 5, 64).to(dtype)[:, :3]
    angles = torch.rand(rows, 32, dtype=torch.float64) * 6
    cos, sin = angles.cos().float(), angles.sin().float()
    pairs = torch.complex(*heads.double().chunk(2, -1))
    turned = pairs * torch.complex(cos.double(), sin.double())[:, None]
    found = rotate.on(backend)(heads, cos, sin)
    assert is_rounded(found, torch.cat((turned.real, turned.imag), -1), dtype)


@each("backend", BACKENDS)
@each("dtype", DTYPES)
@each("rows", [0, 1, 3, MANY])
def test_a_gate_is_silu_of_one_half_times_the_other(
    backend: str, dtype: torch.dtype, rows: int
) -> None:
    both = (torch.randn(rows, 200) * 8).to(dtype)
    left, right = both.double().chunk(2, -1)
    found = gate.on(backend)(both)
    assert is_rounded(found, left * right / (1 + (-left).exp()), dtype)


@each("backend", BACKENDS)
@each("dtype", DTYPES)
def test_a_gate_accepts_numbers_of_any_size(backend: str, dtype: torch.dtype) -> None:
    left = torch.tensor([-60000.0, -100.0, 0.0, 100.0, 60000.0, float("nan")])
    found = gate.on(backend)(torch.cat((left, torch.ones(6)))[None].to(dtype))[0]
    assert found[:3].double().abs().max() < 1e-30
    assert found[5].isnan()
    assert found[3:5].equal(left[3:5].to(dtype))


@each("backend", BACKENDS)
def test_nan_stays_nan(backend: str) -> None:
    """Rounding must not turn a NaN with all bits set into zero."""
    rows = torch.full((1, 16), -1, dtype=torch.int32).view(torch.float32)
    assert rms_norm.on(backend)(rows, torch.ones(16), 1e-5, torch.bfloat16).isnan().all()


@each("dtype", DTYPES)
def test_the_result_of_a_row_does_not_depend_on_other_rows(dtype: torch.dtype) -> None:
    """The output of a request must not depend on the other requests of the batch."""
    rows, weight = torch.randn(MANY, 128).to(dtype), torch.randn(128)
    angles = torch.randn(MANY, 32)
    assert gate(rows)[7:8].equal(gate(rows[7:8]))
    assert rms_norm(rows, weight, 1e-5, dtype)[7:8].equal(rms_norm(rows[7:8], weight, 1e-5, dtype))
    turned = rotate(rows.view(MANY, 2, 64), angles, angles)
    assert turned[7:8].equal(rotate(rows[7:8].view(1, 2, 64), angles[7:8], angles[7:8]))


def test_mismatched_inputs_are_an_error() -> None:
    rows = torch.randn(2, 8)
    with pytest.raises(ConfigError, match="7 weights for rows of 8"):
        rms_norm(rows, torch.ones(7), 1e-5, torch.float32)
    with pytest.raises(ConfigError, match=r"expected float32 \(2, 4\)"):
        rotate(rows[:, None], torch.ones(2, 8), torch.ones(2, 8))
    with pytest.raises(ConfigError, match="expected dense"):
        gate(rows.T)
    with pytest.raises(ConfigError, match=r"torch\.float64"):
        gate(rows.double())


@each("backend", BACKENDS)
@each("dtype", DTYPES)
@each(("heads", "kv_heads", "dim"), [(9, 3, 64), (4, 2, 96), (2, 1, 32), (4, 2, 128), (2, 1, 256)])
def test_the_hadamard_rotation_is_the_matrix_product(
    backend: str, dtype: torch.dtype, heads: int, kv_heads: int, dim: int
) -> None:
    qkv, centre = torch.randn(5, heads + 2 * kv_heads, dim).to(dtype), torch.randn(kv_heads, dim)
    query, key, value = qkv.tensor_split((heads, heads + kv_heads), 1)
    matrix = hadamard(dim).double()
    exact = [part.double() @ matrix for part in (query, key, value)]
    exact[1] -= centre.double()
    found = rotate_kv.on(backend)(query, key, value, centre)
    for mine, its in zip(found, exact, strict=True):
        assert is_rounded(mine.contiguous(), its, torch.float32)
    back = rotate_back.on(backend)(found[0], dtype)
    assert is_rounded(back, found[0].double() @ matrix, dtype)


@each("dim", [32, 64, 80, 96, 128, 256])
def test_a_rotated_row_does_not_depend_on_the_number_of_rows(dim: int) -> None:
    rows, centre = torch.randn(130, 3, dim), torch.randn(1, dim)
    query, key, value = rows.tensor_split(3, 1)
    every = rotate_kv(query, key, value, centre)
    back = rotate_back(rows, torch.float32)
    for count in (1, 2, 3, 5, 7, 16, 33, 100):
        last = slice(130 - count, None)
        found = rotate_kv(query[last], key[last], value[last], centre)
        assert all(a.equal(b[last]) for a, b in zip(found, every, strict=True))
        assert rotate_back(rows[last], torch.float32).equal(back[last])
