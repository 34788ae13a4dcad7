"""A fused forward pass for the plain pre-norm block of Llama, Mistral, Qwen2 and Qwen3.

Weights and arithmetic are those of transformers' layers, but query, key and value come from
one product, gate and up from another, without transposes, masks or wrappers between them. On a
small model at batch 1 that halves the time of a step.
"""

from copy import copy
from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F
from torch import Tensor

from triptych.kernels import add_norm, gate, rms_norm, rotate
from triptych.workers.models.attention_interface import Attend, LayerTraits
from triptych.workers.models.early_exit import Exits, ExitTracker
from triptych.workers.models.facts import ModelFacts
from triptych.workers.models.traits import HEAD, PlainTraits
from triptych.workers.models.vision.feature_rows import FeatureRows
from triptych.workers.models.weights.linear import Linear, Packing, pack
from triptych.workers.models.weights.plain_weights import EMBEDDING, Weights

EXACT_LOGITS = 64
"""Largest logits of a row that are recomputed in float32 for 16-bit models."""


@dataclass(frozen=True, slots=True)
class Norm:
    """An RMS norm that computes in float32."""

    weight: Tensor
    """float32."""
    epsilon: float
    dtype: torch.dtype
    """Type of its result."""

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
class _Block:
    """One layer's weights, fused."""

    traits: LayerTraits
    input_norm: Norm
    qkv: Linear
    query_norm: Norm | None
    key_norm: Norm | None
    out: Linear
    mlp_norm: Norm
    gate_up: Linear
    down: Linear

    @property
    def size_bytes(self) -> int:
        norms = (self.input_norm, self.query_norm, self.key_norm, self.mlp_norm)
        products = (self.qkv, self.out, self.gate_up, self.down)
        norm_bytes = sum(norm.size_bytes for norm in norms if norm is not None)
        return norm_bytes + sum(product.size_bytes for product in products)

    def for_few_rows(self) -> "_Block":
        return replace(
            self,
            qkv=self.qkv.for_few_rows(),
            out=self.out.for_few_rows(),
            gate_up=self.gate_up.for_few_rows(),
            down=self.down.for_few_rows(),
        )


class FusedModel:
    """The fused forward pass, with its own copy of the weights.

    In 16 bits it is more exact than the layers it replaces: the residual stream and the
    norms stay in float32, and the largest logits are recomputed in float32. With SmolLM2
    in bfloat16 that brings the divergence from float32 from 0.0013 to 0.0003, for a
    twentieth of a decode step.
    """

    can_exit = True

    def __init__(
        self,
        facts: ModelFacts,
        plain: PlainTraits,
        weights: Weights,
        packing: Packing = "dense",
    ) -> None:
        """``packing``: of the linear layers. The embedding and the head are kept as they are."""
        self._embedding = weights[EMBEDDING]
        frequencies = torch.tensor(plain.frequencies, dtype=torch.float32)
        self._frequencies = frequencies.to(self._embedding.device)
        self._rotary_scale = plain.rotary_scale
        sections = torch.tensor(plain.rotary_sections, dtype=torch.int64)
        axes = torch.arange(len(sections)).remainder(3).repeat_interleave(sections)
        self._rotary_axes = axes.to(self._embedding.device)
        """Which of a token's three positions rotates each pair of channels."""
        epsilon = plain.norm_epsilon
        self._norm = _norm(weights["model.norm.weight"], epsilon, torch.float32)
        head = self._embedding if plain.is_tied else weights[HEAD]
        self._head = _Head(pack([head]), head)
        self._blocks = [
            _block(weights, f"model.layers.{layer}", traits, epsilon, packing)
            for layer, traits in enumerate(facts.layers)
        ]
        self._heads, self._kv_heads = facts.num_heads, facts.geometry.kv_heads
        self._head_dim = facts.geometry.head_dim
        # A pass reads single rows of the embedding; where it is tied, the head counts.
        layers = sum(block.size_bytes for block in self._blocks)
        self.step_bytes = layers + self._norm.size_bytes + self._head.size_bytes
        """Bytes of weights that a pass reads."""

    def for_decode(self) -> "FusedModel":
        """The same model, with the same weights, as decode steps run it.

        Prefill and decode each compute a row with the same bits whatever the number of rows. On a
        processor with AMX these are not the same in both: it is fast for many rows.
        """
        model = copy(self)
        model._blocks = [block.for_few_rows() for block in self._blocks]
        model._head = self._head.for_few_rows()
        return model

    def __call__(
        self,
        tokens: Tensor,
        positions: Tensor,
        attend: Attend,
        logits_at: Tensor,
        exits: Exits | None = None,
        given: FeatureRows | None = None,
    ) -> Tensor:
        """Shapes:  tokens (T,); positions (T,) or (3, T); logits_at (N,) -> (N, vocab) float32"""
        tracker = ExitTracker(exits, self.logits) if exits is not None else None
        every = range(len(self._blocks))
        hidden = self.through(every, self.embed(tokens, given), positions, attend, tracker)
        return self.logits(hidden[logits_at])

    def embed(self, tokens: Tensor, given: FeatureRows | None = None) -> Tensor:
        """Input of the first layer.

        Shapes:  tokens (T,) -> (T, E) float32
        """
        hidden = F.embedding(tokens, self._embedding).float()
        return hidden if given is None else given.put_into(hidden)

    def through(
        self,
        layers: range,
        hidden: Tensor,
        positions: Tensor,
        attend: Attend,
        tracker: ExitTracker | None = None,
    ) -> Tensor:
        """Run tokens through some layers.

        Shapes:  hidden (T, E) float32; positions (T,) or (3, T) -> (T, E) float32
        """
        cos, sin = self._rotation(positions)
        if tracker is not None:
            return self._until_exits(layers, hidden, cos, sin, attend, tracker)
        delta: Tensor | None = None  # of the block before: it is added where the next norm is
        for layer in layers:
            block = self._blocks[layer]
            hidden, normed = block.input_norm.of_sum(hidden, delta)
            mixed = self._attention(layer, block, normed, cos, sin, attend)
            hidden, normed = block.mlp_norm.of_sum(hidden, block.out(mixed))
            delta = _mlp(block, normed)
        return hidden if delta is None else hidden + delta

    def _until_exits(
        self,
        layers: range,
        hidden: Tensor,
        cos: Tensor,
        sin: Tensor,
        attend: Attend,
        tracker: ExitTracker,
    ) -> Tensor:
        """As ``through``, where some tokens skip the last layers."""
        for layer in layers:
            block = self._blocks[layer]
            active = tracker.active_tokens(layer, hidden)
            # Tokens that exited still get keys and values in this layer.
            mixed = self._attention(layer, block, block.input_norm(hidden), cos, sin, attend)
            if active is None:
                hidden = _after_attention(block, hidden, mixed)
            elif len(active):
                rest = _after_attention(block, hidden[active], mixed[active])
                hidden = hidden.index_copy(0, active, rest)
        return hidden

    def logits(self, hidden: Tensor) -> Tensor:
        """Logits of hidden states after the last layer.

        Shapes:  hidden (N, E) float32 -> (N, vocab) float32
        """
        return self._head(self._norm(hidden))

    def _rotation(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        """Cosine and sine of each pair of channels: both (T, D/2) float32.

        ``positions``: (T,), or (3, T) if those of some tokens count time, row and column.
        """
        if positions.dim() == 1:
            angles = positions.float()[:, None] * self._frequencies
        else:
            angles = positions.float().T[:, self._rotary_axes] * self._frequencies
        return angles.cos() * self._rotary_scale, angles.sin() * self._rotary_scale

    def _attention(
        self, layer: int, block: _Block, normed: Tensor, cos: Tensor, sin: Tensor, attend: Attend
    ) -> Tensor:
        rotated, heads = self._heads + self._kv_heads, self._heads
        qkv = block.qkv(normed).view(normed.shape[0], -1, self._head_dim)
        query_key = qkv[:, :rotated]
        if block.query_norm is not None and block.key_norm is not None:
            parts = (block.query_norm(qkv[:, :heads]), block.key_norm(qkv[:, heads:rotated]))
            query_key = torch.cat(parts, dim=1)
        query_key = rotate(query_key, cos, sin)
        query, key, value = query_key[:, :heads], query_key[:, heads:], qkv[:, rotated:]
        mixed = attend(layer, query, key, value, block.traits)
        return mixed.reshape(normed.shape[0], -1)


@dataclass(frozen=True, slots=True)
class _Head:
    """The head: float32 logits, of which the largest are exact.

    A 16-bit product rounds logits around 25 to steps of 1/8, often more than the difference of the
    two largest. So the ``EXACT_LOGITS`` largest of each row are recomputed in float32.
    """

    rough: Linear
    weight: Tensor

    @property
    def size_bytes(self) -> int:
        return self.rough.size_bytes

    def for_few_rows(self) -> "_Head":
        return _Head(self.rough.for_few_rows(), self.weight)

    def __call__(self, hidden: Tensor) -> Tensor:
        """Shapes:  hidden (N, E) float32 -> (N, vocab) float32"""
        dtype = self.weight.dtype
        logits = self.rough(hidden.to(dtype)).float()
        if dtype == torch.float32:
            return logits
        ids = logits.topk(min(EXACT_LOGITS, logits.shape[1]), dim=-1).indices
        exact = torch.einsum("ne,nke->nk", hidden, self.weight[ids].float())
        return logits.scatter(1, ids, exact)


def _after_attention(block: _Block, hidden: Tensor, mixed: Tensor) -> Tensor:
    """Output projection and MLP of a layer."""
    hidden, normed = block.mlp_norm.of_sum(hidden, block.out(mixed))
    return hidden + _mlp(block, normed)


def _mlp(block: _Block, normed: Tensor) -> Tensor:
    return block.down(gate(block.gate_up(normed)))


def _block(
    weights: Weights, layer: str, traits: LayerTraits, epsilon: float, packing: Packing
) -> _Block:
    def linear(*names: str) -> Linear:
        full = [f"{layer}.{name}" for name in names]
        biases = [weights.get(f"{name}.bias") for name in full]
        return pack([weights[f"{name}.weight"] for name in full], biases, packing)

    def norm(name: str) -> Norm:
        weight = weights[f"{layer}.{name}.weight"]
        return _norm(weight, epsilon, weight.dtype)

    # Qwen3 normalises queries and keys per head.
    is_normed = f"{layer}.self_attn.q_norm.weight" in weights
    return _Block(
        traits=traits,
        input_norm=norm("input_layernorm"),
        qkv=linear("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
        query_norm=norm("self_attn.q_norm") if is_normed else None,
        key_norm=norm("self_attn.k_norm") if is_normed else None,
        out=linear("self_attn.o_proj"),
        mlp_norm=norm("post_attention_layernorm"),
        gate_up=linear("mlp.gate_proj", "mlp.up_proj"),
        down=linear("mlp.down_proj"),
    )


def _norm(weight: Tensor, epsilon: float, dtype: torch.dtype) -> Norm:
    return Norm(weight.float(), epsilon, dtype)
