# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false
# pyright: reportUnknownArgumentType=false
# torch leaves Tensor.unflatten and others untyped in part.
"""How attention weights and values are distributed, and how many tokens have most of it."""

from collections.abc import Mapping
from statistics import fmean

import torch
from torch import Tensor

from triptych.evals.claims.draw import Draw
from triptych.evals.training.captures import Capture

LOW_QUANTILE, HIGH_QUANTILE = 0.01, 0.999
"""Ends of a range, as in LeanKV's figure 1."""
MASS = 0.95
"""Share of attention that the critical tokens have."""


def ranges(draw: Draw) -> Mapping[str, float]:
    """Orders of magnitude between the 1 % and the 99.9 % quantile, over all layers.

    Weights of the queries behind the context on its tokens, and Euclidean norms of the values.

    Source: LeanKV, figure 1 (seven orders for scores, two for norms of values)
    """
    weights = [_orders(context_weights(capture)) for capture in draw.captures]
    norms = [
        _orders(capture.values[:, :, : capture.context].float().norm(dim=-1))
        for capture in draw.captures
    ]
    return {"weights, orders": fmean(weights), "value norms, orders": fmean(norms)}


def critical_tokens(draw: Draw) -> Mapping[str, float]:
    """Tokens that together have 95 % of the attention, as a share of the context.

    Means over queries: by layer the mean and the standard deviation over heads, and over all heads
    the mean, the least, the most and the deviation between queries.

    Source: LeanKV, figures 2 and 3 (they differ between layers, heads and requests)
    """
    found = torch.stack([critical_shares(capture) for capture in draw.captures]).mean(0)
    means, deviations = found[..., 0], found[..., 1]
    whole = {
        "mean of all heads": float(means.mean()),
        "least head": float(means.min()),
        "most head": float(means.max()),
        "deviation between heads": float(means.std()),
        "deviation between queries of a head": float(deviations.mean()),
    }
    for layer, heads in enumerate(means):
        whole[f"layer {layer}, mean"] = float(heads.mean())
        whole[f"layer {layer}, deviation between heads"] = float(heads.std())
    return whole


def context_weights(capture: Capture) -> Tensor:
    """Attention of the captured queries on the context: [L, H, M, N] float32."""
    keys = capture.keys[:, :, : capture.context].float()
    grouped = capture.queries.float().unflatten(1, (keys.shape[1], -1))
    logits = (grouped @ keys[:, :, None].mT).flatten(1, 2)
    return (logits - capture.lse[..., None]).exp()


def critical_shares(capture: Capture) -> Tensor:
    """Mean and deviation over queries of the share of tokens that has ``MASS``: [L, H, 2]."""
    parts = list[Tensor]()
    for weights in context_weights(capture):
        ordered = weights.sort(-1, descending=True).values.cumsum(-1)
        wanted = MASS * ordered[..., -1:]
        counts = (ordered < wanted).sum(-1).float() + 1
        shares = counts / capture.context
        parts.append(torch.stack((shares.mean(-1), shares.std(-1)), -1))
    return torch.stack(parts)


def _orders(values: Tensor) -> float:
    """Decimal orders between two quantiles of positive numbers; zeros count as the least one."""
    ordered = values.flatten().sort().values
    low, high = (
        float(ordered[min(len(ordered) - 1, int(share * len(ordered)))])
        for share in (LOW_QUANTILE, HIGH_QUANTILE)
    )
    least = float(torch.finfo(torch.float32).tiny)
    return float(torch.tensor(max(high, least) / max(low, least)).log10())
