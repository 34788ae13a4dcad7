# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false
# pyright: reportUnknownArgumentType=false
# torch leaves Tensor.flatten and others untyped in part.
"""Fits the bases of keys and values of each head to the queries and values of some texts."""

from collections.abc import Iterable, Sequence
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor

from triptych.core.errors import ModelError
from triptych.evals.methods.masked_attention import by_kv_head, check_plain, ungrouped
from triptych.workers.models.attention_interface import Attend, LayerTraits
from triptych.workers.models.facts import describe
from triptych.workers.models.load import LoadedModel, load


class Moments(Attend):
    """Causal attention that adds up the second moments from which bases are made.

    The moment of values weights each by the energy of its key, ``k (sum of q q^T) k^T``, so values
    that are read much count more. It takes the queries of all texts, so there are two passes.
    """

    def __init__(self, of_queries: Tensor | None = None) -> None:
        """``of_queries``: the sum of q q^T of a first pass, [L, KH, d, d]; None: add that up."""
        self._of_queries = of_queries
        self.sums: dict[int, Tensor] = {}
        """By layer, [KH, d, d] float64."""

    def __call__(
        self,
        layer: int,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        traits: LayerTraits,
        sinks: Tensor | None = None,
    ) -> Tensor:
        """Raises: ModelError for sliding windows or softcaps"""
        check_plain(layer, traits, sinks)
        grouped = by_kv_head(query, key.shape[1])
        keys, values = key.transpose(0, 1), value.transpose(0, 1)
        if self._of_queries is None:
            found = second_moment(grouped.flatten(1, 2))
        else:
            found = second_moment(values, energy(keys, self._of_queries[layer]))
        self.sums[layer] = self.sums[layer] + found if layer in self.sums else found
        wide_keys, wide_values = (part[:, None].expand_as(grouped) for part in (keys, values))
        return ungrouped(
            F.scaled_dot_product_attention(
                grouped, wide_keys, wide_values, is_causal=True, scale=traits.scale
            )
        )

    @property
    def total(self) -> Tensor:
        """[L, KH, d, d] float64"""
        return torch.stack([self.sums[layer] for layer in sorted(self.sums)])


def second_moment(vectors: Tensor, weights: Tensor | None = None) -> Tensor:
    """Sum of weight v v^T: vectors [..., n, d], weights [..., n] -> [..., d, d] float64."""
    exact = vectors.double()
    weighted = exact if weights is None else exact * weights[..., None]
    return weighted.mT @ exact


def energy(keys: Tensor, of_queries: Tensor) -> Tensor:
    """k M k^T of each key: keys [..., n, d], M [..., d, d] -> [..., n] float64."""
    exact = keys.double()
    return (exact @ of_queries * exact).sum(-1)


def axes_of(moment: Tensor) -> Tensor:
    """Eigenvectors as columns, the largest eigenvalue first: [..., d, d] -> float32."""
    return torch.linalg.eigh(moment)[1].flip(-1).float()


def fit_bases(path: Path, texts: Iterable[Sequence[int]]) -> Tensor:
    """Bases of keys and of values, [2, layers, kv_heads, head_dim, head_dim] float32.

    Keys have the axes of the second moment of the queries of their group, values those of their own
    weighted by energy. The Hadamard matrix comes when they are used.

    Raises:  ModelError for models with latents, sliding windows or softcaps
    Source:  OSCAR, with bases of KV heads; its published code has one basis for a layer
    """
    if describe(path).geometry.has_latents:
        raise ModelError("bases of keys and values: this model stores latents, which are both")
    loaded = load(path, "float32", quantization="none")
    kept = list(texts)
    of_queries = _pass(loaded, kept, Moments())
    of_values = _pass(loaded, kept, Moments(of_queries))
    return torch.stack((axes_of(of_queries), axes_of(of_values)))


def _pass(loaded: LoadedModel, texts: Sequence[Sequence[int]], moments: Moments) -> Tensor:
    for text in texts:
        ids = torch.tensor(list(text))
        places = torch.arange(len(ids))
        with torch.inference_mode():
            loaded.network(ids, places, moments, places[-1:])
    return moments.total
