"""Quantized weights as checkpoints store them, read as the weights that they stand for.

Source: the formats of AutoGPTQ, AutoAWQ and compressed-tensors
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from triptych.core.errors import ModelError
from triptych.workers.models.weights import mxfp4
from triptych.workers.models.weights.scheme import QuantizationScheme
from triptych.workers.models.weights.stored_form import (
    PARTS,
    UNUSED,
    WORD_BITS,
    WORDS,
    weight_name,
)

AWQ_ORDER = (0, 4, 1, 5, 2, 6, 3, 7)
"""Where each of eight neighbours is in a word."""


@dataclass(frozen=True, slots=True)
class DequantizedWeights(Mapping[str, Tensor]):
    """Weights by name. Each is dequantized when it is asked for, and not kept."""

    stored: Mapping[str, Tensor]
    scheme: QuantizationScheme

    def __getitem__(self, name: str) -> Tensor:
        """Quantized weights come in float32, MXFP4 ones in bfloat16.

        Raises: ModelError if the parts of a weight do not fit each other
        """
        blocks = self.stored.get(f"{name}{mxfp4.BLOCKS}")
        module = name.removesuffix(".weight")
        beside = {part: f"{module}.{part}" for part in (*WORDS, *PARTS)}
        parts = {part: self.stored[at] for part, at in beside.items() if at in self.stored}
        try:
            if blocks is not None:
                return mxfp4.dequantized(blocks, self.stored[f"{name}{mxfp4.SCALES}"])
            return self._dequantized(name, parts)
        except (KeyError, RuntimeError, IndexError, ValueError, ZeroDivisionError) as error:
            raise ModelError(
                f"{name}: its quantized parts do not fit each other: {error}"
            ) from error

    def __iter__(self) -> Iterator[str]:
        for name in self.stored:
            last = name.rpartition(".")[2]
            if name.endswith(mxfp4.BLOCKS):
                yield name.removesuffix(mxfp4.BLOCKS)
            elif last in WORDS:
                yield weight_name(name)
            elif last not in (*PARTS, *UNUSED) and not self._is_scale(name):
                yield name

    def _is_scale(self, name: str) -> bool:
        return self.scheme.method == "mxfp4" and name.endswith(mxfp4.SCALES)

    def __len__(self) -> int:
        return sum(1 for _ in self)

    def _dequantized(self, name: str, parts: Mapping[str, Tensor]) -> Tensor:
        if "qweight" in parts:
            return (_awq if self.scheme.method == "awq" else _gptq)(parts, self.scheme)
        if "weight_packed" in parts:
            return _compressed(parts, self.scheme)
        scales = parts.get("weight_scale", parts.get("weight_scale_inv"))
        if scales is None:
            return self.stored[name]
        zeros = parts.get("weight_zero_point")
        return _scaled(self.stored[name], scales, zeros, None, self.scheme.block)


def _gptq(parts: Mapping[str, Tensor], scheme: QuantizationScheme) -> Tensor:
    """Words hold neighbours of a column; a row of ``qzeros`` and ``scales`` is a group."""
    values = _unpacked(parts["qweight"].T, scheme.bits)
    zeros = _unpacked(parts["qzeros"], scheme.bits).T + int(scheme.zeros_are_less_one)
    return _scaled(values, parts["scales"].T, zeros, parts.get("g_idx"), scheme.block)


def _awq(parts: Mapping[str, Tensor], scheme: QuantizationScheme) -> Tensor:
    """Words hold neighbours of a row, in an order of their own."""
    values, zeros = (
        _unpacked(parts[part], scheme.bits).view(len(parts[part]), -1, 8)[..., AWQ_ORDER].flatten(1)
        for part in ("qweight", "qzeros")
    )
    return _scaled(values.T, parts["scales"].T, zeros.T, None, scheme.block)


def _compressed(parts: Mapping[str, Tensor], scheme: QuantizationScheme) -> Tensor:
    """Signed integers with an offset; words of zero points hold neighbours of a column."""
    middle = 1 << (scheme.bits - 1)
    values = _unpacked(parts["weight_packed"], scheme.bits) - middle
    zeros = parts.get("weight_zero_point")
    if zeros is not None:
        zeros = _unpacked(zeros.T, scheme.bits).T[: len(values)] - middle
    return _scaled(values, parts["weight_scale"], zeros, parts.get("weight_g_idx"), scheme.block)


def _unpacked(words: Tensor, bits: int) -> Tensor:
    """Unsigned integers of each row of 32-bit words, the lowest bits first."""
    shifts = torch.arange(0, WORD_BITS, bits, dtype=torch.int32)
    return ((words[..., None] >> shifts) & ((1 << bits) - 1)).flatten(1)


def _scaled(
    values: Tensor,
    scales: Tensor,
    zeros: Tensor | None,
    group: Tensor | None,
    block: tuple[int, int],
) -> Tensor:
    """``(values - zeros) * scales`` in float32.

    Shapes:  values (out, in); scales and zeros for the tensor, rows, groups of columns or blocks;
             group (in,): the group of each column, where they have another order
    """
    shape = (values.shape[0], values.shape[1])
    shifted = values.float()
    if zeros is not None:
        shifted = shifted - _spread(zeros.float(), shape, group, block)
    return shifted * _spread(scales.float(), shape, group, block)


def _spread(
    part: Tensor, shape: tuple[int, int], group: Tensor | None, block: tuple[int, int]
) -> Tensor:
    """A number for each weight, or a shape that broadcasts to it."""
    part = part.reshape(-1, 1) if part.dim() != 2 else part
    if group is not None and part.shape[1] > 1 and bool((group >= 0).all()):
        return part[:, group.long()]
    (rows, columns), (given_rows, given_columns) = shape, part.shape
    if given_rows in (1, rows):
        each = columns // given_columns
        if given_columns == 1 or each * given_columns == columns:
            return part.repeat_interleave(each, 1) if 1 < given_columns < columns else part
    elif (given_rows, given_columns) == (-(-rows // block[0]), -(-columns // block[1])):
        part = part.repeat_interleave(block[0], 0)[:rows]
        return part.repeat_interleave(block[1], 1)[:, :columns]
    raise ValueError(f"scales or zero points {tuple(part.shape)} for weights {shape}")
