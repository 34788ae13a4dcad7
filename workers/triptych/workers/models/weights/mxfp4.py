"""MXFP4 weights of experts, as GPT-OSS stores them: 32 numbers of 4 bits and a power of two.

Source: OCP Microscaling Formats (MX) 1.0, the layout of openai/gpt-oss
"""

import torch
from torch import Tensor

BLOCKS, SCALES = "_blocks", "_scales"
"""Endings of the names of the two tensors that stand for a weight."""
BLOCK_BYTES = 16
VALUES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
"""Of the codes 0 to 7; those of 8 to 15 are negative (E2M1)."""
_BIAS = 127


def weight_shape(blocks: tuple[int, ...]) -> tuple[int, ...]:
    """
    >>> weight_shape((32, 5760, 90, 16))
    (32, 2880, 5760)
    """
    experts, rows, groups, size = blocks
    return experts, groups * size * 2, rows


def dequantized(blocks: Tensor, scales: Tensor) -> Tensor:
    """The weights of all experts; they are exact in bfloat16.

    Shapes:  blocks (experts, out, groups, 16), scales (experts, out, groups) -> (experts, in, out)
    Dtypes:  uint8, uint8 -> bfloat16
    Raises:  ValueError if the shapes do not fit each other
    """
    if blocks.shape[-1] != BLOCK_BYTES or blocks.shape[:-1] != scales.shape:
        raise ValueError(f"MXFP4 blocks {tuple(blocks.shape)}, scales {tuple(scales.shape)}")
    values = torch.tensor((*VALUES, *(-value for value in VALUES)), dtype=torch.bfloat16)
    codes = torch.stack((blocks & 15, blocks >> 4), -1).flatten(-2)
    numbers = torch.ldexp(values[codes.int()], (scales.int() - _BIAS)[..., None])
    return numbers.flatten(-2).transpose(1, 2).contiguous()
