"""Placeholders of images, and keys that tell images apart."""

import random

import pytest

from triptych.core.errors import RequestError
from triptych.core.images import (
    KEY_TOKENS,
    Fixed,
    Image,
    ImageLayout,
    ImageSpan,
    Resizing,
    Tiling,
    content_keys,
    expand_images,
    rotary_offset,
)
from triptych.core.messages import Request, Sampling

LAYOUT = ImageLayout(placeholder=9, feature_bytes=20, rule=Fixed(tokens=(3, *[9] * 5, 4)))


def image(seed: int) -> Image:
    return Image.of(2, 1, random.Random(seed).randbytes(6))


def test_a_placeholder_becomes_as_many_as_the_image_has_features() -> None:
    tokens, spans = expand_images([1, 9, 2, 9], [image(0), image(1)], LAYOUT)
    assert tokens == [1, 3, 9, 9, 9, 9, 9, 4, 2, 3, 9, 9, 9, 9, 9, 4]
    assert [(one.start, one.stop, one.digest) for one in spans] == [
        (2, 7, image(0).digest),
        (10, 15, image(1).digest),
    ]


def test_an_image_of_tiles_has_features_with_labels_between_them() -> None:
    layout = ImageLayout(
        placeholder=9,
        feature_bytes=20,
        rule=Tiling(
            longest_edge=4,
            tile=2,
            patterns={"1x2": (3, 9, 9, 4, 9, 9, 5), "2x1": (9, 6, 9)},
        ),
    )
    wide, tall = Image.of(2, 1, bytes(6)), Image.of(1, 2, bytes(6))
    tokens, (first, second) = expand_images([9, 9], [wide, tall], layout)
    assert tokens == [3, 9, 9, 4, 9, 9, 5, 9, 6, 9]
    assert (first.runs, first.features, first.tokens) == (((1, 2), (4, 2)), 4, 5)
    assert (second.runs, second.feature_bytes) == (((7, 1), (9, 1)), 40)


@pytest.mark.parametrize("runs", [(), ((3, 0),), ((-1, 2),), ((3, 2), (4, 2))])
def test_features_of_an_image_are_at_places_of_their_own(runs: tuple[tuple[int, int], ...]) -> None:
    with pytest.raises(ValueError, match="features"):
        ImageSpan(runs=runs, digest=b"", width=1, height=1, feature_bytes=4)


@pytest.mark.parametrize(("tokens", "count"), [([1, 2], 1), ([9, 9], 1), ([9], 0)])
def test_as_many_placeholders_as_images_are_needed(tokens: list[int], count: int) -> None:
    with pytest.raises(RequestError, match="image token"):
        expand_images(tokens, [image(one) for one in range(count)], LAYOUT)


def test_beginnings_with_different_images_have_different_keys() -> None:
    """Whatever comes before an image, and wherever a block of the prefix cache ends inside it."""
    luck = random.Random(0)
    for seed in range(100):
        before = [luck.randrange(1, 9) for _ in range(luck.randrange(20))]
        prompt = [*before, 9, *(luck.randrange(1, 9) for _ in range(3)), 9, 1]
        first, second = (
            expand_images(prompt, [image(seed), image(seed + other)], LAYOUT) for other in (1, 500)
        )
        assert first[0] == second[0]
        keys = [content_keys(*one) for one in (first, second)]
        inside = first[1][1].start + 1
        assert keys[0][: inside - 1 - KEY_TOKENS] == keys[1][: inside - 1 - KEY_TOKENS]
        for end in range(inside, len(first[0]) + 1):
            differ = sum(a != b for a, b in zip(keys[0][:end], keys[1][:end], strict=True))
            assert differ >= min(KEY_TOKENS, first[1][1].start)
            assert content_keys(first[0][:end], first[1]) == keys[0][:end]


def test_equal_prompts_with_other_images_are_not_the_same_prompt() -> None:
    tokens, spans = expand_images([9], [image(0)], LAYOUT)
    _, others = expand_images([9], [image(1)], LAYOUT)
    one, other = (
        Request(id="a", prompt=tuple(tokens), sampling=Sampling(), reply_to="", images=images)
        for images in (spans, others)
    )
    assert one.known == other.known
    assert one.prompt_key != other.prompt_key


def test_the_digest_covers_the_shape() -> None:
    assert Image.of(2, 1, bytes(6)).digest != Image.of(1, 2, bytes(6)).digest
    with pytest.raises(ValueError, match="no RGB image"):
        Image.of(2, 2, bytes(6))


def test_positions_behind_an_image_with_a_grid_go_on_after_its_longer_edge() -> None:
    layout = ImageLayout(
        placeholder=9,
        feature_bytes=4,
        rule=Resizing(unit=2, least_pixels=4, most_pixels=400),
    )
    tokens, spans = expand_images([1, 9, 2], [Image.of(6, 4, bytes(72))], layout)
    assert (spans[0].grid, spans[0].start, len(tokens)) == ((2, 3), 1, 8)
    assert rotary_offset(spans) == 3 - 6
    with pytest.raises(RequestError, match="200 times as long"):
        expand_images([9], [Image.of(201, 1, bytes(603))], layout)


def test_pixels_are_those_that_the_tower_reads() -> None:
    assert Tiling(longest_edge=4, tile=2).pixels(100, 50) == (1 * 2 + 1) * 4
    assert Resizing(unit=2, least_pixels=4, most_pixels=64).pixels(100, 100) == 64
    assert Fixed(tokens=(9,)).pixels(100, 50) == 5000
