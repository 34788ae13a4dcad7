# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false
# torch leaves Tensor.unflatten and others untyped in part.
"""Moments of the attention from the last queries of a prompt, by which CAKE keeps tokens.

A raw page has one number for each token. The window of the last queries is always kept, so the
numbers of its last two tokens are free: they carry the dispersion and the shift of the head row.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

GAMMA = 200.0
"""Weight of the variance beside the mean: CAKE's gamma."""
LEAST = 1e-10
"""Added to weights before their logarithm."""
CARRIERS = 2
"""Last tokens of a prompt whose numbers are those of their head row."""


@dataclass(frozen=True)
class AttentionMoments:
    """Running sums over the queries of the window, which begins at token ``first``.

    Shapes:  l layers, H query heads, N tokens
    """

    first: int
    sums: Tensor
    """Of the attention that each token receives, [l, H, N] float32."""
    squares: Tensor
    """Of its square."""
    entropies: Tensor
    """Of the attention to the tokens before the window, [l, H]."""

    @classmethod
    def empty(
        cls, first: int, shape: tuple[int, int, int], device: torch.device
    ) -> "AttentionMoments":
        """``shape``: (l, H, N)."""
        zeros = torch.zeros(2, *shape, device=device)
        return cls(first, zeros[0], zeros[1], torch.zeros(shape[:2], device=device))

    def add(self, layer: int, weights: Tensor) -> None:
        """Add the attention of some queries of the window.

        Shapes:  weights [H, n, N'], for the first N' tokens
        """
        count, before = weights.shape[-1], weights[..., : self.first]
        self.sums[layer, :, :count] += weights.sum(1)
        self.squares[layer, :, :count] += weights.square().sum(1)
        self.entropies[layer] -= (before * (before + LEAST).log()).sum((1, 2))

    def scores(self, kv_heads: int) -> Tensor:
        """Mean plus ``GAMMA`` times the variance of the attention to each token, the mean over the
        group; the last two tokens have the row's dispersion and shift instead.

        Dispersion: the entropy of the attention to the tokens before the window, summed over its
        queries. Shift: the variance over its queries, summed over those tokens.

        Shapes:  -> [l, KH, N] float32
        Source:  CAKE (spatial dispersion, temporal shift, and the indicator that tolerates shifts);
                 gamma, and weights that are not normalized again, as in the authors' code
        """
        tokens = self.sums.shape[-1]
        queries = tokens - self.first
        mean = self.sums / queries
        spread = (self.squares - queries * mean.square()).clamp(min=0.0) / max(1, queries - 1)
        grouped = (mean + GAMMA * spread).unflatten(1, (kv_heads, -1)).mean(2)
        if tokens >= CARRIERS:
            shifts = spread[..., : self.first].sum(-1)
            for at, of_heads in ((-2, self.entropies), (-1, shifts)):
                grouped[..., at] = of_heads.unflatten(1, (kv_heads, -1)).sum(2)
        return grouped


def layer_preferences(scores: Tensor) -> Tensor:
    """How much memory each layer should have, in no particular unit.

    The product of the dispersion and the shift of its attention, both with the exponent 1.

    Shapes:  scores [l, KH, N] of ``AttentionMoments`` -> [l]
    Source:  CAKE (layer preference); its temperatures are fitted to a model, and 1 otherwise
    """
    if scores.shape[-1] < CARRIERS:
        return torch.ones(len(scores), device=scores.device)
    return scores[..., -2].sum(1) * scores[..., -1].sum(1)
