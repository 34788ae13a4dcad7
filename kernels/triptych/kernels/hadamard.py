"""The Hadamard rotation, which spreads an outlier over all channels and is its own inverse."""

import math
from functools import cache

import torch
from torch import Tensor

CPU = torch.device("cpu")


@cache
def hadamard(dim: int, device: torch.device = CPU) -> Tensor:
    """Block-diagonal Hadamard matrix, orthogonal and symmetric, float32 [dim, dim].

    The block size is the largest power of two that divides ``dim``.

    Source: Sylvester's construction; QuaRot, section 3 (a Hadamard matrix after RoPE)
    """
    block = torch.ones(1, 1)
    size = block_size(dim)
    while len(block) < size:
        block = torch.cat((torch.cat((block, block), 1), torch.cat((block, -block), 1)))
    return torch.kron(torch.eye(dim // size), block / math.sqrt(size)).to(device)


def block_size(dim: int) -> int:
    """Number of channels that a block of ``hadamard(dim)`` mixes."""
    return dim & -dim
