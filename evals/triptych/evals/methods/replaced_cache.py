# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false
# pyright: reportUnknownArgumentType=false
# torch leaves Tensor.masked_fill and others untyped in part.
"""Attention over a context that was replaced: merged, pruned or rounded."""

from dataclasses import dataclass

import torch
from torch import Tensor

from triptych.evals.methods.masked_attention import by_kv_head, ungrouped
from triptych.workers.models.attention_interface import Attend, LayerTraits


@dataclass(frozen=True)
class ReplacedCache:
    """Keys, values and logit biases that stand for a context in attention of later tokens.

    Rows that hold fewer tokens than others are filled with tokens of bias minus infinity.
    """

    keys: Tensor
    """[L, KH, n, d] float32, after RoPE."""
    values: Tensor
    """[L, KH, n, d] float32."""
    bias: Tensor
    """[L, KH, n] float32: is added to the scaled logits."""


class ReplacedAttention(Attend):
    """Attention of the tokens after a context that was replaced; keeps outputs of each layer."""

    def __init__(self, replaced: ReplacedCache) -> None:
        self._replaced = replaced
        self.outputs = list[Tensor]()

    def __call__(
        self,
        layer: int,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        traits: LayerTraits,
        sinks: Tensor | None = None,
    ) -> Tensor:
        """All tokens after the context come in one call, in order."""
        count, replaced = len(query), self._replaced
        keys = torch.cat((replaced.keys[layer], key.transpose(0, 1)), 1)
        values = torch.cat((replaced.values[layer], value.transpose(0, 1)), 1)
        own = torch.zeros(count, count).masked_fill(
            torch.ones(count, count, dtype=torch.bool).triu(1), float("-inf")
        )
        before = replaced.bias[layer][:, None, None].expand(-1, 1, count, -1)
        bias = torch.cat((before, own.expand(len(before), 1, count, count)), -1)
        logits = by_kv_head(query, key.shape[1]) * traits.scale @ keys[:, None].mT + bias
        mixed = ungrouped(logits.softmax(-1) @ values[:, None])
        self.outputs.append(mixed)
        return mixed
