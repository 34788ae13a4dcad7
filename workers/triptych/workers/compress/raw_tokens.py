# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false
# torch leaves Tensor.unflatten and others untyped in part.
"""Tokens of raw pages in the coordinates of the model, which learned networks read and write."""

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from triptych.core.layout import Geometry, PageLayout
from triptych.core.policy import KVRotation
from triptych.kernels.hadamard import hadamard
from triptych.kernels.pages import segments
from triptych.workers.models.kv_rotation import Coordinates

Ids = NDArray[np.int32]


@dataclass(frozen=True)
class ModelCoordinates:
    """Turns stored keys and values back to those after RoPE, and into stored ones again.

    Shapes:  keys and values [L, KH, n, d] float32
    """

    key_rotation: Tensor | None
    """[d, d], its own inverse; None: stored keys are not rotated."""
    value_rotation: Tensor | None
    """The same for values."""
    centre: Tensor
    """[L, KH, d] as stored, or 0."""

    @classmethod
    def of(
        cls, kv_rotation: KVRotation, geometry: Geometry, device: torch.device
    ) -> "ModelCoordinates":
        coordinates = Coordinates.of(kv_rotation, geometry, device)
        if coordinates is None:
            return cls(None, None, torch.zeros(geometry.layers, geometry.kv_heads, 1).to(device))
        rotation = hadamard(geometry.head_dim, device)
        return cls(rotation if kv_rotation.rotates_keys else None, rotation, coordinates.centre)

    def of_stored(
        self, keys: Tensor, values: Tensor, layers: slice = slice(None)
    ) -> tuple[Tensor, Tensor]:
        """``layers``: those of keys and values."""
        keys = keys + self.centre[layers, :, None]
        return _rotated(keys, self.key_rotation), _rotated(values, self.value_rotation)

    def to_stored(self, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        keys = _rotated(keys, self.key_rotation) - self.centre[:, :, None]
        return keys, _rotated(values, self.value_rotation)


def _rotated(vectors: Tensor, rotation: Tensor | None) -> Tensor:
    return vectors if rotation is None else vectors @ rotation


@dataclass(frozen=True)
class RawTokens:
    """The raw pages of a prompt, token by token."""

    arena: Tensor
    layout: PageLayout
    kv_heads: int
    pages: Tensor
    """int64 [head rows, pages of a row], on the device of the arena."""

    def read(self, positions: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Stored keys and values [L, KH, n, d] float32, and scores [L, KH, n] of some positions."""
        page, row = self._slots(positions)
        parts = segments(self.arena, self.layout)
        found = (part[page, row].float() for part in (parts.keys, parts.values, parts.scores))
        keys, values, scores = (part.unflatten(0, (-1, self.kv_heads)) for part in found)
        return keys, values, scores

    def set_scores(self, positions: Tensor, scores: Tensor) -> None:
        """Replace the scores of the tokens at positions (n,); scores: [L, KH, n], or one number."""
        page, row = self._slots(positions)
        flat = scores.flatten(0, 1) if scores.dim() else scores
        segments(self.arena, self.layout).scores[page, row] = flat

    def _slots(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        per_page = self.layout.tokens
        page = self.pages[:, positions // per_page]
        return page, (positions % per_page).expand_as(page)
