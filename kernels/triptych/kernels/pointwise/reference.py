"""Reference of the pointwise ops: computed in float32, rounded once."""

import torch
import torch.nn.functional as F
from torch import Tensor

from triptych.kernels.hadamard import hadamard


def rms_norm(rows: Tensor, weight: Tensor, epsilon: float, dtype: torch.dtype) -> Tensor:
    """``rows`` divided by their root mean square, times ``weight``.

    Shapes:  rows [..., E]; weight [E] -> [..., E], contiguous
    Dtypes:  rows float32, bfloat16 or float16; weight float32; returns ``dtype``
    Source:  Zhang and Sennrich, Root Mean Square Layer Normalization (2019)
    """
    return F.rms_norm(rows.float(), weight.shape, weight, epsilon).to(dtype)


def add_norm(
    hidden: Tensor, delta: Tensor, weight: Tensor, epsilon: float, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """The residual stream after a block, and its RMS norm: the input of the next block.

    Shapes:  hidden, delta [T, E]; weight [E] -> hidden + delta and its norm, both [T, E]
    Dtypes:  hidden float32, as is the sum; delta any float; weight float32; the norm is ``dtype``
    """
    total = hidden + delta
    return total, rms_norm(total, weight, epsilon, dtype)


def rotate(heads: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Apply RoPE: rotate each channel pair (i, i + D/2) of all heads by the angle of its token.

    Shapes:  heads [T, H, D]; cos, sin [T, D/2] -> [T, H, D], contiguous
    Dtypes:  heads float32, bfloat16 or float16, as is what it returns; cos, sin float32
    Source:  Su et al., RoFormer (2021), in the order of Llama's channels
    """
    left, right = heads.float().chunk(2, dim=-1)
    cos, sin = cos[:, None], sin[:, None]
    turned = torch.cat((left * cos - right * sin, right * cos + left * sin), dim=-1)
    return turned.to(heads.dtype)


def gate(gate_up: Tensor) -> Tensor:
    """``silu`` of the first half of the channels, times the second.

    Shapes:  gate_up [T, 2 I] -> [T, I], contiguous
    Dtypes:  float32, bfloat16 or float16, as is what it returns
    Source:  Shazeer, GLU Variants Improve Transformer (2020)
    """
    left, right = gate_up.float().chunk(2, dim=-1)
    return (F.silu(left) * right).to(gate_up.dtype)


def rotate_kv(
    query: Tensor, key: Tensor, value: Tensor, centre: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Rotate queries, keys and values by the Hadamard matrix, then subtract ``centre`` from keys.

    Shapes:  query [T, H, d]; key, value [T, KH, d]; centre [KH, d] -> the same three
    Dtypes:  float32, bfloat16 or float16; centre and the results float32
    Source:  QuaRot, section 3 (a Hadamard matrix after RoPE)
    """
    rotation = hadamard(query.shape[-1], query.device)
    turned = (part.float() @ rotation for part in (query, key, value))
    query, key, value = turned
    return query, key - centre, value


def rotate_back(mixed: Tensor, dtype: torch.dtype) -> Tensor:
    """Rotate the output of attention over rotated values back.

    Shapes:  mixed [T, H, d] float32 -> [T, H, d] ``dtype``
    """
    return (mixed @ hadamard(mixed.shape[-1], mixed.device)).to(dtype)
