"""LeanKV's thresholds: how much of all attention the tokens below them receive together."""

import torch
from torch import Tensor


def mass_limits(scores: Tensor, total: Tensor, mass: float) -> Tensor:
    """The score from which on tokens stay, if those below hold less than ``mass`` of all attention.

    Tokens are taken from the least one on while their running sum is below ``mass * total``.

    Shapes:  scores [rows, N], significance of the tokens to class; total [rows], the sum over all
             tokens of the row, those that are not to class included -> [rows]
    Dtypes:  float32
    Source:  LeanKV, section 4.2 (cumulative thresholds, prompt phase)
    """
    if mass <= 0 or scores.shape[1] == 0:
        return scores.new_zeros(len(scores))
    ordered = scores.sort(dim=1).values
    gone = (ordered.cumsum(1) < mass * total[:, None]).sum(1, keepdim=True)
    beyond = scores.new_full((len(scores), 1), float("inf"))
    return torch.cat((ordered, beyond), 1).gather(1, gone)[:, 0]
