"""Linear layers with constant weights, packed for fast products.

A row of a product has the same bits whatever the number of rows, so an answer does not depend on
the requests beside it.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache
from typing import Literal, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from triptych.kernels import (
    BlockedProduct,
    Int4Tiles,
    Int8Product,
    RegisterProduct,
    in_pieces,
    multiplies_words,
    multiply_int4,
    quantize_rows,
)
from triptych.kernels.int4 import OUTPUTS, PIECE
from triptych.workers.models.weights.int4_grid import (
    GROUP,
    LEVELS,
    Int4Grid,
    find_grid,
    fit_grid,
)

Packing = Literal["dense", "int8", "int4", "int4_if_exact"]
"""How weights are kept: in the type that they were read in; in 8 bits with a scale for each
output; in 4 bits with a step and a middle for 32 of them; in 4 bits if they had been quantized to 4
bits, so that nothing is lost."""


@dataclass(frozen=True, slots=True)
class Packings:
    """How one process keeps the weights of a fused model."""

    layers: Packing
    """Linear layers."""
    head: Packing
    prompts: Packing | None = None
    """A second copy of the linear layers, for prefill; None: there is one copy."""
    rounds_prompts: bool = False
    """Whether prefill may round the inputs of products with 4-bit weights to 8 bits."""

    def made_smaller(self) -> "Packings":
        """With the head in 8 bits, and layers in 4 bits that had been quantized to these.

        As far as this processor multiplies them. The largest logits stay exact: see ``Head``.
        """
        head: Packing = "int8" if Int8Product.takes_here() else self.head
        layers = self.layers
        if layers == "dense" and multiplies_words():
            layers = "int4_if_exact"
        return replace(self, head=head, layers=layers)


INT8_BYTES = 1.0
"""Of a weight in 8 bits."""


class Linear(Protocol):
    """A product with constant weights."""

    @property
    def size_bytes(self) -> int:
        """Bytes of the weights and the bias, all of which a product reads."""
        ...

    def __call__(self, rows: Tensor) -> Tensor:
        """Shapes:  (T, in) -> (T, out)"""
        ...

    def for_few_rows(self) -> "Linear":
        """The same product, with the same weights, as decode steps run it."""
        ...


def pack(
    weights: Sequence[Tensor],
    biases: Sequence[Tensor | None] = (),
    packing: Packing = "dense",
) -> Linear:
    """One matrix product for linear layers that share their input, outputs side by side.

    On a CPU, oneDNN's blocked weight layout makes the product about 1.4x faster in
    bfloat16 for 1 to 64 rows, and up to 2x in float32 where MKL does not use the widest
    vectors (AMD); it was never slower, at 512 rows neither.

    Shapes:  weights (out_i, in), biases (out_i,) -> (T, in) to (T, sum of out_i)
    """
    weight = weights[0] if len(weights) == 1 else torch.cat(list(weights))
    bias = join_biases(weights, biases)
    if packing == "int8":
        return Int8Linear.of(weight, bias)
    if packing != "dense":
        grid = grid_of(weight, packing)
        if grid is not None:
            kind = Int4Linear if Int4Linear.takes(grid, weight.dtype) else TorchInt4Linear
            return kind.of(grid, bias, weight.dtype)
    if weight.device.type == "cpu" and BlockedProduct.takes(weight.dtype):
        return BlockedLinear.of(weight, bias)
    if weight.device.type == "cpu" and weight.dtype == torch.bfloat16 and multiplies_words():
        return RegisterLinear.of(weight, bias)
    return PlainLinear(weight, bias)


def grid_of(weight: Tensor, packing: Packing) -> Int4Grid | None:
    """The grid on which weights are kept in 4 bits; None: they are not."""
    if weight.shape[0] % INT4_OUTPUTS or weight.shape[1] % GROUP:
        return None
    return fit_grid(weight) if packing == "int4" else find_grid(weight)


def join_biases(weights: Sequence[Tensor], biases: Sequence[Tensor | None]) -> Tensor | None:
    """The concatenated biases; zeros where a layer has none."""
    if all(bias is None for bias in biases):
        return None
    parts = zip(weights, biases, strict=True)
    return torch.cat([w.new_zeros(len(w)) if bias is None else bias for w, bias in parts])


def _bytes_of(*tensors: Tensor | None) -> int:
    return sum(tensor.nbytes for tensor in tensors if tensor is not None)


@dataclass(frozen=True, slots=True)
class PlainLinear:
    """Torch's own product."""

    weight: Tensor
    bias: Tensor | None

    @property
    def size_bytes(self) -> int:
        return _bytes_of(self.weight, self.bias)

    def __call__(self, rows: Tensor) -> Tensor:
        return F.linear(rows, self.weight, self.bias)

    def for_few_rows(self) -> "PlainLinear":
        return self


@dataclass(frozen=True, slots=True)
class BlockedLinear:
    """oneDNN's product with weights in its blocked layout."""

    product: BlockedProduct
    size_bytes: int

    @classmethod
    def of(cls, weight: Tensor, bias: Tensor | None) -> "BlockedLinear":
        return cls(BlockedProduct.of(weight, bias), _bytes_of(weight, bias))

    def __call__(self, rows: Tensor) -> Tensor:
        return self.product(rows)

    def for_few_rows(self) -> "BlockedLinear":
        return BlockedLinear(self.product.for_few_rows(), self.size_bytes)


@dataclass(frozen=True, slots=True)
class RegisterLinear:
    """Our product with weights in bfloat16, on processors whose libraries have none."""

    product: RegisterProduct
    bias: Tensor | None
    """float32"""

    @classmethod
    def of(cls, weight: Tensor, bias: Tensor | None) -> "RegisterLinear":
        return cls(RegisterProduct.of(weight), None if bias is None else bias.float())

    @property
    def size_bytes(self) -> int:
        return _bytes_of(self.product.packed, self.bias)

    def __call__(self, rows: Tensor) -> Tensor:
        return self.product(rows, rows.dtype, None, self.bias)

    def for_few_rows(self) -> "RegisterLinear":
        return self


@dataclass(frozen=True, slots=True)
class Int4Linear:
    """A product with 4-bit weights of rows in bfloat16, on processors that multiply these."""

    weights: Int4Tiles
    bias: Tensor | None
    """float32"""
    dtype: torch.dtype

    @classmethod
    def takes(cls, grid: Int4Grid, dtype: torch.dtype) -> bool:
        outputs, fits = len(grid.levels), grid.group % PIECE == 0
        return multiplies_words() and fits and outputs % OUTPUTS == 0 and dtype == torch.bfloat16

    @classmethod
    def of(cls, grid: Int4Grid, bias: Tensor | None, dtype: torch.dtype) -> "Int4Linear":
        tiles = Int4Tiles.pack(grid.levels, grid.step, grid.middle)
        return cls(tiles, None if bias is None else bias.float(), dtype)

    @property
    def size_bytes(self) -> int:
        return _bytes_of(self.weights.tiles, self.bias)

    def __call__(self, rows: Tensor) -> Tensor:
        return multiply_int4(rows, self.weights, self.bias, self.dtype)

    def for_few_rows(self) -> "Int4Linear":
        return self


@dataclass(frozen=True, slots=True)
class TorchInt4Linear:
    """Torch's product with 4-bit weights, which it expands in registers.

    It takes as long as its rows are many, so more than ``EXPANDED_ROWS`` are multiplied with
    weights that are expanded in memory for them. The bits of a row depend on which it is.
    """

    packed: Tensor
    grids: Tensor
    """Step and middle (the weight of level 8) of each group: (groups, out, 2)."""
    bias: Tensor | None

    @classmethod
    def of(cls, grid: Int4Grid, bias: Tensor | None, dtype: torch.dtype) -> "TorchInt4Linear":
        grids = torch.stack((grid.step, grid.middle), dim=-1).transpose(0, 1).contiguous()
        packed = torch.ops.aten._convert_weight_to_int4pack_for_cpu(grid.levels.int(), 1)
        return cls(packed, grids.to(dtype), bias)

    @property
    def size_bytes(self) -> int:
        return _bytes_of(self.packed, self.grids, self.bias)

    @property
    def _group(self) -> int:
        return 2 * self.packed.shape[1] // len(self.grids)

    def __call__(self, rows: Tensor) -> Tensor:
        if len(rows) > EXPANDED_ROWS and packed_block() and len(self.packed) % packed_block() == 0:
            weights = self._expanded()
            product = in_pieces(lambda part: part @ weights, rows)
        else:
            product = torch.ops.aten._weight_int4pack_mm_for_cpu(
                rows.contiguous(), self.packed, self._group, self.grids
            )
        return product if self.bias is None else product + self.bias

    def for_few_rows(self) -> "TorchInt4Linear":
        return self

    def _expanded(self) -> Tensor:
        """The weights, (in, out)."""
        levels = _levels(self.packed, packed_block())
        groups = levels.view(len(self.grids), -1, levels.shape[1]).float() - LEVELS // 2
        step, middle = self.grids.float().unbind(-1)
        weights = groups.mul_(step[:, None]).add_(middle[:, None])
        return weights.flatten(0, 1).to(self.grids.dtype)


@dataclass(frozen=True, slots=True)
class Int8Linear:
    """A product of 8-bit codes; its rows are quantized as they come. Results are float32."""

    product: Int8Product

    @classmethod
    def of(cls, weight: Tensor, bias: Tensor | None) -> "Int8Linear":
        return cls(Int8Product.of(weight, torch.float32, bias))

    @property
    def size_bytes(self) -> int:
        return self.product.size_bytes

    def __call__(self, rows: Tensor) -> Tensor:
        return self.product(quantize_rows(rows))

    def for_few_rows(self) -> "Int8Linear":
        return self


EXPANDED_ROWS = 64
INT4_OUTPUTS = 16
"""Torch packs multiples of it."""


@cache
def packed_block() -> int:
    """Outputs that torch packs together; 0 if its layout is another than the one known here."""
    levels = torch.randint(0, LEVELS, (128, GROUP), dtype=torch.int32)
    packed = torch.ops.aten._convert_weight_to_int4pack_for_cpu(levels, 1)
    known = (block for block in (64, 32, 16) if torch.equal(_levels(packed, block), levels.T))
    return next(known, 0)


def _levels(packed: Tensor, block: int) -> Tensor:
    """Levels of packed weights: a block of outputs has those of its halves in the two halves of
    bytes.

    Shapes:  (out, in / 2) -> (in, out) uint8
    """
    pairs = packed.view(-1, 2 * packed.shape[1], block // 2)
    return torch.cat((pairs & 15, pairs >> 4), 2).transpose(0, 1).flatten(1)
