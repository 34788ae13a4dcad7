"""A block whose products multiply codes of 8 bits.

Norm, gate and attention hand codes to a product, and the ops behind a product multiply by the
scales of its rows.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from triptych.kernels import (
    Int8Product,
    ScaledRows,
    add_norm_quantize,
    gate_quantize,
    quantize_rows,
)
from triptych.workers.models.attention_interface import LayerTraits
from triptych.workers.models.fused.block import HeadLayout, Heads, Norm, has_more_biases
from triptych.workers.models.weights.linear import join_biases
from triptych.workers.models.weights.plain_weights import Weights


@dataclass(frozen=True, slots=True)
class Int8Block:
    """See ``Block``; what is left to be added is a product that is not scaled yet."""

    traits: LayerTraits
    layout: HeadLayout
    input_norm: Norm
    qkv: Int8Product
    qkv_bias: Tensor | None
    out: Int8Product
    mlp_norm: Norm
    gate_up: Int8Product
    down: Int8Product

    @classmethod
    def of(
        cls, weights: Weights, layer: str, traits: LayerTraits, layout: HeadLayout, epsilon: float
    ) -> "Int8Block":
        def matrices(*names: str) -> list[Tensor]:
            return [weights[f"{layer}.{name}.weight"] for name in names]

        def product(*names: str) -> Int8Product:
            whole = torch.cat(matrices(*names))
            return Int8Product.of(whole, whole.dtype)

        qkv = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")
        biases = [weights.get(f"{layer}.{name}.bias") for name in qkv]
        return cls(
            traits=traits,
            layout=layout,
            input_norm=Norm.of(weights[f"{layer}.input_layernorm.weight"], epsilon),
            qkv=product(*qkv),
            qkv_bias=join_biases(matrices(*qkv), biases),
            out=product("self_attn.o_proj"),
            mlp_norm=Norm.of(weights[f"{layer}.post_attention_layernorm.weight"], epsilon),
            gate_up=product("mlp.gate_proj", "mlp.up_proj"),
            down=product("mlp.down_proj"),
        )

    @classmethod
    def takes(cls, weights: Weights, layer: str) -> bool:
        """Whether only queries, keys and values have a bias: ``DenseBlock`` adds any."""
        return not has_more_biases(weights, layer)

    @property
    def size_bytes(self) -> int:
        products = (self.qkv, self.out, self.gate_up, self.down)
        bias = 0 if self.qkv_bias is None else self.qkv_bias.nbytes
        parts = (self.layout, self.input_norm, self.mlp_norm, *products)
        return bias + sum(part.size_bytes for part in parts)

    def heads(
        self, hidden: Tensor, delta: ScaledRows | None, cos: Tensor, sin: Tensor
    ) -> tuple[Tensor, Heads]:
        norm = self.input_norm
        hidden, rows = add_norm_quantize(hidden, delta, norm.weight, norm.epsilon)
        product = self.qkv(rows)
        if self.qkv_bias is not None or self.layout.query_norm is not None:
            query_key, value = self.layout.divide(self._finished(product))
            return hidden, (*self.layout.rotate(query_key, cos, sin), value)
        # Angles of a token times its scale: that is one pass less.
        query_key, value = self.layout.divide(product.numbers)
        scales = product.scales[:, None]
        query, key = self.layout.rotate(query_key, cos * scales, sin * scales)
        return hidden, (query, key, (value * scales[:, None]).to(value.dtype))

    def _finished(self, product: ScaledRows) -> Tensor:
        rows = product.rows()
        return (rows if self.qkv_bias is None else rows + self.qkv_bias).to(product.numbers.dtype)

    def mix(self, hidden: Tensor, mixed: Tensor) -> tuple[Tensor, ScaledRows]:
        norm, projected = self.mlp_norm, self.out(quantize_rows(mixed))
        hidden, rows = add_norm_quantize(hidden, projected, norm.weight, norm.epsilon)
        gate_up = self.gate_up(rows)
        return hidden, self.down(gate_quantize(gate_up.numbers, gate_up.scales))

    def total(self, hidden: Tensor, delta: ScaledRows) -> Tensor:
        return hidden + delta.rows()

    def for_few_rows(self) -> "Int8Block":
        return self
