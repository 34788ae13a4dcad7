# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false
# pyright: reportUnknownArgumentType=false
# torch leaves Tensor.unflatten, amax and others untyped in part.
"""Networks that merge k consecutive tokens of a KV cache into one.

All layers have networks of their own, shared by the KV heads of the layer; they run as one batch of
matrix products. Keys are in the frame of the chunk (``rope_frame``).
"""

from dataclasses import dataclass
from math import log
from typing import Protocol

import torch
from torch import Tensor, nn

from triptych.core.layout import Geometry

GATE_SHARPNESS = 4.0
"""Initial exponent of significance in the gates."""
NETWORKS = ("gates", "keys", "values", "bias")
"""The small networks of ``GatedMerger``, in the order of its first layer's columns."""


@dataclass(frozen=True)
class Chunks:
    """C chunks of k tokens, in all L layers."""

    keys: Tensor
    """[L, KH, C, k, d] float32, in the frame of the middle of each chunk."""
    values: Tensor
    """[L, KH, C, k, d] float32."""
    log_significance: Tensor
    """[L, KH, C, k] float32; only its differences within a chunk matter."""


@dataclass(frozen=True)
class Merged:
    """One token for each chunk."""

    keys: Tensor
    """[L, KH, C, d], in the frame of the chunk."""
    values: Tensor
    """[L, KH, C, d]"""
    bias: Tensor
    """[L, KH, C]: is added to the scaled logit of the token."""


class Merger(Protocol):
    """Merges chunks of a fixed number of tokens."""

    @property
    def chunk_tokens(self) -> int: ...

    def __call__(self, chunks: Chunks) -> Merged: ...


@dataclass(frozen=True)
class MeanMerger:
    """The mean of a chunk; exact for equal tokens if ``has_bias``."""

    chunk_tokens: int
    has_bias: bool = True

    def __call__(self, chunks: Chunks) -> Merged:
        bias = log(self.chunk_tokens) if self.has_bias else 0.0
        keys = chunks.keys.mean(-2)
        return Merged(keys, chunks.values.mean(-2), torch.full_like(keys[..., 0], bias))


@dataclass(frozen=True)
class BestTokenMerger:
    """The most significant token of a chunk stands for all; no bias."""

    chunk_tokens: int

    def __call__(self, chunks: Chunks) -> Merged:
        best = chunks.log_significance.argmax(-1)[..., None, None]
        at = best.expand(*best.shape[:-1], chunks.keys.shape[-1])
        keys, values = (part.gather(-2, at)[..., 0, :] for part in (chunks.keys, chunks.values))
        return Merged(keys, values, torch.zeros_like(keys[..., 0]))


class GatedMerger(nn.Module):
    """Pooling gated by significance, corrected by small networks.

    With features F of a chunk (keys and values, standardized, and the logarithms of significance,
    centred), weights of keys and values are softmax(beta * log significance + networks(F)); key,
    value and bias are the pooled ones plus networks(F). All networks start at zero, so an untrained
    merger is the weighted pooling. The pooled bias is the logarithm of the effective number of
    tokens, the sum of significances over the largest.

    Corrections are multiplied by the spread of the chunk, which is 0 if its tokens are equal: equal
    tokens of equal significance merge exactly, whatever was learned.

    Source: FastCache (k tokens become one by a network); KVMerger (weights by attention, a bias for
            the tokens that one stands for). Gates that start as pooling by significance, and the
            factor of spread, are ours
    """

    def __init__(
        self, geometry: Geometry, chunk_tokens: int, hidden: int = 64, seed: int = 0
    ) -> None:
        """Weights of the first layers are drawn from ``seed``."""
        super().__init__()
        self.geometry, self.hidden = geometry, hidden
        self._chunk_tokens = chunk_tokens
        layers, heads, dim, k = geometry.layers, geometry.kv_heads, geometry.head_dim, chunk_tokens
        width, outputs = k * (2 * dim + 1), (k, dim, dim, 1)
        draw = torch.Generator().manual_seed(seed)
        columns = hidden * len(NETWORKS)
        self.mean = nn.Buffer(torch.zeros(layers, heads, 1, 2, k, dim))
        self.deviation = nn.Buffer(torch.ones(layers, heads, 1, 2, k, dim))
        self.input_weight = nn.Parameter(torch.randn(layers, width, columns, generator=draw))
        self.input_weight.data /= width**0.5
        self.input_bias = nn.Parameter(torch.zeros(layers, 1, columns))
        self.output_weights = nn.ParameterList(
            torch.zeros(layers, hidden, count) for count in outputs
        )
        self.output_biases = nn.ParameterList(torch.zeros(layers, 1, count) for count in outputs)
        self.sharpness = nn.Parameter(torch.full((layers, 2), GATE_SHARPNESS))

    @property
    def chunk_tokens(self) -> int:
        return self._chunk_tokens

    def standardize(self, mean: Tensor, deviation: Tensor) -> None:
        """Set mean and deviation of keys and values. Shapes: [L, KH, 2, k, d]"""
        self.mean.copy_(mean[:, :, None])
        self.deviation.copy_(deviation.clamp_min(1e-6)[:, :, None])

    def forward(self, chunks: Chunks) -> Merged:
        content = torch.stack((chunks.keys, chunks.values), 3)  # [L, KH, C, 2, k, d]
        standard = (content - self.mean) / self.deviation
        sizes = self.deviation.mean(4, keepdim=True)
        spread = (content / sizes).var(4, correction=0).mean((3, 4)).tanh()[..., None]
        logs = chunks.log_significance
        centred = logs - logs.mean(-1, keepdim=True)
        features = torch.cat((standard.flatten(3), centred), -1)
        gates, key, value, bias = (part * spread for part in self._networks(features))
        scale = sizes[..., 0, :]  # [L, KH, 1, 2, d]
        sharp = self.sharpness[:, None, None, :, None]
        weights = [(sharp[:, :, :, i] * centred + gates).softmax(-1)[..., None] for i in (0, 1)]
        effective = (logs - logs.amax(-1, keepdim=True)).exp().sum(-1).log()
        return Merged(
            keys=(weights[0] * chunks.keys).sum(-2) + key * scale[:, :, :, 0],
            values=(weights[1] * chunks.values).sum(-2) + value * scale[:, :, :, 1],
            bias=effective + bias[..., 0],
        )

    def _networks(self, features: Tensor) -> list[Tensor]:
        """Outputs of the four networks. Shapes: [L, KH, C, F] -> [L, KH, C, outputs] each"""
        shape = features.shape[1:3]
        hidden = torch.baddbmm(self.input_bias, features.flatten(1, 2), self.input_weight)
        parts = nn.functional.gelu(hidden).chunk(len(NETWORKS), -1)
        rows = zip(self.output_biases, parts, self.output_weights, strict=True)
        return [torch.baddbmm(bias, part, w).unflatten(1, shape) for bias, part, w in rows]


class PaperMerger(nn.Module):
    """FastCache's plain networks: one for keys and one for values, of all tokens of a chunk.

    Linear(kd -> d), ReLU, Linear(d -> d), ReLU, Linear(d -> d) on standardized keys and values.
    There is no bias and no significance.

    Source: FastCache, section 3.2, and its code; differences: keys are in the frame of the chunk,
            and there is no dropout
    """

    def __init__(self, geometry: Geometry, chunk_tokens: int, seed: int = 0) -> None:
        """Weights are drawn from ``seed``."""
        super().__init__()
        self.geometry = geometry
        self._chunk_tokens = chunk_tokens
        layers, heads, dim, k = geometry.layers, geometry.kv_heads, geometry.head_dim, chunk_tokens
        draw = torch.Generator().manual_seed(seed)
        self.mean = nn.Buffer(torch.zeros(layers, heads, 1, 2, k, dim))
        self.deviation = nn.Buffer(torch.ones(layers, heads, 1, 2, k, dim))
        widths = (k * dim, dim, dim)
        self.weights = nn.ParameterList(
            torch.randn(2 * layers, width, dim, generator=draw) * (2 / width) ** 0.5
            for width in widths
        )
        self.biases = nn.ParameterList(torch.zeros(2 * layers, 1, dim) for _ in widths)

    @property
    def chunk_tokens(self) -> int:
        return self._chunk_tokens

    def standardize(self, mean: Tensor, deviation: Tensor) -> None:
        """Set mean and deviation of keys and values. Shapes: [L, KH, 2, k, d]"""
        self.mean.copy_(mean[:, :, None])
        self.deviation.copy_(deviation.clamp_min(1e-6)[:, :, None])

    def forward(self, chunks: Chunks) -> Merged:
        content = torch.stack((chunks.keys, chunks.values), 3)  # [L, KH, C, 2, k, d]
        standard = ((content - self.mean) / self.deviation).permute(0, 3, 1, 2, 4, 5)
        hidden = standard.flatten(0, 1).flatten(1, 2).flatten(2)  # [2L, KH * C, kd]
        for index, (weight, bias) in enumerate(zip(self.weights, self.biases, strict=True)):
            hidden = torch.baddbmm(bias, hidden if index == 0 else hidden.relu(), weight)
        found = hidden.unflatten(1, chunks.keys.shape[1:3]).unflatten(0, (-1, 2))
        keys, values = (
            found[:, i] * self.deviation[:, :, :, i].mean(3) + self.mean[:, :, :, i].mean(3)
            for i in (0, 1)
        )
        return Merged(keys, values, torch.zeros_like(keys[..., 0]))
