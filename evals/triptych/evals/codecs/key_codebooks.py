# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false
# pyright: reportUnknownArgumentType=false
# torch leaves Tensor.argmin and others untyped in part.
"""A2ATS: keys as indices of centroids, by which a query finds the tokens that it attends to."""

from dataclasses import dataclass

import torch
from torch import Tensor

CENTROIDS = 256
"""Of a codebook, so that an index is one byte."""
ROUNDS = 20


@dataclass(frozen=True)
class KeyCodebooks:
    """Codebooks of one head: a key is cut into equal pieces, each with 256 centroids.

    Centroids are fitted where distances are errors of logits: keys are multiplied by the root of
    the second moment of queries, and queries by its inverse.
    """

    root: Tensor
    """[d, d]: symmetric root of the second moment of queries."""
    inverse: Tensor
    """[d, d]"""
    centroids: Tensor
    """[pieces, 256, d / pieces]"""

    def encode(self, keys: Tensor) -> Tensor:
        """Indices of the nearest centroids: keys [n, d] -> int64 [n, pieces]."""
        pieces = _pieces(keys @ self.root, len(self.centroids))
        return torch.cdist(pieces, self.centroids).argmin(-1).mT

    def logits(self, queries: Tensor, codes: Tensor) -> Tensor:
        """Products of queries with the centroids of keys: [m, d], [n, pieces] -> [m, n].

        A query is multiplied with all centroids once; a key then takes an entry for each piece.
        """
        pieces = _pieces(queries @ self.inverse, len(self.centroids))
        tables = pieces @ self.centroids.mT
        found = tables.gather(2, codes.mT[:, None].expand(-1, len(queries), -1))
        return found.sum(0)


def fit_codebooks(keys: Tensor, moment: Tensor, pieces: int, seed: int = 0) -> KeyCodebooks:
    """Codebooks of keys for queries of a second moment, by k-means.

    Shapes:  keys [n, d]; moment [d, d], the mean of q q^T
    Source:  A2ATS (query-aware vector quantization of keys); several pieces are product
             quantization, and ours
    """
    size, axes = torch.linalg.eigh(moment.double())
    size = size.clamp_min(1e-6 * float(size.max())).sqrt()
    root, inverse = ((axes * scale) @ axes.mT for scale in (size, 1 / size))
    cut = _pieces(keys @ root.float(), pieces)
    draw = torch.Generator().manual_seed(seed)
    first = torch.randperm(cut.shape[1], generator=draw)[:CENTROIDS]
    centroids = cut[:, first].clone()
    for _ in range(ROUNDS):
        nearest = torch.cdist(cut, centroids).argmin(-1)
        wide = nearest[..., None].expand_as(cut)
        sums = torch.zeros_like(centroids).scatter_add_(1, wide, cut)
        ones = torch.ones(nearest.shape)
        counts = torch.zeros(centroids.shape[:2]).scatter_add_(1, nearest, ones)
        means = sums / counts.clamp_min(1)[..., None]
        centroids = torch.where(counts[..., None] > 0, means, centroids)
    return KeyCodebooks(root.float(), inverse.float(), centroids)


def _pieces(vectors: Tensor, count: int) -> Tensor:
    """[n, d] -> [count, n, d / count]"""
    return vectors.unflatten(1, (count, -1)).transpose(0, 1)
