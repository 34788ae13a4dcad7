"""oneDNN's products with constant weights in its blocked layout.

A row of a product has the same bits whatever the number of rows, so an answer does not depend on
the requests beside it.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import lru_cache

import torch
import torch.nn.functional as F
from torch import Tensor

LONGEST_SUM = 1024
"""Longest sums that oneDNN computes in the same order for one row as for several. Longer ones are
computed for two rows: that takes as long, since it is the weights that are read."""

ROW_COUNTS = (1, 2, 4, 8, 16, 24, 32, 48, 64, 128, 256, 512)
"""Numbers of rows for which products are computed."""
FILLED_UP = 64
"""Fewer rows are filled up to one of these numbers, more are divided into several."""
MOST_FILLING = 1 / 8
"""Share by which more rows are filled up, too."""

TILED = (64, 128)
"""Numbers of rows of products that AMX computes with the same bits, up to ``AMX_THREADS`` and
``AMX_SUM``; beyond, only the first one."""
AMX_THREADS = 4
AMX_SUM = 4096
UNTILED = (2, 4, 8, 16, 24, 32)
"""Numbers of rows of products that a processor with AMX computes without it, with the same bits.
Those of a single row differ in short sums, and two take as long."""


@dataclass(frozen=True, slots=True)
class BlockedProduct:
    """A product with constant weights, and a bias."""

    blocked: Tensor
    bias: Tensor | None
    out_features: int
    counts: tuple[int, ...]
    """Of ``row_counts``."""

    @classmethod
    def takes(cls, dtype: torch.dtype) -> bool:
        """Whether oneDNN multiplies this type well on this machine."""
        if not torch.backends.mkldnn.is_available():
            return False
        native = dtype == torch.bfloat16 and torch.ops.mkldnn._is_mkldnn_bf16_supported()
        return native or dtype == torch.float32

    @classmethod
    def of(cls, weight: Tensor, bias: Tensor | None = None) -> "BlockedProduct":
        """Shapes:  weight (out, in), bias (out,)"""
        blocked = torch.ops.mkldnn._reorder_linear_weight(weight.contiguous(), None)
        return cls(blocked, bias, len(weight), row_counts(weight.dtype, weight.shape[1]))

    def for_few_rows(self) -> "BlockedProduct":
        """The same product, faster for up to 32 rows; on a processor with AMX with other bits."""
        return replace(self, counts=UNTILED) if set(self.counts) <= set(TILED) else self

    def __call__(self, rows: Tensor) -> Tensor:
        """Shapes:  (T, in) -> (T, out)"""
        if not len(rows):
            return rows.new_empty(0, self.out_features)
        return in_pieces(self._multiply, rows, self.counts)

    def _multiply(self, rows: Tensor) -> Tensor:
        return torch.ops.mkldnn._linear_pointwise.default(
            rows, self.blocked, self.bias, "none", [], ""
        )


def has_amx() -> bool:
    """Whether the processor multiplies tiles of 16-bit numbers."""
    return torch.cpu._is_amx_tile_supported()  # pyright: ignore[reportPrivateUsage]


def row_counts(dtype: torch.dtype, columns: int) -> tuple[int, ...]:
    """Numbers of rows for which a row of a product has the same bits.

    Only the order of a sum matters. oneDNN computes single rows of long sums in another order. With
    AMX it uses other instructions for up to 32 rows, and for more rows divides long sums by their
    number and that of the threads. So prefill and decode have numbers of their own there. (Where a
    sum is more than about three times as long as the result, threads matter for any number.)
    """
    if dtype == torch.bfloat16 and has_amx():
        is_short = columns <= AMX_SUM and torch.get_num_threads() <= AMX_THREADS
        return TILED if is_short else TILED[:1]
    return ROW_COUNTS[1:] if columns > LONGEST_SUM else ROW_COUNTS


def in_pieces(
    product: Callable[[Tensor], Tensor], rows: Tensor, counts: tuple[int, ...] = ROW_COUNTS
) -> Tensor:
    """A product of one row or more, computed for few different numbers of rows.

    oneDNN and torch each keep the last 1,024 products that they prepared, with the memory that
    those need: 2 MB for 512 rows and 960 outputs.

    Shapes:  (T, in) -> (T, out)
    """
    pieces = row_pieces(len(rows), counts)
    if len(pieces) == 1:
        return _filled_up(product, rows, pieces[0][1])
    return torch.cat(
        [_filled_up(product, rows[start : start + size], size) for start, size in pieces]
    )


def _filled_up(product: Callable[[Tensor], Tensor], rows: Tensor, size: int) -> Tensor:
    missing = size - len(rows)
    return product(F.pad(rows, (0, 0, 0, missing)))[: len(rows)] if missing else product(rows)


@lru_cache(maxsize=1 << 12)
def row_pieces(rows: int, counts: tuple[int, ...]) -> tuple[tuple[int, int], ...]:
    """Start and size of each product for some rows; the last one may reach beyond them.

    >>> row_pieces(300, ROW_COUNTS), row_pieces(240, ROW_COUNTS)
    (((0, 256), (256, 48)), ((0, 256),))
    """
    pieces, start = list[tuple[int, int]](), 0
    while start < rows:
        left = rows - start
        above = min((count for count in counts if count >= left), default=0)
        below = max((count for count in counts if count <= left), default=0)
        fills = above and (left < FILLED_UP or above - left <= MOST_FILLING * left)
        pieces.append((start, above if fills or not below else below))
        start += pieces[-1][1]
    return tuple(pieces)
