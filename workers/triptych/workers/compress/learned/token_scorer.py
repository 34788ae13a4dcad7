# pyright: reportUnknownMemberType=false
# torch leaves Tensor.to and others untyped in part.
"""The learned scorer: significance of tokens from their keys and values alone.

Attention sums cost prefill a second product of queries and keys. The scorer predicts what they
measure, the mean attention that a token receives from all later ones, so it needs no attention
weights, and scores the tokens of many requests in one call.
"""

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from triptych.core.layout import Geometry
from triptych.workers.compress.learned.rope_frame import RopeFrame

POSITION_SCALE = 8.0
"""The logarithm of the position is divided by this: about log 2048."""
LOG_FLOOR = -5.0
"""Smallest logarithm of relative significance that is told apart: 1/150 of the mean weight."""


def relative_significance(significance: Tensor, tokens: int) -> Tensor:
    """Logarithm of significance over 1/N, the mean weight among N keys; at least ``LOG_FLOOR``.

    DiffKV compares it with log alpha.

    Shapes:  [..., N] -> [..., N] float32
    """
    return (significance.float() * tokens).clamp_min(1e-30).log().clamp_min(LOG_FLOOR)


class TokenScorer(nn.Module):
    """One small network per layer, with an output for each KV head.

    Features of a token: its keys before RoPE and its values in all KV heads of the layer,
    standardized per channel, and the logarithm of its position. Network: Linear(2 KH d + 1 ->
    hidden), GELU, Linear(hidden -> KH); the output is the logarithm of significance times N.

    Nothing after the token is a feature, so its score is a function of the tokens up to it: a
    cached prefix has the same scores whatever follows.

    Source: KVzap and FastKVzip score tokens from hidden states; scores from keys and values, which
            are what pages hold, are ours
    """

    def __init__(self, geometry: Geometry, frame: RopeFrame, hidden: int, seed: int = 0) -> None:
        """Weights of the first layers are drawn from ``seed``; the others are zero."""
        super().__init__()
        self.geometry, self.frame, self.hidden = geometry, frame, hidden
        layers, heads, dim = geometry.layers, geometry.kv_heads, geometry.head_dim
        width = 2 * heads * dim
        draw = torch.Generator().manual_seed(seed)
        self.mean = nn.Buffer(torch.zeros(layers, 1, width))
        self.inverse_deviation = nn.Buffer(torch.ones(layers, 1, width))
        self.input_weight = nn.Parameter(torch.randn(layers, width, hidden, generator=draw))
        self.input_weight.data /= width**0.5
        self.position_weight = nn.Parameter(torch.zeros(layers, 1, hidden))
        self.input_bias = nn.Parameter(torch.zeros(layers, 1, hidden))
        self.output_weight = nn.Parameter(torch.zeros(layers, hidden, heads))
        self.output_bias = nn.Parameter(torch.zeros(layers, 1, heads))

    def standardize(self, mean: Tensor, deviation: Tensor) -> None:
        """Set mean and deviation of ``content``. Shapes: [L, 2 KH d]"""
        self.mean.copy_(mean[:, None])
        self.inverse_deviation.copy_(1 / deviation.clamp_min(1e-6)[:, None])

    def content(self, keys: Tensor, values: Tensor, positions: Tensor) -> Tensor:
        """Keys before RoPE and values of each token: [L, KH, n, d] twice -> [L, n, 2 KH d]"""
        both = torch.stack((self.frame.to_local(keys, positions), values))
        return both.permute(1, 3, 0, 2, 4).flatten(2)

    def forward(
        self, keys: Tensor, values: Tensor, positions: Tensor, layers: slice = slice(None)
    ) -> Tensor:
        """Logarithm of significance times N, of the tokens of any number of requests.

        ``layers``: those of keys and values, as when a prompt is prefilled layer by layer.

        Shapes:  keys, values [L, KH, n, d] after RoPE, not rotated by Hadamard; positions (n,)
                 -> [L, KH, n]
        Dtypes:  float32
        """
        content = self.content(keys, values, positions)
        standard = (content - self.mean[layers]) * self.inverse_deviation[layers]
        place = (positions + 1).float().log()[:, None] / POSITION_SCALE
        bias = self.input_bias[layers] + place * self.position_weight[layers]
        hidden = nn.functional.gelu(torch.baddbmm(bias, standard, self.input_weight[layers]))
        found = torch.baddbmm(self.output_bias[layers], hidden, self.output_weight[layers])
        return found.transpose(1, 2)


@torch.inference_mode()
def score_requests(
    scorer: TokenScorer, caches: Sequence[tuple[Tensor, Tensor]], layers: slice = slice(None)
) -> list[Tensor]:
    """Significance of all tokens of a batch of requests, in one call of the network.

    Shapes:  each cache: keys and values [L, KH, N, d] -> for each [L, KH, N] float32
    """
    counts = [keys.shape[2] for keys, _ in caches]
    positions = torch.cat([torch.arange(count) for count in counts])
    keys = torch.cat([keys for keys, _ in caches], 2).float()
    values = torch.cat([values for _, values in caches], 2).float()
    found = scorer(keys, values, positions, layers).exp().split(counts, 2)
    return [part / max(1, count) for part, count in zip(found, counts, strict=True)]
