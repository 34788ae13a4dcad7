from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import product
from math import log
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.moves import ALONE, UNTRACKED
from triptych.core.errors import ConfigError
from triptych.core.layout import FORMATS, LATENT_FORMATS, KeyOrder
from triptych.kernels import Section, decode_attention
from triptych.kernels.pages import segments

BACKENDS = [name for name in decode_attention.backends if name != "cuda"]
"""Backends on the CPU; tests of the GPU backend are in ``gpu/``."""
HEAD_DIMS = [16, 64, 96, 128, 256]
CASES = [
    (16, "token"),
    (64, "token"),
    (64, "channel"),
    (96, "channel"),
    (128, "channel"),
    (256, "token"),
]
"""Each head size, and each order of keys with sizes that fill a vector register and that do not."""
ALL_CASES = [
    pytest.param(*case, marks=[] if case in CASES else [pytest.mark.conformance])
    for case in product(HEAD_DIMS, ("token", "channel"))
]
NewCache = Callable[..., Any]
"""``conftest.Cache``."""


def dense(
    query: Tensor,
    stored: Sequence[Any],
    slots: Tensor,
    *,
    scale: float,
    window: int = 0,
    softcap: float = 0.0,
    positions: Tensor | None = None,
) -> Tensor:
    """Dense attention in float64 over the decoded contents of pages (``conftest.Stored``)."""
    key, value, known, bias = (
        torch.cat([getattr(part, name)[slots.long()] for part in stored], 2)
        for name in ("key", "value", "positions", "bias")
    )
    rows, heads, dim = query.shape
    logits = query.double().view(rows, key.shape[1], -1, dim) @ key.transpose(2, 3) * scale
    if softcap > 0:
        logits = softcap * (logits / softcap).tanh()
    logits = logits + bias[:, :, None]
    visible = known >= 0
    if positions is not None:
        visible = visible & (positions[:, None, None] - known < window)
    logits = logits.masked_fill(~visible[:, :, None], float("-inf"))
    return (logits.softmax(-1) @ value).view(rows, heads, dim)


def check(backend: str, cache: Any, query: Tensor, stored: Sequence[Any], **options: Any) -> None:
    slots = options.pop("slots", torch.arange(len(query), dtype=torch.int32))
    options.setdefault("scale", query.shape[2] ** -0.5)
    sections = [part.section for part in stored]
    got = decode_attention.on(backend)(query, cache.arena, sections, slots, **options)
    assert got.dtype == torch.float32
    want = dense(query, stored, slots, **options)
    torch.testing.assert_close(got.double(), want, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(("head_dim", "order"), ALL_CASES)
@pytest.mark.parametrize("name", [*FORMATS, *LATENT_FORMATS, UNTRACKED])
@pytest.mark.parametrize("backend", BACKENDS)
def test_attention_over_pages_equals_dense_attention_over_decoded_tokens(
    backend: str, name: str, head_dim: int, order: KeyOrder, new_cache: NewCache
) -> None:
    cache = new_cache(head_dim)
    stored = cache.fill(name, [[1, 1], [40, 97], [113, 32]], order=order)
    check(backend, cache, torch.randn(3, 6, head_dim), [stored])


@pytest.mark.parametrize("name", LATENT_FORMATS)
@pytest.mark.parametrize("backend", BACKENDS)
def test_heads_of_deepseek_v2_lite_read_latents_of_its_size(
    backend: str, name: str, new_cache: NewCache
) -> None:
    cache = new_cache(512 + 64)
    stored = [cache.fill(f"{name}{parts}", [[40], [97]]) for parts in ("", "/8")]
    check(backend, cache, torch.randn(2, 16, 512 + 64), stored)


@pytest.mark.parametrize("group", [1, 2, 4, 7, 8, 16])
@pytest.mark.parametrize("name", ["fp16", "k8v4", "k4v2"])
@pytest.mark.parametrize("backend", BACKENDS)
def test_all_query_heads_of_a_group_get_an_output(
    backend: str, name: str, group: int, new_cache: NewCache
) -> None:
    cache = new_cache(128)
    stored = cache.fill(name, [[70, 5], [3, 60]])
    check(backend, cache, torch.randn(2, 2 * group, 128), [stored])


@pytest.mark.parametrize("byte", [0x00, 0x7E, 0xFF, None])
@pytest.mark.parametrize("name", [*FORMATS, UNTRACKED])
@pytest.mark.parametrize("backend", BACKENDS)
def test_unused_bytes_of_pages_do_not_change_the_output(
    backend: str, name: str, byte: int | None, new_cache: NewCache
) -> None:
    cache = new_cache(64, byte=byte)
    stored = cache.fill(name, [[1, 33], [2, 14], [57, 45]])
    check(backend, cache, torch.randn(3, 6, 64), [stored])


@pytest.mark.parametrize("head_dim", [64, 96])
@pytest.mark.parametrize("backend", BACKENDS)
def test_sections_of_several_formats_are_one_softmax(
    backend: str, head_dim: int, new_cache: NewCache
) -> None:
    cache = new_cache(head_dim)
    stored = [
        cache.fill("k8v4", [[90, 0, 33], [0, 0, 1], [0, 64, 7]]),
        cache.fill("k4v2", [[0, 150, 57], [56, 0, 0], [0, 1, 9]]),
        cache.fill(UNTRACKED, [[0, 150, 64], [56, 0, 65], [0, 1, 9]]),
        cache.fill("fp16", [[64, 1, 26], [13, 1, 0], [1, 0, 14]]),
    ]
    check(backend, cache, torch.randn(3, 9, head_dim), stored)


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_window_needs_pages_with_positions(backend: str, new_cache: NewCache) -> None:
    cache = new_cache(64)
    section, slots = cache.fill(UNTRACKED, [[9, 9]]).section, torch.zeros(1, dtype=torch.int32)
    with pytest.raises(ConfigError, match="tokens are tracked"):
        decode_attention.on(backend)(
            torch.randn(1, 4, 64), cache.arena, [section], slots,
            scale=0.125, window=5, positions=slots + 9,
        )  # fmt: skip


@pytest.mark.parametrize("head_dim", [64, 96])
@pytest.mark.parametrize("name", ["k8v8/8", "k8v8/2", "fp16/4", "k8v4/4"])
@pytest.mark.parametrize("backend", BACKENDS)
def test_small_pages_are_one_softmax_with_whole_ones(
    backend: str, name: str, head_dim: int, new_cache: NewCache
) -> None:
    cache = new_cache(head_dim)
    stored = [
        cache.fill(name, [[37, 1, 0], [3, 4, 39]], order="token"),
        cache.fill("k8v4", [[90, 0, 33], [0, 0, 1]]),
    ]
    check(backend, cache, torch.randn(2, 9, head_dim), stored)


@pytest.mark.parametrize(("byte", "order"), [(0xFF, "token"), (None, "channel")])
@pytest.mark.parametrize("name", ALONE)
@pytest.mark.parametrize("backend", BACKENDS)
def test_biases_are_added_to_logits_after_the_cap(
    backend: str, name: str, byte: int | None, order: KeyOrder, new_cache: NewCache
) -> None:
    cache = new_cache(64, byte=byte)
    stored = [
        cache.fill(name, [[90, 20], [1, 33]], order=order, has_bias=True),
        cache.fill("k8v8/8", [[7, 3], [2, 11]], order="token"),
    ]
    query = torch.randn(2, 6, 64)
    check(backend, cache, query, stored)
    options = {"positions": torch.tensor([60, 30], dtype=torch.int32), "window": 45}
    check(backend, cache, query, stored, softcap=2.0, **options)


@pytest.mark.parametrize("backend", BACKENDS)
def test_k_equal_tokens_are_one_with_bias_log_k(backend: str, new_cache: NewCache) -> None:
    cache, query, slots = new_cache(64), torch.randn(1, 2, 64), torch.zeros(1, dtype=torch.int32)
    one, others = cache.fill("fp16", [[1, 1]]), cache.fill("fp16", [[9, 9]])
    five = cache.fill("fp16", [[5, 5]], vectors=(one.key.float().expand(1, 2, 5, 64),) * 2)
    merged = cache.fill("fp16", [[1, 1]], vectors=(one.key.float(),) * 2, has_bias=True)
    page = merged.section.pages[0, :, 0].long()
    segments(cache.arena, merged.section.layout).scores[page, 0] = log(5)
    attend = decode_attention.on(backend)
    found = [
        attend(query, cache.arena, [part.section, others.section], slots, scale=0.125)
        for part in (five, merged)
    ]
    torch.testing.assert_close(found[0], found[1], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("name", ["fp16", "k8v4"])
@pytest.mark.parametrize("backend", BACKENDS)
def test_a_single_token_has_weight_one(backend: str, name: str, new_cache: NewCache) -> None:
    cache = new_cache(64)
    stored = cache.fill(name, [[1, 1]])
    slots = torch.zeros(1, dtype=torch.int32)
    query = torch.randn(1, 4, 64)
    got = decode_attention.on(backend)(query, cache.arena, [stored.section], slots, scale=0.125)
    want = stored.value[0, :, 0].repeat_interleave(2, 0)[None]
    torch.testing.assert_close(got.double(), want, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("lengths", [[[3000, 2500]], [[2000, 1], [5, 0], [700, 1900]]])
def test_a_head_row_split_into_runs_gives_the_same_output(
    threads: int, lengths: list[list[int]], new_cache: NewCache
) -> None:
    cache = new_cache(64, pages=1500)
    recent = [[max(1, count % 60) for count in row] for row in lengths]
    stored = [cache.fill("k8v4", lengths), cache.fill("fp16", recent)]
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    check("cpu", cache, torch.randn(len(lengths), 6, 64), stored)
    torch.set_num_threads(before)


def test_two_threads_can_run_attention_at_the_same_time(new_cache: NewCache) -> None:
    cache = new_cache(64, pages=1500)
    stored = cache.fill("k8v4", [[2000, 1500], [900, 700]])
    slots = torch.arange(2, dtype=torch.int32)
    queries = torch.randn(40, 2, 6, 64)

    def attend(query: Tensor) -> Tensor:
        return decode_attention(query, cache.arena, [stored.section], slots, scale=0.125)

    with ThreadPoolExecutor(2) as pool:
        for query, got in zip(queries, pool.map(attend, queries), strict=True):
            want = dense(query, [stored], slots, scale=0.125)
            torch.testing.assert_close(got.double(), want, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("window", [1, 7, 50, 1000])
@pytest.mark.parametrize("name", ["fp16", "k8v4", "k4v2"])
@pytest.mark.parametrize("backend", BACKENDS)
def test_a_window_hides_keys_that_are_too_old(
    backend: str, name: str, window: int, new_cache: NewCache
) -> None:
    cache = new_cache(64)
    stored = [
        cache.fill(name, [[100, 60], [1, 33]]),
        cache.fill("fp16", [[20, 20], [20, 20]], first_position=100),
    ]
    positions = torch.full((2,), 119, dtype=torch.int32)
    check(backend, cache, torch.randn(2, 6, 64), stored, window=window, positions=positions)


@pytest.mark.parametrize("softcap", [0.5, 30.0])
@pytest.mark.parametrize("name", ["fp16", "k8v4"])
@pytest.mark.parametrize("backend", BACKENDS)
def test_a_soft_cap_bounds_the_logits(
    backend: str, name: str, softcap: float, new_cache: NewCache
) -> None:
    cache = new_cache(64)
    stored = cache.fill(name, [[100, 60]])
    check(backend, cache, torch.randn(1, 4, 64) * 20, [stored], softcap=softcap)


@pytest.mark.parametrize("backend", BACKENDS)
def test_very_large_logits_do_not_overflow(backend: str, new_cache: NewCache) -> None:
    cache = new_cache(64)
    stored = cache.fill("k8v4", [[100, 60]])
    check(backend, cache, torch.randn(1, 4, 64) * 100, [stored], scale=1.0)


@pytest.mark.parametrize("backend", BACKENDS)
def test_requests_read_the_tables_of_their_slots_through_any_strides(
    backend: str, new_cache: NewCache
) -> None:
    cache = new_cache(64)
    stored = cache.fill("k8v4", [[30, 60], [70, 1], [5, 90], [44, 45]])
    section = stored.section
    wide = torch.full((4, 3, 2, 9), 2**30, dtype=torch.int32)
    wide[:, 1, :, : section.pages.shape[2]] = section.pages
    counts = section.tokens.T.contiguous().T
    strided = Section(section.layout, wide[:, 1], counts)
    slots = torch.tensor([2, 0, 3, 2], dtype=torch.int32)
    query = torch.randn(4, 6, 64)
    got = decode_attention.on(backend)(query, cache.arena, [strided], slots, scale=0.1)
    want = dense(query, [stored], slots, scale=0.1)
    torch.testing.assert_close(got.double(), want, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_bfloat16_query_gives_a_float32_output(backend: str, new_cache: NewCache) -> None:
    cache = new_cache(64)
    check(backend, cache, torch.randn(1, 4, 64).bfloat16(), [cache.fill("k8v8", [[9, 9]])])


def _page_out_of_range(section: Section) -> Section:
    return Section(section.layout, section.pages * 0 + 10**6, section.tokens)


def _more_tokens_than_pages(section: Section) -> Section:
    return Section(section.layout, section.pages, section.tokens * 100)


def _fewer_slots(section: Section) -> Section:
    return Section(section.layout, section.pages[:1], section.tokens[:1])


@pytest.mark.parametrize("spoil", [_page_out_of_range, _more_tokens_than_pages, _fewer_slots])
def test_page_tables_out_of_range_are_an_error(
    spoil: Callable[[Section], Section], new_cache: NewCache
) -> None:
    cache = new_cache(64)
    section = spoil(cache.fill("k8v4", [[40, 40], [40, 40]]).section)
    slots = torch.arange(2, dtype=torch.int32)
    with pytest.raises(ConfigError, match="out of range"):
        decode_attention(torch.randn(2, 4, 64), cache.arena, [section], slots, scale=0.1)


def test_a_window_without_positions_is_an_error(new_cache: NewCache) -> None:
    cache = new_cache(64)
    section, slots = cache.fill("k8v4", [[4]]).section, torch.zeros(1, dtype=torch.int32)
    with pytest.raises(ConfigError, match="positions"):
        decode_attention(torch.randn(1, 1, 64), cache.arena, [section], slots, scale=1, window=3)


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_section_can_change_between_two_calls(backend: str, new_cache: NewCache) -> None:
    cache = new_cache(64)
    section = cache.fill("k8v4", [[90, 70]]).section
    query, slots = torch.randn(1, 6, 64), torch.zeros(1, dtype=torch.int32)
    for _ in range(3):
        section.tokens[0, 0] -= 25
        section.pages[0, 1, :2] = section.pages[0, 1, :2].flip(0)
        found, wanted = (
            decode_attention.on(name)(query, cache.arena, [section], slots, scale=0.125)
            for name in (backend, "reference")
        )
        torch.testing.assert_close(found, wanted, rtol=1e-5, atol=1e-5)


def test_a_mismatched_section_is_an_error_after_a_valid_call(new_cache: NewCache) -> None:
    cache = new_cache(64)
    section, slots = cache.fill("k8v4", [[40, 40]]).section, torch.zeros(1, dtype=torch.int32)
    attend = decode_attention.on("cpu")
    attend(torch.randn(1, 6, 64), cache.arena, [section], slots, scale=1.0)
    for _ in range(2):
        with pytest.raises(ConfigError, match="head_dim 64"):
            attend(torch.randn(1, 6, 32), cache.arena, [section], slots, scale=1.0)
