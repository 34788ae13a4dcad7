# transformers leaves the calls of its models and caches untyped.
# pyright: reportUnknownMemberType=false
"""Mean keys of a model: subtracting a head's mean key leaves its attention unchanged."""

from collections.abc import Iterable, Sequence
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import DynamicCache

from triptych.core.layout import Geometry
from triptych.evals.methods.full_cache import TransformersRunner


@torch.inference_mode()
def mean_keys(runner: TransformersRunner, texts: Iterable[Sequence[int]]) -> Tensor:
    """Mean key of each head after RoPE over all tokens but the first of each text.

    The first token is an attention sink; its key is far from all others.

    Shapes:  -> [layers, kv_heads, head_dim] float32
    """
    total, count = torch.zeros(0), 0
    for text in texts:
        cache = DynamicCache(config=runner.model.config)
        cast("Any", runner.model)(torch.tensor([list(text)]), past_key_values=cache)
        keys = torch.stack([_keys(layer, runner.facts.geometry)[:, 1:] for layer in cache.layers])
        total = keys.sum(2) if count == 0 else total + keys.sum(2)
        count += keys.shape[2]
    return total / count


def _keys(layer: object, geometry: Geometry) -> Tensor:
    """Keys of a layer of transformers' cache, [kv_heads, tokens, head_dim], as pages store them.

    Where a model has latents, the cache has the rotated parts of keys in the place of values.
    """
    keys = cast("Any", layer).keys[0]
    if not geometry.has_latents:
        return keys
    keys = torch.cat((keys, cast("Any", layer).values[0]), dim=-1)
    return F.pad(keys, (0, geometry.head_dim - keys.shape[-1]))
