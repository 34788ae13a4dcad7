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


@dataclass(frozen=True, slots=True)
class LibraryProduct:
    """A product of oneDNN, times the scales of outputs, in float32."""

    packed: Tensor
    """In its layout."""
    scales: Tensor
    zeros: Tensor

    @classmethod
    def takes_here(cls) -> bool:
        """Whether oneDNN multiplies codes in tiles.

        In vectors it is no faster than ``DotProduct``, and without VNNI it adds pairs of products
        in 16 bits, which overflow.
        """
        has_library = torch.backends.mkldnn.is_available()
        return multiplies_bytes() and multiplies_tiles() and has_library

    @classmethod
    def of(cls, codes: Tensor, scales: Tensor) -> "LibraryProduct":
        packed = torch.ops.onednn.qlinear_prepack(codes, None)
        return cls(packed, scales, torch.zeros(len(scales), dtype=torch.int32))

    def __call__(self, codes: Tensor) -> Tensor:
        """Shapes:  (T, in) -> (T, out)"""
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
class ScaledProduct:
    """A product to whose results scales of rows, bias and gate are applied afterwards."""

    product: LibraryProduct | RegisterProduct
    scales: Tensor
    """Of outputs."""
    bias: Tensor | None
    is_gated: bool

    def __call__(self, rows: QuantizedRows, dtype: torch.dtype) -> Tensor:
        """As ``DotProduct``."""
        if not len(rows.codes):
            results = len(self.scales) // 2 if self.is_gated else len(self.scales)
            return rows.scales.new_empty(0, results, dtype=dtype)
        if isinstance(self.product, RegisterProduct):
            numbers = self.product(rows.codes, torch.float32, self.scales)
        else:
            numbers = self.product(rows.codes)
        numbers = numbers.mul_(rows.scales[:, None])
        if self.bias is not None:
            numbers = numbers.add_(self.bias)
        return (gate(numbers) if self.is_gated else numbers).to(dtype)


@dataclass(frozen=True, slots=True)
class Int8Product:
    """A product with constant weights in 8 bits, one scale for each output."""

    product: DotProduct | ScaledProduct
    dtype: torch.dtype
    """Type of the results."""
    results: int
    """Numbers of a row of results."""
    size_bytes: int
    """Of weights, scales and bias, all of which a product reads."""

    @classmethod
    def takes_here(cls) -> bool:
        """Whether there is a product for this processor."""
        return multiplies_bytes() or multiplies_words()

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

        ``is_gated``: results are ``silu`` of the first half of the outputs, times the others.

        Shapes:  weight (out, in); bias (out,)
        """
        turned = rotate_inputs(weight.float())
        scales = turned.abs().amax(1).clamp_min(torch.finfo(torch.float32).tiny) / LARGEST_CODE
        codes = (turned / scales[:, None]).round().to(torch.int8)
        bias = None if bias is None else bias.float()
        outputs, size = len(codes), codes.numel() + scales.nbytes
        return cls(
            product=_product(codes, scales, bias, is_gated=is_gated),
            dtype=dtype,
            results=outputs // 2 if is_gated else outputs,
            size_bytes=size if bias is None else size + bias.nbytes,
        )

    def __call__(self, rows: QuantizedRows) -> Tensor:
        """Shapes:  of (T, in) -> (T, results)"""
        return self.product(rows, self.dtype)


def _product(
    codes: Tensor, scales: Tensor, bias: Tensor | None, *, is_gated: bool
) -> DotProduct | ScaledProduct:
    """The fastest product of this processor."""
    if LibraryProduct.takes_here():
        return ScaledProduct(LibraryProduct.of(codes, scales), scales, bias, is_gated)
    if multiplies_bytes() and codes.shape[1] % QUAD == 0:
        return DotProduct.of(codes, scales, bias, is_gated=is_gated)
    return ScaledProduct(RegisterProduct.of(codes), scales, bias, is_gated)
