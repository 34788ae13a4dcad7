"""Reference of sampling: sort a row, filter it, and invert its cumulative distribution."""

import torch
from torch import Tensor

NO_TOKEN = -1
"""In place of a token: the logits of the row are not finite."""
SETTINGS = 5
"""Numbers of a row: temperature (0: greedy), top-k (0: all), top-p, logarithm of min-p, and a
random number in [0, 1)."""


def draw_tokens(logits: Tensor, settings: Tensor | None) -> Tensor:
    """Sample one token of each row; the most likely one, the first of several, if it is greedy.

    Logits are divided by the temperature. Top-k keeps the k most likely tokens, top-p the fewest of
    these that have at least that share of their probability, min-p those that have at least that
    share of the largest probability. Ties at a border all stay. The token is the first one, in the
    order of ids, whose cumulative probability exceeds the random number. If the largest logit of a
    row is not finite, or the row has a NaN, its token is -1. ``settings``: None: all rows are
    greedy.

    Shapes:  logits [N, vocab]; settings [5, N] -> [N]
    Dtypes:  logits float32; settings float64; output int64
    """
    best = logits.max(1).values
    tokens = (logits == best[:, None]).int().argmax(1)
    if settings is not None:
        for row in range(len(tokens)):
            if settings[0, row] > 0 and best[row].isfinite():
                tokens[row] = _drawn(logits[row] - best[row], settings[:, row])
    return tokens.where(best.isfinite(), NO_TOKEN)


def _drawn(logits: Tensor, settings: Tensor) -> Tensor:
    temperature, top_k, top_p, log_min_p, uniform = settings
    scaled = logits / temperature.float()
    ordered = scaled.sort(descending=True).values
    kept = torch.ones_like(scaled, dtype=torch.bool)
    if 0 < top_k < len(scaled):
        kept &= scaled >= ordered[int(top_k) - 1]
    if top_p < 1:
        ordered = ordered[: int(kept.sum())]
        mass = ordered.exp().cumsum(0, dtype=torch.float64)
        needed = int((mass < top_p * mass[-1]).sum())
        kept &= scaled >= ordered[needed]
    kept &= scaled >= log_min_p.float()
    cumulative = (scaled.exp() * kept).cumsum(0, dtype=torch.float64)
    total = cumulative[-1]
    target = torch.minimum(uniform * total, total.nextafter(torch.zeros_like(total)))
    return torch.searchsorted(cumulative, target, right=True)
