# pyright: reportUnknownMemberType=false
# torch leaves Tensor.unflatten and others untyped in part.
"""Statistics of the queries of a prompt that some retention rules score tokens by.

Sums of attention come from the attention kernel; what is here is computed beside it, for prompts of
methods that need it alone. Chunks of a prompt, and some layers of it, add up to the same. The score
that results is stored where sums of attention would be, so nothing else travels to the compressor.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from triptych.core.errors import ConfigError
from triptych.core.layout import Geometry
from triptych.core.pages import PagePlan
from triptych.core.policy import Policy
from triptych.kernels.retain import (
    FIRST_TOKENS,
    AttentionMoments,
    expected_attention,
    mean_rotation,
)
from triptych.workers.compress.learned.rope_frame import RopeFrame
from triptych.workers.compress.raw_tokens import ModelCoordinates
from triptych.workers.models.attention_interface import LayerTraits
from triptych.workers.models.traits import ModelTraits

StoredLayer = Callable[[int], tuple[Tensor, Tensor]]
"""Reads keys and values of one of the layers from the pages, [KH, N, d] float32 each."""


class PromptStatistics(Protocol):
    """Statistics of the queries of a prompt in some layers, by which methods score tokens."""

    def add(
        self,
        layer: int,
        start: int,
        query: Tensor,
        traits: LayerTraits,
        weights: Callable[[], Tensor],
    ) -> None:
        """Add the queries from position ``start`` on, as attention gets them.

        ``layer``: index among the layers. ``weights`` computes what they pay to the tokens so far.

        Shapes:  query [n, H, d]; weights [H, n, start + n]
        """
        ...

    def scores(self, stored: StoredLayer) -> Tensor:
        """The score of each token, [layers, KH, N] float32."""
        ...


@dataclass(frozen=True)
class WindowMoments:
    """Mean and variance of the attention from the last queries."""

    moments: AttentionMoments
    kv_heads: int

    def add(
        self,
        layer: int,
        start: int,
        query: Tensor,
        traits: LayerTraits,
        weights: Callable[[], Tensor],
    ) -> None:
        self.moments.add(layer, weights())

    def scores(self, stored: StoredLayer) -> Tensor:
        return self.moments.scores(self.kv_heads)


class QueryStatistics:
    """Mean and covariance of the queries before RoPE, and the attention that they let expect.

    The first four queries do not count. Sums of the products of queries take ``H d d`` floats a
    layer, however long the prompt is.
    """

    def __init__(
        self,
        frequencies: Sequence[float],
        coordinates: ModelCoordinates,
        geometry: Geometry,
        layers: range,
        num_heads: int,
        tokens: int,
        device: torch.device,
    ) -> None:
        self._frame = RopeFrame(torch.tensor(frequencies, dtype=torch.float32).to(device))
        self._coordinates, self._layers, self._tokens = coordinates, layers, tokens
        shape, width = (len(layers), num_heads), geometry.head_dim
        self._sums = torch.zeros(*shape, width, device=device)
        self._products = torch.zeros(*shape, width, width, device=device)
        self._scales = [1.0] * len(layers)

    def add(
        self,
        layer: int,
        start: int,
        query: Tensor,
        traits: LayerTraits,
        weights: Callable[[], Tensor],
    ) -> None:
        self._scales[layer] = traits.scale
        counted = query[max(0, FIRST_TOKENS - start) :].transpose(0, 1)
        if self._coordinates.key_rotation is not None:
            counted = counted @ self._coordinates.key_rotation
        first = max(start, FIRST_TOKENS)
        positions = torch.arange(first, first + counted.shape[1], device=query.device)
        counted = self._frame.to_local(counted, positions)
        self._sums[layer] += counted.sum(1)
        self._products[layer] += counted.transpose(1, 2) @ counted

    def scores(self, stored: StoredLayer) -> Tensor:
        rotation = mean_rotation(self._frame.frequencies, self._tokens)
        found, queries = list[Tensor](), max(1, self._tokens - FIRST_TOKENS)
        for index, layer in enumerate(self._layers):
            mean = self._sums[index] / queries
            covariance = self._products[index] / queries - mean[:, :, None] * mean[:, None]
            keys, values = (part[None] for part in stored(index))
            keys, _ = self._coordinates.of_stored(keys, values, slice(layer, layer + 1))
            scale = self._scales[index]
            norms = values[0].square().sum(-1).sqrt()
            found.append(
                expected_attention(mean, covariance, keys[0], norms, rotation=rotation, scale=scale)
            )
        return torch.stack(found)


@dataclass(frozen=True)
class StatisticsFactory:
    """Makes the statistics that a method needs."""

    geometry: Geometry
    num_heads: int
    frequencies: Sequence[float]
    """Of RoPE; empty: not known, and no method needs them."""
    device: torch.device

    def make(
        self, policy: Policy, layers: range, tokens: int, first_observed: int
    ) -> PromptStatistics | None:
        """Those of a prompt of ``tokens`` tokens in some layers; None: none are needed."""
        rule = policy.observing_rule
        if rule is None or rule.adds_up_attention:
            return None
        if rule.measured == "attention_moments":
            shape = (len(layers), self.num_heads, tokens)
            moments = AttentionMoments.empty(first_observed, shape, self.device)
            return WindowMoments(moments, self.geometry.kv_heads)
        coordinates = ModelCoordinates.of(policy.kv_rotation, self.geometry, self.device)
        return QueryStatistics(
            self.frequencies,
            coordinates,
            self.geometry,
            layers,
            self.num_heads,
            tokens,
            self.device,
        )


def known_frequencies(plan: PagePlan, traits: ModelTraits) -> tuple[float, ...]:
    """RoPE frequencies of the model, if a method of the server needs them.

    Raises: ConfigError if they are not known
    """
    policies = [one.policy for one in plan.by_method.values()]
    needing = next((policy for policy in policies if policy.measures_queries), None)
    if needing is None:
        return ()
    if traits.plain is None or traits.plain.rotary_sections:
        raise ConfigError(
            f"compressor: {needing.name!r} needs queries before RoPE, so the RoPE frequencies of "
            "the model, which are known for plain layers with one position a token only "
            "(docs/models.md): choose another method"
        )
    return traits.plain.frequencies
