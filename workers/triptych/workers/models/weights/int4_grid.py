"""Weights on grids of 16 steps, one grid for a group of neighbours in a row.

Weights that were quantized to 4 bits lie on such grids already, whatever tool did it: groups of
GPTQ and AWQ, blocks of GGUF's ``Q4_0``, ``Q4_1`` and ``Q4_K``. Their grid is found again from the
numbers, so that one format in memory keeps all of them without a further error.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

GROUP = 32
"""Weights of a group, where the weights do not tell."""
GROUPS = (128, 64, GROUP)
LEVELS = 16
INT4_BYTES = 1 / 2 + 4 / GROUP
"""Of a weight in memory: 4 bits, and a step and a middle in 16 bits for each group."""
TOLERANCE = 2**-7
"""Largest distance to a grid, of the largest weight of the group: two roundings to 16 bits."""
EXACT_SHARE = 0.999
"""Least share of groups that lie on a grid, for weights to count as quantized to 4 bits."""
SAMPLED_ROWS = 16
"""Rows of weights that are looked at first."""
_AT_ONCE = 1 << 23
"""Weights that are fitted together; bounds the memory."""


@dataclass(frozen=True, slots=True)
class Int4Grid:
    """Weights as ``lowest + step * levels``."""

    levels: Tensor
    """0 to 15: (out, in) uint8"""
    step: Tensor
    """(out, in / group) float32"""
    lowest: Tensor
    """(out, in / group) float32"""
    is_exact: bool
    """Whether the weights lay on the grid."""

    @property
    def group(self) -> int:
        """Weights of a group."""
        return self.levels.shape[1] // self.step.shape[1]

    @property
    def middle(self) -> Tensor:
        """The weight of the middle level, (out, in / group) float32."""
        return self.lowest + LEVELS // 2 * self.step

    def weights(self) -> Tensor:
        """Shapes:  (out, in) float32"""
        groups = self.levels.view(*self.step.shape, self.group).float()
        return (groups * self.step[..., None] + self.lowest[..., None]).flatten(1)


def find_grid(weight: Tensor) -> Int4Grid | None:
    """The grid of the largest groups on which weights lie; None if they lie on none.

    Shapes:  weight (out, in)
    """
    sample = weight[:: -(-len(weight) // SAMPLED_ROWS)]
    for group in GROUPS:
        if weight.shape[1] % group or not fit_grid(sample, group=group, search=True).is_exact:
            continue
        grid = fit_grid(weight, group=group, search=True)
        if grid.is_exact:
            return grid
    return None


def fit_grid(weight: Tensor, *, group: int = GROUP, search: bool = False) -> Int4Grid:
    """Find the grid of each group of weights.

    ``search``: also grids of which the weights use fewer than 16 levels. Only weights that were
    quantized have such; for others the grid from the smallest to the largest has the least error.

    Shapes:  weight (out, in), ``in`` a multiple of the group
    """
    rows, columns = weight.shape
    groups = weight.reshape(-1, group)
    each = max(1, _AT_ONCE // group)
    starts = range(0, len(groups), each)
    parts = [_fit(groups[at : at + each].float(), search=search) for at in starts]
    levels, step, lowest, exact = (torch.cat(part) for part in zip(*parts, strict=True))
    shape = (rows, columns // group)
    return Int4Grid(
        levels.view(rows, columns),
        step.view(shape),
        lowest.view(shape),
        is_exact=bool(exact.float().mean() >= EXACT_SHARE),
    )


def _fit(groups: Tensor, *, search: bool) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Levels, step and lowest weight of each group, and whether its weights lie on the grid.

    Shapes:  groups (N, group) -> (N, group) uint8, (N,), (N,), (N,) bool
    """
    low, high = groups.aminmax(dim=1, keepdim=True)
    allowed = (TOLERANCE * torch.maximum(low.abs(), high.abs()))[:, 0]
    last = torch.full((len(groups), 1), LEVELS - 1.0)
    exact = torch.zeros(len(groups), dtype=torch.bool)
    left = torch.arange(len(groups))
    for steps in range(LEVELS - 1, 0 if search else LEVELS - 2, -1):
        step = (high[left] - low[left]).clamp_min(torch.finfo(torch.float32).tiny) / steps
        offset = groups[left] - low[left]
        fits = (offset - (offset / step).round() * step).abs().amax(1) <= allowed[left]
        last[left[fits]] = steps
        exact[left[fits]] = True
        left = left[~fits]
        if not len(left):
            break
    step = (high - low).clamp_min(torch.finfo(torch.float32).tiny) / last
    levels = ((groups - low) / step).round()
    return levels.to(torch.uint8), *_least_squares(groups, levels, step[:, 0], low[:, 0]), exact


def _least_squares(
    groups: Tensor, levels: Tensor, step: Tensor, low: Tensor
) -> tuple[Tensor, Tensor]:
    """Step and lowest weight that are nearest to the weights; as given where all are equal."""
    mean, middle = groups.mean(1, keepdim=True), levels.mean(1, keepdim=True)
    spread = (levels - middle).square().sum(1)
    slope = ((levels - middle) * (groups - mean)).sum(1) / spread
    is_flat = spread == 0
    slope = torch.where(is_flat, step, slope)
    return slope, torch.where(is_flat, low, mean[:, 0] - slope * middle[:, 0])
