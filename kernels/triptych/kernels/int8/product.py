"""oneDNN's product of 8-bit codes, with 32-bit sums.

Sums of integers are exact, so a row has the same bits whatever the number of rows, the threads and
the instructions.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from triptych.kernels.blocked_product import ROW_COUNTS, in_pieces
from triptych.kernels.int8.rows import (
    LARGEST_CODE,
    ZERO_CODE,
    QuantizedRows,
    ScaledRows,
    rotate_inputs,
)


@dataclass(frozen=True, slots=True)
class Int8Product:
    """A product with constant weights in 8 bits, one scale for each output."""

    packed: Tensor
    scales: Tensor
    zeros: Tensor
    dtype: torch.dtype
    """Type of the results."""

    @classmethod
    def takes_here(cls) -> bool:
        """Whether this processor adds products of 8 bits in 32 bits.

        Without VNNI pairs of them are added in 16 bits, which overflow.
        """
        has_vnni = torch.cpu._is_vnni_supported()  # pyright: ignore[reportPrivateUsage]
        return bool(has_vnni) and torch.backends.mkldnn.is_available()

    @classmethod
    def of(cls, weight: Tensor, dtype: torch.dtype) -> "Int8Product":
        """Rotate and quantize weights.

        Shapes:  weight (out, in)
        """
        turned = rotate_inputs(weight.float())
        scales = turned.abs().amax(1).clamp_min(torch.finfo(torch.float32).tiny) / LARGEST_CODE
        codes = (turned / scales[:, None]).round().to(torch.int8)
        packed = torch.ops.onednn.qlinear_prepack(codes, None)
        return cls(packed, scales, torch.zeros(len(scales), dtype=torch.int32), dtype)

    @property
    def size_bytes(self) -> int:
        return len(self.scales) * self.packed.shape[0] + self.scales.nbytes

    def __call__(self, rows: QuantizedRows) -> ScaledRows:
        """Shapes:  of (T, in) -> of (T, out)"""
        if not len(rows.codes):
            empty = rows.scales.new_empty(0, len(self.scales), dtype=self.dtype)
            return ScaledRows(empty, rows.scales)
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
