# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false
# pyright: reportUnknownArgumentType=false
# torch leaves Tensor.argmin and others untyped in part.
"""Spherical KV with any number of bits: keys as radius and angle of each RoPE pair."""

import math
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class PolarKeys:
    """Codes of keys: ``radius * step`` and an angle in equal parts of a turn, of each pair."""

    radius: Tensor
    """Integers [n, d/2], 0 to 2**radius_bits - 1."""
    angle: Tensor
    """Integers [n, d/2], 0 to 2**angle_bits - 1."""
    step: Tensor
    """[n, 1], numbers of float16: the radius of code 1."""
    angle_bits: int

    def decode(self) -> Tensor:
        """Keys [n, d], pair c being channels c and c + d/2."""
        radius, turn = self.radius * self.step, self.angle * (2 * math.pi / 2**self.angle_bits)
        return torch.cat((radius * turn.cos(), radius * turn.sin()), -1)

    def logits(self, query: Tensor) -> Tensor:
        """Products of a query with all keys from the codes, by a table of the query.

        The table has the product of each pair of the query with each angle, so a pair of a key is
        one entry times its radius.

        Shapes:  query [d] -> [n]
        """
        turns = torch.arange(2**self.angle_bits) * (2 * math.pi / 2**self.angle_bits)
        left, right = query.chunk(2)
        table = left[:, None] * turns.cos() + right[:, None] * turns.sin()
        found = table.gather(1, self.angle.mT).mT
        return (self.radius * found).sum(-1) * self.step[:, 0]


def encode_polar(keys: Tensor, radius_bits: int, angle_bits: int) -> PolarKeys:
    """Codes of keys [n, d]; the largest radius of a key has the largest code.

    Source:  Spherical KV (radius and angle codes)
    """
    left, right = keys.chunk(2, -1)
    radius, angle = torch.hypot(left, right), torch.atan2(right, left)
    top = 2**radius_bits - 1
    step = (radius.amax(-1, keepdim=True) / top).half().float()
    step = torch.where(step > 0, step, 1.0)
    turns = (angle * (2**angle_bits / (2 * math.pi))).round().long() % 2**angle_bits
    return PolarKeys((radius / step).round().clamp(0, top), turns, step, angle_bits)
