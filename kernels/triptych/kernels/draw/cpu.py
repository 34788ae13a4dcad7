# torch leaves Tensor.tolist untyped.
# pyright: reportUnknownMemberType=false
"""Sampling on the CPU, row by row: the numbers of a row stay in the core's cache."""

from math import isfinite, nextafter
from typing import cast

import numpy as np
import torch
from torch import Tensor

from triptych.kernels.draw.reference import NO_TOKEN

_FLOORS = (-8.0, -16.0, -torch.inf)
"""Scaled logits from which tokens are candidates: e**-8 is 1/3000 of the best one."""


def draw_tokens(logits: Tensor, settings: Tensor | None) -> Tensor:
    """See ``reference.draw_tokens``.

    The largest logits are found by numpy, which takes a third of torch's time: 42 us for 8 rows of
    49,152.
    """
    numbers = logits.numpy()
    tokens = numbers.argmax(axis=-1)
    best: list[float] = numbers[np.arange(len(numbers)), tokens].tolist()
    asked = [] if settings is None else cast("list[list[float]]", settings.T.tolist())
    for row, value in enumerate(best):
        if not isfinite(value):
            tokens[row] = NO_TOKEN
        elif asked and asked[row][0] > 0:
            tokens[row] = _drawn(logits[row], value, *asked[row])
    return torch.from_numpy(tokens)


def _drawn(
    logits: Tensor,
    best: float,
    temperature: float,
    top_k: float,
    top_p: float,
    log_min_p: float,
    uniform: float,
) -> int:
    """Sample by the inverse of the cumulative distribution, in the order of token ids.

    Weights are relative to the most likely token, so they need no normalisation. One row
    at a time: for 16 rows of 49,152 logits that is several times faster than passes over all of
    them.

    Shapes:  logits (vocab,)
    """
    scaled = logits.sub(best).div_(temperature)
    border = _border(scaled, int(top_k), top_p, log_min_p)
    kept = (scaled >= border).nonzero().squeeze(1) if border > -torch.inf else None
    weights = (scaled if kept is None else scaled[kept]).exp()
    cumulative = weights.cumsum(dim=0, dtype=torch.float64)
    total = float(cumulative[-1])
    target = min(uniform * total, nextafter(total, 0.0))
    place = int(torch.searchsorted(cumulative, target, right=True))
    return place if kept is None else int(kept[place])


def _border(scaled: Tensor, top_k: int, top_p: float, least: float) -> float:
    """The lowest scaled logit that top-k, top-p and min-p keep; the best one is 0.

    Only tokens near the best one are sorted, more of them until the border is found.

    Shapes:  scaled (vocab,)
    """
    vocab = scaled.shape[0]
    top_k = top_k if 0 < top_k < vocab else vocab
    if top_k == vocab and top_p >= 1.0:
        return least
    total = float(scaled.exp().sum(dtype=torch.float64)) if top_k == vocab else None
    for floor in _FLOORS:
        near = scaled[scaled >= floor].sort(descending=True).values
        found = _border_among(near, top_k, top_p, total)
        if found is not None:
            return max(found, least)
    return least


def _border_among(near: Tensor, top_k: int, top_p: float, total: float | None) -> float | None:
    """The border, if it lies among the best tokens; ``total``: weight of all, if top-k keeps all.

    Shapes:  near (M,), falling
    """
    kept = near
    if total is None:
        if near.shape[0] < top_k:
            return None
        kept = near[near >= near[top_k - 1]]
    if top_p >= 1.0:
        return float(kept[-1])
    mass = kept.exp().cumsum(0, dtype=torch.float64)
    wanted = top_p * (float(mass[-1]) if total is None else total)
    needed = int((mass < wanted).sum())
    return float(kept[needed]) if needed < kept.shape[0] else None
