"""Products with 4-bit weights agree with expanded weights."""

from importlib import import_module
from types import ModuleType

import pytest
import torch
from torch import Tensor

from triptych.core.errors import ConfigError
from triptych.kernels import Int4Tiles, add_norm_multiply_int4, multiplies_bfloat, multiply_int4
from triptych.kernels.codegen.native import multiplies_tiles, multiplies_words
from triptych.kernels.int4 import cpu

each = pytest.mark.parametrize
FAST = [
    *(["word_product", "byte_product"] if multiplies_words() else []),
    *(["vector_product"] if multiplies_bfloat() else []),
    *(["amx_product", "amx_levels"] if multiplies_tiles() else []),
]
"""Modules of the products that this processor can run."""
PRODUCTS = ["reference", *FAST]
DTYPES = [torch.float32, torch.bfloat16, torch.float16]


def random_weights(outputs: int, columns: int, group: int) -> tuple[Tensor, Int4Tiles]:
    """Weights in float32, and packed; steps and middles are bfloat16 already."""
    levels = torch.randint(0, 16, (outputs, columns), dtype=torch.uint8)
    step, middle = (torch.randn(2, outputs, columns // group) * 0.02).bfloat16().float()
    groups = levels.view(outputs, -1, group).float() - 8
    weights = (groups * step[..., None] + middle[..., None]).flatten(1)
    return weights, Int4Tiles.pack(levels, step, middle)


def choose(monkeypatch: pytest.MonkeyPatch, product: str) -> str:
    """Run a product where the CPU's would be; returns the backend that has it."""
    if product == "reference":
        return product
    module = import_module(f"triptych.kernels.int4.{product}")

    def product_of(*, is_for_few_rows: bool, rounds_inputs: bool) -> ModuleType:
        assert not is_for_few_rows
        assert not rounds_inputs
        return module

    monkeypatch.setattr(cpu, "_product", product_of)
    return "cpu"


def inputs_of(product: str, rows: Tensor) -> Tensor:
    """The inputs that a product multiplies: bfloat16, or integers with a scale for 32 of them."""
    bits = {"byte_product": 8, "word_product": 16}.get(product)
    if bits is None:
        return rows.bfloat16().double()
    pieces = rows.float().unflatten(1, (-1, 32))
    scales = pieces.abs().amax(2, keepdim=True) * (1 / (2 ** (bits - 1) - 1))
    codes = (pieces * torch.where(scales > 0, 1 / scales, 0)).round()
    return (codes.double() * scales.double()).flatten(1)


def weights_of(product: str, weights: Tensor) -> Tensor:
    """The weights that a product multiplies: tiles of them are expanded to bfloat16."""
    return weights.bfloat16().double() if product == "amx_product" else weights.double()


@each("group", [32, 64, 128])
def test_weights_are_packed_and_expanded(group: int) -> None:
    weights, packed = random_weights(96, 384, group)
    assert packed.shape == (96, 384)
    assert packed.weights().equal(weights)
    assert packed.tiles.nbytes == 96 * 384 // 2 + 4 * 96 * 384 // group


@each("product", PRODUCTS)
@each("dtype", DTYPES)
@each(("outputs", "columns", "group"), [(32, 32, 32), (96, 384, 64), (160, 256, 128)])
@each("count", [0, 1, 2, 3, 7, 8, 21, 70])
def test_products_agree_with_those_of_expanded_weights(
    monkeypatch: pytest.MonkeyPatch,
    product: str,
    dtype: torch.dtype,
    outputs: int,
    columns: int,
    group: int,
    count: int,
) -> None:
    backend = choose(monkeypatch, product)
    weights, packed = random_weights(outputs, columns, group)
    bias = torch.randn(outputs) if count % 2 else None
    rows = (torch.randn(count, columns + 5) * 3).to(dtype)[:, :columns]
    exact = inputs_of(product, rows) @ weights_of(product, weights).T
    exact = exact if bias is None else exact + bias
    found = multiply_int4.on(backend)(rows, packed, bias, torch.float32)
    torch.testing.assert_close(found.double(), exact, rtol=1e-5, atol=1e-5)
    rounded = multiply_int4.on(backend)(rows, packed, bias, torch.bfloat16)
    assert rounded.dtype == torch.bfloat16
    torch.testing.assert_close(rounded.double(), exact, rtol=2**-8, atol=1e-4)


@each("product", PRODUCTS)
@each("count", [1, 5, 30])
@each("is_first", [False, True])
def test_a_norm_of_a_sum_is_multiplied_and_gated(
    monkeypatch: pytest.MonkeyPatch, product: str, count: int, *, is_first: bool
) -> None:
    backend = choose(monkeypatch, product)
    levels = torch.randint(0, 16, (192, 96), dtype=torch.uint8)
    step, middle = (torch.randn(2, 192, 3) * 0.02).bfloat16().float()
    plain = Int4Tiles.pack(levels, step, middle)
    gated = Int4Tiles.pack(levels, step, middle, is_gated=True)
    assert gated.weights().equal(plain.weights())
    hidden, norm = torch.randn(count, 96), torch.rand(96)
    delta, before = None if is_first else torch.randn(count, 96), hidden.clone()
    run = add_norm_multiply_int4.on(backend)
    total, found = run(hidden, delta, norm, 1e-5, gated, None, torch.float32)
    assert hidden.equal(before)
    torch.testing.assert_close(total, hidden if delta is None else hidden + delta)
    normed = torch.nn.functional.rms_norm(total, (96,), norm, 1e-5)
    weights = weights_of(product, plain.weights())
    halves = (inputs_of(product, normed) @ weights.T).chunk(2, 1)
    exact = torch.nn.functional.silu(halves[0]) * halves[1]
    # A norm may lie where it rounds to either of two neighbours.
    near = {"rtol": 2e-3, "atol": 2e-2 if product == "byte_product" else 2e-3}
    torch.testing.assert_close(found.double(), exact, **near)
    whole = run(hidden, delta, norm, 1e-5, plain, torch.ones(192), torch.float32)[1]
    torch.testing.assert_close(whole.double(), torch.cat(halves, 1) + 1, **near)


@pytest.mark.skipif(not multiplies_tiles(), reason="no tiles")
def test_decode_steps_do_not_round_weights() -> None:
    weights, packed = random_weights(96, 384, 32)
    rows = torch.randn(5, 384).bfloat16()
    usual, few = (
        multiply_int4(rows, tiles, None, torch.float32).double()
        for tiles in (packed, packed.for_few_rows())
    )
    exact = rows.double() @ weights.double().T
    assert (few - exact).abs().max() < 1e-5 < 1e-3 < (usual - exact).abs().max()


@pytest.mark.skipif(not multiplies_words(), reason="not a processor of x86")
@each(("product", "largest"), [("word_product", 32767), ("byte_product", 127)])
@each("group", [32, 128])
def test_the_largest_sums_of_integers_do_not_overflow(
    monkeypatch: pytest.MonkeyPatch, product: str, largest: int, group: int
) -> None:
    """All levels and inputs at their limits: pairs of 8 bits are added in 16 bits."""
    choose(monkeypatch, product)
    levels = torch.full((32, 1536), 15, dtype=torch.uint8)
    step, middle = torch.ones(32, 1536 // group), torch.zeros(32, 1536 // group)
    rows = torch.full((2, 1536), float(largest))
    rows[1] *= -1
    found = multiply_int4(rows, Int4Tiles.pack(levels, step, middle), None, torch.float32)
    exact = torch.tensor([7.0, -7.0])[:, None].expand(2, 32) * largest * 1536
    torch.testing.assert_close(found, exact, rtol=1e-6, atol=0)


@pytest.mark.skipif(multiplies_bfloat() or not multiplies_words(), reason="bfloat16 is multiplied")
def test_inputs_are_rounded_to_8_bits_where_that_is_allowed() -> None:
    weights, packed = random_weights(96, 384, 32)
    rows = torch.randn(5, 384)
    exact = rows.double() @ weights.double().T
    usual, rounded = (
        (multiply_int4(rows, tiles, None, torch.float32) - exact).abs().max()
        for tiles in (packed, packed.with_inputs_in_8_bits())
    )
    assert usual < 1e-3 < rounded < 0.1


@each("product", FAST)
def test_a_row_has_the_same_bits_whatever_is_beside_it(
    monkeypatch: pytest.MonkeyPatch, product: str
) -> None:
    choose(monkeypatch, product)
    _, packed = random_weights(1024, 576, 32)
    rows = torch.randn(69, 576)
    whole = multiply_int4(rows, packed, None, torch.float32)
    for count in (1, 2, 5, 8, 16, 17, 32, 35):
        assert multiply_int4(rows[:count], packed, None, torch.float32).equal(whole[:count])
        assert multiply_int4(rows[-count:], packed, None, torch.float32).equal(whole[-count:])


@each("product", PRODUCTS)
@each("wrong", [float("nan"), float("inf")])
def test_a_row_that_is_not_finite_spoils_itself_alone(
    monkeypatch: pytest.MonkeyPatch, product: str, wrong: float
) -> None:
    backend = choose(monkeypatch, product)
    _, packed = random_weights(64, 64, 32)
    rows = torch.randn(3, 64)
    rows[1, 7] = wrong
    found = multiply_int4.on(backend)(rows, packed, None, torch.float32)
    assert found.isfinite().all(1).tolist() == [True, False, True]


@pytest.mark.skipif(not multiplies_words(), reason="not a processor of x86")
def test_rows_and_biases_that_do_not_fit_are_refused() -> None:
    _, packed = random_weights(64, 64, 32)
    with pytest.raises(ConfigError, match=r"rows \(2, 63\)"):
        multiply_int4(torch.randn(2, 63), packed, None, torch.float32)
    with pytest.raises(ConfigError, match=r"rows of torch\.float64"):
        multiply_int4(torch.randn(2, 64).double(), packed, None, torch.float32)
    with pytest.raises(ConfigError, match="bias"):
        multiply_int4(torch.randn(2, 64), packed, torch.randn(32), torch.float32)
