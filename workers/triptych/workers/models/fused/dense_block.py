"""A block whose products have inputs and outputs in the type of the model."""

from dataclasses import dataclass, replace

from torch import Tensor

from triptych.kernels import gate
from triptych.workers.models.attention_interface import LayerTraits
from triptych.workers.models.fused.block import HeadLayout, Heads, Norm
from triptych.workers.models.weights.linear import Linear, Packing, pack
from triptych.workers.models.weights.plain_weights import Weights


@dataclass(frozen=True, slots=True)
class DenseBlock:
    """See ``Block``; what is left to be added is a row of each token."""

    traits: LayerTraits
    layout: HeadLayout
    input_norm: Norm
    qkv: Linear
    out: Linear
    mlp_norm: Norm
    gate_up: Linear
    down: Linear

    @classmethod
    def of(
        cls,
        weights: Weights,
        layer: str,
        traits: LayerTraits,
        layout: HeadLayout,
        epsilon: float,
        packing: Packing,
    ) -> "DenseBlock":
        def linear(*names: str) -> Linear:
            full = [f"{layer}.{name}" for name in names]
            biases = [weights.get(f"{name}.bias") for name in full]
            return pack([weights[f"{name}.weight"] for name in full], biases, packing)

        return cls(
            traits=traits,
            layout=layout,
            input_norm=Norm.of(weights[f"{layer}.input_layernorm.weight"], epsilon),
            qkv=linear("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
            out=linear("self_attn.o_proj"),
            mlp_norm=Norm.of(weights[f"{layer}.post_attention_layernorm.weight"], epsilon),
            gate_up=linear("mlp.gate_proj", "mlp.up_proj"),
            down=linear("mlp.down_proj"),
        )

    @property
    def size_bytes(self) -> int:
        parts = (self.layout, self.input_norm, self.mlp_norm, *self._products)
        return sum(part.size_bytes for part in parts)

    @property
    def _products(self) -> tuple[Linear, ...]:
        return self.qkv, self.out, self.gate_up, self.down

    def heads(
        self, hidden: Tensor, delta: Tensor | None, cos: Tensor, sin: Tensor
    ) -> tuple[Tensor, Heads]:
        hidden, normed = self.input_norm.of_sum(hidden, delta)
        query_key, value = self.layout.divide(self.qkv(normed))
        return hidden, (*self.layout.rotate(query_key, cos, sin), value)

    def mix(self, hidden: Tensor, mixed: Tensor) -> tuple[Tensor, Tensor]:
        hidden, normed = self.mlp_norm.of_sum(hidden, self.out(mixed))
        return hidden, self.down(gate(self.gate_up(normed)))

    def total(self, hidden: Tensor, delta: Tensor) -> Tensor:
        return hidden + delta

    def for_few_rows(self) -> "DenseBlock":
        return replace(
            self,
            qkv=self.qkv.for_few_rows(),
            out=self.out.for_few_rows(),
            gate_up=self.gate_up.for_few_rows(),
            down=self.down.for_few_rows(),
        )
