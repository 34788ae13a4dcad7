"""Token significance from column sums of attention; compression policies compare it."""

from collections.abc import Sequence

import torch
from torch import Tensor

ALWAYS_HIGH = 1e30
"""Score of tokens that stay in the high format: far above all sums of attention, and finite."""


def largest_sums(sums: Tensor, num_kv_heads: int) -> Tensor:
    """The largest column sum among the query heads of each KV head, the score stored in pages.

    Shapes:  sums [..., H, N] -> [..., KH, N]
    Dtypes:  float32
    Source:  DiffKV, significance of prompt tokens (maximum over the group)
    """
    *shape, heads, keys = sums.shape
    return sums.reshape(*shape, num_kv_heads, heads // num_kv_heads, keys).amax(-2)


def mean_sums(sums: Tensor, num_kv_heads: int) -> Tensor:
    """The mean column sum of the query heads of each KV head, by which retention rules score.

    Shapes:  sums [..., H, N] -> [..., KH, N]
    Dtypes:  float32
    """
    *shape, heads, keys = sums.shape
    return sums.reshape(*shape, num_kv_heads, heads // num_kv_heads, keys).mean(-2)


def sums_of_heads(sums: Tensor, heads: Sequence[Sequence[int]], num_kv_heads: int) -> Tensor:
    """The mean column sum of some query heads of each layer, the same for all KV heads.

    Shapes:  sums [l, H, N]; heads: l times some of H -> [l, KH, N]
    Dtypes:  float32
    Source:  CompressKV (retrieval heads choose the tokens of all heads of a layer)
    """
    layers = [layer[list(some)].mean(0) for layer, some in zip(sums, heads, strict=True)]
    return torch.stack(layers)[:, None].expand(-1, num_kv_heads, -1).contiguous()


def significance_of(sums: Tensor, tokens: int, num_kv_heads: int) -> Tensor:
    """Mean attention per key from column sums, the largest over the query heads of a KV head.

    Key t is seen by ``tokens - t`` queries, itself included.

    Shapes:  sums [..., H, N] -> [..., KH, tokens]
    Dtypes:  float32
    Source:  DiffKV, significance of prompt tokens (mean over later queries, maximum over the
             group); with self-attention counted, so the last token has a mean too
    """
    seen_by = torch.arange(tokens, 0, -1, dtype=sums.dtype, device=sums.device)
    return largest_sums(sums[..., :tokens], num_kv_heads) / seen_by
