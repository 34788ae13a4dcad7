"""The largest logits are exact, whatever the size of the vocabulary."""

import pytest
import torch

from triptych.core.errors import ConfigError
from triptych.kernels import recompute_largest

COUNT = 64


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("vocab", [1, 50, 64, 4096, 5003, 49152])
def test_the_largest_logits_are_exact_and_the_others_are_left(
    vocab: int, dtype: torch.dtype
) -> None:
    hidden, weight = torch.randn(3, 96), torch.randn(vocab, 96).to(dtype)
    exact = hidden.double() @ weight.double().T
    rough = (exact + torch.randn_like(exact) * 0.1).float()
    found = recompute_largest(rough.clone(), hidden, weight, COUNT)
    largest = rough.topk(min(COUNT, vocab)).indices
    for logits in (found, recompute_largest.on("reference")(rough.clone(), hidden, weight, COUNT)):
        picked = logits.gather(1, largest).double()
        torch.testing.assert_close(picked, exact.gather(1, largest), rtol=1e-5, atol=1e-4)
    is_exact = (found.double() - exact).abs() < 1e-4
    assert torch.where(is_exact, rough, found).equal(rough)


def test_equal_logits_and_nan_are_no_trouble() -> None:
    hidden, weight = torch.randn(2, 32), torch.randn(300, 32)
    exact = hidden @ weight.T
    flat = recompute_largest(torch.zeros(2, 300), hidden, weight, 2)
    torch.testing.assert_close(flat, exact)
    broken = torch.full((2, 300), float("nan"))
    assert recompute_largest(broken, hidden, weight, 2).isnan().any()
    with pytest.raises(ConfigError, match="they do not fit"):
        recompute_largest(torch.zeros(2, 299), hidden, weight, 2)
