"""A block whose weights are in 4 bits; norms and the gate are parts of its products."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from triptych.kernels import Int4Tiles, add_norm_multiply_int4, multiply_int4
from triptych.workers.models.attention_interface import LayerTraits
from triptych.workers.models.fused.block import HeadLayout, Heads, Norm, has_more_biases
from triptych.workers.models.weights.linear import Int4Linear, Packing, grid_of, join_biases
from triptych.workers.models.weights.plain_weights import Weights
from triptych.workers.models.weights.shared_tiles import TileSource

QKV = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")
GATE_UP = ("mlp.gate_proj", "mlp.up_proj")


@dataclass(frozen=True, slots=True)
class Int4Block:
    """See ``Block``; what is left to be added is a row of each token, in float32."""

    traits: LayerTraits
    layout: HeadLayout
    dtype: torch.dtype
    """Type of queries, keys and values."""
    input_norm: Norm
    qkv: Int4Tiles
    qkv_bias: Tensor | None
    out: Int4Tiles
    mlp_norm: Norm
    gate_up: Int4Tiles
    down: Int4Tiles

    @classmethod
    def of(
        cls,
        weights: Weights,
        layer: str,
        traits: LayerTraits,
        layout: HeadLayout,
        epsilon: float,
        packing: Packing,
        source: TileSource,
    ) -> "Int4Block | None":
        """None if some product cannot be kept in 4 bits, or has a bias: see ``DenseBlock``."""
        if has_more_biases(weights, layer):
            return None
        qkv = [weights[f"{layer}.{name}.weight"] for name in QKV]
        biases = join_biases(qkv, [weights.get(f"{layer}.{name}.bias") for name in QKV])
        products = (QKV, ("self_attn.o_proj",), GATE_UP, ("mlp.down_proj",))
        packed = [
            source.get(
                f"{layer}.{names[0]}",
                lambda names=names: _tiles(
                    [weights[f"{layer}.{name}.weight"] for name in names],
                    packing,
                    is_gated=names is GATE_UP,
                ),
            )
            for names in products
        ]
        tiles = [product for product in packed if product is not None]
        if len(tiles) < len(packed):
            return None
        return cls(
            traits=traits,
            layout=layout,
            dtype=qkv[0].dtype,
            input_norm=Norm.of(weights[f"{layer}.input_layernorm.weight"], epsilon),
            qkv=tiles[0],
            qkv_bias=None if biases is None else biases.float(),
            out=tiles[1],
            mlp_norm=Norm.of(weights[f"{layer}.post_attention_layernorm.weight"], epsilon),
            gate_up=tiles[2],
            down=tiles[3],
        )

    @property
    def size_bytes(self) -> int:
        tiles = (self.qkv, self.out, self.gate_up, self.down)
        bias = 0 if self.qkv_bias is None else self.qkv_bias.nbytes
        norms = sum(part.size_bytes for part in (self.layout, self.input_norm, self.mlp_norm))
        return bias + norms + sum(part.tiles.nbytes for part in tiles)

    def heads(
        self, hidden: Tensor, delta: Tensor | None, cos: Tensor, sin: Tensor
    ) -> tuple[Tensor, Heads]:
        norm = self.input_norm
        hidden, qkv = add_norm_multiply_int4(
            hidden, delta, norm.weight, norm.epsilon, self.qkv, self.qkv_bias, self.dtype
        )
        query_key, value = self.layout.divide(qkv)
        return hidden, (*self.layout.rotate(query_key, cos, sin), value)

    def mix(self, hidden: Tensor, mixed: Tensor) -> tuple[Tensor, Tensor]:
        norm, projected = self.mlp_norm, multiply_int4(mixed, self.out, None, torch.float32)
        hidden, gated = add_norm_multiply_int4(
            hidden, projected, norm.weight, norm.epsilon, self.gate_up, None, self.dtype
        )
        return hidden, multiply_int4(gated, self.down, None, torch.float32)

    def total(self, hidden: Tensor, delta: Tensor) -> Tensor:
        return hidden + delta

    def for_few_rows(self) -> "Int4Block":
        return self._changed(Int4Tiles.for_few_rows)

    def with_inputs_in_8_bits(self) -> "Int4Block":
        """The same block, whose products may round their inputs."""
        return self._changed(Int4Tiles.with_inputs_in_8_bits)

    def _changed(self, change: Callable[[Int4Tiles], Int4Tiles]) -> "Int4Block":
        parts = self.qkv, self.out, self.gate_up, self.down
        qkv, out, gate_up, down = map(change, parts)
        return replace(self, qkv=qkv, out=out, gate_up=gate_up, down=down)


def _tiles(
    matrices: Sequence[Tensor], packing: Packing, *, is_gated: bool = False
) -> Int4Tiles | None:
    """The matrices as one product; None if it cannot be kept in 4 bits."""
    weight = torch.cat(list(matrices))
    grid = grid_of(weight, packing)
    if grid is None or not Int4Linear.takes(grid, weight.dtype):
        return None
    return Int4Tiles.pack(grid.levels, grid.step, grid.middle, is_gated=is_gated)
