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

from triptych.core.layout import FORMATS, Geometry
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
        if kv_rotation.pair_order:
            return PairCoordinates.of_order(kv_rotation.pair_order, centre, geometry, device)
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
        stored = self._as_stored(layer, query, key, value)
        if isinstance(attend, RotatingAttend):
            return attend.rotated_back(layer, *stored, traits, sinks, query.dtype)
        return rotate_back(attend(layer, *stored, traits, sinks), query.dtype)

    def _as_stored(
        self, layer: int, query: Tensor, key: Tensor, value: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Queries, keys and values in the coordinates of pages.

        Computes in float32, so that the rotation adds no 16-bit rounding.
        """
        return rotate_kv(query, key, value, self.centre[layer])


class ValueCoordinates(Coordinates):
    """Only values are rotated; keys are centred."""

    def _as_stored(
        self, layer: int, query: Tensor, key: Tensor, value: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        # The matrix is its own inverse.
        rotated = rotate_back(value.float(), torch.float32)
        return query.float(), key.float() - self.centre[layer], rotated


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


@dataclass(frozen=True)
class PairCoordinates(Coordinates):
    """Channels of the keys of each head are ordered by energy, and mixed inside their segment.

    The matrix of a head is followed by the Hadamard matrix, which it begins with, so the product is
    that order and mixing alone. Values are rotated by the Hadamard matrix.

    Source: Block-GTQ (channels of equal bits together, and a rotation of each segment)
    """

    bases: Tensor
    """Of keys: [layers, kv_heads, head_dim, head_dim] float32, orthogonal."""

    @classmethod
    def of_order(
        cls, packed: bytes, centre: Tensor, geometry: Geometry, device: torch.device | None
    ) -> "PairCoordinates":
        """``packed``: as ``KVRotation.pair_order``; ``centre``: mean keys [layers, heads, dim]."""
        order = torch.from_numpy(np.frombuffer(packed, np.uint8).astype(np.int64))
        ordered = order_matrices(order.view(*centre.shape[:2], -1), geometry.head_dim)
        bases = ordered @ hadamard(geometry.head_dim)
        return cls(in_bases(centre, ordered).to(device), bases.to(device))

    def _as_stored(
        self, layer: int, query: Tensor, key: Tensor, value: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        of_keys = self.bases[layer]
        return super()._as_stored(layer, in_bases(query, of_keys), in_bases(key, of_keys), value)


def order_matrices(order: Tensor, dim: int) -> Tensor:
    """Matrices that put channels in the order of their pairs, and mix those of a segment.

    A segment is mixed by Hartley's matrix, which exists for any number of channels, is its own
    inverse, and has no number above sqrt(2 / n).

    Shapes: order int64 [..., d/2] -> [..., d, d] float32, orthogonal
    """
    mixing = torch.zeros(dim, dim, dtype=torch.float64)
    unit = torch.eye(dim, dtype=torch.float64)
    channels = list[Tensor]()
    for _, first, count, _ in FORMATS["block_gtq"].key_segments(dim):
        pairs = order[..., first // 2 : (first + count) // 2]
        channels += [pairs, pairs + dim // 2]
        mixing[first : first + count, first : first + count] = hartley(count)
    permuted = unit[torch.cat(channels, -1)].mT
    return (permuted @ mixing).float()


def hartley(count: int) -> Tensor:
    """The symmetric orthogonal matrix (cos + sin)(2 pi i j / n) / sqrt(n), float64 [n, n].

    Source: Hartley, A More Symmetrical Fourier Analysis (1942); Bracewell's discrete transform
    """
    index = torch.arange(count, dtype=torch.float64)
    angle = 2 * torch.pi / count * torch.outer(index, index).remainder(count)
    return (angle.cos() + angle.sin()) / count**0.5


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
