from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor

from triptych.core.errors import ConfigError
from triptych.kernels import (
    PageLists,
    Rule,
    Section,
    Summaries,
    decode_attention,
    select_pages,
    summarize_pages,
)
from triptych.kernels.select import gpu, reference
from triptych.kernels.select.summary import KINDS, WHOLE, Kind, tile_bytes
from triptych.kernels.triton import triton_layout

NewCache = Callable[..., Any]
"""``conftest.Cache``."""
MIXED = {"k8v4": [[200, 0], [32, 170]], "k4v2": [[57, 300], [0, 56]], "k8v8/8": [[20, 14], [39, 1]]}
POSITION = 150


def summarized(
    op: Any,
    device: Any,
    arena: Tensor,
    section: Section,
    kind: Kind,
    rotated: bool = False,
) -> Summaries:
    """Summaries of all full pages, copied to the CPU."""
    slots, heads, width = section.pages.shape
    size = (slots, heads, -(-width // 16), tile_bytes(kind, section.layout.head_dim))
    made = Summaries(kind, torch.zeros(size, dtype=torch.uint8), section.layout.head_dim, rotated)
    full = section.tokens // section.layout.tokens
    column = torch.arange(width).expand(section.pages.shape)
    row = torch.arange(full.numel()).view(*full.shape, 1).expand_as(column)
    wanted = column < full[..., None]
    tensors = [part[wanted].int() for part in (section.pages, row, column)]
    there = replace(made, memory=device.take(made.memory)[0])
    pages, rows, columns = device.take(*tensors)
    op(device.take(arena)[0], section.layout, pages, there, rows, columns)
    return replace(made, memory=there.memory.cpu())


@pytest.mark.parametrize("name", ["fp16", "k8v4", "k4v2"])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("rotated", [False, True])
def test_summaries_are_those_of_the_reference(
    rotated: bool, kind: Kind, name: str, device: Any, new_cache: NewCache
) -> None:
    cache = new_cache(64, pages=60)
    section = cache.fill(name, [[200, 0], [32, 70]]).section
    got = summarized(summarize_pages.on("cuda"), device, cache.arena, section, kind, rotated)
    want = summarized(summarize_pages.on("reference"), device, cache.arena, section, kind, rotated)
    codes = [reference.whole_codes(part).int() for part in (got, want)]
    assert int((codes[0] - codes[1]).abs().max()) <= 1
    torch.testing.assert_close(got.numbers, want.numbers, rtol=1e-5, atol=1e-6)
    assert torch.equal(got.positions, want.positions)


UNEVEN = torch.tensor([[0] * 12 + [WHOLE] * 21, list(range(0, WHOLE + 1, WHOLE // 32))]).int()
"""Budgets of two heads: one reads no page below a mean share of 3/8 and all above, the other the
mean share."""


def select(
    backend: str,
    device: Any,
    query: Tensor,
    sections: Sequence[Section],
    summaries: Sequence[Summaries | None],
    rule: Rule,
    rows: list[int],
    spread: Tensor | None = None,
) -> tuple[PageLists, Tensor]:
    """Page lists and scores, copied to the CPU."""
    slots, heads = sections[0].tokens.shape
    most = sum(section.pages.shape[2] for section in sections)
    take = device.take if backend == "cuda" else lambda *tensors: list(tensors)
    made = take(
        torch.full((slots, heads, most), -7, dtype=torch.int32),
        torch.full((slots, heads), -9, dtype=torch.int32),
        torch.tensor(rows, dtype=torch.int32),
    )
    page_lists = PageLists(*made)
    here = [replace(part, memory=take(part.memory)[0]) if part else None for part in summaries]
    there = [device.section(section) for section in sections] if backend == "cuda" else sections
    asked, scores, which, now = take(
        query,
        torch.full((len(query), heads, most), float("nan")),
        torch.arange(len(query), dtype=torch.int32),
        torch.full((len(query),), POSITION, dtype=torch.int32),
    )
    choose = select_pages.on(backend)
    shares = None if spread is None else take(spread)[0]
    choose(
        asked,
        there,
        here,
        which,
        now,
        rule,
        page_lists,
        scale=0.125,
        head_budgets=shares,
        scores=scores,
    )
    return PageLists(*(part.cpu() for part in made)), scores.cpu()


@pytest.fixture(params=["one launch", "two launches in chunks"])
def launches(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Force fused or separate launches, independent of the length of rows."""
    monkeypatch.setattr(gpu, "fuses", lambda *_: request.param == "one launch")
    monkeypatch.setattr(
        triton_layout, "LISTED_AT_ONCE", 1024 if request.param == "one launch" else 16
    )
    return request.param


def mixed_case(
    new_cache: NewCache, head_dim: int, kind: Kind
) -> tuple[Any, list[Section], list[Summaries | None]]:
    """A cache, sections of three formats, one of them backward, and summaries of two."""
    cache = new_cache(head_dim, pages=80)
    sections = [cache.fill(name, counts).section for name, counts in MIXED.items()]
    sections[1] = replace(sections[1], pages=sections[1].pages.flip(-1), backward=True)
    forward = [replace(s, pages=s.forward_pages, backward=False) for s in sections]
    op = summarize_pages.on("reference")
    known = [summarized(op, Here(), cache.arena, one, kind, kind == "box") for one in forward[:2]]
    return cache, sections, [*known, None]


@pytest.mark.parametrize(
    ("kind", "head_dim", "rule", "spread", "rows"),
    [
        ("box", 64, Rule.of(0.4, sink_tokens=33, window_tokens=20), None, [1, 0]),
        ("moments", 64, Rule.of(0.0, 150, sink_tokens=0, window_tokens=0), None, [0, 1]),
        ("moments", 96, Rule.of(0.5), None, [1, -1]),
        ("moments", 64, Rule.of(0.37, sink_tokens=0, window_tokens=0), UNEVEN, [1, 0]),
        ("moments", 64, Rule.of(0.0, sink_tokens=1, omitted_mass=0.3), None, [0, 1]),
        ("moments", 64, Rule.of(1.0), UNEVEN, [0, 1]),
    ],
)
def test_page_lists_equal_those_of_the_reference(
    launches: str,
    kind: Kind,
    head_dim: int,
    rule: Rule,
    spread: Tensor | None,
    rows: list[int],
    device: Any,
    new_cache: NewCache,
) -> None:
    _, sections, known = mixed_case(new_cache, head_dim, kind)
    query = torch.randn(2, 6, head_dim)
    want, wanted = select("reference", Here(), query, sections, known, rule, rows, spread)
    got, found = select("cuda", device, query, sections, known, rule, rows, spread)
    torch.testing.assert_close(
        found[torch.tensor(rows) >= 0], wanted[torch.tensor(rows) >= 0], rtol=1e-5, atol=1e-5,
        equal_nan=True,
    )  # fmt: skip
    assert torch.equal(got.counts, want.counts)
    for place in [row for row in rows if row >= 0]:
        for head in range(2):
            count = int(want.counts[place, head])
            assert torch.equal(
                got.ordinals[place, head, :count], want.ordinals[place, head, :count]
            )


@pytest.mark.parametrize("at_once", [16, 1024])
@pytest.mark.parametrize(("head_dim", "rows"), [(64, [1, 0]), (96, [1, -1])])
def test_attention_reads_the_listed_pages(
    head_dim: int,
    rows: list[int],
    at_once: int,
    device: Any,
    new_cache: NewCache,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """One request may have no list and reads all pages. ``at_once``: entries read at a time."""
    monkeypatch.setattr(triton_layout, "LISTED_AT_ONCE", at_once)
    cache, sections, known = mixed_case(new_cache, head_dim, "moments")
    query, rule = torch.randn(2, 6, head_dim), Rule.of(0.4)
    want, _ = select("reference", Here(), query, sections, known, rule, rows)
    slots = torch.arange(2, dtype=torch.int32)
    expected = decode_attention.on("reference")(
        query, cache.arena, sections, slots, scale=0.125, page_lists=want
    )
    moved = [device.section(section) for section in sections]
    page_lists = PageLists(*device.take(want.ordinals, want.counts, want.rows))
    asked, arena, which = device.take(query, cache.arena, slots)
    mixed = decode_attention.on("cuda")(
        asked, arena, moved, which, scale=0.125, page_lists=page_lists
    )
    torch.testing.assert_close(mixed.cpu(), expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(("keep", "omitted"), [(0.3, 0.0), (0.0, 0.05), (0.9, 0.6)])
def test_of_pages_with_equal_scores_the_earlier_ones_are_read(
    launches: str, keep: float, omitted: float, device: Any, new_cache: NewCache
) -> None:
    """Pages have few different scores, with zeros of both signs."""
    cache = new_cache(64, pages=100)
    sections = [cache.fill("k8v4", [[400, 33], [64, 600]]).section]
    op = summarize_pages.on("reference")
    known = summarized(op, Here(), cache.arena, sections[0], "moments")
    page = torch.arange(16) % 3
    known.codes[:] = known.codes[:, :, :1][..., page]
    known.numbers[:] = known.numbers[:, :, :1][..., page]
    rule = Rule.of(keep, sink_tokens=1, window_tokens=1, omitted_mass=omitted)
    for query in (torch.randn(2, 4, 64), torch.zeros(2, 4, 64)):
        want, _ = select("reference", Here(), query, sections, [known], rule, [0, 1])
        got, _ = select("cuda", device, query, sections, [known], rule, [0, 1])
        assert torch.equal(got.counts, want.counts)
        for row, head in product(range(2), range(2)):
            count = int(want.counts[row, head])
            assert got.ordinals[row, head, :count].tolist() == (
                want.ordinals[row, head, :count].tolist()
            )


@pytest.mark.parametrize("group", [1, 7, 20])
@pytest.mark.parametrize("kind", KINDS)
def test_scores_are_those_of_the_reference_for_any_group_and_size_of_query(
    launches: str, kind: Kind, group: int, device: Any, new_cache: NewCache
) -> None:
    cache = new_cache(96, pages=60)
    sections = [cache.fill("k4v2", [[700, 5]]).section]
    known = summarized(summarize_pages.on("reference"), Here(), cache.arena, sections[0], kind)
    rule = Rule.of(0.5, sink_tokens=0, window_tokens=0)
    for size in (1e-6, 1.0, 3e4):
        query = torch.randn(1, 2 * group, 96) * size
        query[:, 0] = 0
        _, want = select("reference", Here(), query, sections, [known], rule, [0])
        _, got = select("cuda", device, query, sections, [known], rule, [0])
        torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-5 * size, equal_nan=True)


def test_slots_and_lists_out_of_range_are_not_read_or_written(
    launches: str, device: Any, new_cache: NewCache
) -> None:
    """With a slot and a list out of range nothing is read or written, and nothing is raised."""
    cache = new_cache(64, pages=40)
    section = cache.fill("k8v4", [[200, 90], [150, 60]]).section
    known = summarized(summarize_pages.on("reference"), Here(), cache.arena, section, "moments")
    (memory,) = device.take(known.memory)
    made = device.take(
        torch.full((2, 2, 30), -7).int(), torch.full((2, 2), -9).int(), torch.tensor([1, 5]).int()
    )
    asked, slots, now = device.take(
        torch.randn(2, 4, 64), torch.tensor([9, 0]).int(), torch.tensor([POSITION] * 2).int()
    )
    select_pages.on("cuda")(
        asked, [device.section(section)], [replace(known, memory=memory)], slots, now,
        Rule.of(0.3), PageLists(*made), scale=0.125,
    )  # fmt: skip
    assert made[1].tolist() == [[-9, -9], [0, 0]]
    assert (made[0] == -7).all()


def test_mismatched_inputs_are_an_error(device: Any, new_cache: NewCache) -> None:
    cache = new_cache(64, pages=40)
    section = cache.fill("k8v4", [[200, 90]]).section
    known = summarized(summarize_pages.on("reference"), Here(), cache.arena, section, "moments")
    narrow = replace(known, memory=known.memory[:, :1])
    query, rule = torch.randn(1, 4, 64), Rule.of(0.3)
    with pytest.raises(ConfigError, match="no section has summaries"):
        select("cuda", device, query, [section], [None], rule, [0])
    with pytest.raises(ConfigError, match="summaries of 1 KV heads"):
        select("cuda", device, query, [section], [narrow], rule, [0])
    with pytest.raises(ConfigError, match=r"scores \(1, 2, 1\)"):
        gpu.plan(
            query, [section], [known], torch.zeros(1).int(), torch.zeros(1).int(), rule,
            PageLists(torch.zeros(1, 2, 9).int(), torch.zeros(1, 2).int(), torch.zeros(1).int()),
            0.125, scores=torch.zeros(1, 2, 1),
        )  # fmt: skip


class Here:
    """A device on which inputs are not copied."""

    def take(self, *tensors: Tensor) -> list[Tensor]:
        return list(tensors)

    def section(self, section: Section) -> Section:
        return section
