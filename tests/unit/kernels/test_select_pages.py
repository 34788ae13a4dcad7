# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false
# pyright: reportUnknownArgumentType=false
# torch.linalg and Tensor.tolist have no types.
"""Tests of page summaries, page selection, and attention over page lists."""

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from tests.moves import ALONE
from triptych.core.errors import ConfigError
from triptych.core.head_budgets import BUDGET_STEPS
from triptych.core.layout import FORMATS, PageLayout, default_page_bytes
from triptych.kernels import (
    PageLists,
    Rule,
    Section,
    Summaries,
    decode_attention,
    load_tokens,
    select_pages,
    store_tokens,
    summarize_pages,
)
from triptych.kernels.hadamard import hadamard
from triptych.kernels.select import reference
from triptych.kernels.select.summary import KINDS, WHOLE, Kind, summary_bytes, tile_bytes

BACKENDS = [name for name in select_pages.backends if name != "cuda"]
NewCache = Callable[..., Any]
"""``conftest.Cache``."""
DIM = 64


def new_summaries(section: Section, kind: Kind, rotated: bool = False) -> Summaries:
    """Uninitialised summaries for all pages, filled with garbage."""
    slots, heads, width = section.pages.shape
    size = tile_bytes(kind, section.layout.head_dim)
    memory = torch.randint(0, 256, (slots, heads, -(-width // 16), size), dtype=torch.uint8)
    return Summaries(kind, memory, section.layout.head_dim, rotated)


def summarize(backend: str, arena: Tensor, section: Section, summaries: Summaries) -> None:
    """Summaries of all full pages of all head rows."""
    full = section.tokens // section.layout.tokens
    column = torch.arange(section.pages.shape[2]).expand(section.pages.shape)
    wanted = column < full[..., None]
    row = torch.arange(full.numel()).view(*full.shape, 1).expand_as(column)
    pages, rows, columns = (part[wanted].int() for part in (section.pages, row, column))
    summarize_pages.on(backend)(arena, section.layout, pages, summaries, rows, columns)


def new_lists(sections: Sequence[Section], requests: int) -> PageLists:
    """Page lists filled with garbage, one for each slot; request r has list r."""
    slots, heads = sections[0].tokens.shape
    most = sum(section.pages.shape[2] for section in sections)
    return PageLists(
        ordinals=torch.full((slots, heads, most), -7, dtype=torch.int32),
        counts=torch.full((slots, heads), 10**6, dtype=torch.int32),
        rows=torch.arange(requests, dtype=torch.int32),
    )


@dataclass
class Chosen:
    page_lists: PageLists
    scores: Tensor

    def of(self, request: int, head: int) -> list[int]:
        place = self.page_lists.rows[request]
        count = int(self.page_lists.counts[place, head])
        return self.page_lists.ordinals[place, head, :count].tolist()


def select(
    backend: str,
    query: Tensor,
    sections: Sequence[Section],
    summaries: Sequence[Summaries | None],
    rule: Rule,
    position: int = 10**6,
    head_budgets: Tensor | None = None,
) -> Chosen:
    requests = len(query)
    page_lists = new_lists(sections, requests)
    scores = torch.full((requests, *page_lists.ordinals.shape[1:]), float("nan"))
    slots = torch.arange(requests, dtype=torch.int32)
    positions = torch.full((requests,), position, dtype=torch.int32)
    choose = select_pages.on(backend)
    arguments = query, sections, summaries, slots, positions, rule, page_lists
    choose(*arguments, scale=DIM**-0.5, head_budgets=head_budgets, scores=scores)
    return Chosen(page_lists, scores)


def keys_of_a_model(*shape: int) -> Tensor:
    """Rotated keys with a mean, channels of large variance, and outliers."""
    basis, _ = torch.linalg.qr(torch.randn(shape[-1], shape[-1], dtype=torch.float64))
    keys = torch.randn(shape) * torch.logspace(-2, 1, shape[-1]) + torch.randn(shape[-1]) * 3
    keys = torch.where(torch.rand(shape) < 0.01, keys * 20, keys)
    return (keys.double() @ basis).float()


# ---------------------------------------------------------------- summaries


@pytest.mark.parametrize("head_dim", [16, 64, 80, 96, 128, 256])
@pytest.mark.parametrize("kind", KINDS)
def test_a_summary_takes_less_than_seven_percent_of_a_page(kind: Kind, head_dim: int) -> None:
    most = 0.07 if head_dim >= 64 else 0.12
    assert summary_bytes(kind, head_dim) <= most * default_page_bytes(head_dim)


@pytest.mark.parametrize("head_dim", [32, 64, 96])
@pytest.mark.parametrize("name", ALONE)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("rotated", [False, True])
def test_the_fast_summaries_are_those_of_the_reference(
    rotated: bool, kind: Kind, name: str, head_dim: int, new_cache: NewCache
) -> None:
    cache = new_cache(head_dim)
    vectors = keys_of_a_model(2, 2, 200, head_dim), torch.randn(2, 2, 200, head_dim)
    section = cache.fill(name, [[200, 131], [1, 57]], vectors=vectors).section
    want, got = (new_summaries(section, kind, rotated) for _ in range(2))
    want.memory[:] = got.memory
    summarize("reference", cache.arena, section, want)
    summarize("cpu", cache.arena, section, got)
    # The order of a sum can move a number across the midpoint between two codes.
    codes = [reference.whole_codes(part).int() for part in (got, want)]
    assert int((codes[0] - codes[1]).abs().max()) <= 1
    torch.testing.assert_close(got.numbers, want.numbers, rtol=1e-4, atol=1e-5, equal_nan=True)
    assert torch.equal(got.positions, want.positions)


def rotated_keys(keys: Tensor) -> Tensor:
    return keys @ hadamard(keys.shape[-1])


@pytest.mark.parametrize("rotated", [False, True])
def test_a_box_contains_all_keys_of_its_page(rotated: bool, new_cache: NewCache) -> None:
    cache = new_cache(DIM)
    stored = cache.fill("k8v8", [[24]])
    summaries = new_summaries(stored.section, "box", rotated)
    summarize("cpu", cache.arena, stored.section, summaries)
    numbers = summaries.numbers[0, 0, 0, :, 0]
    most, least = (vector[0] for vector in reference.decoded_box(summaries, 0, 0))
    keys = stored.key[0, 0].float()
    keys = rotated_keys(keys) if rotated else keys
    assert (most >= keys.amax(0)).all()
    assert (least <= keys.amin(0)).all()
    torch.testing.assert_close(most, keys.amax(0), rtol=0, atol=float(numbers[0]) * 1.1)
    torch.testing.assert_close(least, keys.amin(0), rtol=0, atol=-float(numbers[2]) * 1.1)


@pytest.mark.parametrize("name", ["fp16", "k8v8", "k4v2"])
@pytest.mark.parametrize("rotated", [False, True])
def test_moments_are_those_of_quarters_of_a_page(
    rotated: bool, name: str, new_cache: NewCache
) -> None:
    """Pages of 13, 24 and 56 tokens: means within half of one of 15 steps, and deviations."""
    cache = new_cache(DIM)
    room = PageLayout(FORMATS[name], DIM, default_page_bytes(DIM)).tokens
    stored = cache.fill(name, [[room]])
    summaries = new_summaries(stored.section, "moments", rotated)
    summarize("cpu", cache.arena, stored.section, summaries)
    means, deviations = (part[:, 0] for part in reference.decoded_moments(summaries, 0, 0))
    keys = stored.key[0, 0].float()
    keys = rotated_keys(keys) if rotated else keys
    edges = [quarter * room // 4 for quarter in range(5)]
    blocks = [keys[start:end] for start, end in itertools.pairwise(edges)]
    steps = summaries.numbers[0, 0, 0, 0::3, 0]
    for mean, step, block in zip(means, steps.tolist(), blocks, strict=True):
        torch.testing.assert_close(mean, block.mean(0), rtol=0, atol=step * 0.51)
    away = torch.cat([block - block.mean(0) for block in blocks])
    whole = away.square().mean(0).sqrt()
    for deviation, block in zip(deviations, blocks, strict=True):
        factor = (block.var(0, correction=0).sum() / whole.square().sum()).sqrt()
        close = float(whole.max() * factor) / 255
        torch.testing.assert_close(deviation, whole * factor, rtol=1e-4, atol=close)


@pytest.mark.parametrize("kind", KINDS)
def test_scores_do_not_depend_on_the_rotation_of_pages(kind: Kind, new_cache: NewCache) -> None:
    cache = new_cache(DIM)
    keys, query = keys_of_a_model(1, 2, 300, DIM), torch.randn(1, 6, DIM)
    scores = list[Tensor]()
    for rotated in (False, True):
        held = rotated_keys(keys) if rotated else keys
        section = cache.fill("fp16", [[300, 300]], vectors=(held, torch.randn_like(held))).section
        summaries = new_summaries(section, kind, rotated)
        summarize("cpu", cache.arena, section, summaries)
        asked = rotated_keys(query) if rotated else query
        scores.append(select("cpu", asked, [section], [summaries], ANY).scores)
    plain, turned = (found[found.isfinite()] for found in scores)
    # 16 bits round differently in rotated coordinates, so a code may differ by one.
    torch.testing.assert_close(turned, plain, rtol=0.02, atol=0.05 * float(plain.std()))


def violations(name: str, pages: int, rotated: bool) -> int:
    """Number of pages with a key whose logit is above the score of the page's box."""
    heads = 20
    layout = PageLayout(FORMATS[name], DIM, default_page_bytes(DIM))
    count = pages // heads * layout.tokens
    arena = torch.zeros(pages, layout.page_bytes, dtype=torch.uint8)
    table = torch.randperm(pages, dtype=torch.int32).view(1, heads, -1)
    token = torch.arange(count)
    keys, query = keys_of_a_model(count, heads, DIM), keys_of_a_model(1, heads, DIM)
    slot_pages = table[0][:, token // layout.tokens].T.contiguous()
    rows = (token % layout.tokens).int()[:, None].repeat(1, heads)
    store_tokens(arena, layout, keys, keys, slot_pages, rows, token.int())
    tokens = torch.full((1, heads), count, dtype=torch.int32)
    section = Section(layout, table, tokens)
    summaries = new_summaries(section, "box", rotated)
    summarize("cpu", arena, section, summaries)
    scores = select("cpu", query, [section], [summaries], ANY).scores[0]
    held = load_tokens(arena, layout, table[0], tokens[0])[0].double()
    logits = (held @ query[0].double()[:, :, None])[..., 0] * DIM**-0.5
    largest = logits.view(heads, -1, layout.tokens).amax(2)[:, :-1]  # the last page has no score
    scores = scores[:, :-1]
    assert scores.isfinite().all()
    return int((scores.double() < largest).sum())


ANY = Rule.of(0.5, sink_tokens=0, window_tokens=0)


@pytest.mark.parametrize("rotated", [False, True])
@pytest.mark.parametrize("name", ALONE)
def test_no_logit_is_above_the_score_of_its_box(name: str, rotated: bool) -> None:
    assert violations(name, 2_000, rotated) == 0


@pytest.mark.conformance
@pytest.mark.parametrize("name", ["fp16", "fp8", "k8v4", "k4v2", "k2v4"])  # one for each key codec
def test_no_logit_of_100_000_pages_is_above_the_score_of_its_box(name: str) -> None:
    assert sum(violations(name, 4_000, rotated=bool(turn % 2)) for turn in range(25)) == 0


# ---------------------------------------------------------------- selection


def filled(
    cache: Any, kind: Kind, lengths: dict[str, list[list[int]]], rotated: bool = False
) -> tuple[Any, Any]:
    """Sections of several formats and their summaries; the last section has none."""
    sections = [cache.fill(name, counts).section for name, counts in lengths.items()]
    summaries = [new_summaries(section, kind, rotated) for section in sections]
    for section, known in zip(sections[:-1], summaries, strict=False):
        summarize("cpu", cache.arena, section, known)
    return sections, [*summaries[:-1], None]


MIXED = {
    "k8v4": [[320, 0, 333], [32, 31, 700]],
    "k4v2": [[560, 1000, 57], [0, 56, 0]],
    "fp16": [[30, 14, 26], [13, 1, 27]],
    "k8v8/8": [[30, 1, 26], [0, 3, 39]],
}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("rotated", [False, True])
def test_fast_scores_equal_those_of_the_reference(
    rotated: bool, kind: Kind, new_cache: NewCache
) -> None:
    cache = new_cache(DIM)
    sections, summaries = filled(cache, kind, MIXED, rotated)
    query = torch.randn(2, 9, DIM)
    rule = Rule.of(0.5, sink_tokens=40, window_tokens=10)
    want = select("reference", query, sections, summaries, rule, 600)
    got = select("cpu", query, sections, summaries, rule, 600)
    torch.testing.assert_close(got.scores, want.scores, rtol=1e-5, atol=1e-5, equal_nan=True)
    assert torch.equal(got.page_lists.counts, want.page_lists.counts)


@pytest.mark.parametrize("group", [1, 4, 13])
@pytest.mark.parametrize("head_dim", [16, 96, 128])
@pytest.mark.parametrize("kind", KINDS)
def test_scores_are_the_largest_over_the_query_heads_of_a_group(
    kind: Kind, head_dim: int, group: int, new_cache: NewCache
) -> None:
    cache = new_cache(head_dim)
    section = cache.fill("k8v4", [[700, 350]]).section
    summaries = new_summaries(section, kind)
    summarize("cpu", cache.arena, section, summaries)
    query = torch.randn(1, 2 * group, head_dim)
    want = select("reference", query, [section], [summaries], ANY).scores
    got = select("cpu", query, [section], [summaries], ANY).scores
    torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-5, equal_nan=True)


@pytest.mark.parametrize("rotated", [False, True])
@pytest.mark.parametrize("backend", BACKENDS)
def test_a_page_with_three_tokens_that_matter_is_among_the_first(
    backend: str, rotated: bool, new_cache: NewCache
) -> None:
    """Of 100 pages; a few channels have a large variance, but not the relevant ones."""
    pages, room, heads = 100, 24, 8
    loud = torch.arange(DIM) < 8
    keys = torch.randn(1, heads, pages * room, DIM) * torch.where(loud, 10.0, 0.3)
    query = torch.randn(1, heads, DIM).where(~loud, 0.0)
    wanted = torch.randint(1, pages - 1, (heads,))
    for head, page in enumerate(wanted.tolist()):
        first = page * room + 7
        keys[0, head, first : first + 3] += 4 * query[0, head] / query[0, head].norm()
    if rotated:
        keys, query = rotated_keys(keys), rotated_keys(query)
    counts = [[pages * room] * heads]
    cache = new_cache(DIM, pages=1000)
    section = cache.fill("k8v8", counts, vectors=(keys, torch.randn_like(keys))).section

    def places(told: bool) -> Tensor:
        """How many pages stand before the one that is wanted, for each head."""
        summaries = new_summaries(section, "moments", told)
        summarize("cpu", cache.arena, section, summaries)
        scores = select(backend, query, [section], [summaries], ANY).scores[0, :, : pages - 1]
        return (scores > scores.gather(1, wanted[:, None])).sum(1)

    assert int(places(rotated).max()) <= 3
    assert int(places(not rotated).max()) > 10, "in rotated coordinates loud channels hide it"


def best(scores: Tensor, count: int) -> list[int]:
    """Expected pages by brute force: by score, then by index."""
    order = sorted(range(len(scores)), key=lambda page: (-float(scores[page]), page))
    forced = int(scores.isposinf().sum())
    return sorted(order[: max(count, forced)])


def random_spread(kv_heads: int) -> Tensor:
    """Head budgets that grow with the mean share, from no pages to all pages."""
    shares = torch.randint(0, WHOLE + 1, (kv_heads, BUDGET_STEPS + 1), dtype=torch.int32)
    shares[:, 0], shares[:, -1] = 0, WHOLE
    return shares.sort(1).values


@given(
    keep=st.integers(0, WHOLE),
    budget=st.integers(0, 40_000),
    pages=st.integers(1, 5_000),
    tokens=st.integers(1, 40_000),
)
def test_equal_head_budgets_equal_no_head_budgets(
    keep: int, budget: int, pages: int, tokens: int
) -> None:
    """Without head budgets the share is that of the rule, rounded up from 1/65,536."""
    rule, even = Rule(keep=keep, budget_tokens=budget), range(0, WHOLE + 1, WHOLE // BUDGET_STEPS)
    found = rule.pages(pages, tokens)
    assert found == rule.pages(pages, tokens, even)
    asked = min(Fraction(pages), pages * max(Fraction(keep, WHOLE), Fraction(budget, tokens)))
    assert asked - Fraction(pages, WHOLE) <= found < asked + 1


def test_head_budgets_are_interpolated_between_steps() -> None:
    shares = [0, 0, *[WHOLE // 2] * 30, WHOLE]
    read = [Rule.of(mean / 64).pages(1000, 1, shares) for mean in range(65)]
    assert read == [0, 0, 0, 250, *[500] * 59, 750, 1000]


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("spread", [torch.zeros(3, 33), torch.zeros(2, 33, dtype=torch.int32)])
def test_head_budgets_of_a_wrong_shape_are_an_error(
    backend: str, spread: Tensor, new_cache: NewCache
) -> None:
    sections, summaries = filled(new_cache(DIM), "moments", MIXED)
    with pytest.raises(ConfigError, match="head_budgets"):
        select(backend, torch.randn(2, 6, DIM), sections, summaries, ANY, head_budgets=spread)


@pytest.mark.parametrize("backend", BACKENDS)
def test_the_pages_with_the_largest_scores_are_chosen(backend: str, new_cache: NewCache) -> None:
    """1,000 head rows; each page is in its table twice, so that scores are often equal."""
    cache = new_cache(DIM, pages=2000)
    stored = cache.fill("k4v2", torch.randint(57, 900, (20, 5)).tolist())
    section = stored.section
    doubled = section.pages.repeat_interleave(2, 2)
    tokens = section.tokens // 56 * 112
    section = Section(section.layout, doubled, tokens)
    summaries = new_summaries(section, "moments")
    summarize("cpu", cache.arena, section, summaries)
    rounds = 10 if backend == "cpu" else 2
    for turn, keep in enumerate(torch.rand(rounds).tolist()):
        rule = Rule.of(keep, sink_tokens=3, window_tokens=0)
        spread = random_spread(5) if turn % 2 else None
        query = torch.randn(20, 10, DIM)
        chosen = select(backend, query, [section], [summaries], rule, head_budgets=spread)
        for request in range(20):
            for head in range(5):
                pages = int(tokens[request, head]) // 56
                scores = chosen.scores[request, head, :pages]
                own = () if spread is None else spread[head].tolist()
                count = rule.pages(pages, int(tokens[request, head]), own)
                assert chosen.of(request, head) == best(scores, count)


@pytest.mark.parametrize(
    "rule",
    [
        Rule.of(0.0, sink_tokens=1, window_tokens=1),
        Rule.of(0.3, sink_tokens=40, window_tokens=100),
        Rule.of(0.0, budget_tokens=400, sink_tokens=4, window_tokens=64),
        Rule.of(1.0),
    ],
)
@pytest.mark.parametrize("backend", BACKENDS)
def test_sink_window_and_last_pages_are_always_read(
    backend: str, rule: Rule, new_cache: NewCache
) -> None:
    cache = new_cache(DIM)
    sections, summaries = filled(cache, "moments", MIXED)
    position = 650
    chosen = select(backend, torch.randn(2, 6, DIM), sections, summaries, rule, position)
    for request in range(2):
        for head in range(3):
            listed, start, forced, tokens = chosen.of(request, head), 0, set[int](), 0
            small = 0
            assert listed == sorted(set(listed))
            for section, known in zip(sections, summaries, strict=True):
                count, room = int(section.tokens[request, head]), section.layout.tokens
                for page in range(-(-count // room)):
                    last = page * room + room - 1  # positions count from 0 in each section
                    is_recent = last > position - rule.window_tokens
                    is_sink = page * room < rule.sink_tokens
                    if known is None or last >= count - 1 or is_recent or is_sink:
                        forced.add(start + page)
                start += -(-count // room)
                small += -(-count // room) - section.layout.pool_pages(-(-count // room))
                tokens += count
            assert forced <= set(listed)
            assert len(listed) == max(len(forced), rule.pages(start, tokens, small=small))


@pytest.mark.parametrize("omitted", [0.02, 0.2, 0.7])
@pytest.mark.parametrize("backend", BACKENDS)
def test_pages_are_added_until_the_omitted_mass_is_small(
    backend: str, omitted: float, new_cache: NewCache
) -> None:
    """Fewest pages that suffice; the expected mass is computed in float64 from summaries."""
    cache = new_cache(DIM)
    sections, summaries = filled(cache, "moments", MIXED)
    query = torch.randn(2, 9, DIM) * 3
    rule = Rule.of(0.0, sink_tokens=33, window_tokens=10, omitted_mass=omitted)
    chosen = select(backend, query, sections, summaries, rule, 600)
    least = select(backend, query, sections, summaries, replace(rule, omitted_mass=0.0), 600)
    added = 0
    for request in range(2):
        for head in range(3):
            asked = query[request].view(3, 3, DIM)[head].double() * DIM**-0.5
            shares = expected_shares(asked, sections, summaries, request, head)
            listed, few = chosen.of(request, head), least.of(request, head)
            assert set(few) <= set(listed)
            if not shares.any():
                assert listed == few
                continue
            assert 1 - float(shares[:, listed].sum(1).min()) <= omitted + 1e-4
            scores = chosen.scores[request, head]
            optional = [page for page in listed if scores[page].isfinite()]
            added += len(optional)
            if optional:
                worst = min(optional, key=lambda page: float(scores[page]))
                rest = [page for page in listed if page != worst]
                assert 1 - float(shares[:, rest].sum(1).min()) > omitted - 1e-4
    assert added > 0


def expected_shares(
    query: Tensor, sections: Any, summaries: Any, request: int, head: int
) -> Tensor:
    """Expected masses [G, pages] in float64; pages without summaries have mass 0."""
    parts: list[Tensor] = []
    for section, known in zip(sections, summaries, strict=True):
        count, room = int(section.tokens[request, head]), section.layout.tokens
        logits = torch.full((len(query), -(-count // room)), -1e9, dtype=torch.float64)
        for page in range(max(0, count - 1) // room if known else 0):
            tile, place = divmod(page, 16)
            codes = known.codes[request, head, tile, :, :, place].int()
            numbers = known.numbers[request, head, tile, :, place].double()
            expected = 0.0
            for block in range(4):
                scale, zero, spread = numbers[3 * block : 3 * block + 3]
                mean = (codes[block // 2] >> 4 * (block % 2) & 15) * scale + zero
                tokens = (block + 1) * room // 4 - block * room // 4
                variance = query.square() @ (codes[2] * spread).square()
                expected = expected + tokens * (query @ mean + variance / 2).exp()
            logits[:, page] = torch.as_tensor(expected).log()
        parts.append(logits)
    whole = torch.cat(parts, 1)
    return whole.softmax(1) * (whole > -1e8)


def test_omitted_mass_with_box_summaries_is_an_error(new_cache: NewCache) -> None:
    cache = new_cache(DIM)
    section = cache.fill("k8v4", [[100]]).section
    rule, summaries = replace(ANY, omitted_mass=0.1), [new_summaries(section, "box")]
    for backend in BACKENDS:
        with pytest.raises(ConfigError, match="omitted_mass"):
            select(backend, torch.randn(1, 1, DIM), [section], summaries, rule)


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_request_without_a_list_is_skipped(backend: str, new_cache: NewCache) -> None:
    cache = new_cache(DIM)
    sections, summaries = filled(cache, "moments", MIXED)
    page_lists = replace(new_lists(sections, 2), rows=torch.tensor([-1, 0], dtype=torch.int32))
    before = page_lists.ordinals.clone()
    slots = positions = torch.tensor([0, 1], dtype=torch.int32)
    select_pages.on(backend)(
        torch.randn(2, 3, DIM),
        sections,
        summaries,
        slots,
        positions,
        Rule.of(0.5),
        page_lists,
        scale=1,
    )
    assert torch.equal(page_lists.ordinals[1], before[1])
    assert (page_lists.counts[1] == 10**6).all()
    assert (page_lists.counts[0] < 10**6).all()


# ---------------------------------------------------------------- attention over page lists


def attend(backend: str, cache: Any, query: Tensor, sections: Any, **options: Any) -> Tensor:
    slots = torch.arange(len(query), dtype=torch.int32)
    return decode_attention.on(backend)(query, cache.arena, sections, slots, scale=0.1, **options)


@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("backend", BACKENDS)
def test_lists_of_all_pages_give_the_same_bits_as_no_lists(
    backend: str, threads: int, new_cache: NewCache
) -> None:
    cache = new_cache(DIM)
    sections, summaries = filled(cache, "moments", MIXED)
    query = torch.randn(2, 9, DIM)
    chosen = select(backend, query, sections, summaries, Rule.of(1.0))
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    lse, other = torch.empty(2, 9), torch.empty(2, 9)
    whole = attend(backend, cache, query, sections, lse=lse)
    listed = attend(backend, cache, query, sections, lse=other, page_lists=chosen.page_lists)
    torch.set_num_threads(before)
    assert torch.equal(whole, listed)
    assert torch.equal(lse, other)


@pytest.mark.parametrize("backend", BACKENDS)
def test_attention_reads_only_the_listed_pages(backend: str, new_cache: NewCache) -> None:
    """Attention over a list equals attention over a table with only those pages."""
    cache = new_cache(DIM)
    sections, summaries = filled(cache, "box", MIXED)
    query = torch.randn(2, 9, DIM)
    chosen = select("cpu", query, sections, summaries, Rule.of(0.4), 400)
    got = attend(backend, cache, query, sections, page_lists=chosen.page_lists)
    few = [Section(s.layout, s.pages * 0, s.tokens * 0) for s in sections]
    for request in range(2):
        for head in range(3):
            for ordinal in chosen.of(request, head):
                page = ordinal
                for section, left in zip(sections, few, strict=True):
                    room, count = section.layout.tokens, int(section.tokens[request, head])
                    if page < -(-count // room):
                        at = int(left.tokens[request, head]) // room
                        left.pages[request, head, at] = section.pages[request, head, page]
                        left.tokens[request, head] += min(room, count - page * room)
                        break
                    page -= -(-count // room)
    want = attend("reference", cache, query, few)
    torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("backend", BACKENDS)
def test_requests_with_and_without_lists_share_a_batch(backend: str, new_cache: NewCache) -> None:
    cache = new_cache(DIM)
    sections, summaries = filled(cache, "moments", MIXED)
    query = torch.randn(2, 6, DIM)
    page_lists = select(backend, query, sections, summaries, Rule.of(0.3)).page_lists
    listed = attend(backend, cache, query, sections, page_lists=page_lists)
    rows = torch.tensor([-1, 1], dtype=torch.int32)
    both = attend(backend, cache, query, sections, page_lists=replace(page_lists, rows=rows))
    torch.testing.assert_close(both[0], attend(backend, cache, query, sections)[0])
    torch.testing.assert_close(both[1], listed[1])
    assert (both[0] - listed[0]).abs().max() > 1e-3


def _unsorted(page_lists: PageLists) -> PageLists:
    return replace(page_lists, ordinals=page_lists.ordinals.flip(2))


def _beyond_the_end(page_lists: PageLists) -> PageLists:
    return replace(page_lists, ordinals=page_lists.ordinals + 30)


def _too_many(page_lists: PageLists) -> PageLists:
    return replace(page_lists, counts=page_lists.counts + 40)


def _no_such_list(page_lists: PageLists) -> PageLists:
    return replace(page_lists, rows=page_lists.rows + 1)


@pytest.mark.parametrize("spoil", [_unsorted, _beyond_the_end, _too_many, _no_such_list])
def test_page_lists_out_of_range_are_an_error(
    spoil: Callable[[PageLists], PageLists], new_cache: NewCache
) -> None:
    cache = new_cache(DIM)
    sections, summaries = filled(cache, "moments", MIXED)
    query = torch.randn(2, 6, DIM)
    page_lists = spoil(select("cpu", query, sections, summaries, Rule.of(0.5)).page_lists)
    with pytest.raises(ConfigError, match="out of range"):
        attend("cpu", cache, query, sections, page_lists=page_lists)


def test_summaries_of_too_few_pages_are_an_error(new_cache: NewCache) -> None:
    cache = new_cache(DIM)
    section = cache.fill("k8v4", [[1000]]).section
    summaries = Summaries("box", new_summaries(section, "box").memory[:, :, :1], DIM)
    with pytest.raises(ConfigError, match="out of range"):
        summarize("cpu", cache.arena, section, summaries)
    with pytest.raises(ConfigError, match="out of range"):
        select("cpu", torch.randn(1, 1, DIM), [section], [summaries], ANY)
