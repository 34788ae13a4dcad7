# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false
# pyright: reportUnknownArgumentType=false
# torch leaves norm, mean and others untyped in part.
"""Eviction baselines: which tokens of a prompt are kept, as their papers define it.

A policy maps what prefill observed (``PromptAttention``) and a budget to the tokens of each head
row that are kept. Kept tokens and all tokens after the prompt stay in full precision at their
positions. Policies that also evict while decoding (H2O) are applied to the prompt alone, as in
kvpress.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from triptych.kernels.prefill import significance_of
from triptych.kernels.retain import (
    POOL_TOKENS,
    SINK_TOKENS,
    WINDOW_TOKENS,
    largest,
    newest,
    pyramid_budgets,
)


@dataclass(frozen=True, kw_only=True)
class PromptAttention:
    """Keys of a prompt of N tokens, and the attention that they received.

    L layers, H query heads, KH KV heads.
    """

    keys: tuple[Tensor, ...]
    """Of each layer, after RoPE: [KH, N, d] float32."""
    sums: Tensor
    """Attention that each token received from all queries: [L, H, N] float32."""
    last: Tensor
    """Mean attention that each token received from the last ``WINDOW_TOKENS`` queries: [L, H, N]"""

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


EvictionPolicy = Callable[[PromptAttention, int], Tensor]
"""From the prompt and the mean number of tokens kept per head row to a mask, bool [L, KH, N]."""


def streaming_llm(prompt: PromptAttention, budget: int) -> Tensor:
    """The first four tokens and the newest.

    Source: Xiao et al., Efficient Streaming Language Models with Attention Sinks; positions stay
            what they were, as in kvpress
    """
    sinks = min(SINK_TOKENS, budget)
    token = torch.arange(prompt.tokens)
    kept = (token < sinks) | (token >= prompt.tokens - (budget - sinks))
    return kept.expand(len(prompt.keys), prompt.kv_heads, -1)


def knorm(prompt: PromptAttention, budget: int) -> Tensor:
    """Tokens whose keys have the smallest L2 norms.

    Source: Devoto et al., A Simple and Effective L2 Norm-Based Strategy for KV Cache Compression
    """
    return largest(-torch.stack(prompt.keys).norm(dim=-1), budget)


def h2o(prompt: PromptAttention, budget: int) -> Tensor:
    """Half of the budget for the newest tokens, half for those with the most attention.

    Source: Zhang et al., H2O; sums are not divided by age, which favours old tokens
    """
    return largest(newest(grouped(prompt.sums, prompt), budget // 2), budget)


def mean_attention(prompt: PromptAttention, budget: int) -> Tensor:
    """Tokens with the largest mean attention from later ones, and the newest 64 of them.

    Source: DiffKV's significance as a ranking; kvpress's ObservedAttention with the largest head
            of a group in place of its mean
    """
    return largest(newest(prompt.significance, min(WINDOW_TOKENS, budget)), budget)


def snapkv(prompt: PromptAttention, budget: int) -> Tensor:
    """The last 64 tokens, and those with the most attention from them after pooling.

    Source: Li et al., SnapKV: LLM Knows What You are Looking for Before Generation
    """
    return largest(_snap(prompt, budget), budget)


def pyramidkv(prompt: PromptAttention, budget: int) -> Tensor:
    """SnapKV with budgets that decrease from the first layer to the last.

    Source: Cai et al., PyramidKV; budget beyond a layer's tokens goes to the others
    """
    scores = _snap(prompt, budget)
    budgets = pyramid_budgets(len(scores), prompt.tokens, budget)
    return torch.stack([largest(row, count) for row, count in zip(scores, budgets, strict=True)])


def soft_prune(prompt: PromptAttention, budget: int) -> Tensor:
    """Tokens whose mean attention reaches one threshold for all layers and heads.

    The threshold is the one that keeps as much as the budget, so rows keep different numbers. The
    newest 64 stay.

    Source: TinyServe's SoftPrune, pruning by a threshold; the paper does not name the quantity
    """
    scores = newest(prompt.significance, min(WINDOW_TOKENS, budget))
    layers, kv_heads, tokens = scores.shape
    return largest(scores.reshape(-1), budget * layers * kv_heads).view(layers, kv_heads, tokens)


EVICTIONS: dict[str, EvictionPolicy] = {
    policy.__name__: policy
    for policy in (streaming_llm, snapkv, pyramidkv, h2o, knorm, mean_attention, soft_prune)
}


# ------------------------------------------------------------------ shared by the policies


def grouped(scores: Tensor, prompt: PromptAttention) -> Tensor:
    """Mean over the query heads of each KV head: [L, H, N] -> [L, KH, N]."""
    return scores.unflatten(1, (prompt.kv_heads, -1)).mean(2)


def _snap(prompt: PromptAttention, budget: int) -> Tensor:
    window = min(WINDOW_TOKENS, budget, prompt.tokens)
    before = prompt.last[..., : prompt.tokens - window]
    if before.shape[-1]:
        before = functional.avg_pool1d(
            before, POOL_TOKENS, stride=1, padding=POOL_TOKENS // 2, count_include_pad=True
        )
    scores = functional.pad(before, (0, window))
    return newest(grouped(scores, prompt), window)
