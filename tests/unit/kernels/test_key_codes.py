# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false
# torch.linalg has no types.
"""A2ATS: codes of keys, logits of codes, and the pages that they choose, on all backends."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.unit.kernels.test_select_pages import BACKENDS, select, summarize
from triptych.core.errors import ConfigError
from triptych.kernels import Rule, Section, Summaries, load_tokens
from triptych.kernels.hadamard import hadamard
from triptych.kernels.select.key_codes import CENTROIDS, KeyCodebooks, moved
from triptych.kernels.select.summary import tile_bytes

NewCache = Callable[..., Any]
"""``conftest.Cache``."""
DIM, DISTANCE = 64, 64


def codebooks(kv_heads: int = 2, dim: int = DIM, layers: int = 1) -> KeyCodebooks:
    roots = torch.randn(layers, kv_heads, dim, dim)
    return KeyCodebooks(
        centroids=torch.randn(layers, kv_heads, CENTROIDS, dim),
        moments=roots @ roots.mT + torch.eye(dim),
        frequencies=10000.0 ** -(torch.arange(dim // 2) / (dim // 2)),
        distance=DISTANCE,
        centre=torch.randn(layers, kv_heads, dim),
    )


def new_summaries(section: Section, books: KeyCodebooks, rotated: bool = False) -> Summaries:
    """Uninitialised summaries for all pages, filled with garbage."""
    slots, heads, width = section.pages.shape
    dim, tokens = section.layout.head_dim, section.layout.tokens
    size = (slots, heads, -(-width // 16), tile_bytes("a2ats", dim, tokens))
    memory = torch.randint(0, 256, size, dtype=torch.uint8)
    return Summaries("a2ats", memory, dim, rotated, tokens, books)


def test_codes_and_logits_by_hand() -> None:
    """Two channels, one frequency of a quarter turn: a key at position 1 is turned back by it.

    The metric counts the second channel only, so the nearest centroid is that with its number.
    """
    centroids = torch.full((1, 1, CENTROIDS, 2), 100.0)
    centroids[0, 0, 3], centroids[0, 0, 7] = torch.tensor([5.0, 2.0]), torch.tensor([1.0, -3.0])
    quarter = torch.tensor([torch.pi / 2])
    metric = torch.tensor([[[[0.0, 0.0], [0.0, 1.0]]]])
    books = KeyCodebooks(centroids, metric, quarter, 2, torch.zeros(1, 1, 2))
    keys = torch.tensor([[[9.0, 2.0], [-2.0, 9.0], [0.5, -2.5]]])  # the second at position 1
    positions = torch.tensor([[0, 1, 4]])
    rows = torch.zeros(1, dtype=torch.int64)
    assert books.codes(keys, positions, rows, rotated=False).tolist() == [[3, 3, 7]]
    # A query at position 3 moves to 2, a quarter turn back: (4, 1) becomes (1, -4).
    query = torch.tensor([[[4.0, 1.0], [0.0, 0.0]]])
    found = books.logits(query, torch.tensor([3]), scale=0.5)
    assert found.shape == (1, 1, CENTROIDS)
    assert found[0, 0, 3].item() == pytest.approx(0.0)  # the zero query: max(-1.5, 0)
    assert found[0, 0, 7].item() == pytest.approx(6.5)  # (1 + 12) / 2


def transcribed(keys: Tensor, positions: Tensor, books: KeyCodebooks, head: int) -> Tensor:
    """Codes of tokens [n, d] of the first layer by distances, one by one."""
    root = torch.linalg.cholesky(books.moments[0, head])
    keys = keys + books.centre[0, head]
    back = moved(keys, -positions, books.frequencies)
    return torch.cdist(back @ root, books.centroids[0, head] @ root).argmin(-1)


@pytest.mark.parametrize("name", ["fp16", "k8v4", "k4v2", "k2v2"])
@pytest.mark.parametrize("backend", BACKENDS)
def test_summaries_hold_the_nearest_centroids_of_decoded_keys(
    backend: str, name: str, new_cache: NewCache
) -> None:
    cache, books = new_cache(DIM), codebooks()
    section = cache.fill(name, [[200, 131], [1, 57]]).section
    got = new_summaries(section, books)
    summarize(backend, cache.arena, section, got)
    same = every = 0
    for slot, head in ((0, 0), (0, 1), (1, 1)):
        tokens = int(section.tokens[slot, head])
        full = tokens // section.layout.tokens
        table, count = section.pages[slot, head][None], section.tokens[slot, head][None]
        key, _, positions = load_tokens(cache.arena, section.layout, table, count)
        count = full * section.layout.tokens
        want = transcribed(key[0, :count], positions[0, :count], books, head)
        codes = got.token_codes[slot, head].flatten(0, 1)[:full].flatten()
        same, every = same + int((codes == want).sum()), every + count
        ends = got.positions[slot, head].transpose(0, 1).flatten(1)[:, :full]
        pages = positions[0, :count].view(full, section.layout.tokens)
        assert torch.equal(ends, torch.stack((pages.amin(1), pages.amax(1))))
    assert same >= 0.99 * every, "a key may be as near to two centroids"


@pytest.mark.parametrize("rotated", [False, True])
@pytest.mark.parametrize("backend", BACKENDS)
def test_a_page_has_the_largest_logit_of_its_codes(
    backend: str, rotated: bool, new_cache: NewCache
) -> None:
    cache, books = new_cache(DIM), codebooks()
    sections = [
        cache.fill("k8v4", [[200, 40], [32, 170]]).section,
        cache.fill("k4v2", [[157, 300], [0, 56]]).section,
    ]
    known = [new_summaries(section, books, rotated) for section in sections]
    for section, summaries in zip(sections, known, strict=True):
        summarize("reference", cache.arena, section, summaries)
    query = torch.randn(2, 6, DIM)
    rule = Rule.of(0.4, 0, 4, 64, 0.0)
    chosen = select(backend, query, sections, known, rule, position=700)
    plain = query @ hadamard(DIM) if rotated else query
    logits = books.logits(plain, torch.tensor([700, 700]), scale=DIM**-0.5)
    for request in range(2):
        for head in range(2):
            at = 0
            for section, summaries in zip(sections, known, strict=True):
                tokens, room = int(section.tokens[request, head]), section.layout.tokens
                pages, full = -(-tokens // room), max(0, tokens - 1) // room
                codes = summaries.token_codes[request, head].flatten(0, 1)[:full].long()
                want = logits[request, head][codes].amax(1)
                got = chosen.scores[request, head, at : at + full]
                is_scored = got.isfinite()
                torch.testing.assert_close(got[is_scored], want[is_scored])
                assert is_scored.any() or full < 4
                assert chosen.scores[request, head, at + full : at + pages].isposinf().all()
                at += pages
    plain_choice = select("reference", query, sections, known, rule, position=700)
    for request in range(2):
        for head in range(2):
            assert chosen.of(request, head) == plain_choice.of(request, head)


def test_layers_have_books_of_their_own() -> None:
    books = codebooks(kv_heads=2, layers=3)
    keys, positions = torch.randn(6, 5, DIM), torch.arange(30).view(6, 5)
    rows = torch.arange(6) + 6  # the second slot: all layers, both heads
    found = books.codes(keys, positions, rows, rotated=False)
    for row in range(6):
        one = books.of_layer(row // 2)
        head = torch.tensor([row % 2])
        alone = one.codes(keys[row : row + 1], positions[row : row + 1], head, rotated=False)
        assert torch.equal(found[row], alone[0])


def test_summaries_without_books_and_estimates_of_mass_are_refused(new_cache: NewCache) -> None:
    cache = new_cache(DIM)
    section = cache.fill("k8v4", [[200, 40], [32, 170]]).section
    memory = torch.zeros(2, 2, 1, tile_bytes("a2ats", DIM, 32), dtype=torch.uint8)
    with pytest.raises(ConfigError, match="expected codebooks"):
        Summaries("a2ats", memory, DIM)
    known = new_summaries(section, codebooks())
    with pytest.raises(ConfigError, match="omitted_mass"):
        select("cpu", torch.randn(2, 6, DIM), [section], [known], Rule.of(0.5, 0, 4, 64, 0.1))
