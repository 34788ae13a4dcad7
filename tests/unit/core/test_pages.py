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
    tokens = made.raw.tokens
    assert made.fixed_span(1024, 1056) == range(64, 960), "64 tokens stay in raw pages"
    assert made.fixed_span(1024, 4096) == range(64, 1024)
    assert made.fixed_span(64, 4096) == made.fixed_span(1024, 150) == range(0)
    for prompt in range(150, 1200, 7):
        span = made.fixed_span(1 << 20, prompt)
        raw = made.sink_tokens + made.leaving_pages(prompt) * tokens
        assert span.stop <= raw <= prompt - made.policy.window_tokens
        assert raw - span.stop < made.block_tokens + tokens or not span
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
