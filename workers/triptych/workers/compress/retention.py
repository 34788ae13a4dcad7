"""Retention rules on the raw pages of a prompt: which tokens its policy keeps, and how."""

from collections.abc import Iterator
from dataclasses import replace

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from triptych.core.pages import PagePlan
from triptych.core.policy import Retention
from triptych.kernels import load_tokens
from triptych.kernels.pages import segments
from triptych.kernels.retain import (
    BUDGETS,
    SCORES,
    KeyScore,
    ObservedPrompt,
    Tiers,
    value_distortions,
)
from triptych.workers.kv.device_pages import DevicePages
from triptych.workers.models.kv_rotation import Coordinates

Ids = NDArray[np.int32]
HIGH = 2
"""Class of tokens that are high."""


def retained(
    memory: DevicePages,
    plan: PagePlan,
    rule: Retention,
    raw: Ids,
    tokens: int,
    rows_before: int,
    concerned: Ids,
    competing: Ids,
) -> Tensor:
    """The classes of tokens in each head row, uint8 [head rows, tokens]: 0 dropped, 1 low, 2 high.

    ``raw``: raw pages of whole layers, [head rows, pages]; ``rows_before``: head rows of the layers
    in front of them; ``concerned``: positions of the tokens of which a share is kept: all, or those
    of one modality; ``competing``: positions of those about which the rule decides. The others are
    kept anyway, and count towards the budget if they are concerned.
    """
    kv_heads = plan.geometry.kv_heads
    layers = range(rows_before // kv_heads, (rows_before + len(raw)) // kv_heads)
    there = memory.device
    scores = segments(memory.near, plan.raw).scores[there.put(raw).long()]
    at = there.put(concerned).long()
    prompt = ObservedPrompt(
        tokens=tokens,
        kv_heads=kv_heads,
        layers=layers,
        model_layers=plan.geometry.layers,
        attention=scores.flatten(1)[:, :tokens].reshape(len(layers), kv_heads, tokens),
        of_keys=lambda score: _of_keys(score, memory, plan, raw, tokens, layers),
        kept=rule.most_tokens(concerned.size),
        head_shares=rule.head_shares,
        layer_errors=rule.layer_errors,
        tiers=None if plan.low is None else lambda: _tiers(memory, plan, raw, tokens, at),
    )
    always = torch.ones(tokens, dtype=torch.bool, device=there.name)
    always[there.put(competing).long()] = False
    found = SCORES[rule.score](prompt).masked_fill(always, float("inf"))
    of_these = BUDGETS[rule.budget](found[..., at], replace(prompt, tokens=concerned.size))
    classes = torch.full_like(found, HIGH, dtype=torch.uint8)
    is_mask = of_these.dtype == torch.bool
    classes[..., at] = of_these.to(torch.uint8) * (HIGH if is_mask else 1)
    return classes.reshape(len(raw), tokens)


def _tiers(memory: DevicePages, plan: PagePlan, raw: Ids, tokens: int, at: Tensor) -> Tiers:
    """Bytes of the classes, and distortions of the values of tokens ``at``."""
    low = plan.low
    assert low is not None
    forms = low.format, plan.high.format
    found = [
        value_distortions(values[:, at], [form.value_bits for form in forms])
        for _, values in _vectors(memory, plan, raw, tokens)
    ]
    return Tiers((0, low.token_bytes, plan.high.token_bytes), torch.stack(found))


def _vectors(
    memory: DevicePages, plan: PagePlan, raw: Ids, tokens: int
) -> Iterator[tuple[Tensor, Tensor]]:
    """Stored keys and values of each layer, [kv_heads, tokens, d] float32."""
    kv_heads, put = plan.geometry.kv_heads, memory.device.put
    counts = put(np.full(kv_heads, tokens, np.int32))
    for pages in np.split(raw, len(raw) // kv_heads):
        keys, values, _ = load_tokens(
            memory.near, plan.raw, put(np.ascontiguousarray(pages)), counts
        )
        yield keys, values


def _of_keys(
    score: KeyScore, memory: DevicePages, plan: PagePlan, raw: Ids, tokens: int, layers: range
) -> Tensor:
    """Scores of keys, [layers, kv_heads, tokens], layer by layer.

    Pages hold rotated and centred keys; a rotation changes neither norms nor angles.
    """
    rotation = Coordinates.of(plan.policy.kv_rotation, plan.geometry)
    found = list[Tensor]()
    for (keys, _), layer in zip(_vectors(memory, plan, raw, tokens), layers, strict=True):
        if rotation is not None:
            keys = keys + rotation.centre[layer].to(keys.device)[:, None]
        found.append(score(keys))
    return torch.stack(found)
