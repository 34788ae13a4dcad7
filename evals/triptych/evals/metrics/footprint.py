"""Bytes of a compressed prompt, counted from the handle that the decode stage receives."""

from collections.abc import Iterable

import numpy as np

from triptych.core.handles import KVHandle
from triptych.core.layout import PageFormat, PageLayout, page_format
from triptych.core.pages import PagePlan
from triptych.evals.data.cases import Footprint

TABLE_ENTRY_BYTES = 4
"""One int32 in the decode stage's tables: per page its id, per head row and format its tokens."""


def of_handle(handle: KVHandle, plan: PagePlan) -> Footprint:
    """Count data bytes and all-in bytes of the pages of a handle.

    All-in bytes are whole pages, so scores, positions, the recent window and unfilled slots are
    included, and the page table's entries. What all requests share (the free list, a model's mean
    keys) is not.
    """
    runs = [(page_format(run.format), np.frombuffer(run.tokens, "<i4")) for run in handle.runs]
    rows = ((form, int(count)) for form, counts in runs for count in counts)
    return of_rows(rows, plan.geometry.head_dim, plan.page_bytes, plan.raw_bytes(handle.tokens))


def of_rows(
    rows: Iterable[tuple[PageFormat, int]], head_dim: int, page_bytes: int, full_bytes: int
) -> Footprint:
    """As ``of_handle``, from the tokens of each head row in each format."""
    data = all_in = 0
    for form, tokens in rows:
        pages = PageLayout(form, head_dim, page_bytes).pages(tokens)
        data += tokens * form.read_bytes(head_dim)
        all_in += pages * (page_bytes + TABLE_ENTRY_BYTES) + TABLE_ENTRY_BYTES
    return Footprint(full_bytes=full_bytes, data_bytes=data, all_in_bytes=all_in)
