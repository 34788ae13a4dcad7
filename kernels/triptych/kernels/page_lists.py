"""Lists of the pages that decode attention reads of each head row after page selection."""

from dataclasses import dataclass, field, replace

from torch import Tensor

from triptych.core.errors import ConfigError
from triptych.kernels.codegen.call_cache import CallCache
from triptych.kernels.pages import check_indices


@dataclass(frozen=True, slots=True, eq=False)
class PageLists:
    """The pages that attention reads of each head row, numbered over its sections in order.

    If the first section of a row has 2 pages, number 3 is page 1 of the second section.
    """

    ordinals: Tensor
    """int32 [S, KH, M], the last one dense: ascending."""
    counts: Tensor
    """int32 [S, KH]."""
    rows: Tensor
    """int32 [R]: index of the list of each request of a call; negative: it reads all pages."""
    call_cache: CallCache = field(default_factory=CallCache, init=False, repr=False)
    """``replace`` starts a new one, since the copy may have other memory."""

    def of(self, rows: Tensor) -> "PageLists":
        """The same lists and call cache, for the requests ``rows`` of another call."""
        page_lists = replace(self, rows=rows)
        object.__setattr__(page_lists, "call_cache", self.call_cache)
        return page_lists


def check_page_lists(page_lists: PageLists, rows: int, kv_heads: int) -> None:
    """Raise ``ConfigError`` unless there are lists for all KV heads and an index for each row."""
    _check_rows(page_lists, rows)
    ordinals, counts = page_lists.ordinals, page_lists.counts
    check_indices(ordinals, counts)
    if {ordinals.shape[1], counts.shape[1]} != {kv_heads} or ordinals.stride(2) != 1:
        raise ConfigError(
            f"lists of pages {tuple(ordinals.shape)}, counts {tuple(counts.shape)}: "
            f"expected {kv_heads} KV heads, ordinals dense"
        )


def _check_rows(page_lists: PageLists, rows: int) -> None:
    check_indices(page_lists.rows)
    if page_lists.rows.shape != (rows,):
        raise ConfigError(
            f"page lists for {tuple(page_lists.rows.shape)} requests: expected {rows}"
        )


def page_list_words(page_lists: PageLists, rows: int, kv_heads: int) -> tuple[int, ...]:
    """Checked lists as integers for compiled code: count, addresses, strides, entries of a row."""
    _check_rows(page_lists, rows)
    return page_lists.call_cache.get(lambda: _words(page_lists, kv_heads), kv_heads)


def _words(page_lists: PageLists, kv_heads: int) -> tuple[int, ...]:
    check_page_lists(page_lists, len(page_lists.rows), kv_heads)
    ordinals, counts = page_lists.ordinals, page_lists.counts
    return (
        min(ordinals.shape[0], counts.shape[0]),
        ordinals.data_ptr(),
        *ordinals.stride()[:2],
        ordinals.shape[2],
        counts.data_ptr(),
        *counts.stride(),
    )
