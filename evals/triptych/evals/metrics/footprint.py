"""Bytes of a compressed prompt, counted from the handle that the decode stage receives."""

from collections.abc import Iterable

import numpy as np

from triptych.core.handles import KVHandle, PageRun
from triptych.core.layout import PageLayout
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
    runs = [
        (layout_of(run, plan), np.frombuffer(run.tokens, "<i4").tolist()) for run in handle.runs
    ]
    return of_rows(runs, plan.raw_bytes(handle.tokens))


def layout_of(run: PageRun, plan: PagePlan) -> PageLayout:
    """The layout of the pages of a run."""
    layouts = (plan.raw, plan.recent, *plan.classes)
    return next(one for one in layouts if (one.format.name, one.parts) == (run.format, run.parts))


def of_rows(runs: Iterable[tuple[PageLayout, Iterable[int]]], full_bytes: int) -> Footprint:
    """As ``of_handle``, from the tokens of each head row in each layout."""
    data = all_in = 0
    for layout, counts in runs:
        pages = rows = 0
        for tokens in counts:
            pages, rows = pages + layout.pages(tokens), rows + 1
            data += round(tokens * layout.read_bytes)
        all_in += layout.pool_pages(pages) * layout.page_bytes + (pages + rows) * TABLE_ENTRY_BYTES
    return Footprint(full_bytes=full_bytes, data_bytes=data, all_in_bytes=all_in)
