# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false
# pyright: reportUnknownArgumentType=false
# torch.from_numpy and others have no type hints.
"""KV rotation: keys and values are rotated by a Hadamard matrix, and keys are centred.

Softmax depends only on differences of query-key products: rotating queries and keys by the same
orthogonal matrix changes nothing, nor does subtracting the same vector from all keys of a head.
Values are rotated back after attention. Quantization becomes more exact: a rotated outlier is
spread over all channels, and a centred key is shorter. Vectors of each head may be put into a basis
of their own before. Codecs of pairs of channels keep keys as they are, and only their centre is
taken away.
"""

from dataclasses import dataclass
from functools import partial

import numpy as np
import torch
from torch import Tensor

from triptych.core.layout import Geometry
from triptych.core.policy import KVRotation
from triptych.kernels import rotate_back, rotate_kv
from triptych.kernels.hadamard import hadamard
from triptych.workers.models.attention_interface import Attend, LayerTraits, RotatingAttend


@dataclass(frozen=True)
class Coordinates:
    """Rotates queries, keys and values before attention over pages, and its output back."""

    centre: Tensor
    """Mean key of each head as stored, [layers, kv_heads, head_dim] float32."""

    @classmethod
    def of(
        cls, kv_rotation: KVRotation, geometry: Geometry, device: torch.device | None = None
    ) -> "Coordinates | None":
        """The rotation on ``device``; None if keys and values are not rotated."""
        if not kv_rotation.rotated:
            return None
        shape = geometry.layers, geometry.kv_heads, geometry.head_dim
        centre = torch.zeros(shape)
        if kv_rotation.key_centre:
            packed = np.frombuffer(kv_rotation.key_centre, "<f2").astype(np.float32)
            centre = torch.from_numpy(packed).view(shape)
        if kv_rotation.bases:
            return BasisCoordinates.of_bases(kv_rotation.bases, centre, geometry, device)
        if not kv_rotation.rotates_keys:
            return ValueCoordinates(centre.to(device))
        kind = LatentCoordinates if geometry.has_latents else cls
        return kind((centre @ hadamard(geometry.head_dim)).to(device))

    def around(self, attend: Attend) -> Attend:
        """``attend`` with rotated queries, keys and values."""
        return partial(self._attend, attend)

    def _attend(
        self,
        attend: Attend,
        layer: int,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        traits: LayerTraits,
        sinks: Tensor | None = None,
    ) -> Tensor:
        """Computes in float32, so that the rotation adds no 16-bit rounding."""
        rotated = rotate_kv(query, key, value, self.centre[layer])
        if isinstance(attend, RotatingAttend):
            return attend.rotated_back(layer, *rotated, traits, sinks, query.dtype)
        mixed = attend(layer, *rotated, traits, sinks)
        return rotate_back(mixed, query.dtype)


class ValueCoordinates(Coordinates):
    """Only values are rotated; keys are centred."""

    def _attend(
        self,
        attend: Attend,
        layer: int,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        traits: LayerTraits,
        sinks: Tensor | None = None,
    ) -> Tensor:
        centred = key.float() - self.centre[layer]
        # The matrix is its own inverse.
        parts = query.float(), centred, rotate_back(value.float(), torch.float32)
        if isinstance(attend, RotatingAttend):
            return attend.rotated_back(layer, *parts, traits, sinks, query.dtype)
        return rotate_back(attend(layer, *parts, traits, sinks), query.dtype)


class LatentCoordinates(Coordinates):
    """Coordinates of a model whose values are its keys: values are centred too.

    Weights of attention add up to 1, so that the centre is added to the output.
    """

    def _attend(
        self,
        attend: Attend,
        layer: int,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        traits: LayerTraits,
        sinks: Tensor | None = None,
    ) -> Tensor:
        centre = self.centre[layer]
        rotated_query, latent, _ = rotate_kv(query, key, key, centre)
        mixed = attend(layer, rotated_query, latent, latent, traits, sinks)
        return rotate_back(mixed + centre, query.dtype)


@dataclass(frozen=True)
class BasisCoordinates(Coordinates):
    """Vectors of each head are in a basis of their own before they are rotated.

    Source: OSCAR (an orthogonal basis of each head before the Hadamard matrix)
    """

    bases: Tensor
    """Of keys and of values: [2, layers, kv_heads, head_dim, head_dim] float32, orthogonal."""

    @classmethod
    def of_bases(
        cls, packed: bytes, centre: Tensor, geometry: Geometry, device: torch.device | None
    ) -> "BasisCoordinates":
        """``centre``: mean keys [layers, kv_heads, head_dim]."""
        codes = torch.from_numpy(np.frombuffer(packed, np.int8).astype(np.float64))
        dim = geometry.head_dim
        left, _, right = torch.linalg.svd(codes.view(2, *centre.shape[:2], dim, dim))
        bases = (left @ right).float()
        turned = in_bases(centre, bases[0]) @ hadamard(dim)
        return cls(turned.to(device), bases.to(device))

    def _attend(
        self,
        attend: Attend,
        layer: int,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        traits: LayerTraits,
        sinks: Tensor | None = None,
    ) -> Tensor:
        of_keys, of_values = self.bases[:, layer].unbind()
        parts = in_bases(query, of_keys), in_bases(key, of_keys), in_bases(value, of_values)
        mixed = super()._attend(attend, layer, *parts, traits, sinks)
        return in_bases(mixed, of_values.mT).to(query.dtype)


def in_bases(vectors: Tensor, bases: Tensor) -> Tensor:
    """Vectors of some heads, or of some query heads of each of them, times the matrix of the head.

    Shapes:  vectors [..., heads, d]; bases [..., KH, d, d] -> [..., heads, d] float32
    """
    grouped = vectors.float().unflatten(-2, (bases.shape[-3], -1))
    found: Tensor = grouped @ bases
    return found.flatten(-3, -2)


def pack_bases(bases: Tensor) -> bytes:
    """Orthogonal matrices [..., d, d] as ``KVRotation.bases``: their numbers in steps of 1/127."""
    return (bases * 127).round().to(torch.int8).numpy().tobytes()
