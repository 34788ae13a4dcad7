# transformers leaves its modules untyped.
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false
# pyright: reportUnknownArgumentType=false
"""Multi-head latent attention (MLA) on its latents, in layers of transformers.

A layer of DeepSeek-V2 and its descendants computes one *latent* of a token for all heads, and
expands it to the keys and values of each head. Here the expansion is moved from keys to queries,
and from values to the output, so that attention is that of a model with a single KV head.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor, nn

AttentionFunction = Callable[..., tuple[Tensor, Tensor | None]]
"""Of transformers: module; query, key, value (1, H, T, D); options -> (1, T, H, D), weights"""

_EXPAND = "expand_kv"
"""The method of transformers' layers that makes keys and values of latents."""


@dataclass(frozen=True, eq=False)
class Latents:
    """Stands in the place of ``expand_kv`` of a layer, and does not expand.

    With W_k and W_v, the parts of the expanding weight of a head, the logit of a query q and a
    latent c is q . (W_k c) = (W_k^T q) . c, and the output is the weighted sum of W_v c, which is
    W_v times the weighted sum of c. So the key of a token is its latent and its rotated part, which
    heads share in any case, and its value is the latent.

    Source: DeepSeek-V2, section 2.1.2 and appendix B (weights of the expansion are absorbed)
    """

    key_weight: Tensor
    """(H, D of queries without the rotated part, rank)"""
    value_weight: Tensor
    """(H, D of values, rank)"""
    expand: Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]
    """transformers' own method."""
    is_ours: Callable[[], bool]
    """Whether the layer calls an attention function that ``on_latents`` made."""

    def __call__(self, latent: Tensor, rotated: Tensor) -> tuple[Tensor, Tensor]:
        """Key and value of the only KV head.

        Shapes:  latent (1, 1, T, rank); rotated (1, 1, T, R) -> (1, 1, T, rank + R),
            (1, 1, T, rank)
        """
        if not self.is_ours():
            return self.expand(latent, rotated)
        return torch.cat((latent, rotated), dim=-1), latent

    def absorbed(self, query: Tensor) -> Tensor:
        """Queries for latents.

        Shapes:  (1, H, T, D) -> (1, H, T, rank + R)
        """
        plain, rotated = query.tensor_split((self.key_weight.shape[1],), dim=-1)
        return torch.cat((plain @ self.key_weight, rotated), dim=-1)

    def expanded(self, mixed: Tensor) -> Tensor:
        """Outputs of heads, of sums of latents.

        Shapes:  (1, T, H, rank) -> (1, T, H, D of values)
        """
        return torch.einsum("bthr,hvr->bthv", mixed, self.value_weight)


def read_latents(model: nn.Module, attention: str) -> bool:
    """Have all MLA layers of a model hand latents to the attention function of this name.

    The absorbed weights are views, so nothing is copied. Layers with other expansions are left as
    they are: they hand over the keys and values of each head.

    Returns: whether there are such layers
    """
    found = [(module, _latents(module, attention)) for module in model.modules()]
    for module, latents in found:
        if latents is not None:
            module.__dict__[_EXPAND] = latents
    return any(latents is not None for _, latents in found)


def on_latents(attention: AttentionFunction) -> AttentionFunction:
    """An attention function that gets absorbed queries where a layer hands over latents."""

    def attend(
        module: nn.Module, query: Tensor, key: Tensor, value: Tensor, *rest: Any, **options: Any
    ) -> tuple[Tensor, Tensor | None]:
        latents = module.__dict__.get(_EXPAND)
        if not isinstance(latents, Latents):
            return attention(module, query, key, value, *rest, **options)
        options.setdefault("scaling", query.shape[3] ** -0.5)
        mixed, weights = attention(module, latents.absorbed(query), key, value, *rest, **options)
        return latents.expanded(mixed), weights

    return attend


def _latents(module: Any, attention: str) -> Latents | None:
    projection = getattr(module, "kv_b_proj", None)
    if not hasattr(module, _EXPAND) or not isinstance(projection, nn.Linear):
        return None
    sizes = int(module.qk_nope_head_dim), int(module.v_head_dim)
    heads, rank = int(module.num_heads), int(module.kv_lora_rank)
    bias = cast("Tensor | None", projection.bias)
    if bias is not None or projection.weight.shape != (heads * sum(sizes), rank):
        return None
    key_weight, value_weight = projection.weight.view(heads, sum(sizes), rank).split(sizes, dim=1)
    return Latents(
        key_weight,
        value_weight,
        getattr(module, _EXPAND),
        lambda: module.config._attn_implementation == attention,
    )
