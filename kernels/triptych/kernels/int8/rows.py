"""Rows before a product in 8 bits."""

from dataclasses import dataclass

from torch import Tensor

from triptych.kernels.hadamard import block_size, hadamard

LARGEST_BLOCK = 512
"""Most numbers that a rotation of inputs mixes."""
ZERO_CODE = 128
LARGEST_CODE = 127


def input_block(width: int) -> int:
    """Number of inputs that the rotation before a product mixes."""
    return min(block_size(width), LARGEST_BLOCK)


def rotate_inputs(rows: Tensor) -> Tensor:
    """Rotate rows of inputs, or of weights, in blocks of ``input_block``.

    Shapes:  (T, E) float32 -> (T, E)
    """
    block = input_block(rows.shape[1])
    blocks = rows.reshape(len(rows), rows.shape[1] // block, block) @ hadamard(block, rows.device)
    return blocks.reshape(rows.shape)


@dataclass(frozen=True, slots=True)
class QuantizedRows:
    """Rows in 8 bits with one scale each, rotated by Hadamard matrices of ``input_block``.

    A rotated number is ``(code - ZERO_CODE) * scale``.
    """

    codes: Tensor
    """(T, E) uint8, from 1 to 255."""
    scales: Tensor
    """(T,) float32."""
