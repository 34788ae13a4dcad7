"""Products of 8-bit codes, with 32-bit sums: oneDNN's, or without VNNI our own.

Sums of integers are exact, so a row has the same bits whatever the number of rows, the threads and
the instructions.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from triptych.kernels.codegen.native import multiplies_words
from triptych.kernels.dense.blocked_product import ROW_COUNTS, in_pieces
from triptych.kernels.dense.register_product import RegisterProduct
from triptych.kernels.int8.rows import (
    LARGEST_CODE,
    ZERO_CODE,
    QuantizedRows,
    ScaledRows,
    rotate_inputs,
)


def has_vnni() -> bool:
    """Whether this processor adds products of 8 bits in 32 bits.

    Without it oneDNN adds pairs of them in 16 bits, which overflow.
    """
    has_instructions = torch.cpu._is_vnni_supported()  # pyright: ignore[reportPrivateUsage]
    return bool(has_instructions) and torch.backends.mkldnn.is_available()


@dataclass(frozen=True, slots=True)
class Int8Product:
    """A product with constant weights in 8 bits, one scale for each output."""

    packed: Tensor | RegisterProduct
    """In oneDNN's layout, or without VNNI in ours."""
    scales: Tensor
    zeros: Tensor
    dtype: torch.dtype
    """Type of the results."""

    @classmethod
    def takes_here(cls) -> bool:
        """Whether there is a product for this processor."""
        return has_vnni() or multiplies_words()

    @classmethod
    def of(cls, weight: Tensor, dtype: torch.dtype) -> "Int8Product":
        """Rotate and quantize weights.

        Shapes:  weight (out, in)
        """
        turned = rotate_inputs(weight.float())
        scales = turned.abs().amax(1).clamp_min(torch.finfo(torch.float32).tiny) / LARGEST_CODE
        codes = (turned / scales[:, None]).round().to(torch.int8)
        has_library = has_vnni()
        packed = (
            torch.ops.onednn.qlinear_prepack(codes, None)
            if has_library
            else RegisterProduct.of(codes)
        )
        return cls(packed, scales, torch.zeros(len(scales), dtype=torch.int32), dtype)

    @property
    def size_bytes(self) -> int:
        packed = self.packed
        columns = packed.columns if isinstance(packed, RegisterProduct) else packed.shape[0]
        return len(self.scales) * columns + self.scales.nbytes

    def __call__(self, rows: QuantizedRows) -> ScaledRows:
        """Shapes:  of (T, in) -> of (T, out)"""
        if not len(rows.codes):
            empty = rows.scales.new_empty(0, len(self.scales), dtype=self.dtype)
            return ScaledRows(empty, rows.scales)
        if isinstance(self.packed, RegisterProduct):
            return ScaledRows(self.packed(rows.codes, self.dtype, self.scales), rows.scales)
        return ScaledRows(in_pieces(self._multiply, rows.codes, ROW_COUNTS), rows.scales)

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
            self.dtype,
            "none",
            [],
            "",
        )
