# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false
# pyright: reportUnknownArgumentType=false
# torch leaves norm, mean and others untyped in part.
"""Baselines that drop tokens of the prompt: who is kept, as their papers say, a few lines each.

Every policy sees what the prompt's pass showed (``Seen``) and a budget, and answers which tokens
of each head row stay. What stays, stays in full precision at its own position, and so does
whatever comes after the prompt: the policies that go on dropping while they answer (H2O) are
applied to the prompt alone here, as kvpress does with all of them.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from triptych.kernels.prefill import significance_of

SINK_TOKENS = 4
"""First tokens that StreamingLLM keeps."""
WINDOW_TOKENS = 64
"""Last queries of a prompt, by which SnapKV judges, and which it keeps."""
POOL_TOKENS = 5
"""Neighbours that SnapKV averages scores over, so that a token does not come without them."""
PYRAMID = 20
"""PyramidKV's beta: its last layer gets so many times less than the mean."""


@dataclass(frozen=True, kw_only=True)
class Seen:
    """What the pass over a prompt of N tokens showed; L layers, H heads, KH KV heads."""

    keys: tuple[Tensor, ...]
    """Of each layer, after RoPE: [KH, N, d] float32."""
    sums: Tensor
    """Attention that each token received from all queries: [L, H, N] float32."""
    last: Tensor
    """Mean attention that it received from the last ``WINDOW_TOKENS`` queries: [L, H, N]."""

    @property
    def tokens(self) -> int:
        return self.sums.shape[2]

    @property
    def kv_heads(self) -> int:
        return self.keys[0].shape[0]

    @property
    def significance(self) -> Tensor:
        """Mean attention from all later tokens, the largest of the group: [L, KH, N]."""
        return significance_of(self.sums, self.tokens, self.kv_heads)


Evict = Callable[[Seen, int], Tensor]
"""What was seen and the mean number of tokens that a head row keeps, to bool [L, KH, N]."""


def streaming_llm(seen: Seen, budget: int) -> Tensor:
    """The first four tokens and the newest.

    Source: Xiao et al., Efficient Streaming Language Models with Attention Sinks; positions stay
            what they were, as in kvpress
    """
    sinks = min(SINK_TOKENS, budget)
    token = torch.arange(seen.tokens)
    kept = (token < sinks) | (token >= seen.tokens - (budget - sinks))
    return kept.expand(len(seen.keys), seen.kv_heads, -1)


def knorm(seen: Seen, budget: int) -> Tensor:
    """Tokens whose keys are short.

    Source: Devoto et al., A Simple and Effective L2 Norm-Based Strategy for KV Cache Compression
    """
    return largest(-torch.stack(seen.keys).norm(dim=-1), budget)


def h2o(seen: Seen, budget: int) -> Tensor:
    """Half of the budget for the newest tokens, half for those that received most attention.

    Source: Zhang et al., H2O; sums are not divided by age, which favours old tokens
    """
    return largest(protect(grouped(seen.sums, seen), budget // 2), budget)


def mean_attention(seen: Seen, budget: int) -> Tensor:
    """Tokens with the largest mean attention from later ones, and the newest 64 of them.

    Source: DiffKV's significance as a ranking; kvpress's ObservedAttention with the largest head
            of a group in place of its mean
    """
    return largest(protect(seen.significance, min(WINDOW_TOKENS, budget)), budget)


def snapkv(seen: Seen, budget: int) -> Tensor:
    """The last 64 tokens and those that they look at, with their neighbours.

    Source: Li et al., SnapKV: LLM Knows What You are Looking for Before Generation
    """
    return largest(_snap(seen, budget), budget)


def pyramidkv(seen: Seen, budget: int) -> Tensor:
    """SnapKV with budgets that fall from the first layer to the last.

    Source: Cai et al., PyramidKV; what a layer cannot hold goes to the others
    """
    scores = _snap(seen, budget)
    budgets = pyramid(len(scores), seen.tokens, budget)
    return torch.stack([largest(row, count) for row, count in zip(scores, budgets, strict=True)])


def soft_prune(seen: Seen, budget: int) -> Tensor:
    """Tokens whose mean attention reaches one threshold for all layers and heads.

    The threshold is the one that keeps as much as the budget, so rows keep different numbers. The
    newest 64 stay.

    Source: TinyServe's SoftPrune, pruning of tokens by a threshold; of what, the paper does not say
    """
    scores = protect(seen.significance, min(WINDOW_TOKENS, budget))
    layers, kv_heads, tokens = scores.shape
    return largest(scores.reshape(-1), budget * layers * kv_heads).view(layers, kv_heads, tokens)


EVICTIONS: dict[str, Evict] = {
    policy.__name__: policy
    for policy in (streaming_llm, snapkv, pyramidkv, h2o, knorm, mean_attention, soft_prune)
}


# ------------------------------------------------------------------ what they share


def largest(scores: Tensor, count: int) -> Tensor:
    """Where the ``count`` largest of the last axis are; of equal ones the earlier.

    Shapes:  [..., N] -> bool [..., N]
    """
    order = scores.argsort(dim=-1, descending=True, stable=True)[..., : max(0, count)]
    return torch.zeros_like(scores, dtype=torch.bool).scatter_(-1, order, value=True)


def protect(scores: Tensor, newest: int) -> Tensor:
    """Scores with the newest tokens above all others."""
    newer = torch.arange(scores.shape[-1]) >= scores.shape[-1] - newest
    return scores.masked_fill(newer, float("inf"))


def grouped(scores: Tensor, seen: Seen) -> Tensor:
    """Mean over the query heads of each KV head: [L, H, N] -> [L, KH, N]."""
    return scores.unflatten(1, (seen.kv_heads, -1)).mean(2)


def pyramid(layers: int, tokens: int, budget: int) -> list[int]:
    """Tokens of each layer: from ``2 budget - budget / 20`` down to ``budget / 20``, in a line.

    As many in all as if each had ``budget``: a layer has no more than all tokens, and none less
    than SnapKV's window; those between share what is left over.
    """
    least = min(max(min(WINDOW_TOKENS, budget), budget // PYRAMID), tokens)
    steps = range(layers)
    line = [budget + (budget - budget / PYRAMID) * (1 - 2 * i / max(1, layers - 1)) for i in steps]
    found = [min(tokens, max(least, round(wish))) for wish in line]
    left = budget * layers - sum(found)
    while left:
        step = 1 if left > 0 else -1
        free = [i for i in steps if least <= found[i] + step <= tokens]
        if not free:
            break
        for i in free[: abs(left)]:
            found[i] += step
        left -= step * min(len(free), abs(left))
    return found


def _snap(seen: Seen, budget: int) -> Tensor:
    window = min(WINDOW_TOKENS, budget, seen.tokens)
    before = seen.last[..., : seen.tokens - window]
    if before.shape[-1]:
        before = functional.avg_pool1d(
            before, POOL_TOKENS, stride=1, padding=POOL_TOKENS // 2, count_include_pad=True
        )
    scores = functional.pad(before, (0, window))
    return protect(grouped(scores, seen), window)
