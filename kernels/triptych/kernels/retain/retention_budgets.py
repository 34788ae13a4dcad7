# pyright: reportUnknownMemberType=false
# torch leaves argsort untyped in part.
"""Budgets of retention rules: how the tokens that are kept divide among layers and heads."""

from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor

from triptych.kernels.retain.attention_moments import layer_preferences
from triptych.kernels.retain.observed_prompt import ObservedPrompt
from triptych.kernels.retain.retention_scores import WINDOW_TOKENS
from triptych.kernels.retain.tiers import choose_tiers

PYRAMID = 20
"""PyramidKV's beta: the last layer gets this many times less than the mean."""
SAFE_SHARE = 0.2
"""Ada-KV's safeguard: each head keeps this share of what it would keep without it."""

REPRESENTED_SHARE = 0.25
"""KVCrush's share of the budget for tokens that stand for others."""

LEAST_TOKENS = 32
"""CompressKV's least budget of a layer."""
MOST_TIMES = 3
"""CompressKV's largest budget of a layer, in multiples of the mean."""

Budget = Callable[[Tensor, ObservedPrompt], Tensor]
"""From scores [l, KH, N] to the tokens that are kept, bool [l, KH, N]; or to their classes, uint8:
0 dropped, 1 low, 2 high."""


def largest(scores: Tensor, count: int) -> Tensor:
    """Mask of the ``count`` largest of the last axis; ties go to the earlier.

    Shapes:  [..., N] -> bool [..., N]
    """
    order = scores.argsort(dim=-1, descending=True, stable=True)[..., : max(0, count)]
    return torch.zeros_like(scores, dtype=torch.bool).scatter_(-1, order, value=True)


def per_head(scores: Tensor, prompt: ObservedPrompt) -> Tensor:
    """The same number for each head row."""
    return largest(scores, prompt.kept)


def per_layer(scores: Tensor, prompt: ObservedPrompt) -> Tensor:
    """More in early layers and fewer in late ones.

    Source: PyramidKV, section 4
    """
    budgets = pyramid_budgets(prompt.model_layers, prompt.tokens, prompt.kept)
    rows = zip(scores, (budgets[layer] for layer in prompt.layers), strict=True)
    return torch.stack([largest(row, count) for row, count in rows])


def across_heads(scores: Tensor, prompt: ObservedPrompt) -> Tensor:
    """The best tokens of all heads of a layer together, after a least number for each head.

    Source: Ada-KV, algorithm 1 (safeguard 0.2); as in kvpress
    """
    safe = max(1, int(prompt.kept * SAFE_SHARE))
    scores = scores.masked_fill(largest(scores, safe), float("inf"))
    return largest(scores.flatten(1), prompt.kept * prompt.kv_heads).view_as(scores)


def by_preference(scores: Tensor, prompt: ObservedPrompt) -> Tensor:
    """More in layers whose attention is spread over many tokens and changes between queries.

    What is left of the budget behind the tokens that are always kept divides in proportion to the
    preferences of the layers; a layer that has fewer tokens leaves the rest to the others.

    Source: CAKE (preference-prioritized allocation); all layers at once, so no cascade
    """
    always = int(scores[0, 0].isinf().sum())
    preferences = [float(one) for one in layer_preferences(prompt.attention)]
    free = max(0, prompt.kept - always)
    budgets = divided(free * len(scores), preferences, prompt.tokens - always)
    rows = zip(scores, budgets, strict=True)
    return torch.stack([largest(row, min(always, prompt.kept) + count) for row, count in rows])


def with_representatives(scores: Tensor, prompt: ObservedPrompt) -> Tensor:
    """The best tokens of each head row, and a quarter of the budget for tokens that stand for the
    others.

    A token is described by one bit for each head of its layer: whether it is in the better half of
    the tokens about which the rule decides. The tokens that are not among the best are put in order
    of the Hamming distance between their bits and 0, 1, 0, 1, ...; those at even steps are kept.

    Source: KVCrush (signatures by the behaviour of heads, an anchor, representatives); share,
            anchor and even steps as in the authors' code, tokens instead of pages
    """
    tokens, kv_heads = scores.shape[-1], scores.shape[1]
    always = int(scores[0, 0].isinf().sum())
    representatives = int(max(0, prompt.kept - always) * REPRESENTED_SHARE)
    kept = largest(scores, prompt.kept - representatives)
    bits = largest(scores.masked_fill(scores.isinf(), float("-inf")), (tokens - always) // 2)
    anchor = torch.arange(kv_heads, device=scores.device) % 2 == 1
    distances = (bits != anchor[:, None]).sum(1, keepdim=True).expand_as(bits)
    order = distances.masked_fill(kept, kv_heads + 1).argsort(dim=-1, stable=True)
    steps = torch.arange(representatives, device=scores.device)
    others = tokens - min(tokens, prompt.kept - representatives)
    return kept.scatter_(-1, order[..., steps * others // max(1, representatives)], value=True)


def by_calibration(scores: Tensor, prompt: ObservedPrompt) -> Tensor:
    """Fixed budgets of head rows, measured by calibration: the same for every prompt.

    What is left of the budget behind the tokens that are always kept divides in proportion to the
    shares of all head rows of the model.

    Source: Tangram (static ratios of heads, known when a request is admitted)
    """
    always, kv_heads = int(scores[0, 0].isinf().sum()), prompt.kv_heads
    free = max(0, prompt.kept - always) * prompt.model_layers * kv_heads
    budgets = divided(free, prompt.head_shares, prompt.tokens - always)
    own = budgets[prompt.layers.start * kv_heads : prompt.layers.stop * kv_heads]
    rows = zip(scores.flatten(0, 1), own, strict=True)
    kept = [largest(row, min(always, prompt.kept) + count) for row, count in rows]
    return torch.stack(kept).view_as(scores)


def by_layer_error(scores: Tensor, prompt: ObservedPrompt) -> Tensor:
    """Fixed budgets of layers, by the error that calibration found when they keep few tokens.

    Source: CompressKV (error-aware budgets)
    """
    always = int(scores[0, 0].isinf().sum())
    least = min(prompt.kept, max(LEAST_TOKENS, always))
    most = min(prompt.tokens, MOST_TIMES * prompt.kept)
    total = prompt.kept * prompt.model_layers
    budgets = error_budgets(prompt.layer_errors, total, least, most)
    rows = zip(scores, (budgets[layer] for layer in prompt.layers), strict=True)
    return torch.stack([largest(row, count) for row, count in rows])


def rate_and_distortion(scores: Tensor, prompt: ObservedPrompt) -> Tensor:
    """The classes with the least distortion, weighted by the scores, of the tokens of each layer.

    All heads of a layer share a budget: the bytes of ``prompt.kept`` high tokens of each. Tokens
    that are always kept are high and count towards it.

    Source: Spherical KV (keep or drop, and a tier, by rate and distortion); tiers of tokens of a
            layer, by the distortion of their values
    """
    assert prompt.tiers is not None
    tiers, kept = prompt.tiers(), scores.isinf()[0, 0]
    free = ~kept
    budget = tiers.bytes[-1] * (prompt.kept - int(kept.sum()))
    mean = budget / max(1, int(free.sum()))
    classes = torch.full_like(scores, len(tiers.bytes) - 1, dtype=torch.uint8)
    for layer, weights, distortions in zip(classes, scores, tiers.distortions, strict=True):
        found = choose_tiers(weights[:, free], distortions[:, free], tiers.bytes, mean)
        layer[:, free] = found.to(torch.uint8)
    return classes


BUDGETS: Mapping[str, Budget] = {
    budget.__name__: budget
    for budget in (
        *(per_head, per_layer, across_heads, by_preference, with_representatives),
        *(by_calibration, by_layer_error, rate_and_distortion),
    )
}
"""Budgets by name."""


def divided(total: int, weights: Sequence[float], most: int) -> list[int]:
    """``total`` in whole parts in proportion to weights, none above ``most``.

    What is cut off is shared equally by the parts below ``most``, the first ones first.

    Source: CAKE, the authors' code (``adjust_budgets``)
    """
    whole = sum(weights)
    wishes = [total * weight / whole if whole > 0 else total / len(weights) for weight in weights]
    parts = [min(most, int(wish)) for wish in wishes]
    while left := total - sum(parts):
        free = [index for index, part in enumerate(parts) if part < most]
        if not free:
            break
        share, more = divmod(left, len(free))
        for rank, index in enumerate(free):
            parts[index] = min(most, parts[index] + share + (rank < more))
    return parts


def error_budgets(errors: Sequence[float], total: int, least: int, most: int) -> list[int]:
    """Tokens of each layer: ``least``, and the rest in proportion to the errors, at most ``most``.

    What is missing or too much is given or taken one by one: given to layers with large errors
    first, taken from those with small ones first.

    Source: CompressKV, the authors' code (``error_aware_layer_budget_allocation``)

    >>> error_budgets([3.0, 1.0, 0.0], total=300, least=20, most=150)
    [150, 105, 45]
    """
    layers, whole = len(errors), sum(errors)
    shares = [error / whole if whole > 0 else 1 / layers for error in errors]
    rest = total - least * layers
    found = [min(most, max(least, least + round(share * rest))) for share in shares]
    order = sorted(range(layers), key=lambda layer: -shares[layer])
    left = total - sum(found)
    while left:
        step = 1 if left > 0 else -1
        free = [one for one in order[::step] if least <= found[one] + step <= most]
        if not free:
            break
        for layer in free[: abs(left)]:
            found[layer] += step
        left -= step * min(len(free), abs(left))
    return found


def pyramid_budgets(layers: int, tokens: int, budget: int) -> list[int]:
    """Tokens of each layer: from ``2 budget - budget / 20`` down to ``budget / 20``, linearly.

    The sum is that of ``budget`` for each layer. A layer has at most ``tokens`` and at least
    SnapKV's window; layers between these limits share the remainder.

    Source: PyramidKV, section 4.2
    """
    least = min(max(min(WINDOW_TOKENS, budget), budget // PYRAMID), tokens)
    steps = range(layers)
    line = [budget + (budget - budget / PYRAMID) * (1 - 2 * i / max(1, layers - 1)) for i in steps]
    found = [min(tokens, max(least, round(wish))) for wish in line]
    left = budget * layers - sum(found)
    while left:
        step = 1 if left > 0 else -1
        free = [i for i in steps if least <= found[i] + step <= tokens]
        if not free:
            break
        for i in free[: abs(left)]:
            found[i] += step
        left -= step * min(len(free), abs(left))
    return found
