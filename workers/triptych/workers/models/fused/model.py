"""A fused forward pass for the plain pre-norm block of Llama, Mistral, Qwen2 and Qwen3.

Weights and arithmetic are those of transformers' layers, but query, key and value come from
one product, gate and up from another, without transposes, masks or wrappers between them. On a
small model at batch 1 that halves the time of a step.
"""

from collections.abc import Callable, Sequence
from copy import copy
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from triptych.workers.models.attention_interface import Attend
from triptych.workers.models.early_exit import Exits, ExitTracker
from triptych.workers.models.facts import ModelFacts
from triptych.workers.models.fused.block import Block, HeadLayout, Heads, Norm
from triptych.workers.models.fused.dense_block import DenseBlock
from triptych.workers.models.fused.head import Head
from triptych.workers.models.fused.int4_block import Int4Block
from triptych.workers.models.fused.int8_block import Int8Block
from triptych.workers.models.traits import HEAD, PlainTraits
from triptych.workers.models.vision.feature_rows import FeatureRows
from triptych.workers.models.weights.linear import Packing, Packings, pack
from triptych.workers.models.weights.plain_weights import EMBEDDING, Weights
from triptych.workers.models.weights.shared_tiles import (
    TileSource,
    tiles_key,
    with_shared_tiles,
)

IN_4_BITS: tuple[Packing, ...] = ("int4", "int4_if_exact")

Layers = Callable[[Tensor, Tensor, Tensor], Tensor]
"""Layers that are run together: the residual stream, cosine and sine to the residual stream."""


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
        packings: Packings,
    ) -> None:
        """The embedding is kept as it is."""
        self._embedding = weights[EMBEDDING]
        frequencies = torch.tensor(plain.frequencies, dtype=torch.float32)
        self._frequencies = frequencies.to(self._embedding.device)
        self._rotary_scale = plain.rotary_scale
        sections = torch.tensor(plain.rotary_sections, dtype=torch.int64)
        axes = torch.arange(len(sections)).remainder(3).repeat_interleave(sections)
        self._rotary_axes = axes.to(self._embedding.device)
        """Which of a token's three positions rotates each pair of channels."""
        epsilon = plain.norm_epsilon
        self._norm = Norm.of(weights["model.norm.weight"], epsilon, torch.float32)
        head = self._embedding if plain.is_tied else weights[HEAD]
        self._head = Head(pack([head], packing=packings.head), head)
        self._blocks = _blocks(weights, facts, epsilon, packings.layers)
        self._prompt_blocks = self._blocks
        if packings.prompts is not None:
            self._prompt_blocks = _blocks(weights, facts, epsilon, packings.prompts)
        elif packings.rounds_prompts:
            self._prompt_blocks = [_rounding(block) for block in self._blocks]
        # A pass reads single rows of the embedding; where it is tied, the head counts.
        layers = sum(block.size_bytes for block in self._blocks)
        self.step_bytes = layers + self._norm.size_bytes + self._head.size_bytes
        """Bytes of weights that a pass reads."""

    def for_prefill(self) -> "FusedModel":
        """The same model as prefill runs it, which may multiply in another precision."""
        model = copy(self)
        model._blocks = self._prompt_blocks
        return model

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
        hidden = self.embed(tokens, given)
        if tracker is not None:
            return self.logits(self.through(every, hidden, positions, attend, tracker)[logits_at])
        return self.logits(self._through(every, hidden, positions, attend, logits_at))

    @property
    def program_blocks(self) -> Sequence[Int4Block] | Sequence[Int8Block] | None:
        """The blocks, if the products of all of them can be jobs: in 4 bits, or all in 8 bits."""
        blocks = self._blocks
        in_4_bits = [block for block in blocks if isinstance(block, Int4Block)]
        in_8_bits = [block for block in blocks if isinstance(block, Int8Block) and block.has_jobs]
        return next((each for each in (in_4_bits, in_8_bits) if len(each) == len(blocks)), None)

    def run(
        self,
        layers: Layers,
        tokens: Tensor,
        positions: Tensor,
        given: FeatureRows | None = None,
    ) -> Tensor:
        """Run ``layers``, such as a ``LayerProgram``, in the place of this model's.

        Shapes:  tokens (T,); positions (T,) or (3, T) -> (N, vocab) float32, of the N rows that
            ``layers`` return
        """
        return self.logits(self.apply(layers, self.embed(tokens, given), positions))

    def apply(self, layers: Layers, hidden: Tensor, positions: Tensor) -> Tensor:
        """Run ``layers``, such as a ``LayerProgram``, on the residual stream.

        Shapes:  hidden (T, E) float32; positions (T,) or (3, T) -> as ``layers`` return it
        """
        return layers(hidden, *self._rotation(positions))

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
        if tracker is None:
            return self._through(layers, hidden, positions, attend)
        cos, sin = self._rotation(positions)
        return self._until_exits(layers, hidden, cos, sin, attend, tracker)

    def _through(
        self,
        layers: range,
        hidden: Tensor,
        positions: Tensor,
        attend: Attend,
        rows: Tensor | None = None,
    ) -> Tensor:
        """As ``through``. ``rows``: tokens that are returned; None: all.

        If they are few, only they are computed behind the attention of the last layer.
        """
        is_part = rows is not None and len(rows) < len(hidden)
        cos, sin = self._rotation(positions)
        delta: Any = None  # of the block before: it is added where the next norm is
        for layer in layers:
            block = self._blocks[layer]
            hidden, heads = block.heads(hidden, delta, cos, sin)
            mixed = _mixed(layer, block, heads, attend)
            if is_part and layer == layers[-1]:
                hidden, mixed = hidden[rows], mixed[rows]
            hidden, delta = block.mix(hidden, mixed)
        if delta is not None:
            hidden = self._blocks[layers[-1]].total(hidden, delta)
        return hidden if is_part or rows is None else hidden[rows]

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
            hidden, heads = block.heads(hidden, None, cos, sin)
            mixed = _mixed(layer, block, heads, attend)
            if active is None:
                hidden = block.total(*block.mix(hidden, mixed))
            elif len(active):
                rest = block.total(*block.mix(hidden[active], mixed[active]))
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


def _rounding(block: Block[Any]) -> Block[Any]:
    """The same block, whose products may round their inputs to 8 bits if it has 4-bit weights."""
    return block.with_inputs_in_8_bits() if isinstance(block, Int4Block) else block


def _mixed(layer: int, block: Block[Any], heads: Heads, attend: Attend) -> Tensor:
    """Output of attention, (T, H d)."""
    mixed = attend(layer, *heads, block.traits)
    return mixed.reshape(len(mixed), -1)


def _blocks(
    weights: Weights, facts: ModelFacts, epsilon: float, packing: Packing
) -> list[Block[Any]]:
    def build(source: TileSource) -> list[Block[Any]]:
        every = range(len(facts.layers))
        return [_block(weights, layer, facts, epsilon, packing, source) for layer in every]

    if packing not in IN_4_BITS:
        return build(TileSource())
    return with_shared_tiles(tiles_key(facts.revision, packing, weights[EMBEDDING].dtype), build)


def _block(
    weights: Weights,
    index: int,
    facts: ModelFacts,
    epsilon: float,
    packing: Packing,
    source: TileSource,
) -> Block[Any]:
    layer, traits, geometry = f"model.layers.{index}", facts.layers[index], facts.geometry
    shape = facts.num_heads, geometry.kv_heads, geometry.head_dim
    layout = HeadLayout.of(weights, layer, shape, epsilon)
    if packing == "int8" and Int8Block.takes(weights, layer):
        return Int8Block.of(weights, layer, traits, layout, epsilon)
    if packing in IN_4_BITS:
        block = Int4Block.of(weights, layer, traits, layout, epsilon, packing, source)
        if block is not None:
            return block
    return DenseBlock.of(weights, layer, traits, layout, epsilon, packing)
