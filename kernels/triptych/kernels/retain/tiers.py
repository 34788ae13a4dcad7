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
    """Rates and distortions of tokens by tier: their bytes, and the errors of their values."""

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
    if not weight.numel():
        return torch.zeros_like(weight, dtype=torch.int64)
    error = weight.double()[..., None] * distortion.double()
    least = min(after - before for before, after in pairwise(rates))
    high = (error.max() + 1.0) / least
    low = torch.zeros_like(high)
    for _ in range(STEPS):
        # Without a condition of the host, which would wait for the device at each step.
        price = (low + high) / 2
        found = _cheapest(error, rates, price)
        shares = [(found == tier).double().mean() for tier in range(len(rates))]
        spent = torch.stack([share * rate for share, rate in zip(shares, rates, strict=True)]).sum()
        fits = spent <= mean_rate
        low, high = torch.where(fits, low, price), torch.where(fits, price, high)
    return _cheapest(error, rates, high)


def _cheapest(error: Tensor, rates: Sequence[float], price: Tensor) -> Tensor:
    parts = zip(error.unbind(-1), rates, strict=True)
    return torch.stack([part + price * rate for part, rate in parts], -1).argmin(-1)


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
