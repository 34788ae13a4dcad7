"""Products whose rows do not depend on the rows beside them, nor on the number of threads."""

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

from triptych.kernels.dense.blocked_product import (
    FILLED_UP,
    MOST_FILLING,
    ROW_COUNTS,
    TILED,
    UNTILED,
    has_amx,
    row_pieces,
)
from triptych.workers.models.weights.linear import BlockedLinear, pack

SHAPES = [(960, 576), (576, 1536), (1024, 3072), (320, 8192), (4096, 128), (33, 48)]
COUNTS = [ROW_COUNTS, ROW_COUNTS[1:], TILED, TILED[:1], UNTILED]

DIVIDED = 3
"""How much longer than the row of results a sum is that threads may divide among them, with AMX."""


@pytest.fixture
def threads() -> Iterator[None]:
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


def cancelling(outputs: int, columns: int, rows: int) -> tuple[Tensor, Tensor]:
    """Weights and inputs whose sums are zero but for rounding: every order of a sum shows."""
    generator = torch.Generator().manual_seed(outputs + columns)
    order = torch.randperm(columns, generator=generator)
    weight = torch.randn(outputs, columns // 2, generator=generator)
    inputs = torch.randn(rows, columns // 2, generator=generator)
    return torch.cat([weight, -weight], 1)[:, order], torch.cat([inputs, inputs], 1)[:, order]


@pytest.mark.parametrize("stage", ["prefill", "decode"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.usefixtures("threads")
def test_rows_have_the_same_bits_alone_and_beside_others(
    shape: tuple[int, int], dtype: torch.dtype, stage: str
) -> None:
    weight, inputs = cancelling(*shape, rows=300)
    product = pack([weight.to(dtype)])
    product = product.for_few_rows() if stage == "decode" else product
    rows = inputs.to(dtype)
    wholes = list[Tensor]()
    for threads in (1, 2):
        torch.set_num_threads(threads)
        whole = product(rows)
        for first, last in ((0, 1), (5, 7), (3, 20), (0, 40), (7, 72), (0, 130), (99, 300)):
            assert torch.equal(product(rows[first:last]), whole[first:last]), (first, last)
        wholes.append(whole)
    if not (has_amx() and shape[1] >= DIVIDED * shape[0]):
        assert torch.equal(*wholes)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_a_product_is_that_of_torch(dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(3)
    weights = [torch.randn(count, 96, generator=generator).to(dtype) for count in (64, 33)]
    bias = torch.randn(33, generator=generator).to(dtype)
    packed = pack(weights, [None, bias])
    error = 1e-4 if dtype == torch.float32 else 0.1
    for product in (packed, packed.for_few_rows()):
        for count in (0, 1, 5, 63, 64, 65, 200, 700):
            rows = torch.randn(count, 96, generator=generator).to(dtype)
            expected = rows.float() @ torch.cat(weights).float().T
            expected[:, 64:] += bias.float()
            torch.testing.assert_close(product(rows).float(), expected, rtol=0.01, atol=error)


@pytest.mark.parametrize("counts", COUNTS, ids=str)
def test_pieces_have_few_sizes_and_cover_every_row_once(counts: tuple[int, ...]) -> None:
    sizes = set[int]()
    for rows in range(1, 1200):
        pieces, end = row_pieces(rows, counts), 0
        for start, size in pieces:
            assert start == end < rows
            end = start + size
        left = rows - pieces[-1][0]
        assert 0 <= end - rows <= MOST_FILLING * left or left < FILLED_UP
        sizes |= {size for _, size in pieces}
    assert sizes == {count for count in counts if count < 1350}


def test_the_memory_of_products_does_not_grow_with_the_numbers_of_rows() -> None:
    """oneDNN keeps what it prepared for a number of rows."""
    product = pack([torch.randn(3072, 576).bfloat16()])
    if not isinstance(product, BlockedLinear):
        pytest.skip("this processor has no 16-bit products")

    def anonymous_kib() -> int:
        with open("/proc/self/status") as status:
            (line,) = (line for line in status if line.startswith("RssAnon"))
        return int(line.split()[1])

    def run(counts: range) -> None:
        for count in counts:
            product(torch.randn(count, 576).bfloat16())

    run(range(1, 513, 3))
    before = anonymous_kib()
    run(range(2, 513, 3))
    assert anonymous_kib() - before < 40 << 10
