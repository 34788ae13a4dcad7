# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false
# torch leaves Tensor.unflatten, cumsum and others untyped in part.
"""KVMerger: neighbouring tokens with alike keys become one token of Gaussian weights.

All head rows have the same number of sets, so their tokens need no padding. Sums over a set are
those of consecutive tokens (``segment_reduce``), which have one order on every device.
"""

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from triptych.kernels.retain.retention_budgets import largest


@dataclass(frozen=True)
class MergedTokens:
    """One token for each set of each head row, in the order of the tokens."""

    keys: Tensor
    """[KH, sets, d] float32"""
    values: Tensor
    """[KH, sets, d] float32"""
    bias: Tensor
    """Logarithm of the number of members, [KH, sets] float32: what attention adds to the logit."""
    pivots: Tensor
    """Index of the member whose position the merged token has, [KH, sets] int64."""


def alike_sets(keys: Tensor, may_join: Tensor, sets: int) -> Tensor:
    """Join neighbours with the largest cosine between their keys, until ``sets`` sets are left.

    ``may_join``: whether a token may be joined with the next one. Ties go to the earlier.

    Shapes:  keys [KH, n, d], not rotated or all by one rotation; may_join [n - 1] bool
             -> number of the set of each token, [KH, n] int64, ascending from 0
    Source:  KVMerger, merging set identification (the neighbours above a cosine; here their number
             is given instead of the cosine)
    """
    directions = functional.normalize(keys, dim=-1)
    cosines = (directions[:, :-1] * directions[:, 1:]).sum(-1)
    is_joined = largest(cosines.masked_fill(~may_join, -torch.inf), keys.shape[1] - sets)
    return functional.pad((~is_joined).cumsum(-1), (1, 0))


def merge_sets(
    keys: Tensor, values: Tensor, attention: Tensor, set_of: Tensor, sets: int
) -> MergedTokens:
    """Merge the tokens of each set, with Gaussian weights around its pivot.

    The pivot is the member with most attention, the earlier one of equals. The weight of a member
    is ``exp(-|k - k_pivot|^2 / (2 sigma^2))``, divided by the sum over the set. ``sigma`` is the
    mean of ``|k - k_pivot|`` over the set, pivot included, divided by the square root of 2. Keys
    and values may be rotated, and keys centred: distances and means are the same.

    ``attention``: what each token has received, the largest of its query heads as in prefill.

    Shapes:  keys, values [KH, n, d]; attention [KH, n]; set_of [KH, n] of ``alike_sets``
    Dtypes:  float32; set_of int64
    Source:  KVMerger, Gaussian kernel weighted merging. The bandwidth, and a bias of log n for n
             members (none in the paper), are ours
    """
    kv_heads, tokens, dim = keys.shape
    sizes = torch.zeros(kv_heads, sets, dtype=torch.int64, device=keys.device)
    sizes = sizes.scatter_add_(1, set_of, torch.ones_like(set_of)).flatten()

    def reduced(numbers: Tensor, how: str) -> Tensor:
        """Of the members of each set: [KH, n, ...] -> [KH, sets, ...]."""
        flat = torch.segment_reduce(
            numbers.flatten(0, 1).contiguous(), how, lengths=sizes, axis=0, unsafe=True
        )
        return flat.unflatten(0, (kv_heads, sets))

    most = reduced(attention, "max").gather(1, set_of)
    index = torch.arange(tokens, device=keys.device).expand_as(set_of)
    # The index is counted from the end: float32 holds it exactly, and the largest is the earliest.
    from_end = torch.where(attention == most, tokens - index, 0).float()
    pivots = tokens - reduced(from_end, "max").long()
    of_pivot = pivots.gather(1, set_of)[..., None].expand(-1, -1, dim)
    distances = (keys - keys.gather(1, of_pivot)).square().sum(-1)
    spread = reduced(distances.sqrt(), "mean").gather(1, set_of)
    weights = torch.where(spread > 0, -distances / spread.square(), 0.0).exp()
    shares = (weights / reduced(weights, "sum").gather(1, set_of))[..., None]
    return MergedTokens(
        keys=reduced(shares * keys, "sum"),
        values=reduced(shares * values, "sum"),
        bias=sizes.view(kv_heads, sets).float().log(),
        pivots=pivots,
    )
