"""Tokens of prompts that a prefill step computes on a CPU, as words that compiled code reads."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

START, COUNT, FIRST, TABLE, TABLE_LAYER, TABLE_HEAD, WIDTH, ROUNDED_FROM, ROUNDED_TO = range(9)
SUMS, SUMS_LAYER, SUMS_HEAD, SUMS_FROM, SUMMED = range(9, 14)
PART_WORDS = 14
"""Words of a part, from the fields of ``PromptPart``; strides of tables and sums are in bytes.

``SUMMED`` tokens from position ``SUMS_FROM`` on have sums.
"""

NO_PAGES = np.zeros((0, 0, 0), np.int32)


@dataclass(frozen=True, slots=True)
class PromptPart:
    """Successive tokens of one prompt, whose earlier tokens are in raw pages already."""

    start: int
    """Row of its first token in the step."""
    count: int
    first: int
    """Position of its first token, and number of the earlier ones."""
    pages: NDArray[np.int32]
    """Raw pages, [layers, kv_heads, pages of a head row]."""
    rounded: range
    """Positions of the tokens whose keys and values are rounded to what their codes decode to."""
    sums: Tensor | None
    """Attention that each token from ``rounded.stop`` on received, [layers, heads, tokens] float32:
    it is added to. None: it is not needed."""

    def words(self) -> tuple[int, ...]:
        layer, head, _ = self.pages.strides
        table = self.pages.ctypes.data, layer, head, self.pages.shape[2]
        begin, end = self.rounded.stop, self.first + self.count
        sums = 0, 0, 0, 0, 0
        if self.sums is not None and end > begin:
            layer, head, _ = self.sums.stride()
            sums = self.sums.data_ptr(), 4 * layer, 4 * head, begin, end - begin
        return (self.start, self.count, self.first, *table, self.rounded.start, begin, *sums)


class PartTable:
    """Memory for the parts of a step, always at the same address."""

    def __init__(self, most: int) -> None:
        """``most``: parts that a step may have."""
        self._most = most
        self._words = np.zeros(1 + most * PART_WORDS, np.int64)

    @classmethod
    def of_tensors(cls, count: int, known: int, sums: Tensor | None) -> "PartTable":
        """One part whose keys are in no pages, the last ``count`` of ``known``.

        Shapes:  sums [heads, tokens] or None, of at most ``known`` tokens
        """
        table = cls(1)
        part = PromptPart(0, count, known - count, NO_PAGES, range(0), None)
        table.write([part])
        if sums is not None:
            summed = min(known, sums.shape[1])
            table._words[1 + SUMS :] = sums.data_ptr(), 0, 4 * sums.stride(0), 0, summed
        return table

    @property
    def address(self) -> int:
        """Of the number of parts, which their words follow."""
        return self._words.ctypes.data

    def holds(self, parts: int) -> bool:
        return parts <= self._most

    def write(self, parts: Sequence[PromptPart]) -> None:
        """The words are valid as long as the pages and sums of the parts are."""
        self._words[0] = len(parts)
        rows = self._words[1 : 1 + len(parts) * PART_WORDS].reshape(-1, PART_WORDS)
        for row, part in zip(rows, parts, strict=True):
            row[:] = part.words()
