"""Tests of products in 8 bits and of the ops around them."""

import pytest
import torch
from torch import Tensor

from triptych.core.errors import ConfigError
from triptych.kernels import (
    Int8Product,
    QuantizedRows,
    add_norm_quantize,
    gate,
    quantize_rows,
)
from triptych.kernels.int8.rows import ZERO_CODE, rotate_inputs

WIDTHS = [7, 12, 96, 576, 1536, 2048]
"""Blocks of 1, 4, 32, 64, 512 and 512 numbers."""
DTYPES = [torch.float32, torch.bfloat16, torch.float16]
each = pytest.mark.parametrize


def numbers_of(rows: QuantizedRows) -> Tensor:
    return (rows.codes.float() - ZERO_CODE) * rows.scales[:, None]


def assert_near(found: QuantizedRows, expected: QuantizedRows) -> None:
    """Scales agree, and codes but for numbers halfway between two of them."""
    torch.testing.assert_close(found.scales, expected.scales, rtol=3e-6, atol=0)
    apart = (found.codes.int() - expected.codes.int()).abs()
    assert apart.max() <= 1
    assert apart.float().mean() < 1e-3


@each("dtype", DTYPES)
@each("width", WIDTHS)
@each("count", [0, 1, 5, 300])
def test_rows_are_rotated_and_quantized(dtype: torch.dtype, width: int, count: int) -> None:
    wide = (torch.randn(count, width + 3) * 4).to(dtype)[:, :width]
    found = quantize_rows(wide)
    if count:
        assert_near(found, quantize_rows.on("reference")(wide))
    error = (numbers_of(found) - rotate_inputs(wide.float())).abs()
    assert (error <= 0.5001 * found.scales[:, None] + 1e-6).all()


@each("width", [12, 576])
@each("is_first", [False, True])
def test_a_norm_adds_and_quantizes(width: int, *, is_first: bool) -> None:
    hidden, weight = torch.randn(40, width), torch.rand(width)
    delta = None if is_first else torch.randn(40, width).bfloat16()
    before = hidden.clone()
    total, found = add_norm_quantize(hidden, delta, weight, 1e-5)
    expected, rows = add_norm_quantize.on("reference")(hidden, delta, weight, 1e-5)
    torch.testing.assert_close(total, expected)
    assert_near(found, rows)
    assert hidden.equal(before)


@each("backend", ["reference", "cpu"])
@each("wrong", [float("nan"), float("inf"), -float("inf")])
def test_a_row_that_is_not_finite_stays_so(backend: str, wrong: float) -> None:
    rows = torch.randn(3, 64)
    rows[1, 5] = wrong
    scales = quantize_rows.on(backend)(rows).scales
    assert scales.isnan().tolist() == [False, True, False]


def test_a_row_of_zeros_is_zero() -> None:
    for backend in ("reference", "cpu"):
        assert numbers_of(quantize_rows.on(backend)(torch.zeros(2, 96))).eq(0).all()


needs_x86 = pytest.mark.skipif(not Int8Product.takes_here(), reason="not a processor of x86")


@needs_x86
@each("width", WIDTHS)
@each("dtype", [torch.float32, torch.bfloat16])
def test_a_product_is_that_of_the_rows(width: int, dtype: torch.dtype) -> None:
    weight = torch.randn(80, width)
    weight[3] = 0
    product = Int8Product.of(weight, dtype)
    for count in (0, 1, 2, 33, 130, 300):
        rows = torch.randn(count, width)
        found, exact = product(quantize_rows(rows)), rows @ weight.T
        assert found.shape == exact.shape
        assert found.dtype == dtype
        assert (found - exact).norm() <= 0.015 * exact.norm()


@needs_x86
@each("outputs", [2, 80, 128, 3072])
def test_a_gated_product_is_the_gate_of_the_product(outputs: int) -> None:
    weight = torch.randn(outputs, 96)
    plain, gated = (
        Int8Product.of(weight, torch.float32, is_gated=is_gated) for is_gated in (False, True)
    )
    for count in (0, 1, 5, 97):
        rows = quantize_rows(torch.randn(count, 96))
        found = gated(rows)
        assert found.shape == (count, outputs // 2)
        torch.testing.assert_close(found, gate.on("reference")(plain(rows)), rtol=1e-5, atol=1e-5)


@needs_x86
def test_a_bias_is_added() -> None:
    weight, bias = torch.randn(80, 96), torch.randn(80)
    rows = quantize_rows(torch.randn(7, 96))
    plain, biased = (Int8Product.of(weight, torch.float32, each) for each in (None, bias))
    torch.testing.assert_close(biased(rows), plain(rows) + bias)


@needs_x86
def test_a_row_has_the_same_bits_whatever_is_beside_it() -> None:
    product = Int8Product.of(torch.randn(960, 576), torch.bfloat16)
    rows = torch.randn(300, 576)
    whole = product(quantize_rows(rows))
    for first, end in ((0, 1), (5, 7), (3, 20), (7, 72), (0, 130), (99, 300)):
        part = product(quantize_rows(rows[first:end]))
        assert part.equal(whole[first:end])


@needs_x86
def test_sums_do_not_overflow() -> None:
    """All codes at their limits: pairs of products do not fit in 16 bits."""
    product = Int8Product.of(torch.ones(8, 4096), torch.float32)
    found = product(quantize_rows(torch.ones(2, 4096)))
    torch.testing.assert_close(found, torch.full((2, 8), 4096.0))


def test_mismatched_inputs_are_an_error() -> None:
    with pytest.raises(ConfigError, match="expected dense"):
        quantize_rows(torch.randn(4, 8).T)
    with pytest.raises(ConfigError, match="7 weights for rows of 8"):
        add_norm_quantize(torch.randn(3, 8), None, torch.ones(7), 1e-5)
    delta = torch.ones(3, 4)
    with pytest.raises(ConfigError, match=r"\(3, 4\) to \(3, 8\)"):
        add_norm_quantize(torch.randn(3, 8), delta, torch.ones(8), 1e-5)
