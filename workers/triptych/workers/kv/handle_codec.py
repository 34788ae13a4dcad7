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
MOST_PARTS = 64
"""Most small pages of a page that a run of a peer may name."""

Run = tuple[PageLayout, Ids, Ids]
"""Layout, tokens per head row, page ids of all head rows one after another."""


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


def _packed(layout: PageLayout, counts: Ids, pages: Ids) -> PageRun:
    tokens = np.ascontiguousarray(counts, "<i4").tobytes()
    return PageRun(layout.format.name, tokens, page_runs.pack(pages), layout.parts)


def pool_pages(ids: Ids, parts: int) -> Ids:
    """Pages of the pool that have some pages of a run, each once; in their order if ``parts`` is
    1."""
    return ids if parts == 1 else np.unique(ids // np.int32(parts))


def small_pages(pages: Ids, parts: int) -> Ids:
    """All pages of a run in some pages of the pool, in their order."""
    each = np.arange(parts, dtype=np.int32)
    return (pages[:, None] * np.int32(parts) + each).ravel()


def unpack_run(
    run: PageRun, layout: PageLayout, head_rows: int, arena_pages: int
) -> tuple[Ids, Ids]:
    """Tokens per head row, and page ids in row order.

    Raises: MessageError if format, number of head rows and number of pages do not agree
    """
    if (run.format, run.parts) != (layout.format.name, layout.parts):
        raise MessageError(
            f"run holds {run.format} pages, {run.parts} in a page of the pool, expected "
            f"{layout.format.name}, {layout.parts}"
        )
    if len(run.tokens) != 4 * head_rows:
        raise MessageError(f"run has {len(run.tokens) // 4} head rows, the model {head_rows}")
    tokens = np.frombuffer(run.tokens, "<i4").astype(np.int32)
    if tokens.min(initial=0) < 0:
        raise MessageError("run has a head row with fewer than no tokens")
    wanted = int(pages_of(tokens, layout).sum())
    ids = page_runs.unpack(run.pages, arena_pages * layout.parts)
    if len(ids) != wanted:
        raise MessageError(f"run names {len(ids)} pages, its tokens take {wanted}")
    return tokens, ids


def pages_by_run(handle: KVHandle, arena_pages: int) -> list[Ids]:
    """The pages of the pool that each run of a handle takes.

    Raises: MessageError if a run names pages that a pool of ``arena_pages`` pages does not have
    """
    return [pool_pages(_unpacked(run, arena_pages), run.parts) for run in handle.runs]


def copied_handle(handle: KVHandle, arena_pages: int, lease_ref: LeaseRef, copies: Ids) -> KVHandle:
    """The handle of copies of a handle's pages, which are in the order of ``pages_by_run``."""
    runs = list[PageRun]()
    for run in handle.runs:
        ids = _unpacked(run, arena_pages)
        theirs = pool_pages(ids, run.parts)
        mine, copies = copies[: theirs.size], copies[theirs.size :]
        if run.parts > 1:
            page, place = np.divmod(ids, np.int32(run.parts))
            mine = mine[np.searchsorted(theirs, page)] * np.int32(run.parts) + place
        runs.append(replace(run, pages=page_runs.pack(mine)))
    return replace(handle, lease_ref=lease_ref, runs=tuple(runs))


def _unpacked(run: PageRun, arena_pages: int) -> Ids:
    if not 1 <= run.parts <= MOST_PARTS:
        raise MessageError(f"run of {run.parts} pages in one of the pool: at most {MOST_PARTS}")
    return page_runs.unpack(run.pages, arena_pages * run.parts)


def pages_of(tokens: Ids, layout: PageLayout) -> Ids:
    """Pages of each head row."""
    return -(-tokens // layout.tokens)
