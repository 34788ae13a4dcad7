"""Chunks of prompts whose images attend to themselves in both directions: none divides an image."""

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.unit.workers.test_local_server import greedy
from triptych.core.config import AppConfig
from triptych.core.images import ImageSpan
from triptych.core.layout import Geometry
from triptych.core.messages import Request
from triptych.core.pages import PagePlan
from triptych.workers.prefill.prefill_engine import NO_PAGES
from triptych.workers.prefill.prompt_batch import ChunkBudget, Prompt

LAYERS = range(2)
PLAN = PagePlan.of(
    AppConfig.from_mapping({"compressor": {"policy": "uniform:k8v4/snapkv"}}),
    Geometry(layers=2, kv_heads=2, head_dim=64),
)
LAST_QUERIES = PLAN.policy.observing_rule.last_queries if PLAN.policy.observing_rule else 0


def prompt_of(gaps: list[int], images: list[int], rest: int, *, two_way: bool = True) -> Prompt:
    """Text of ``gaps[i]`` tokens before image i, and ``rest`` tokens behind the last one."""
    spans, at = list[ImageSpan](), 0
    for gap, size in zip(gaps, images, strict=True):
        at += gap
        spans.append(
            ImageSpan(
                runs=((at, size),), digest=b"%d" % at, width=1, height=1, feature_bytes=4 * size
            )
        )
        at += size
    request = Request(
        id="r",
        prompt=tuple(range(at + rest)),
        sampling=greedy(4),
        reply_to="client",
        images=tuple(spans),
    )
    return Prompt(request, PLAN, [], 0.0, NO_PAGES, two_way_images=two_way)


def chunks_of(prompt: Prompt, budget: int) -> list[tuple[int, int]]:
    found = list[tuple[int, int]]()
    while prompt.tokens_left:
        chunk = ChunkBudget(budget).take(prompt, LAYERS)
        assert chunk is not None
        found.append((chunk.start, chunk.end))
        prompt.read = chunk.end
    return found


SHAPES = st.lists(st.tuples(st.integers(1, 20), st.integers(2, 30)), min_size=1, max_size=5)


@given(shape=SHAPES, rest=st.integers(1, 50), budget=st.integers(1, 64))
def test_chunks_follow_each_other_and_no_border_is_in_an_image(
    shape: list[tuple[int, int]], rest: int, budget: int
) -> None:
    gaps, images = map(list, zip(*shape, strict=True))
    prompt = prompt_of(gaps, images, rest)
    found = chunks_of(prompt, budget)
    assert [start for start, _ in found] == [0, *(end for _, end in found[:-1])]
    assert found[-1][1] == prompt.request.known_tokens
    assert all(prompt.block_at(end) is None for _, end in found)
    for start, end in found:
        longest = max((len(one) for one in prompt.blocks if one.start == start), default=0)
        assert end - start <= max(budget, longest)


@given(shape=SHAPES, rest=st.integers(1, 50), budget=st.integers(1, 64))
def test_each_image_is_one_sequence_and_only_images_read_both_ways(
    shape: list[tuple[int, int]], rest: int, budget: int
) -> None:
    gaps, images = map(list, zip(*shape, strict=True))
    prompt, found = prompt_of(gaps, images, rest), list[tuple[int, int, bool]]()
    while prompt.tokens_left:
        chunk = ChunkBudget(budget).take(prompt, LAYERS)
        assert chunk is not None
        parts = chunk.sequences()
        assert [part.start for part in parts] == [chunk.start, *(one.end for one in parts[:-1])]
        found += [(part.start, part.end, part.is_two_way) for part in parts]
        prompt.read = chunk.end
    both = [(start, end) for start, end, is_two_way in found if is_two_way]
    assert both == [(one.start, one.stop) for one in prompt.blocks]
    assert found[-1][1] == prompt.request.known_tokens


def test_a_prompt_whose_beginning_is_cached_goes_on_inside_an_image() -> None:
    prompt = prompt_of([5], [20], 8)
    prompt.read = 12
    chunk = ChunkBudget(4).take(prompt, LAYERS)
    assert chunk is not None
    assert (chunk.start, chunk.end) == (12, 25)
    (part,) = chunk.sequences()
    assert part.is_two_way


@pytest.mark.parametrize("rest", [1, LAST_QUERIES - 5, LAST_QUERIES + 3])
def test_queries_that_are_observed_begin_with_an_image_that_they_are_in(rest: int) -> None:
    assert LAST_QUERIES > 10
    prompt = prompt_of([40], [30], rest)
    first = prompt.request.known_tokens - LAST_QUERIES
    assert prompt.first_observed == (40 if 40 < first < 70 else first)
    chunk = ChunkBudget(1000).take(prompt, LAYERS)
    assert chunk is not None
    assert prompt.first_observed in [part.start for part in chunk.sequences()]


def test_images_of_other_models_are_divided_as_text_is() -> None:
    prompt = prompt_of([5, 5], [20, 20], 3, two_way=False)
    assert chunks_of(prompt, 8) == list(pairwise((*range(0, 53, 8), 53)))
    prompt.read = 0
    chunk = ChunkBudget(1000).take(prompt, LAYERS)
    assert chunk is not None
    assert not any(part.is_two_way for part in chunk.sequences())
