"""How 4-bit weights lie in memory: tiles of 32 outputs, one group of inputs after another."""

from dataclasses import dataclass, field, replace

import numpy as np
import torch
from torch import Tensor

LANES = 16
OUTPUTS = 2 * LANES
"""Outputs of a tile, in two vectors of floats."""
LEVELS = 16
ZERO_LEVEL = LEVELS // 2
PIECE = 32
"""Groups are multiples of so many inputs."""
PAIRS = 4
"""Pairs of inputs of which a word of 16 bits has the levels, the first in its lowest bits. A word
has the first inputs of its pairs, and the next word the second ones."""
PIECE_BYTES = PIECE * OUTPUTS // 2
"""Of the levels of a piece of a tile."""
GRID_BYTES = 4 * OUTPUTS
"""Before the levels of a group: a step for each output in the lower half of a word, and the weight
of ``ZERO_LEVEL`` in the upper, both in bfloat16."""
TABLE = [
    int(np.float32(index % LEVELS - ZERO_LEVEL).view(np.uint32)) >> 16 for index in range(2 * LANES)
]
"""Weights of levels, as bfloat16. A permutation reads five bits of a word: a level and one more."""


@dataclass(frozen=True, slots=True)
class Int4Tiles:
    """Weights of a product in 4 bits: ``(level - ZERO_LEVEL) * step + middle``."""

    tiles: Tensor
    """(out / 32, bytes of a tile) uint8"""
    groups: int
    """Groups of a row of weights."""
    is_gated: bool = False
    """Whether the product is ``silu`` of the first half of the outputs, times the second: a tile
    has 16 outputs of each half."""
    is_for_few_rows: bool = False
    """Whether products are those of decode steps, in the order of additions that is fastest there:
    on processors with AMX their weights are not rounded to bfloat16."""
    rounds_inputs: bool = False
    """Whether inputs may be rounded to 8 bits, as they are on processors that do not multiply
    bfloat16: that takes 0.6 of the time of 16 bits."""
    shape: tuple[int, int] = field(init=False)
    """Outputs and inputs."""
    results: int = field(init=False)
    """Numbers of a row of the product."""

    def __post_init__(self) -> None:
        count, tile_bytes = self.tiles.shape
        outputs, columns = count * OUTPUTS, 2 * (tile_bytes - self.groups * GRID_BYTES) // OUTPUTS
        object.__setattr__(self, "shape", (outputs, columns))
        object.__setattr__(self, "results", outputs // 2 if self.is_gated else outputs)

    @classmethod
    def pack(
        cls, levels: Tensor, step: Tensor, middle: Tensor, *, is_gated: bool = False
    ) -> "Int4Tiles":
        """Steps and middles are rounded to bfloat16.

        Shapes:  levels (out, in) uint8, 0 to 15; step, middle (out, groups) float32
        """
        (outputs, columns), groups = levels.shape, step.shape[1]
        if is_gated:
            order = torch.arange(outputs).view(2, -1, LANES).transpose(0, 1).flatten()
            levels, step, middle = levels[order], step[order], middle[order]
        tiles, parts = outputs // OUTPUTS, columns // groups // (2 * PAIRS)
        lanes = levels.view(tiles, 2, LANES, groups, parts, PAIRS, 2)
        lanes = lanes.permute(0, 3, 4, 1, 2, 6, 5).int()
        words = (lanes << _shifts()).sum(-1, dtype=torch.int32).to(torch.uint16)
        codes = words.contiguous().view(torch.uint8).reshape(tiles, groups, -1)
        grids = torch.stack((step, middle), -1).bfloat16().view(tiles, OUTPUTS, groups, 2)
        grids = grids.transpose(1, 2).contiguous().view(torch.uint8).reshape(tiles, groups, -1)
        return cls(torch.cat((grids, codes), -1).flatten(1), groups, is_gated)

    def for_few_rows(self) -> "Int4Tiles":
        """The same weights for decode steps."""
        return replace(self, is_for_few_rows=True)

    def with_inputs_in_8_bits(self) -> "Int4Tiles":
        """The same weights for inputs that may be rounded."""
        return replace(self, rounds_inputs=True)

    def weights(self) -> Tensor:
        """The weights, (out, in) float32."""
        (outputs, columns), groups = self.shape, self.groups
        parts = self.tiles.view(len(self.tiles), groups, -1)
        grids = parts[..., :GRID_BYTES].contiguous().view(torch.bfloat16).float()
        step, middle = grids.view(len(parts), groups, 2, LANES, 1, 2).unbind(-1)
        words = parts[..., GRID_BYTES:].contiguous().view(torch.uint16).int()
        lanes = words.view(len(parts), groups, -1, 2, LANES, 2, 1) >> _shifts() & LEVELS - 1
        levels = lanes.permute(0, 1, 3, 4, 2, 6, 5).flatten(4) - ZERO_LEVEL
        weights = levels * step + middle  # tile, group, half, lane, input of the group
        halves = weights.permute(0, 2, 3, 1, 4).reshape(-1, 2, LANES, columns)
        return (halves.transpose(0, 1) if self.is_gated else halves).reshape(outputs, columns)


def _shifts() -> Tensor:
    return 4 * torch.arange(PAIRS, dtype=torch.int32)
