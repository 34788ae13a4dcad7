# pyright: reportUnknownMemberType=false
# torch leaves Tensor.to and others untyped in part.
"""RoPE rotation of keys into the frame of an anchor position, and back.

A network that sees keys after RoPE sees inputs that depend on absolute positions. In the frame of
an anchor, keys depend on their content and on their distance to the anchor alone, so a network is
equivariant: when all positions shift, its output keys rotate with them.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from triptych.core.errors import ModelError
from triptych.core.methods.learned_files import LearnedFile
from triptych.workers.models.traits import ModelTraits


def frequencies_of(traits: ModelTraits) -> tuple[float, ...]:
    """RoPE frequencies of a model. Raises: ModelError if they are not known"""
    if traits.plain is None:
        raise ModelError(
            "learned compression needs the RoPE frequencies of the model, which are known for "
            "plain layers only (docs/models.md)"
        )
    if traits.plain.rotary_sections:
        raise ModelError(
            "learned compression does not know rotary positions by row and column (M-RoPE); choose "
            "another method"
        )
    return traits.plain.frequencies


@dataclass(frozen=True)
class RopeFrame:
    """Rotation of keys by RoPE, for channels in half-split order (channel c pairs c + d/2).

    The factor on cosine and sine of scaled RoPE is not applied again: keys have it.

    Source: RoFormer (RoPE); the frame of a chunk is ours, FastCache mixes keys of all rotations
    """

    frequencies: Tensor
    """[d/2] float32, radians per position."""

    @classmethod
    def of(cls, traits: ModelTraits) -> "RopeFrame":
        """Raises: ModelError if RoPE of the model is not known"""
        return cls(torch.tensor(frequencies_of(traits), dtype=torch.float32))

    @classmethod
    def of_file(cls, file: LearnedFile) -> "RopeFrame":
        """The frame of the model that a file of networks was checked for."""
        return cls(torch.tensor(file.frequencies, dtype=torch.float32))

    def rotate(self, keys: Tensor, positions: Tensor) -> Tensor:
        """R(positions) applied to keys.

        Shapes:  keys [..., d]; positions: any shape that broadcasts with [...] -> [..., d]
        Dtypes:  float32; positions may be fractions
        """
        angles = positions.float()[..., None] * self.frequencies
        cos, sin = angles.cos(), angles.sin()
        first, second = keys.chunk(2, -1)
        return torch.cat((first * cos - second * sin, second * cos + first * sin), -1)

    def to_local(self, keys: Tensor, positions: Tensor) -> Tensor:
        """Keys in the frame of ``positions``: R(-positions) keys. Shapes: as ``rotate``."""
        return self.rotate(keys, -positions.float())
