"""How much of a pool is for prefixes, and the shape of their blocks."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from triptych.core.config import AppConfig
from triptych.core.errors import ConfigError
from triptych.core.layout import Geometry
from triptych.core.pages import PagePlan

SMOLLM2 = Geometry(layers=30, kv_heads=3, head_dim=64)
TINY = Geometry(layers=1, kv_heads=1, head_dim=64)


def plan(geometry: Geometry = SMOLLM2, policy: str = "uniform:k8v4", **pool: object) -> PagePlan:
    settings: dict[str, object] = {"compressor": {"policy": policy}, "pool": pool}
    return PagePlan.of(AppConfig.from_mapping(settings), geometry)


def test_a_block_is_two_high_pages_of_each_head_row() -> None:
    made = plan()
    assert made.block_tokens == 2 * made.high.tokens == 64
    assert made.block_pages(1) == 2 * 90
    assert made.block_pages(0) == (2 + 1) * 90, "one raw page holds the sink"
    raw = plan(policy="uniform:fp16")
    assert (raw.block_tokens, raw.block_pages(0)) == (2 * raw.raw.tokens, 2 * 90)


def test_what_is_shared_is_whole_blocks_between_sink_and_window() -> None:
    made = plan()
    assert made.fixed_span(1024, 1056) == range(3, 960), "64 tokens stay in recent pages"
    assert made.fixed_span(1024, 4096) == range(3, 1024)
    assert made.fixed_span(63, 4096) == made.fixed_span(1024, 120) == range(0)
    for prompt in range(150, 1200, 7):
        span = made.fixed_span(1 << 20, prompt)
        end = made.sink_tokens + made.leaving_tokens(prompt)
        assert span.stop <= end <= prompt - made.policy.window_tokens
        assert end - span.stop < made.block_tokens or not span
    for copies in (
        plan(share_pages=False, repeatable_prompts=False),
        plan(prefix_bytes=0),
        plan(policy="uniform:fp16"),
    ):
        assert copies.fixed_span(1024, 4096) == range(0)
    no_sink = PagePlan.of(
        AppConfig.from_mapping({"compressor": {"policy": "uniform:k8v4", "sink_tokens": 0}}),
        SMOLLM2,
    )
    assert no_sink.fixed_span(1024, 4096) == range(1024)


@pytest.mark.parametrize("head_dim", [64, 80, 96, 128, 256])
def test_an_eighth_of_a_page_is_full_with_three_recent_tokens(head_dim: int) -> None:
    made = plan(Geometry(1, 1, head_dim))
    recent = made.recent
    assert (recent.parts, recent.tokens, recent.size_bytes) == (8, 3, made.page_bytes // 8)
    assert recent.used_bytes(3) == recent.size_bytes
    assert (made.sink_tokens, made.sink_pages, made.retire_tokens) == (3, 1, 24)


@pytest.mark.parametrize(("page_bytes", "parts"), [(3584, 8), (4096, 8), (1792, 4), (768, 1)])
def test_a_small_page_has_three_tokens_at_least(page_bytes: int, parts: int) -> None:
    made = plan(TINY, page_bytes=page_bytes)
    assert (made.recent.parts, made.recent.tokens >= 3) == (parts, True)


def test_a_16_bit_policy_has_raw_pages_alone() -> None:
    made = plan(policy="uniform:fp16")
    assert made.recent == made.raw
    assert made.leaving_tokens(1000) == made.retire_tokens == 0


@given(st.integers(1, 2000), st.integers(0, 100), st.integers(0, 30))
def test_tokens_leave_for_high_pages_that_they_fill_or_pay_for(
    tokens: int, window: int, sink: int
) -> None:
    policy = replace(plan().policy, window_tokens=window, sink_tokens=sink)
    made = replace(plan(), policy=policy)
    leaving = made.leaving_tokens(tokens)
    stays = tokens - leaving
    assert stays >= min(tokens, made.sink_tokens + window)
    assert stays < made.full_recent_tokens
    if leaving:
        end = leaving
        if made.fixed_span(tokens, tokens):
            end += made.sink_shift  # pages are filled from the end of the blocks on
        last = (end - 1) % made.high.tokens + 1
        assert made.recent.pool_pages(made.recent.pages(last)) >= 1
        assert last >= made.retire_tokens
    left = made.full_recent_tokens - made.retire_tokens
    assert left % made.recent.tokens == 0
    assert left >= made.sink_tokens + window


@given(st.integers(1, 2000), st.integers(0, 100), st.integers(0, 40))
def test_fixed_pages_of_its_own_are_within_the_bound(tokens: int, window: int, sink: int) -> None:
    """A request that the cache refuses takes no more pages than are booked for it."""
    made = replace(plan(), policy=replace(plan().policy, window_tokens=window, sink_tokens=sink))
    span, leaving = made.fixed_span(tokens, tokens), made.leaving_tokens(tokens)
    pages = made.high.pages(len(span)) + made.high.pages(leaving - len(span))
    assert pages <= made.high.pages(max(0, tokens - made.sink_tokens - window))
    assert not span or made.sink_tokens <= span.start < made.sink_tokens + made.high.tokens


def test_a_quarter_is_for_prefixes_unless_it_holds_too_little() -> None:
    assert plan(kv_cache_memory_bytes=1 << 30).prefix_bytes == 1 << 28
    assert plan(kv_cache_memory_bytes=5_000_000).prefix_bytes == 0
    assert plan(kv_cache_memory_bytes=1 << 30, prefix_bytes=0).prefix_bytes == 0
    assert plan(kv_cache_memory_bytes=1 << 30, prefix_bytes=5_000_000).prefix_bytes == 5_000_000


def test_what_is_left_must_do_for_a_request() -> None:
    page = plan(TINY).page_bytes
    with pytest.raises(ConfigError, match=r"at least 21504 bytes \(two blocks of 64 tokens\)"):
        plan(TINY, prefix_bytes=6 * page - 1)
    assert (
        plan(TINY, kv_cache_memory_bytes=10 * page, prefix_bytes=6 * page).prefix_bytes == 6 * page
    )
    with pytest.raises(ConfigError, match=f"beside pool.prefix_bytes={6 * page}"):
        plan(TINY, kv_cache_memory_bytes=10 * page - 1, prefix_bytes=6 * page)


@pytest.mark.parametrize(("gpus", "order"), [(0, "channel"), (1, "token")])
def test_keys_lie_as_the_device_of_decode_reads_them(gpus: int, order: str) -> None:
    settings = {"compressor": {"policy": "diffkv"}, "decode": {"actor": {"num_gpus": gpus}}}
    made = PagePlan.of(AppConfig.from_mapping(settings), SMOLLM2)
    assert [layout.key_order for layout in made.classes] == [order, order]


@given(st.integers(1, 12), st.integers(1, 100), st.integers(0, 5), st.integers(1, 400))
def test_layers_at_once_change_only_after_a_bound(
    layers: int, chunk: int, at_once: int, tokens: int
) -> None:
    geometry = replace(TINY, layers=layers)
    made = replace(plan(geometry), chunk_tokens=chunk, layers_at_once=at_once)
    if made.layers_of(tokens) != made.layers_of(tokens + 1):
        assert tokens in made.layer_group_bounds


LOW = {"policy": "diffkv", "high_format": "k8v4", "low_format": "k4v2"}


@pytest.mark.parametrize(
    ("settings", "tracks"),
    [
        ({}, False),
        ({"decode": {"selection": {"method": "moments"}}}, True),
        ({"decode": {"plugins": ["prune"]}}, True),
        ({"compressor": {**LOW, "alpha_high": 2.0, "alpha_low": 0.1}}, True),
        ({"compressor": {**LOW, "policy": "leankv", "mass_high": 0.9}}, True),
        ({"compressor": {**LOW, "high_window_tokens": 63}}, True),
        (
            {
                "compressor": {**LOW, "high_window_tokens": 63},
                "pool": {"keep_answers": "never"},
            },
            False,
        ),
    ],
)
def test_low_tokens_are_tracked_if_they_may_leave_or_are_asked_for(
    settings: dict[str, object], tracks: bool
) -> None:
    made = PagePlan.of(AppConfig.from_mapping({"compressor": LOW} | settings), SMOLLM2)
    assert made.low is not None
    assert made.low.is_tracked == tracks
    assert made.low.tokens == (56 if tracks else 64)


def test_low_tokens_of_layers_with_windows_are_tracked() -> None:
    windowed = replace(SMOLLM2, windows=(512, 0) * 15)
    made = PagePlan.of(AppConfig.from_mapping({"compressor": LOW}), windowed)
    assert made.low is not None
    assert made.low.is_tracked
