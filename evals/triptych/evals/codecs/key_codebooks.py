# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false
# pyright: reportUnknownArgumentType=false
# torch leaves Tensor.argmin and others untyped in part.
"""A2ATS: keys as codes of a codebook, by which a query finds the tokens that it reads."""

from dataclasses import dataclass

import torch
from torch import Tensor

CENTROIDS = 256
"""Of a codebook: a code is a byte."""
PASSES = 8
"""Of k-means."""
LEAST_ENERGY = 1e-6
"""Least eigenvalue of the queries' second moment, next to the largest one."""


@dataclass(frozen=True)
class KeyCodebooks:
    """Codebooks of the keys of one head: a key is so many bytes, one code of each book.

    Keys are multiplied by a root of the queries' second moment, so that distances of codes are
    errors of logits. Then a query is divided by that root. With several books each has an equal
    part of the channels, in the order of eigenvalues taken in turns.
    """

    root: Tensor
    """[d, d]: keys times it have the metric of logits."""
    inverse: Tensor
    """[d, d]: queries times it, transposed."""
    centroids: Tensor
    """[books, centroids, d / books]"""

    def encode(self, keys: Tensor) -> Tensor:
        """The nearest centroid of each part: keys [n, d] -> int64 [n, books]."""
        books = len(self.centroids)
        parts = (keys @ self.root).view(len(keys), -1, books).permute(2, 0, 1)
        return torch.cdist(parts, self.centroids).argmin(-1).T

    def logits(self, queries: Tensor, codes: Tensor) -> Tensor:
        """Products of queries [..., d] with the keys that codes [n, books] stand for: [..., n]."""
        books = len(self.centroids)
        parts = (queries @ self.inverse.T).unflatten(-1, (-1, books)).movedim(-1, 0)
        tables = torch.einsum("b...c,bkc->b...k", parts, self.centroids)
        return torch.stack([tables[b][..., codes[:, b]] for b in range(books)]).sum(0)


def fit_codebooks(keys: Tensor, moment: Tensor, books: int) -> KeyCodebooks:
    """Fit codebooks to keys [n, d] under the second moment [d, d] of queries, by k-means.

    The expected squared error of a logit is the squared distance of a key to its centroid after
    both are multiplied by a root of the moment.

    Source: A2ATS, query-aware vector quantization (one book); parts of keys are product
            quantization (Jegou et al., 2011), to compare at equal bytes
    """
    found, axes = torch.linalg.eigh(moment.double())
    sizes = found.clamp(min=LEAST_ENERGY * float(found.max())).sqrt()
    order = torch.arange(len(sizes) - 1, -1, -1)  # the largest eigenvalue first
    root = (axes * sizes)[:, order].float()
    inverse = (axes / sizes)[:, order].T.float()
    parts = (keys @ root).view(len(keys), -1, books).permute(2, 0, 1)
    return KeyCodebooks(root, inverse, torch.stack([_k_means(part) for part in parts]))


def _k_means(vectors: Tensor) -> Tensor:
    """Centroids of vectors [n, c], from evenly spaced ones; one without vectors stays."""
    count = min(CENTROIDS, len(vectors))
    centres = vectors[torch.linspace(0, len(vectors) - 1, count).long()].clone()
    for _ in range(PASSES):
        nearest = torch.cdist(vectors, centres).argmin(-1)
        sums = torch.zeros_like(centres).index_add_(0, nearest, vectors)
        members = nearest.bincount(minlength=count)[:, None]
        centres = torch.where(members > 0, sums / members.clamp(min=1), centres)
    return centres
