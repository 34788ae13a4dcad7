# Triton's kernels and numpy's arrays of numbers have no types.
# pyright: basic, reportCallIssue=false, reportIndexIssue=false, reportAttributeAccessIssue=false, reportArgumentType=false, reportGeneralTypeIssues=false
"""The work list of decode attention, for batches of requests of very different lengths."""

from collections.abc import Sequence
from heapq import heapreplace
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import torch
import triton
import triton.language as tl
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from triptych.core.layout import PageLayout, default_page_bytes, stored_format
from triptych.kernels import Section
from triptych.kernels.decode.gpu import LEAST_UNITS, WAVES, most_runs
from triptych.kernels.decode.gpu_work import run_at, runs_in, work_of
from triptych.kernels.page_lists import PageLists
from triptych.kernels.triton.triton_layout import form_of, page_list_arguments, section_arguments

HEADS, TILE, DIM = 2, 16, 64
FORMATS = ("fp16", "k8v4", "k4v2")


@triton.jit
def list_runs(
    found, starts, slots, sections, page_lists, head_rows, wanted, least,
    KV_HEADS: tl.constexpr, FORMS: tl.constexpr, TILE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Store head row, section, number and count of each run; -1 for a program that has none."""
    index = tl.program_id(0)
    row, begin, each = run_at(
        index, starts, sections, page_lists, slots, head_rows, wanted, least, KV_HEADS, FORMS, TILE,
        BLOCK,
    )  # fmt: skip
    to = found + index * 4
    tl.store(to, -1)
    if row < head_rows:
        work = work_of(sections, page_lists, slots, row, head_rows, KV_HEADS, FORMS, TILE)
        run = index - begin
        for at in tl.static_range(len(sections)):
            runs = runs_in(work[at], each)
            if (run >= 0) & (run < runs):
                tl.store(to, row)
                tl.store(to + 1, at)
                tl.store(to + 2, run)
                tl.store(to + 3, runs)
            run -= runs


def layout_of(name: str) -> PageLayout:
    return PageLayout(stored_format(name), DIM, default_page_bytes(DIM), "token")


def runs_of(work: Any, wanted: int) -> Any:
    """Runs of each section of each head row, [rows, sections], in the arithmetic of the kernel."""
    work = np.asarray(work, np.float32)
    total = work.sum(dtype=np.float32)
    each = np.float32(wanted) / np.maximum(total, np.float32(wanted * LEAST_UNITS))
    return np.ceil(work * each).astype(int)


def makespan(sizes: Sequence[float], workers: int) -> float:
    """Time until all runs are done, if each worker takes the next one when it is free."""
    free = [0.0] * workers
    for size in sizes:
        heapreplace(free, free[0] + size)
    return max(free)


ROWS = st.lists(
    st.tuples(*[st.integers(0, 40) | st.integers(0, 2000)] * 3), min_size=1, max_size=60
)


@given(work=ROWS, resident=st.integers(1, 300))
def test_runs_fill_the_programs_that_are_resident(
    work: list[tuple[int, ...]], resident: int
) -> None:
    wanted = WAVES * resident
    runs, units = runs_of(work, wanted), np.asarray(work)
    assert ((runs > 0) == (units > 0)).all()
    assert runs.sum() <= most_runs(wanted, units.size)
    each = -(-units // np.maximum(runs, 1))
    longest = max(LEAST_UNITS, -(-int(units.sum()) // wanted))
    assert each.max() <= longest + 1
    sizes = [size for size, count in zip(each.flat, runs.flat, strict=True) for _ in range(count)]
    if units.sum() >= wanted * LEAST_UNITS:
        spread = float(units.sum()) / resident
        assert makespan(sizes, resident) <= sum(sizes) / resident + longest + 1
        assert longest <= spread / WAVES + 1


def units_of(section: Section) -> Any:
    """Units of work of each head row: pages, or tiles of 16-bit pages."""
    span = TILE if form_of(section.layout).by_tile else section.layout.tokens
    width = section.pages.shape[2]
    held = np.minimum(section.tokens.numpy(), (width + 1) * section.layout.tokens)
    return -(-held.reshape(-1) // span)


@pytest.mark.parametrize(("seed", "is_listed"), [(0, False), (1, True), (2, False)])
def test_programs_find_the_runs_of_the_list(seed: int, is_listed: bool, device: Any) -> None:
    """Each run once, in the order of head rows and sections, whatever the block of rows is."""
    generator = torch.Generator().manual_seed(seed)
    requests, width = 9, 40
    sections = list[Section]()
    for name in FORMATS:
        tokens = torch.randint(0, 60, (requests, HEADS), generator=generator, dtype=torch.int32)
        tokens[seed] *= 30  # more than the table has room for, in some formats
        pages = torch.zeros(requests, HEADS, width, dtype=torch.int32)
        sections.append(Section(layout_of(name), pages, tokens))
    work = np.stack([units_of(section) for section in sections], 1).astype(np.float32)
    lists = listed_pages(sections, generator) if is_listed else None
    if lists is not None:
        work *= shares(lists, sections)[:, None]
    wanted = 30
    found, starts = programs(device, sections, lists, wanted)
    runs = runs_of(work, wanted)
    want = [
        [row, at, run, count]
        for (row, at), count in np.ndenumerate(runs)
        for run in range(int(count))
    ]
    assert len(want) <= len(found)
    assert found[: len(want)].tolist() == want
    assert (found[len(want) :, 0] == -1).all()
    assert [end - begin for begin, end in pairwise(starts.tolist())] == runs.sum(1).tolist()
    assert starts[0] == 0


def listed_pages(sections: Sequence[Section], generator: torch.Generator) -> PageLists:
    """Lists of the even requests; only their lengths count here."""
    requests = len(sections[0].tokens)
    rows = torch.arange(requests, dtype=torch.int32) // 2
    rows[1::2] = -1
    shape = (requests + 1) // 2, HEADS
    counts = torch.randint(0, 9, shape, generator=generator, dtype=torch.int32)
    return PageLists(torch.zeros(*shape, 9, dtype=torch.int32), counts, rows)


def shares(lists: PageLists, sections: Sequence[Section]) -> Any:
    """Part of the pages of each head row that is in its list, float32."""
    pages = sum(
        -(-np.minimum(one.tokens.numpy(), (one.pages.shape[2] + 1) * one.layout.tokens)
          // one.layout.tokens)
        for one in sections
    ).reshape(-1)  # fmt: skip
    places = lists.rows.repeat_interleave(HEADS).numpy()
    heads = np.tile(np.arange(HEADS), len(lists.rows))
    length = np.minimum(lists.counts.numpy()[places, heads], pages).astype(np.float32)
    return np.where(places < 0, 1, length / np.maximum(pages, 1).astype(np.float32))


def programs(
    device: Any, sections: Sequence[Section], lists: PageLists | None, wanted: int
) -> tuple[Tensor, Tensor]:
    """Runs that the programs find, int32 [programs, 4], and the first run of each head row."""
    requests = len(sections[0].tokens)
    head_rows = requests * HEADS
    moved = [device.section(section) for section in sections]
    if lists is not None:
        lists = PageLists(*device.take(lists.ordinals, lists.counts, lists.rows))
    count = most_runs(wanted, head_rows * len(sections))
    found, starts, slots = device.take(
        torch.full((count, 4), -7, dtype=torch.int32),
        torch.full((head_rows + 1,), -7, dtype=torch.int32),
        torch.arange(requests, dtype=torch.int32),
    )
    list_runs[(count,)](
        found, starts, slots, tuple(tuple(section_arguments(one)) for one in moved),
        None if lists is None else tuple(page_list_arguments(lists)),
        head_rows, float(wanted), float(LEAST_UNITS), KV_HEADS=HEADS,
        FORMS=tuple(form_of(section.layout) for section in sections), TILE=TILE, BLOCK=16,
        num_warps=1,
    )  # fmt: skip
    return found.cpu(), starts.cpu()
