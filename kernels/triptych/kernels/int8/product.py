"""Products of 8-bit codes, with 32-bit sums: our own, or with AMX oneDNN's.

Sums of integers are exact, so a row has the same bits whatever the number of rows, the threads and
the instructions.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from triptych.kernels.codegen.native import multiplies_bytes, multiplies_tiles, multiplies_words
from triptych.kernels.dense.blocked_product import ROW_COUNTS, in_pieces
from triptych.kernels.dense.register_product import RegisterProduct
from triptych.kernels.int8.dot_product import QUAD, DotProduct
from triptych.kernels.int8.rows import LARGEST_CODE, ZERO_CODE, QuantizedRows, rotate_inputs
from triptych.kernels.pointwise import gate


def has_vnni() -> bool:
    """Whether this processor adds products of 8 bits in 32 bits."""
    return multiplies_bytes()


def _has_library() -> bool:
    """Whether oneDNN multiplies codes in tiles.

    In vectors it is no faster than ``DotProduct``, and without VNNI it adds pairs of products in 16
    bits, which overflow.
    """
    return has_vnni() and multiplies_tiles() and torch.backends.mkldnn.is_available()


@dataclass(frozen=True, slots=True)
class LibraryProduct:
    """A product of oneDNN."""

    packed: Tensor
    """In its layout."""
    scales: Tensor
    zeros: Tensor

    @classmethod
    def of(cls, codes: Tensor, scales: Tensor) -> "LibraryProduct":
        packed = torch.ops.onednn.qlinear_prepack(codes, None)
        return cls(packed, scales, torch.zeros(len(scales), dtype=torch.int32))

    def __call__(self, codes: Tensor) -> Tensor:
        """The product times the scales of outputs.

        Shapes:  (T, in) -> (T, out) float32
        """
        return in_pieces(self._multiply, codes, ROW_COUNTS)

    def _multiply(self, codes: Tensor) -> Tensor:
        return torch.ops.onednn.qlinear_pointwise.default(
            codes,
            1.0,
            ZERO_CODE,
            self.packed,
            self.scales,
            self.zeros,
            None,
            1.0,
            0,
            torch.float32,
            "none",
            [],
            "",
        )


@dataclass(frozen=True, slots=True)
class Int8Product:
    """A product with constant weights in 8 bits, one scale for each output."""

    product: DotProduct | LibraryProduct | RegisterProduct
    scales: Tensor
    """Of outputs."""
    bias: Tensor | None
    dtype: torch.dtype
    """Type of the results."""
    inputs: int
    is_gated: bool
    """Whether results are ``silu`` of the first half of the outputs, times the others."""

    @classmethod
    def takes_here(cls) -> bool:
        """Whether there is a product for this processor."""
        return has_vnni() or multiplies_words()

    @classmethod
    def of(
        cls,
        weight: Tensor,
        dtype: torch.dtype,
        bias: Tensor | None = None,
        *,
        is_gated: bool = False,
    ) -> "Int8Product":
        """Rotate and quantize weights.

        Shapes:  weight (out, in); bias (out,)
        """
        turned = rotate_inputs(weight.float())
        scales = turned.abs().amax(1).clamp_min(torch.finfo(torch.float32).tiny) / LARGEST_CODE
        codes = (turned / scales[:, None]).round().to(torch.int8)
        bias, inputs = None if bias is None else bias.float(), weight.shape[1]
        product: DotProduct | LibraryProduct | RegisterProduct
        if _has_library():
            product = LibraryProduct.of(codes, scales)
        elif has_vnni() and inputs % QUAD == 0:
            product = DotProduct.of(codes, scales, bias, is_gated=is_gated)
        else:
            product = RegisterProduct.of(codes)
        return cls(product, scales, bias, dtype, inputs, is_gated)

    @property
    def results(self) -> int:
        """Numbers of a row of results."""
        return len(self.scales) // 2 if self.is_gated else len(self.scales)

    @property
    def size_bytes(self) -> int:
        bias = 0 if self.bias is None else self.bias.nbytes
        return len(self.scales) * self.inputs + self.scales.nbytes + bias

    def __call__(self, rows: QuantizedRows) -> Tensor:
        """Shapes:  of (T, in) -> (T, results)"""
        if isinstance(self.product, DotProduct):
            return self.product(rows, self.dtype)
        if not len(rows.codes):
            return rows.scales.new_empty(0, self.results, dtype=self.dtype)
        if isinstance(self.product, RegisterProduct):
            numbers = self.product(rows.codes, torch.float32, self.scales)
        else:
            numbers = self.product(rows.codes)
        numbers = numbers.mul_(rows.scales[:, None])
        if self.bias is not None:
            numbers = numbers.add_(self.bias)
        return (gate(numbers) if self.is_gated else numbers).to(self.dtype)
