"""Byte arithmetic of pages."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from triptych.core.errors import ConfigError
from triptych.core.layout import (
    ALIGN_BYTES,
    FORMATS,
    RECENT_TOKENS,
    PageLayout,
    default_page_bytes,
    page_format,
)

HEAD_DIMS = [16, 32, 64, 80, 96, 128, 256]


@pytest.mark.parametrize(
    ("form", "tokens"),
    [
        ("fp16", 13),
        ("k8v8", 24),
        ("k8v4", 32),
        ("k4v4", 44),
        ("k4v2", 56),
        ("kivi4", 42),
        ("kivi2", 75),
        ("kvarn", 51),
    ],
)
def test_a_default_page_at_head_dim_64_holds_the_published_counts(form: str, tokens: int) -> None:
    assert default_page_bytes(64) == 3584
    assert default_page_bytes(64, on_disk=True) == 4096
    assert PageLayout(page_format(form), 64, 3584).tokens == tokens


def segment_bytes(layout: PageLayout, tokens: int) -> list[int]:
    form, dim = layout.format, layout.head_dim
    each = zip(form.segment_token_bytes(dim), form.segment_page_bytes(dim), strict=True)
    return [tokens * of_token + of_page for of_token, of_page in each]


@given(
    form=st.sampled_from(sorted(FORMATS)),
    head_dim=st.sampled_from(HEAD_DIMS),
    kilobytes=st.integers(12, 64),
)
def test_segments_are_aligned_do_not_overlap_and_fit(
    form: str, head_dim: int, kilobytes: int
) -> None:
    layout = PageLayout(FORMATS[form], head_dim, kilobytes * 256)
    sizes = segment_bytes(layout, layout.tokens)
    ends = [start + size for start, size in zip(layout.offsets, sizes, strict=True)]
    assert all(start % ALIGN_BYTES == 0 for start in layout.offsets)
    assert all(end <= start for end, start in zip(ends, layout.offsets[1:], strict=False))
    assert ends[-1] <= layout.page_bytes


@given(
    form=st.sampled_from(sorted(FORMATS)),
    head_dim=st.sampled_from(HEAD_DIMS),
    kilobytes=st.integers(12, 64),
)
def test_one_more_token_would_not_fit(form: str, head_dim: int, kilobytes: int) -> None:
    layout = PageLayout(FORMATS[form], head_dim, kilobytes * 256)
    more = RECENT_TOKENS if layout.format.codes_whole_pages else 1
    end = 0
    for size in segment_bytes(layout, layout.tokens + more):
        end = -(-(end + size) // ALIGN_BYTES) * ALIGN_BYTES
    assert end > layout.page_bytes
    assert not layout.tokens % more


def test_a_page_too_small_for_one_token_says_how_large_it_must_be() -> None:
    with pytest.raises(ConfigError, match="at least 1056 bytes"):
        PageLayout(FORMATS["fp16"], 256, 256)
    with pytest.raises(ConfigError, match="page_bytes=3584: expected a multiple of 3"):
        PageLayout(FORMATS["fp16"], 64, 3584, parts=3)


def test_an_unknown_format_lists_the_known_ones() -> None:
    with pytest.raises(ConfigError, match="k8v4"):
        page_format("k9v9")
