# pyright: reportUnknownMemberType=false
# torch.from_numpy has no type hints.
"""Keys and values in rotated, centred coordinates, on both sides of attention over pages.

Softmax sees only differences of products of queries and keys: rotating both by the same
orthogonal matrix changes nothing, nor does taking the same vector from all keys of a head.
Values come back by the inverse rotation. What changes is how well the numbers round: a
rotated outlier is spread over all channels, and a centred key is shorter.
"""

from dataclasses import dataclass
from functools import partial

import numpy as np
import torch
from torch import Tensor

from triptych.core.layout import Geometry
from triptych.core.policy import KVRotation
from triptych.kernels.hadamard import hadamard
from triptych.workers.models.attention_interface import Attend


@dataclass(frozen=True)
class Coordinates:
    """Rotates queries, keys and values into the coordinates of the pages, and results back."""

    rotation: Tensor
    """[head_dim, head_dim], its own inverse, float32."""
    centre: Tensor
    """Rotated mean key of each head, [layers, kv_heads, head_dim] float32."""

    @classmethod
    def of(
        cls, kv_rotation: KVRotation, geometry: Geometry, device: torch.device | None = None
    ) -> "Coordinates | None":
        """Where a model's activations are; None for plain coordinates."""
        if not kv_rotation.rotated:
            return None
        rotation = hadamard(geometry.head_dim)
        shape = geometry.layers, geometry.kv_heads, geometry.head_dim
        centre = torch.zeros(shape)
        if kv_rotation.key_centre:
            packed = np.frombuffer(kv_rotation.key_centre, "<f2").astype(np.float32)
            centre = torch.from_numpy(packed).view(shape)
        return cls(rotation.to(device), (centre @ rotation).to(device))

    def around(self, attend: Attend) -> Attend:
        """The same attention, in these coordinates."""
        return partial(self._attend, attend)

    def _attend(
        self,
        attend: Attend,
        layer: int,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        *,
        scale: float,
        window: int,
        softcap: float,
    ) -> Tensor:
        """Computes in float32, so that a rotation in 16 bits rounds nothing a second time."""
        mixed = attend(
            layer,
            query.float() @ self.rotation,
            key.float() @ self.rotation - self.centre[layer],
            value.float() @ self.rotation,
            scale=scale,
            window=window,
            softcap=softcap,
        )
        return (mixed @ self.rotation).to(query.dtype)
