"""Reference of RMS norm, RoPE and gated activation: computed in float32, rounded once."""

import torch
import torch.nn.functional as F
from torch import Tensor


def rms_norm(rows: Tensor, weight: Tensor, epsilon: float, dtype: torch.dtype) -> Tensor:
    """``rows`` divided by their root mean square, times ``weight``.

    Shapes:  rows [..., E]; weight [E] -> [..., E], contiguous
    Dtypes:  rows float32, bfloat16 or float16; weight float32; returns ``dtype``
    Source:  Zhang and Sennrich, Root Mean Square Layer Normalization (2019)
    """
    return F.rms_norm(rows.float(), weight.shape, weight, epsilon).to(dtype)


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
