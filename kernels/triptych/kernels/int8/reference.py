"""Reference of the ops around products in 8 bits: computed in float32, rounded once."""

import torch
from torch import Tensor

from triptych.kernels.int8.rows import LARGEST_CODE, ZERO_CODE, QuantizedRows, rotate_inputs
from triptych.kernels.pointwise import reference


def quantize_rows(rows: Tensor) -> QuantizedRows:
    """Rotate and quantize rows; the largest number of a row has the largest code.

    Rows with a NaN or an infinity have a scale of NaN.

    Shapes:  rows [T, E]
    Dtypes:  float32, bfloat16 or float16
    Source:  QuaRot (Ashkboos et al., 2024), sections 3 and 4
    """
    turned = rotate_inputs(rows.float())
    scales = turned.abs().amax(1) / LARGEST_CODE + 0 * turned.abs().sum(1)
    inverse = torch.where(scales > 0, 1 / scales, 0.0)
    codes = (turned * inverse[:, None]).round().nan_to_num() + ZERO_CODE
    return QuantizedRows(codes.clamp(0, 255).to(torch.uint8), scales)


def add_norm_quantize(
    hidden: Tensor, delta: Tensor | None, weight: Tensor, epsilon: float
) -> tuple[Tensor, QuantizedRows]:
    """The residual stream after a block, and its RMS norm: the input of the next product.

    Shapes:  hidden [T, E] float32; delta [T, E]; weight [E] float32 -> the sum [T, E] and its
        norm
    Dtypes:  delta float32, bfloat16 or float16
    """
    total = hidden if delta is None else hidden + delta.float()
    return total, quantize_rows(reference.rms_norm(total, weight, epsilon, torch.float32))
