"""One layer of a fused model: its two halves before and after attention."""

from dataclasses import dataclass
from typing import Protocol, TypeVar

import torch
from torch import Tensor

from triptych.kernels import add_norm, rms_norm, rotate
from triptych.workers.models.attention_interface import LayerTraits
from triptych.workers.models.weights.plain_weights import Weights

Delta = TypeVar("Delta")
"""What the second half of a block leaves to be added where the next norm is."""
Heads = tuple[Tensor, Tensor, Tensor]
"""Query (T, H, d), key and value (T, KH, d)."""


class Block(Protocol[Delta]):
    """A pre-norm block without its attention."""

    @property
    def traits(self) -> LayerTraits: ...

    @property
    def size_bytes(self) -> int:
        """Bytes of weights that a pass reads."""
        ...

    def heads(
        self, hidden: Tensor, delta: Delta | None, cos: Tensor, sin: Tensor
    ) -> tuple[Tensor, Heads]:
        """Add ``delta`` to the residual stream, and compute queries, keys and values.

        Shapes:  hidden (T, E) float32; cos, sin (T, d / 2) -> the sum (T, E), and heads
        """
        ...

    def mix(self, hidden: Tensor, mixed: Tensor) -> tuple[Tensor, Delta]:
        """Output projection and MLP.

        Shapes:  hidden (T, E) float32; mixed (T, H d) -> (T, E) and what is still to be added
        """
        ...

    def total(self, hidden: Tensor, delta: Delta) -> Tensor:
        """The residual stream after the block, (T, E) float32."""
        ...

    def for_few_rows(self) -> "Block[Delta]":
        """The same block, with the same weights, as decode steps run it."""
        ...


def has_more_biases(weights: Weights, layer: str) -> bool:
    """Whether products have biases besides those of queries, keys and values."""
    names = ("self_attn.o_proj", "mlp.gate_proj", "mlp.up_proj", "mlp.down_proj")
    return any(f"{layer}.{name}.bias" in weights for name in names)


@dataclass(frozen=True, slots=True)
class Norm:
    """An RMS norm that computes in float32."""

    weight: Tensor
    """float32."""
    epsilon: float
    dtype: torch.dtype
    """Type of its result."""

    @classmethod
    def of(cls, weight: Tensor, epsilon: float, dtype: torch.dtype | None = None) -> "Norm":
        return cls(weight.float(), epsilon, dtype or weight.dtype)

    @property
    def size_bytes(self) -> int:
        return self.weight.nbytes

    def __call__(self, rows: Tensor) -> Tensor:
        return rms_norm(rows, self.weight, self.epsilon, self.dtype)

    def of_sum(self, hidden: Tensor, delta: Tensor | None) -> tuple[Tensor, Tensor]:
        """The residual stream with ``delta`` added, and its norm; None: nothing is added."""
        if delta is None:
            return hidden, self(hidden)
        return add_norm(hidden, delta, self.weight, self.epsilon, self.dtype)


@dataclass(frozen=True, slots=True)
class HeadLayout:
    """How the outputs of one product are divided into heads, and how queries and keys are rotated.

    Qwen3 normalises queries and keys per head.
    """

    heads: int
    kv_heads: int
    dim: int
    query_norm: Norm | None
    key_norm: Norm | None

    @classmethod
    def of(
        cls, weights: Weights, layer: str, shape: tuple[int, int, int], epsilon: float
    ) -> "HeadLayout":
        """``shape``: query heads, KV heads, and numbers of a head."""
        names = (f"{layer}.self_attn.q_norm.weight", f"{layer}.self_attn.k_norm.weight")
        norms = [Norm.of(weights[name], epsilon) if name in weights else None for name in names]
        return cls(*shape, norms[0], norms[1])

    @property
    def size_bytes(self) -> int:
        return sum(norm.size_bytes for norm in (self.query_norm, self.key_norm) if norm is not None)

    def divide(self, qkv: Tensor) -> tuple[Tensor, Tensor]:
        """Shapes:  (T, (H + 2 KH) d) -> queries and keys (T, H + KH, d), values (T, KH, d)"""
        heads = qkv.view(len(qkv), -1, self.dim)
        rotated = self.heads + self.kv_heads
        return heads[:, :rotated], heads[:, rotated:]

    def rotate(self, query_key: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
        """Norms of heads and RoPE.

        Shapes:  (T, H + KH, d) -> (T, H, d), (T, KH, d)
        """
        if self.query_norm is not None and self.key_norm is not None:
            query, key = query_key[:, : self.heads], query_key[:, self.heads :]
            query_key = torch.cat((self.query_norm(query), self.key_norm(key)), dim=1)
        query_key = rotate(query_key, cos, sin)
        return query_key[:, : self.heads], query_key[:, self.heads :]
