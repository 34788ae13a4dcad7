# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false
# torch leaves avg_pool1d and others untyped in part.
"""Eviction after each block of a prompt that is read in bounded memory: scores and budgets.

Functions of one layer take its n stored tokens in the order of their positions, which have gaps.
"""

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn import functional

from triptych.kernels.prefill.significance import mean_sums
from triptych.kernels.retain.retention_budgets import MOST_TIMES, error_budgets, largest
from triptych.kernels.retain.retention_scores import POOL_TOKENS

LEAST_SHARE = 0.5
"""Least budget of a layer, as a share of the mean of all layers."""


def block_scores(sums: Tensor, kv_heads: int, weights: Tensor, first: int, newest: int) -> Tensor:
    """The score of each stored token of a layer; infinity for those that are always kept.

    A mean over five neighbouring stored tokens of the attention from the last queries of the block,
    times the weight of the token.

    ``first``, ``newest``: number of the first and of the newest tokens that are always kept.

    Shapes:  sums [H, n], attention from the queries that count; weights [KH, n] -> [KH, n]
    Dtypes:  float32
    Source:  EpiCache (eviction after each block); SnapKV, section 4 (last queries, pooling)
    """
    scores = mean_sums(sums, kv_heads)
    tokens = scores.shape[-1]
    scores = functional.avg_pool1d(
        scores, POOL_TOKENS, stride=1, padding=POOL_TOKENS // 2, count_include_pad=False
    )
    at = torch.arange(tokens, device=scores.device)
    always = (at < first) | (at >= tokens - newest)
    return (scores * weights).masked_fill(always, float("inf"))


def kept_of_block(scores: Tensor, budget: int) -> Tensor:
    """Indices of the ``budget`` tokens with the best scores in each head, ascending.

    Shapes:  [KH, n] -> int64 [KH, min(n, budget)]
    """
    count = min(budget, scores.shape[-1])
    return largest(scores, count).nonzero()[:, 1].view(len(scores), count)


def lost_attention(scores: Tensor, kept: int) -> float:
    """The sensitivity of a layer: the share of the scores of its tokens that dropping all but
    ``kept`` of them loses, the mean over its heads; tokens that are always kept do not count.

    Shapes:  scores [KH, n], infinite for tokens that are always kept
    Source:  EpiCache measures 1 minus the cosine between the keys of full and of block-wise
             prefill on texts of a calibration; this is the attention of the prompt itself
    """
    finite = scores.masked_fill(scores.isinf(), 0.0)
    dropped = finite.masked_fill(largest(scores, kept), 0.0)
    return float((dropped.sum(-1) / finite.sum(-1).clamp_min(1e-20)).mean())


def layer_budgets(errors: Sequence[float], kept: int, least: int, tokens: int) -> list[int]:
    """Tokens that each layer keeps: ``kept`` on the mean, more where ``errors`` are larger.

    A layer keeps at least half of the mean and ``least`` tokens, and at most ``tokens``, and three
    times the mean.

    Source:  EpiCache (budgets in proportion to sensitivity); limits as in CompressKV

    >>> layer_budgets([3.0, 1.0], kept=100, least=10, tokens=400)
    [125, 75]
    """
    lower = min(kept, max(least, int(kept * LEAST_SHARE)))
    upper = min(tokens, MOST_TIMES * kept)
    return error_budgets(errors, kept * len(errors), lower, upper)
