"""A2ATS on a GPU: codes and choices are those of the reference."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch

from tests.unit.kernels.test_key_codes import DIM, codebooks, new_summaries
from tests.unit.kernels.test_select_pages import new_lists, summarize
from triptych.kernels import PageLists, Rule, Section, Summaries, select_pages, summarize_pages
from triptych.kernels.select import gpu
from triptych.kernels.select.key_codes import KeyCodebooks

NewCache = Callable[..., Any]
"""``conftest.Cache``."""


def there(device: Any, books: KeyCodebooks) -> KeyCodebooks:
    """Codebooks on the device."""
    parts = books.centroids, books.moments, books.frequencies, books.centre
    centroids, moments, frequencies, centre = device.take(*parts)
    return KeyCodebooks(centroids, moments, frequencies, books.distance, centre)


def moved(device: Any, summaries: Summaries) -> Summaries:
    assert summaries.codebooks is not None
    (memory,) = device.take(summaries.memory)
    return replace(summaries, memory=memory, codebooks=there(device, summaries.codebooks))


def on(device: Any, section: Section) -> Section:
    pages, tokens = device.take(section.pages, section.tokens)
    return Section(section.layout, pages, tokens)


@pytest.mark.parametrize("name", ["k8v4", "k4v2"])
def test_codes_are_those_of_the_reference(name: str, device: Any, new_cache: NewCache) -> None:
    cache, books = new_cache(DIM, pages=60), codebooks()
    section = cache.fill(name, [[200, 0], [32, 170]]).section
    want = new_summaries(section, books)
    got = moved(device, replace(want, memory=want.memory.clone()))
    summarize("reference", cache.arena, section, want)
    full = section.tokens // section.layout.tokens
    column = torch.arange(section.pages.shape[2]).expand(section.pages.shape)
    wanted = column < full[..., None]
    row = torch.arange(full.numel()).view(*full.shape, 1).expand_as(column)
    parts = [part[wanted].int() for part in (section.pages, row, column)]
    (arena,) = device.take(cache.arena)
    pages, rows, columns = device.take(*parts)
    summarize_pages.on("cuda")(arena, section.layout, pages, got, rows, columns)
    same = got.token_codes.cpu() == want.token_codes
    assert same.float().mean() >= 0.99, "a key may be as near to two centroids"
    assert torch.equal(got.positions.cpu(), want.positions)


@pytest.mark.parametrize("is_fused", [True, False])
@pytest.mark.parametrize("rotated", [False, True])
def test_choices_are_those_of_the_reference(
    is_fused: bool,
    rotated: bool,
    device: Any,
    new_cache: NewCache,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(gpu, "fuses", lambda *_: is_fused)
    cache, books = new_cache(DIM, pages=60), codebooks()
    sections = [
        cache.fill("k8v4", [[200, 40], [32, 170]]).section,
        cache.fill("k4v2", [[157, 300], [0, 56]]).section,
    ]
    known = [new_summaries(section, books, rotated) for section in sections]
    for section, summaries in zip(sections, known, strict=True):
        summarize("reference", cache.arena, section, summaries)
    query, rule = torch.randn(2, 6, DIM), Rule.of(0.4, 0, 4, 64, 0.0)
    slots, positions = torch.arange(2, dtype=torch.int32), torch.full((2,), 700, dtype=torch.int32)
    want = new_lists(sections, 2)
    expected = torch.zeros(2, *want.ordinals.shape[1:])
    arguments = query, sections, known, slots, positions, rule, want
    select_pages.on("reference")(*arguments, scale=DIM**-0.5, scores=expected)
    got = new_lists(sections, 2)
    ordinals, counts, rows = device.take(got.ordinals, got.counts, got.rows)
    found = PageLists(ordinals, counts, rows)
    scores = device.take(torch.full_like(expected, float("nan")))[0]
    select_pages.on("cuda")(
        device.take(query)[0],
        [on(device, section) for section in sections],
        [moved(device, summaries) for summaries in known],
        *device.take(slots, positions),
        rule,
        found,
        scale=DIM**-0.5,
        scores=scores,
    )
    assert torch.equal(counts.cpu(), want.counts)
    for request in range(2):
        for head in range(2):
            count = int(want.counts[request, head])
            mine, theirs = (part[request, head, :count] for part in (ordinals.cpu(), want.ordinals))
            assert torch.equal(mine, theirs)
            held = sum(
                -(-int(section.tokens[request, head]) // section.layout.tokens)
                for section in sections
            )
            torch.testing.assert_close(
                scores.cpu()[request, head, :held], expected[request, head, :held]
            )
