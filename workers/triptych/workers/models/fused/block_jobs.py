"""The products of a block as jobs, with the norms, gates and codes that belong to them.

Source of the order: ``heads`` and ``mix`` of the blocks, whose bits the jobs have.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from triptych.kernels import DotProduct, Int8Product, QuantizedRows
from triptych.kernels.cpu_jobs import (
    Job,
    add_norm_multiply_job,
    add_norm_quantize_job,
    dot_job,
    multiply_job,
    quantize_job,
)
from triptych.workers.models.fused.int4_block import Int4Block
from triptych.workers.models.fused.int8_block import Int8Block

ProgramBlock = Int4Block | Int8Block
"""A block whose products can be jobs: see ``Int8Block.has_jobs``."""


@dataclass(frozen=True, slots=True)
class StepMemory:
    """Memory of a step for a number of tokens: its input, and what one layer hands to the next.

    All layers use the same. ``of_tokens`` is that of some of them.
    """

    hidden: Tensor
    """The residual stream, (T, E) float32: the embedding, in the end the output of all layers."""
    cos: Tensor
    sin: Tensor
    """(T, d / 2) float32."""
    delta: Tensor
    """What is still to be added to the residual stream."""
    qkv: Tensor
    normed: Tensor
    """Queries and keys after the norms of heads."""
    rotated: Tensor
    """Queries and keys after RoPE."""
    turned: Tensor
    """Queries, keys and values in the coordinates of pages, float32."""
    mixed: Tensor
    back: Tensor
    """The output of attention, in the coordinates of the model."""
    gated: Tensor
    codes: Tensor
    """Inputs of a product in 8 bits; no columns if products are in 4 bits."""
    scales: Tensor
    """Of ``codes``."""

    @classmethod
    def of(
        cls, block: ProgramBlock, tokens: int, mixed: torch.dtype = torch.float32
    ) -> "StepMemory":
        """For blocks of the same shapes as ``block``; ``mixed``: type of attention's output."""
        layout, width, dtype = block.layout, len(block.input_norm.weight), block.dtype
        heads, dim, gated = layout.heads, layout.dim, block.gate_up.results
        every, rotated = heads + 2 * layout.kv_heads, heads + layout.kv_heads
        widest = max(width, heads * dim, gated) if isinstance(block, Int8Block) else 0
        return cls(
            hidden=torch.empty(tokens, width),
            cos=torch.empty(tokens, dim // 2),
            sin=torch.empty(tokens, dim // 2),
            delta=torch.empty(tokens, width),
            qkv=torch.empty(tokens, every * dim, dtype=dtype),
            normed=torch.empty(tokens, rotated, dim, dtype=dtype),
            rotated=torch.empty(tokens, rotated, dim, dtype=dtype),
            turned=torch.empty(tokens, every, dim),
            mixed=torch.empty(tokens, heads, dim, dtype=mixed),
            back=torch.empty(tokens, heads, dim, dtype=dtype),
            gated=torch.empty(tokens, gated, dtype=dtype),
            codes=torch.empty(tokens, widest, dtype=torch.uint8),
            scales=torch.empty(tokens),
        )

    def of_tokens(self, tokens: range) -> "StepMemory":
        rows = slice(tokens.start, tokens.stop)
        return StepMemory(**{name: getattr(self, name)[rows] for name in self.__slots__})

    def rows(self, width: int) -> QuantizedRows:
        """Memory of rows of codes."""
        return QuantizedRows(self.codes[:, :width], self.scales)


def head_jobs(block: ProgramBlock, memory: StepMemory, *, is_first: bool) -> list[Job]:
    """Add ``delta``, unless it is the first block, and compute ``qkv``."""
    hidden, norm = memory.hidden, block.input_norm
    delta = None if is_first else memory.delta
    if isinstance(block, Int4Block):
        product = add_norm_multiply_job(
            hidden, delta, hidden, norm.weight, norm.epsilon, block.qkv, block.qkv_bias, memory.qkv
        )
        return [product]
    rows = memory.rows(hidden.shape[1])
    return [
        add_norm_quantize_job(hidden, delta, hidden, norm.weight, norm.epsilon, rows),
        dot_job(rows, _dot(block.qkv), memory.qkv),
    ]


def mix_jobs(block: ProgramBlock, memory: StepMemory) -> list[Job]:
    """Output projection and MLP, from ``back`` to ``delta``."""
    hidden, delta, norm = memory.hidden, memory.delta, block.mlp_norm
    back, gated = memory.back.flatten(1), memory.gated
    if isinstance(block, Int4Block):
        return [
            multiply_job(back, block.out, None, delta),
            add_norm_multiply_job(
                hidden, delta, hidden, norm.weight, norm.epsilon, block.gate_up, None, gated
            ),
            multiply_job(gated, block.down, None, delta),
        ]
    of_heads, of_norm, of_gate = map(memory.rows, (back.shape[1], hidden.shape[1], gated.shape[1]))
    return [
        quantize_job(back, of_heads),
        dot_job(of_heads, _dot(block.out), delta),
        add_norm_quantize_job(hidden, delta, hidden, norm.weight, norm.epsilon, of_norm),
        dot_job(of_norm, _dot(block.gate_up), gated),
        quantize_job(gated, of_gate),
        dot_job(of_gate, _dot(block.down), delta),
    ]


def _dot(product: Int8Product) -> DotProduct:
    assert isinstance(product.product, DotProduct)
    return product.product
