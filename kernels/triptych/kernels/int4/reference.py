"""Reference of products with 4-bit weights: weights are expanded, and sums are float32."""

import torch
from torch import Tensor

from triptych.kernels.int4.layout import Int4Tiles
from triptych.kernels.pointwise.reference import gate, rms_norm


def multiply_int4(
    rows: Tensor, weights: Int4Tiles, bias: Tensor | None, dtype: torch.dtype
) -> Tensor:
    """A product with 4-bit weights, whose inputs are rounded to bfloat16.

    Shapes:  rows [T, in]; bias [out] float32 -> [T, out]
    Dtypes:  rows float32, bfloat16 or float16; result ``dtype``, one of them
    """
    product = rows.bfloat16().float() @ weights.weights().T
    product = product if bias is None else product + bias
    return (gate(product) if weights.is_gated else product).to(dtype)


def add_norm_multiply_int4(
    hidden: Tensor,
    delta: Tensor | None,
    norm: Tensor,
    epsilon: float,
    weights: Int4Tiles,
    bias: Tensor | None,
    dtype: torch.dtype,
) -> tuple[Tensor, Tensor]:
    """The residual stream after a block, and the product of its RMS norm with 4-bit weights.

    Shapes:  hidden [T, in] float32; delta [T, in], None: nothing is added; norm [in] float32; bias
        [out] float32 -> the sum [T, in] float32 and [T, out]
    """
    total = hidden if delta is None else hidden + delta
    return total, multiply_int4(rms_norm(total, norm, epsilon, torch.float32), weights, bias, dtype)
