# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false
# torch leaves Tensor.split and others untyped in part.
"""Expected attention: what queries of the future will pay to a key, from statistics of queries."""

import torch
from torch import Tensor

FUTURE_TOKENS = 512
"""Positions behind the prompt over which RoPE is averaged."""
FIRST_TOKENS = 4
"""First tokens, which are always kept and whose queries do not count: they are outliers."""


def mean_rotation(frequencies: Tensor, first: int) -> Tensor:
    """The mean matrix of RoPE over the ``FUTURE_TOKENS`` positions from ``first`` on.

    It applies to column vectors of channels in half-split order (channel c pairs c + d/2).

    Shapes:  frequencies [d/2], radians per position -> [d, d] float32
    Source:  Expected Attention (averaged RoPE); 512 positions as in kvpress
    """
    positions = torch.arange(first, first + FUTURE_TOKENS, device=frequencies.device)
    angles = positions.float()[:, None] * frequencies
    cos, sin = angles.cos().mean(0).diag(), angles.sin().mean(0).diag()
    return torch.cat((torch.cat((cos, -sin), 1), torch.cat((sin, cos), 1)))


def expected_attention(
    mean: Tensor,
    covariance: Tensor,
    keys: Tensor,
    value_norms: Tensor,
    *,
    rotation: Tensor,
    scale: float,
) -> Tensor:
    """The attention that a Gaussian query is expected to pay to each key, times its value's norm.

    A query q with mean m and covariance S has E[exp(scale q.k)] = exp(scale m.k + scale^2 k.S.k/2).
    The softmax of these is the mean over the query heads of a KV head. The first four tokens take
    no part and have the score 0.

    ``mean``, ``covariance``: those of queries before RoPE; ``rotation``: the mean of RoPE.

    Shapes:  mean [H, d]; covariance [H, d, d]; keys [KH, N, d]; value_norms [KH, N];
             rotation [d, d] -> [KH, N]
    Dtypes:  float32
    Source:  Expected Attention; constants of kvpress's ``ExpectedAttentionPress``
    """
    group = len(mean) // len(keys)
    ahead = (scale * mean @ rotation.T).split(group)
    spread = (0.5 * scale**2 * rotation @ covariance @ rotation.T).split(group)
    found = torch.zeros_like(value_norms)
    for head, row in enumerate(keys[:, FIRST_TOKENS:]):  # one at a time: it takes less memory
        logits = ahead[head] @ row.T + ((row @ spread[head]) * row).sum(-1)
        found[head, FIRST_TOKENS:] = logits.softmax(-1).mean(0)
    return found * value_norms
