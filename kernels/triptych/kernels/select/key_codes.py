# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false
# pyright: reportUnknownArgumentType=false
# torch leaves Tensor.unflatten, argmax and others untyped in part.
"""A2ATS: keys as codes of a codebook of their head, and the logits of a query with all codes."""

from dataclasses import dataclass

import torch
from torch import Tensor

from triptych.kernels.hadamard import hadamard

CENTROIDS = 256
"""Keys of a codebook: a code is a byte."""
PAGES_AT_ONCE = 64
"""Pages that are coded together: 4 MiB of factors at head_dim 64."""


@dataclass(frozen=True, eq=False)
class KeyCodebooks:
    """Codebooks of the KV heads of some layers, for keys before RoPE in the model's coordinates.

    The code of a key is that of the centroid whose logits are nearest to the key's: the squared
    distance is measured by the second moment of queries. A query is moved to a fixed distance from
    the keys, whatever their positions are, so it has one logit for each code (windowed RoPE).

    Source: A2ATS (query-aware vector quantization, windowed RoPE)
    """

    centroids: Tensor
    """[L, KH, 256, d] float32."""
    moments: Tensor
    """Second moments of queries, [L, KH, d, d] float32, in any unit."""
    frequencies: Tensor
    """[d/2], radians per position; channel c pairs c + d/2."""
    distance: int
    """Tokens from a query to the keys, for all keys."""
    centre: Tensor
    """What pages lack of their keys, rotated like these: [L, KH, d] float32."""

    def of_layer(self, layer: int) -> "KeyCodebooks":
        """The codebooks of one layer."""
        one = slice(layer, layer + 1)
        parts = self.centroids[one], self.moments[one]
        return KeyCodebooks(*parts, self.frequencies, self.distance, self.centre[one])

    def codes(self, keys: Tensor, positions: Tensor, rows: Tensor, *, rotated: bool) -> Tensor:
        """The codes of keys in the coordinates of pages, uint8 [n, T].

        ``rows``: head row of each page, ``slot * KH + head``, where slots of all layers follow one
        another; ``rotated``: whether pages hold rotated keys.

        Shapes:  keys [n, T, d] float32; positions [n, T]; rows [n] int64
        """
        layers, kv_heads, _, dim = self.centroids.shape
        book = rows // kv_heads % layers * kv_heads + rows % kv_heads
        # |k - c|^2 by a metric M is -2 (k M c - c M c / 2) and what does not depend on c.
        factors = (self.moments @ self.centroids.mT).flatten(0, 1)
        halves = (self.centroids.mT * (self.moments @ self.centroids.mT)).sum(2).flatten(0, 1) / 2
        keys = keys + self.centre.flatten(0, 1)[book][:, None]
        if rotated:
            keys = keys @ hadamard(dim, keys.device)
        keys = moved(keys, -positions, self.frequencies)
        found = torch.empty(keys.shape[:2], dtype=torch.uint8, device=keys.device)
        for first in range(0, len(keys), PAGES_AT_ONCE):
            some = slice(first, first + PAGES_AT_ONCE)
            logits = keys[some] @ factors[book[some]] - halves[book[some]][:, None]
            found[some] = logits.argmax(-1).to(torch.uint8)
        return found

    def logits(self, query: Tensor, positions: Tensor, *, scale: float) -> Tensor:
        """The largest scaled logit among the query heads of a KV head, for each code of one layer.

        Shapes:  query [R, H, d] in the coordinates of the model, after RoPE; positions [R]
                 -> [R, KH, 256] float32
        """
        far = moved(query, (self.distance - positions)[:, None], self.frequencies)
        grouped = far.unflatten(1, (self.centroids.shape[1], -1)) * scale
        return (grouped @ self.centroids[0].mT).amax(2).contiguous()


def moved(vectors: Tensor, positions: Tensor, frequencies: Tensor) -> Tensor:
    """Vectors turned by RoPE as if they moved by so many positions.

    Shapes:  vectors [..., d] float32; positions [...] -> [..., d]
    """
    angles = positions[..., None].double() * frequencies  # float32 is too coarse for long contexts
    cos, sin = angles.cos().float(), angles.sin().float()
    first, second = vectors.chunk(2, -1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), -1)
