# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false
# torch leaves avg_pool1d and others untyped in part.
"""Scores of retention rules: the higher, the rather a token is kept.

Infinity is for tokens that a rule always keeps. Scores need no particular scale: budgets compare
tokens of one head row, or of the head rows of one layer.
"""

from collections.abc import Callable, Mapping

import torch
from torch import Tensor
from torch.nn import functional

from triptych.core.methods.retention.kept_share import (
    MOMENT_QUERIES,
    RETRIEVAL_QUERIES,
    WINDOW_QUERIES,
)
from triptych.kernels.retain.attention_moments import CARRIERS
from triptych.kernels.retain.expected_attention import FIRST_TOKENS
from triptych.kernels.retain.observed_prompt import ObservedPrompt

SINK_TOKENS = 4
"""First tokens that StreamingLLM keeps."""
WINDOW_TOKENS = WINDOW_QUERIES
"""Last tokens that SnapKV keeps: those whose queries count."""
POOL_TOKENS = 5
"""Width of SnapKV's mean over neighbouring tokens, so that neighbours are kept together."""

Score = Callable[[ObservedPrompt], Tensor]
"""From a prompt to [l, KH, N] float32."""


def newest(scores: Tensor, count: int) -> Tensor:
    """Scores with the newest ``count`` tokens above all others."""
    tokens = scores.shape[-1]
    is_new = torch.arange(tokens, device=scores.device) >= tokens - count
    return scores.masked_fill(is_new, float("inf"))


def recency(prompt: ObservedPrompt) -> Tensor:
    """The position; the first four tokens are always kept.

    Source: StreamingLLM, section 3.2; positions stay what they were, as in kvpress
    """
    like = prompt.attention
    position = torch.arange(prompt.tokens, device=like.device, dtype=torch.float32)
    scores = position.masked_fill(position < SINK_TOKENS, float("inf"))
    return scores.expand(len(prompt.layers), prompt.kv_heads, -1)


def key_norm(prompt: ObservedPrompt) -> Tensor:
    """Minus the L2 norm of the key.

    Source: Devoto et al., A Simple and Effective L2 Norm-Based Strategy for KV Cache Compression
    """
    return -prompt.of_keys(lambda keys: keys.square().sum(-1).sqrt())


def key_difference(prompt: ObservedPrompt) -> Tensor:
    """Minus the cosine of the angle between a key and the mean direction of all keys.

    Source: KeyDiff (the anchor is the mean of normalized keys); the whole prompt at once, as in
            kvpress, and not block by block
    """
    return prompt.of_keys(_difference_of_directions)


def heavy_hitters(prompt: ObservedPrompt) -> Tensor:
    """The attention from all queries, not divided by age; half of the budget is the newest.

    Source: H2O, section 4 (on the prompt alone)
    """
    return newest(prompt.attention, prompt.kept // 2)


def window_attention(prompt: ObservedPrompt) -> Tensor:
    """The attention from the last 64 queries, a mean over five neighbours; the window is kept.

    Source: SnapKV, section 4 (observation window, pooling); mean over the group, as in kvpress
    """
    return _pooled(prompt, min(WINDOW_TOKENS, prompt.kept, prompt.tokens))


def shifting_attention(prompt: ObservedPrompt) -> Tensor:
    """Mean and variance of the attention from the last 32 queries, a mean over five neighbours.

    Prefill has computed it (``AttentionMoments``); the window is kept.

    Source: CAKE (indicator that tolerates shifts of attention), pooled as in the authors' code
    """
    return _pooled(prompt, min(max(CARRIERS, min(MOMENT_QUERIES, prompt.kept)), prompt.tokens))


def retrieval_attention(prompt: ObservedPrompt) -> Tensor:
    """The attention from the last 8 queries of the retrieval heads of a layer, a mean over five
    neighbours; the window is kept.

    Prefill has taken the mean over these heads (``sums_of_heads``).

    Source: CompressKV (retrieval heads choose the tokens of a layer), pooled as in the authors'
            code
    """
    return _pooled(prompt, min(RETRIEVAL_QUERIES, prompt.kept, prompt.tokens))


def last_attention(prompt: ObservedPrompt) -> Tensor:
    """The attention from the last query, the mean over all heads of a layer; it is kept itself.

    Source: TOVA, section 3.2 (mean over heads)
    """
    scores = prompt.attention.mean(1, keepdim=True).expand_as(prompt.attention)
    return newest(scores, 1)


def expected(prompt: ObservedPrompt) -> Tensor:
    """The attention that later queries are expected to pay, times the norm of the value.

    Prefill has computed it (``expected_attention``); the first four tokens are kept.

    Source: Expected Attention; the first tokens as in kvpress
    """
    position = torch.arange(prompt.tokens, device=prompt.attention.device)
    return prompt.attention.masked_fill(position < FIRST_TOKENS, float("inf"))


def _pooled(prompt: ObservedPrompt, window: int) -> Tensor:
    before = prompt.attention[..., : prompt.tokens - window]
    if before.shape[-1]:
        before = functional.avg_pool1d(before, POOL_TOKENS, stride=1, padding=POOL_TOKENS // 2)
    return newest(functional.pad(before, (0, window)), window)


def _difference_of_directions(keys: Tensor) -> Tensor:
    directions = functional.normalize(keys, dim=-1)
    anchor = functional.normalize(directions.mean(1, keepdim=True), dim=-1)
    return -(directions * anchor).sum(-1)


SCORES: Mapping[str, Score] = {
    score.__name__: score
    for score in (
        *(recency, key_norm, key_difference),
        *(heavy_hitters, window_attention, last_attention),
        *(expected, shifting_attention, retrieval_attention),
    )
}
"""Scores by name."""
