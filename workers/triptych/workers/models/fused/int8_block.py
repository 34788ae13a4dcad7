"""A block whose products multiply codes of 8 bits; norms hand codes to them."""

from dataclasses import dataclass

import torch
from torch import Tensor

from triptych.kernels import DotProduct, Int8Product, add_norm_quantize, quantize_rows
from triptych.workers.models.attention_interface import LayerTraits
from triptych.workers.models.fused.block import HeadLayout, Heads, Norm, has_more_biases
from triptych.workers.models.weights.linear import join_biases
from triptych.workers.models.weights.plain_weights import Weights


@dataclass(frozen=True, slots=True)
class Int8Block:
    """See ``Block``; what is left to be added is a row of each token, in float32."""

    traits: LayerTraits
    layout: HeadLayout
    dtype: torch.dtype
    """Type of queries, keys and values."""
    input_norm: Norm
    qkv: Int8Product
    out: Int8Product
    mlp_norm: Norm
    gate_up: Int8Product
    down: Int8Product

    @classmethod
    def of(
        cls, weights: Weights, layer: str, traits: LayerTraits, layout: HeadLayout, epsilon: float
    ) -> "Int8Block":
        def matrix(name: str) -> Tensor:
            return weights[f"{layer}.{name}.weight"]

        names = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")
        qkv = [matrix(name) for name in names]
        bias = join_biases(qkv, [weights.get(f"{layer}.{name}.bias") for name in names])
        gate_up = torch.cat([matrix("mlp.gate_proj"), matrix("mlp.up_proj")])
        dtype = qkv[0].dtype
        return cls(
            traits=traits,
            layout=layout,
            dtype=dtype,
            input_norm=Norm.of(weights[f"{layer}.input_layernorm.weight"], epsilon),
            qkv=Int8Product.of(torch.cat(qkv), dtype, bias),
            out=Int8Product.of(matrix("self_attn.o_proj"), torch.float32),
            mlp_norm=Norm.of(weights[f"{layer}.post_attention_layernorm.weight"], epsilon),
            gate_up=Int8Product.of(gate_up, dtype, is_gated=True),
            down=Int8Product.of(matrix("mlp.down_proj"), torch.float32),
        )

    @classmethod
    def takes(cls, weights: Weights, layer: str) -> bool:
        """Whether only queries, keys and values have a bias: ``DenseBlock`` adds any."""
        return not has_more_biases(weights, layer)

    @property
    def products(self) -> tuple[Int8Product, ...]:
        return self.qkv, self.out, self.gate_up, self.down

    @property
    def has_jobs(self) -> bool:
        """Whether its products can be jobs of a program."""
        return all(isinstance(each.product, DotProduct) for each in self.products)

    @property
    def size_bytes(self) -> int:
        parts = (self.layout, self.input_norm, self.mlp_norm, *self.products)
        return sum(part.size_bytes for part in parts)

    def heads(
        self, hidden: Tensor, delta: Tensor | None, cos: Tensor, sin: Tensor
    ) -> tuple[Tensor, Heads]:
        norm = self.input_norm
        hidden, rows = add_norm_quantize(hidden, delta, norm.weight, norm.epsilon)
        query_key, value = self.layout.divide(self.qkv(rows))
        return hidden, (*self.layout.rotate(query_key, cos, sin), value)

    def mix(self, hidden: Tensor, mixed: Tensor) -> tuple[Tensor, Tensor]:
        norm, projected = self.mlp_norm, self.out(quantize_rows(mixed))
        hidden, rows = add_norm_quantize(hidden, projected, norm.weight, norm.epsilon)
        return hidden, self.down(quantize_rows(self.gate_up(rows)))

    def total(self, hidden: Tensor, delta: Tensor) -> Tensor:
        return hidden + delta

    def for_few_rows(self) -> "Int8Block":
        return self
