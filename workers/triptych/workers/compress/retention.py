"""Retention rules on the raw pages of a prompt: which tokens its policy keeps."""

from dataclasses import replace

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from triptych.core.pages import PagePlan
from triptych.core.policy import Retention
from triptych.kernels import load_tokens
from triptych.kernels.pages import segments
from triptych.kernels.retain import BUDGETS, SCORES, KeyScore, ObservedPrompt
from triptych.workers.kv.device_pages import DevicePages
from triptych.workers.models.kv_rotation import Coordinates

Ids = NDArray[np.int32]


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
    """The tokens that each head row keeps, bool [head rows, tokens].

    ``raw``: raw pages of whole layers, [head rows, pages]; ``rows_before``: head rows of the layers
    in front of them; ``concerned``: positions of the tokens of which a share is kept: all, or those
    of one modality; ``competing``: positions of those about which the rule decides. The others are
    kept anyway, and count towards the budget if they are concerned.
    """
    kv_heads = plan.geometry.kv_heads
    layers = range(rows_before // kv_heads, (rows_before + len(raw)) // kv_heads)
    there = memory.device
    scores = segments(memory.near, plan.raw).scores[there.put(raw).long()]
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
    )
    always = torch.ones(tokens, dtype=torch.bool, device=there.name)
    always[there.put(competing).long()] = False
    found = SCORES[rule.score](prompt).masked_fill(always, float("inf"))
    at = there.put(concerned).long()
    of_these = BUDGETS[rule.budget](found[..., at], replace(prompt, tokens=concerned.size))
    kept = torch.ones_like(found, dtype=torch.bool)
    kept[..., at] = of_these
    return kept.reshape(len(raw), tokens)


def _of_keys(
    score: KeyScore, memory: DevicePages, plan: PagePlan, raw: Ids, tokens: int, layers: range
) -> Tensor:
    """Scores of keys, [layers, kv_heads, tokens], layer by layer.

    Pages hold rotated and centred keys; a rotation changes neither norms nor angles.
    """
    kv_heads, put = plan.geometry.kv_heads, memory.device.put
    rotation = Coordinates.of(plan.policy.kv_rotation, plan.geometry)
    counts = put(np.full(kv_heads, tokens, np.int32))
    found = list[Tensor]()
    for pages, layer in zip(np.split(raw, len(layers)), layers, strict=True):
        keys, _, _ = load_tokens(memory.near, plan.raw, put(np.ascontiguousarray(pages)), counts)
        if rotation is not None:
            keys = keys + rotation.centre[layer].to(keys.device)[:, None]
        found.append(score(keys))
    return torch.stack(found)
