"""Which pages of each head row attention reads, where it does not read all."""

from dataclasses import dataclass

from torch import Tensor

from triptych.core.errors import ConfigError
from triptych.kernels.pages import check_indices


@dataclass(frozen=True, slots=True)
class PageLists:
    """Which pages of a head row are read, as places in its sections laid end to end.

    Page 3 of a row whose first section has 2 pages is page 1 of its second section.
    """

    ordinals: Tensor
    """int32 [S, KH, M], the last one dense: ascending."""
    counts: Tensor
    """int32 [S, KH]."""
    rows: Tensor
    """int32 [R]: which of the S lists each request of a call has. Negative: none, it reads all
    pages."""


def check_lists(lists: PageLists, rows: int, kv_heads: int) -> None:
    """Raise ``ConfigError`` unless there is a list for each KV head, and a place for each row."""
    check_indices(lists.ordinals, lists.counts, lists.rows)
    heads = {lists.ordinals.shape[1], lists.counts.shape[1]}
    if heads != {kv_heads} or lists.rows.shape != (rows,) or lists.ordinals.stride(2) != 1:
        raise ConfigError(
            f"lists of pages {tuple(lists.ordinals.shape)} for {tuple(lists.rows.shape)} requests: "
            f"expected {kv_heads} KV heads and {rows} requests, ordinals dense"
        )
