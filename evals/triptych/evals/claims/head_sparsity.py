# pyright: reportUnknownMemberType=false
# torch leaves some calls untyped.
"""Tokens that are kept by each head's own need, beside as many in each head."""

from collections.abc import Mapping
from statistics import fmean

import torch
from torch import Tensor

from triptych.evals.claims.draw import Draw
from triptych.evals.methods.replaced_cache import ReplacedCache
from triptych.evals.training.captures import Capture
from triptych.evals.training.output_matching import context_of, output_error

KEPT_SHARES = (0.5, 0.25, 0.1)
"""Shares of the context that are kept, of all head rows together."""
SINK_TOKENS, WINDOW_TOKENS = 3, 64
"""Tokens that are kept in any case."""


def dynamic_over_static(draw: Draw) -> Mapping[str, float]:
    """Error of attention outputs at equal bytes: one threshold, or as many tokens in each head.

    ``dynamic``: the tokens of largest significance of all heads of a layer together, as a threshold
    relative to the mean keeps them. ``static``: those of each head. Squared error over the square
    of the output, mean over layers and texts; then the share of texts whose error is no larger.

    Source: LeanKV, figure 8, and DiffKV, figure 9 (dynamic sparsity is better than static)
    """
    found = dict[str, float]()
    for share in KEPT_SHARES:
        errors = [
            tuple(_error(capture, kept(capture, share, by_head=by_head)) for by_head in (0, 1))
            for capture in draw.captures
        ]
        dynamic, static = zip(*errors, strict=True)
        found[f"keep {share:g}: error, dynamic"] = fmean(dynamic)
        found[f"keep {share:g}: error, static"] = fmean(static)
        found[f"keep {share:g}: texts where dynamic is no worse"] = fmean(
            one <= other for one, other in errors
        )
    return found


def kept(capture: Capture, share: float, *, by_head: bool | int) -> Tensor:
    """Which tokens of the context are kept: bool [L, KH, N], as many in each layer."""
    scores = capture.significance[capture.context].clone()
    layers, kv_heads, tokens = scores.shape
    scores[..., :SINK_TOKENS] = float("inf")
    scores[..., tokens - WINDOW_TOKENS :] = float("inf")
    rows = scores if by_head else scores.view(layers, 1, -1)
    count = round(share * rows.shape[2])
    mask = torch.zeros_like(rows, dtype=torch.bool)
    mask.scatter_(2, rows.topk(count, -1).indices, value=True)
    return mask.view(layers, kv_heads, tokens)


def _error(capture: Capture, mask: Tensor) -> float:
    cache = context_of(capture)
    dropped = torch.zeros(mask.shape).masked_fill(~mask, float("-inf"))
    error, _ = output_error(ReplacedCache(cache.keys, cache.values, dropped), capture)
    return float(error.mean())
