# pyright: reportUnknownMemberType=false
# torch.from_numpy has no type hints.
"""KV rotation: keys and values are rotated by a Hadamard matrix, and keys are centred.

Softmax depends only on differences of query-key products: rotating queries and keys by the same
orthogonal matrix changes nothing, nor does subtracting the same vector from all keys of a head.
Values are rotated back after attention. Quantization becomes more exact: a rotated outlier is
spread over all channels, and a centred key is shorter.
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
    """Rotated mean key of each head, [layers, kv_heads, head_dim] float32."""

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
