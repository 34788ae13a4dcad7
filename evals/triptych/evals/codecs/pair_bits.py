# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false
# pyright: reportUnknownArgumentType=false
# torch leaves Tensor.argmin and others untyped in part.
"""Block-GTQ: keys with bits by RoPE pair, in codes of Lloyd and Max."""

import math
from functools import cache

import torch
from torch import Tensor

LEAST_BITS, MOST_BITS = 1, 8
"""Of a channel."""
NORM_BYTES = 2
"""Of the norm of a segment, in float16."""


def bits_by_energy(energy: Tensor, mean_bits: float) -> Tensor:
    """Bits of the channels of each RoPE pair: the next bit goes where the error falls most.

    A bit divides the squared error of a pair, ``energy / 4**bits``, by four, so the pair with the
    largest error has the largest gain.

    Shapes:  energy [..., pairs] -> int64 [..., pairs], whose mean is ``mean_bits`` rounded to whole
             bits of pairs
    Units:   energy: mean squared norm of the pairs of queries and of keys, the mean of the two
    Source:  Block-GTQ (greedy allocation, 1 to 8 bits)
    """
    pairs = energy.shape[-1]
    flat = energy.reshape(-1, pairs).double()
    bits = torch.full(flat.shape, LEAST_BITS)
    rows = torch.arange(len(flat))
    for _ in range(round(mean_bits * pairs) - LEAST_BITS * pairs):
        error = flat * 4.0 ** -bits.double()
        best = error.masked_fill(bits >= MOST_BITS, -1.0).argmax(-1)
        bits[rows, best] += 1
    return bits.view(energy.shape)


def pair_energy(vectors: Tensor) -> Tensor:
    """Mean squared norm of each RoPE pair (channel c and c + d/2): [..., n, d] -> [..., d/2].

    RoPE changes no norm of a pair, so vectors before and after it have the same energy.
    """
    left, right = vectors.chunk(2, -1)
    return (left.square() + right.square()).mean(-2)


def mixed_bits(vectors: Tensor, bits: Tensor, seed: int = 0) -> Tensor:
    """Vectors after a round trip through codes with bits by pair.

    Pairs with equal bits are a segment: its norm is stored, a random rotation spreads it evenly,
    and its channels have codes of ``lloyd_max``. The stored norm is corrected, so that the decoded
    segment is as long as the original.

    Shapes:  vectors [n, d]; bits [d/2] -> [n, d] float32
    Source:  Block-GTQ (segments); TurboQuant (random rotation, codes of Lloyd and Max)
    """
    out = torch.zeros_like(vectors)
    half = vectors.shape[1] // 2
    for width in bits.unique().tolist():
        pairs = (bits == width).nonzero()[:, 0]
        channels = torch.cat((pairs, pairs + half))
        out[:, channels] = normed_codes(vectors[:, channels], int(width), seed)
    return out


def normed_codes(vectors: Tensor, bits: int, seed: int = 0) -> Tensor:
    """A round trip through TurboQuant's codes: one norm, a rotation, one table for all channels.

    Shapes:  [n, d] -> [n, d] float32
    Source:  TurboQuant, without the sketch of the residual
    """
    dim = vectors.shape[1]
    turn = random_rotation(dim, seed)
    levels = lloyd_max(bits) / math.sqrt(dim)
    norm = vectors.norm(dim=1, keepdim=True)
    turned = vectors / norm.clamp_min(1e-12) @ turn
    edges = (levels[1:] + levels[:-1]) / 2
    decoded = levels[torch.bucketize(turned, edges)]
    corrected = norm / decoded.norm(dim=1, keepdim=True).clamp_min(1e-12)
    return (decoded * corrected.half().float()) @ turn.mT


def segment_bytes(bits: Tensor) -> int:
    """Bytes of a key: codes of all channels, and a norm for each segment."""
    return int(2 * bits.sum()) // 8 + NORM_BYTES * len(bits.unique())


@cache
def random_rotation(dim: int, seed: int) -> Tensor:
    """A random orthogonal matrix, float32 [dim, dim], the same for the same seed."""
    draw = torch.Generator().manual_seed(seed)
    return torch.linalg.qr(torch.randn(dim, dim, generator=draw, dtype=torch.float64))[0].float()


@cache
def lloyd_max(bits: int) -> Tensor:
    """Levels with the least squared error for a normal variable of deviation 1, float32 [2**bits].

    Source:  Max 1960, Lloyd 1982: levels are means of their cells, edges are midpoints
    """
    count = 2**bits
    levels = torch.linspace(-3.0, 3.0, count + 2, dtype=torch.float64)[1:-1]
    far = torch.tensor([math.inf], dtype=torch.float64)
    for _ in range(2000):
        edges = torch.cat((-far, (levels[1:] + levels[:-1]) / 2, far))
        density = torch.exp(-edges.square() / 2) / math.sqrt(2 * math.pi)
        share = torch.special.ndtr(edges).diff()
        levels = (density[:-1] - density[1:]) / share.clamp_min(1e-300)
    return levels.float()
