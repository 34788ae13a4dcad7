"""Reference of products with 4-bit weights: weights are expanded, and sums are float32."""

import torch
from torch import Tensor

from triptych.kernels.int4.layout import Int4Tiles


def multiply_int4(
    rows: Tensor, weights: Int4Tiles, bias: Tensor | None, dtype: torch.dtype
) -> Tensor:
    """A product with 4-bit weights, whose inputs are rounded to bfloat16.

    Shapes:  rows [T, in]; bias [out] float32 -> [T, out]
    Dtypes:  rows float32, bfloat16 or float16; result ``dtype``, one of them
    """
    product = rows.bfloat16().float() @ weights.weights().T
    return (product if bias is None else product + bias).to(dtype)
