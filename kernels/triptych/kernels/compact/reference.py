"""Reference of ``plan_tokens``: thresholds, then a prefix sum for each class."""

import torch
from torch import Tensor

DROPPED, LOW, HIGH, NOTHING = 0, 1, 2, 255


def plan_tokens(
    scores: Tensor, tokens: Tensor, high: Tensor, low: Tensor, *, first: int = 0, window: int = 0
) -> tuple[Tensor, Tensor, Tensor]:
    """Classify all tokens of a prompt, and rank each within its class in order of position.

    High are the ``first`` tokens of a row, its last ``window`` tokens, and tokens with a score of
    at least ``high``. Low are the other tokens with a score of at least ``low``. The rest is
    dropped. Ranks are exclusive prefix sums: nothing is sorted, and the counts are exact before a
    page is allocated.

    Shapes:  scores [rows, N], mean significance; tokens, high, low [rows]
             -> classes, ranks [rows, N]; counts [rows, 2], high and low
    Dtypes:  scores, high, low float32; tokens int32 -> uint8 (255 beyond ``tokens``); int32,
             0 where nothing is stored; int32
    Source:  DiffKV, section 4; LeanKV (coordination by prefix sum)
    """
    position = torch.arange(scores.shape[1], device=scores.device, dtype=torch.int32)
    live = position < tokens[:, None]
    kept = (position < first) | (position >= tokens[:, None] - window)
    is_high = live & (kept | (scores >= high[:, None]))
    is_low = live & ~is_high & (scores >= low[:, None])
    classes = torch.where(live, is_low.byte() * LOW + is_high.byte() * HIGH, NOTHING)
    ranks = torch.zeros_like(scores, dtype=torch.int32)
    for chosen in (is_high, is_low):
        ranks = torch.where(chosen, chosen.int().cumsum(1, dtype=torch.int32) - 1, ranks)
    counts = torch.stack((is_high.sum(1), is_low.sum(1)), 1)
    return classes.to(torch.uint8), ranks, counts.int()
