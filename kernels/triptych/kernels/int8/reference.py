"""Reference of the ops around products in 8 bits: computed in float32, rounded once."""

import torch
from torch import Tensor

from triptych.kernels.int8.rows import (
    LARGEST_CODE,
    ZERO_CODE,
    QuantizedRows,
    ScaledRows,
    rotate_inputs,
)
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
    hidden: Tensor, delta: ScaledRows | None, weight: Tensor, epsilon: float
) -> tuple[Tensor, QuantizedRows]:
    """The residual stream after a block, and its RMS norm: the input of the next product.

    Shapes:  hidden [T, E] float32; delta of [T, E]; weight [E] float32 -> the sum [T, E] and its
        norm
    """
    total = hidden if delta is None else hidden + delta.rows()
    return total, quantize_rows(reference.rms_norm(total, weight, epsilon, torch.float32))


def gate_quantize(gate_up: Tensor, scales: Tensor) -> QuantizedRows:
    """``silu`` of the first half of the channels, times the second.

    Shapes:  gate_up [T, 2 I], before it is multiplied by scales [T] -> of [T, I]
    Dtypes:  gate_up float32, bfloat16 or float16; scales float32
    """
    return quantize_rows(reference.gate(ScaledRows(gate_up, scales).rows()))
