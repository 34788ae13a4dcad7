# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false
# pyright: reportUnknownArgumentType=false
# torch leaves Tensor.flatten and others untyped in part.
"""Fits bases of keys and values, and the order of RoPE pairs, of each head to some texts."""

from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor

from triptych.core.errors import ModelError
from triptych.evals.codecs.pair_bits import pair_energy
from triptych.evals.methods.masked_attention import by_kv_head, check_plain, ungrouped
from triptych.workers.models.attention_interface import Attend, LayerTraits
from triptych.workers.models.facts import describe
from triptych.workers.models.load import load

MOST_DIM = 512
"""Channels of a head, so that the number of a pair is a byte."""


class Moments(Attend):
    """Causal attention of some texts at once that keeps the second moments of which bases are made.

    The moment of values weights each by the energy of its key, ``k (sum of q q^T) k^T``, so values
    that are read much count more. It takes the queries of all texts, which one call of a layer has.
    """

    def __init__(self, lengths: Sequence[int], done: Callable[[], None] = lambda: None) -> None:
        """``lengths``: tokens of each text; ``done``: called after each layer."""
        self._lengths, self._done = list(lengths), done
        self._queries, self._values = list[Tensor](), list[Tensor]()

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
        of_queries = second_moment(grouped.flatten(1, 2))
        self._queries.append(of_queries)
        self._values.append(second_moment(values, energy(keys, of_queries)))
        by_text = zip(
            grouped.split(self._lengths, 2),
            keys[:, None].split(self._lengths, 2),
            values[:, None].split(self._lengths, 2),
            strict=True,
        )
        found = [
            F.scaled_dot_product_attention(
                text, some.expand_as(text), read.expand_as(text), is_causal=True, scale=traits.scale
            )
            for text, some, read in by_text
        ]
        self._done()
        return ungrouped(torch.cat(found, 2))

    @property
    def of_queries(self) -> Tensor:
        """Sum of q q^T by layer and KV head, [L, KH, d, d] float64."""
        return torch.stack(self._queries)

    @property
    def of_values(self) -> Tensor:
        """Weighted sum of v v^T, [L, KH, d, d] float64."""
        return torch.stack(self._values)


class PairEnergies(Moments):
    """``Moments`` that also keeps the mean squared norms of RoPE pairs, of queries and of keys."""

    def __init__(
        self, lengths: Sequence[int], centre: Tensor, done: Callable[[], None] = lambda: None
    ) -> None:
        """``centre``: subtracted from keys, [L, KH, d]."""
        super().__init__(lengths, done)
        self._centre, self._energies = centre, list[Tensor]()

    def __call__(
        self,
        layer: int,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        traits: LayerTraits,
        sinks: Tensor | None = None,
    ) -> Tensor:
        grouped = by_kv_head(query, key.shape[1]).flatten(1, 2)
        centred = key.transpose(0, 1) - self._centre[layer][:, None]
        self._energies.append((pair_energy(grouped) + pair_energy(centred)) / 2)
        return super().__call__(layer, query, key, value, traits, sinks)

    @property
    def of_pairs(self) -> Tensor:
        """The mean energy of queries and keys by layer, KV head and pair, [L, KH, d/2]."""
        return torch.stack(self._energies)


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


def fit_bases(
    path: Path, texts: Iterable[Sequence[int]], done: Callable[[], None] = lambda: None
) -> Tensor:
    """Bases of keys and of values, [2, layers, kv_heads, head_dim, head_dim] float32.

    Keys have the axes of the second moment of the queries of their group, values those of their own
    weighted by energy. The Hadamard matrix comes when they are used. All texts go through the model
    together; ``done`` is called after each layer.

    Raises:  ModelError for models with latents, sliding windows or softcaps
    Source:  OSCAR, with bases of KV heads; its published code has one basis for a layer
    """
    kept = _texts_of(path, texts)
    moments = Moments([len(text) for text in kept], done)
    _read(path, kept, moments)
    return torch.stack((axes_of(moments.of_queries), axes_of(moments.of_values)))


def fit_pair_order(
    path: Path,
    texts: Iterable[Sequence[int]],
    centre: Tensor | None = None,
    done: Callable[[], None] = lambda: None,
) -> Tensor:
    """RoPE pairs of each head, those with the most energy first, uint8 [layers, kv_heads, d/2].

    ``centre``: the mean keys that are subtracted from keys, [layers, kv_heads, d]; None: zeros.

    Raises:  ModelError as ``fit_bases``, or if heads have more than 512 channels
    Source:  Block-GTQ (energy: half the mean squared norm of queries and half that of keys)
    """
    kept, shape = _texts_of(path, texts), describe(path).geometry
    if shape.head_dim > MOST_DIM:
        raise ModelError(
            f"order of RoPE pairs: heads of {shape.head_dim} channels: expected at most {MOST_DIM}"
        )
    zeros = torch.zeros(shape.layers, shape.kv_heads, shape.head_dim)
    energies = PairEnergies([len(text) for text in kept], zeros if centre is None else centre, done)
    _read(path, kept, energies)
    return energies.of_pairs.argsort(dim=-1, descending=True, stable=True).to(torch.uint8)


def _texts_of(path: Path, texts: Iterable[Sequence[int]]) -> list[Sequence[int]]:
    """Raises: ModelError for models with latents"""
    if describe(path).geometry.has_latents:
        raise ModelError("bases of keys and values: this model stores latents, which are both")
    return list(texts)


def _read(path: Path, texts: Sequence[Sequence[int]], attend: Attend) -> None:
    """Run a model over some texts together."""
    ids = torch.tensor([token for text in texts for token in text])
    places = torch.cat([torch.arange(len(text)) for text in texts])
    loaded = load(path, "float32", quantization="none")
    with torch.inference_mode():
        loaded.network(ids, places, attend, torch.tensor([len(ids) - 1]))
