"""Products with weights in 8 bits and in bfloat16 agree with those of float64."""

import pytest
import torch
from torch import Tensor

from triptych.core.errors import ConfigError
from triptych.kernels import RegisterProduct, multiplies_words

pytestmark = pytest.mark.skipif(not multiplies_words(), reason="not a processor of x86")
each = pytest.mark.parametrize
SHAPES = [(16, 2), (50, 33), (960, 576), (7, 1)]
COUNTS = [0, 1, 2, 3, 4, 5, 7, 8, 9, 19]


def random_codes(*shape: int) -> Tensor:
    return torch.randint(1, 256, shape, dtype=torch.uint8)


@each("shape", SHAPES)
@each("count", COUNTS)
@each("dtype", [torch.float32, torch.bfloat16])
def test_products_of_codes_are_exact(
    shape: tuple[int, int], count: int, dtype: torch.dtype
) -> None:
    weight = torch.randint(-127, 128, shape, dtype=torch.int8)
    codes, scales = random_codes(count, shape[1]), torch.rand(shape[0])
    found = RegisterProduct.of(weight)(codes, dtype, scales)
    sums = (codes.double() - 128) @ weight.double().T
    assert found.equal((sums.float() * scales).to(dtype))


@each("shape", SHAPES)
@each("count", COUNTS)
@each("dtype", [torch.float32, torch.bfloat16])
def test_products_of_floats_are_added_in_float32(
    shape: tuple[int, int], count: int, dtype: torch.dtype
) -> None:
    weight, bias = torch.randn(shape).bfloat16(), torch.randn(shape[0])
    rows = torch.randn(count, shape[1] + 3).to(dtype)[:, : shape[1]]
    found = RegisterProduct.of(weight)(rows, torch.float32, None, bias)
    exact = rows.double() @ weight.double().T + bias
    torch.testing.assert_close(found.double(), exact, rtol=1e-5, atol=1e-4)
    rounded = RegisterProduct.of(weight)(rows, torch.bfloat16, None, bias)
    assert rounded.equal(found.bfloat16())


def test_the_largest_sums_of_codes_do_not_overflow() -> None:
    weight = torch.full((16, 4096), -127, dtype=torch.int8)
    codes = torch.full((3, 4096), 255, dtype=torch.uint8)
    found = RegisterProduct.of(weight)(codes, torch.float32)
    assert found.eq(-127.0 * 127 * 4096).all()


@each("dtype", [torch.int8, torch.bfloat16])
def test_a_row_has_the_same_bits_whatever_is_beside_it(dtype: torch.dtype) -> None:
    weight = (torch.randn(320, 576) * 30).to(dtype)
    rows = random_codes(40, 576) if dtype == torch.int8 else torch.randn(40, 576)
    product = RegisterProduct.of(weight)
    whole = product(rows, torch.float32)
    for first, end in ((0, 1), (5, 7), (3, 20), (7, 12), (9, 40)):
        assert product(rows[first:end], torch.float32).equal(whole[first:end])


@each("wrong", [float("nan"), float("inf")])
def test_a_row_that_is_not_finite_spoils_itself_alone(wrong: float) -> None:
    rows = torch.randn(3, 64)
    rows[1, 7] = wrong
    found = RegisterProduct.of(torch.randn(32, 64).bfloat16())(rows, torch.float32)
    assert found.isfinite().all(1).tolist() == [True, False, True]


def test_rows_that_do_not_fit_are_refused() -> None:
    kinds = torch.int8, torch.bfloat16
    codes, floats = (RegisterProduct.of(torch.ones(4, 8).to(kind)) for kind in kinds)
    with pytest.raises(ConfigError, match=r"rows \(2, 7\): expected dense \(T, 8\)"):
        floats(torch.ones(2, 7), torch.float32)
    with pytest.raises(ConfigError, match=r"rows of torch\.float32 with weights of torch\.int8"):
        codes(torch.ones(2, 8), torch.float32)
    with pytest.raises(ConfigError, match=r"rows of torch\.float64"):
        floats(torch.ones(2, 8).double(), torch.float32)
