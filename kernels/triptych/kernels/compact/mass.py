"""LeanKV's cumulative thresholds: score limits from a share of the total attention."""

import torch
from torch import Tensor


def mass_limits(scores: Tensor, total: Tensor, mass: float) -> Tensor:
    """Score limit of each row: the tokens below it hold less than ``mass`` of all attention.

    Tokens are summed in ascending order while the sum is below ``mass * total``; the limit is the
    score of the next token, or infinity.

    Shapes:  scores [rows, N], significance of the tokens to classify; total [rows], the sum over
             all tokens of the row, the unclassified ones included -> [rows]
    Dtypes:  float32
    Source:  LeanKV, section 4.2 (cumulative thresholds, prompt phase)
    """
    if mass <= 0 or scores.shape[1] == 0:
        return scores.new_zeros(len(scores))
    ordered = scores.sort(dim=1).values
    gone = (ordered.cumsum(1) < mass * total[:, None]).sum(1, keepdim=True)
    beyond = scores.new_full((len(scores), 1), float("inf"))
    return torch.cat((ordered, beyond), 1).gather(1, gone)[:, 0]
