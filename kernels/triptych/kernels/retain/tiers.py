"""Tiers of tokens by rate and distortion: dropped, low or high."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor

STEPS = 40
"""Halvings of the interval that the price lies in."""


@dataclass(frozen=True, slots=True)
class Tiers:
    """What it takes to store a token in each tier, and what is lost of its value there."""

    bytes: Sequence[float]
    """Of a token that is dropped (0), low and high."""
    distortions: Tensor
    """Squared error of the value of each token in these tiers, [l, KH, N, 3] float32."""


def choose_tiers(
    weight: Tensor, distortion: Tensor, rates: Sequence[float], mean_rate: float
) -> Tensor:
    """The tier of each token with the least weighted distortion in a budget.

    A token takes the tier with the least ``weight * distortion + price * rate``. The price is the
    lowest one at which the mean rate of all tokens stays in the budget; a token whose tiers cost
    the same takes the first of them. Rates of tiers ascend.

    Shapes:  weight [...]; distortion [..., tiers] -> int64 [...]
    Units:   rates and their mean: any, such as bytes of a token
    Promise: the mean rate is above the budget only if that is below the first rate: then all tokens
             take the first tier
    Source:  Spherical KV (tiers by rate and distortion); the price is found by bisection
    """
    cost = torch.tensor(rates, dtype=torch.float64, device=weight.device)
    error = weight.double()[..., None] * distortion.double()
    if not error.numel():
        return torch.zeros(weight.shape, dtype=torch.int64, device=weight.device)
    least = min(after - before for before, after in pairwise(rates))
    low, high = 0.0, (float(error.max()) + 1.0) / least
    for _ in range(STEPS):
        price = (low + high) / 2
        spent = cost[(error + price * cost).argmin(-1)].mean()
        low, high = (low, price) if spent <= mean_rate else (price, high)
    return (error + high * cost).argmin(-1)


def value_distortions(values: Tensor, bits: Sequence[int]) -> Tensor:
    """Squared errors of values that are dropped, or stored as codes of their range.

    A dropped value is lost. The error of a code is the mean one of rounding: a twelfth of the
    square of the step, in each channel.

    Shapes:  values [..., d]; -> [..., 1 + len(bits)]
    Units:   bits of a code
    """
    width, dim = values.amax(-1) - values.amin(-1), values.shape[-1]
    coded = [dim / 12 * (width / (2**each - 1)).square() for each in bits]
    return torch.stack((values.square().sum(-1), *coded), -1)
