"""Encodes page tables in handles and decodes handles into page tables."""

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from triptych.core.errors import MessageError
from triptych.core.handles import KVHandle, LeaseRef, PageRun
from triptych.core.layout import PageLayout
from triptych.kvpool.rpc import page_ranges as page_runs

Ids = NDArray[np.int32]
Run = tuple[str, Ids, Ids]
"""Format name, tokens per head row, page ids of all head rows one after another."""


def make_handle(
    lease_ref: LeaseRef, runs: Sequence[Run], tokens: int, fixed: Run | None = None
) -> KVHandle:
    """Make a handle of a request's pages.

    ``tokens``: length of the whole sequence, dropped tokens included.

    ``fixed``: the read-only pages of a shared prefix, if the request has one.
    """
    packed = [_packed(*run) for run in runs]
    if fixed is not None:
        packed.append(replace(_packed(*fixed), fixed=True))
    return KVHandle(lease_ref, tuple(packed), tokens)


def _packed(form: str, counts: Ids, pages: Ids) -> PageRun:
    tokens = np.ascontiguousarray(counts, "<i4").tobytes()
    return PageRun(form, tokens, page_runs.pack(pages))


def unpack_run(
    run: PageRun, layout: PageLayout, head_rows: int, arena_pages: int
) -> tuple[Ids, Ids]:
    """Tokens per head row, and page ids in row order.

    Raises: MessageError if format, number of head rows and number of pages do not agree
    """
    if run.format != layout.format.name:
        raise MessageError(f"run holds {run.format} pages, expected {layout.format.name}")
    if len(run.tokens) != 4 * head_rows:
        raise MessageError(f"run has {len(run.tokens) // 4} head rows, the model {head_rows}")
    tokens = np.frombuffer(run.tokens, "<i4").astype(np.int32)
    if tokens.min(initial=0) < 0:
        raise MessageError("run has a head row with fewer than no tokens")
    wanted = int(pages_of(tokens, layout).sum())
    ids = page_runs.unpack(run.pages, arena_pages)
    if len(ids) != wanted:
        raise MessageError(f"run names {len(ids)} pages, its tokens take {wanted}")
    return tokens, ids


def pages_of(tokens: Ids, layout: PageLayout) -> Ids:
    """Pages of each head row."""
    return -(-tokens // layout.tokens)
