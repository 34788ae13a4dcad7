"""Which tokens stand for an image in the prompts of a model, by the size of the image."""

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from math import ceil, floor, sqrt

from triptych.core.errors import RequestError
from triptych.core.images.image_spans import NO_GRID, Grid, Image, ImageSpan

MOST_RATIO = 200
"""How many times longer one edge of a resized image may be than the other."""


class ImageRule(ABC):
    """How a family of models turns images into tokens."""

    @abstractmethod
    def pattern(self, placeholder: int, width: int, height: int) -> tuple[int, ...]:
        """The tokens of an image of some size, in pixels: placeholders, and what is around them.

        Raises: RequestError for an image that the model cannot read
        """

    @abstractmethod
    def pixels(self, width: int, height: int) -> int:
        """Pixels that the vision tower reads of an image. Raises: RequestError, as ``pattern``"""

    def rotary_grid(self, width: int, height: int) -> Grid:
        """Rows and columns, if rotary positions of an image count them; else ``NO_GRID``."""
        return NO_GRID


@dataclass(frozen=True, slots=True, kw_only=True)
class Fixed(ImageRule):
    """Every image is resized to the same size, and has the same tokens.

    Source: LLaVA
    """

    tokens: tuple[int, ...]

    def pattern(self, placeholder: int, width: int, height: int) -> tuple[int, ...]:
        return self.tokens

    def pixels(self, width: int, height: int) -> int:
        return width * height


@dataclass(frozen=True, slots=True, kw_only=True)
class Tiling(ImageRule):
    """Images are split: the model reads square tiles, and then the whole image.

    An image is resized so that its longest edge has ``longest_edge`` pixels, and then so that both
    edges are multiples of ``tile`` pixels.

    Source: Idefics3, SmolVLM (transformers' ``get_number_of_image_patches``)
    """

    longest_edge: int
    tile: int
    patterns: Mapping[str, tuple[int, ...]] = field(default_factory=dict[str, tuple[int, ...]])
    """The tokens of an image by its tiles, as in ``"2x3"``: two rows of three."""

    def grid(self, width: int, height: int) -> Grid:
        """Rows and columns of the tiles of an image; ``NO_GRID`` if it is not split.

        >>> one = Tiling(longest_edge=2048, tile=512)
        >>> one.grid(640, 480), one.grid(100, 100), one.grid(30, 500)
        ((3, 4), (4, 4), (4, 1))
        """
        across = ceil(self.longest_edge / self.tile)
        scaled = _other_edge(self.longest_edge, width, height)
        scaled = max(1, scaled + scaled % 2)  # as transformers rounds
        sides = (self.longest_edge, scaled) if width >= height else (scaled, self.longest_edge)
        along = _other_edge(across * self.tile, *sides)
        down = max(1, ceil(along / self.tile))
        if across == down == 1:
            return NO_GRID
        return (down, across) if width >= height else (across, down)

    @property
    def grids(self) -> list[Grid]:
        """All that images can have."""
        most = ceil(self.longest_edge / self.tile)
        if most == 1:
            return [NO_GRID]
        flat = [(down, most) for down in range(1, most + 1)]
        return [*flat, *((most, down) for down in range(1, most))]

    def pattern(self, placeholder: int, width: int, height: int) -> tuple[int, ...]:
        rows, columns = self.grid(width, height)
        return self.patterns[f"{rows}x{columns}"]

    def pixels(self, width: int, height: int) -> int:
        rows, columns = self.grid(width, height)
        return (rows * columns + 1) * self.tile * self.tile


def _other_edge(longest: int, width: int, height: int) -> int:
    """The shorter edge of an image whose longest one gets ``longest`` pixels.

    The rounding of floats is that of transformers, which multiplies in one case only.
    """
    ratio = width / height
    return int(longest / ratio) if width >= height else int(longest * ratio)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Squares(ImageRule):
    """A feature stands for a square of ``unit`` pixels."""

    unit: int

    @abstractmethod
    def grid(self, width: int, height: int) -> Grid:
        """Rows and columns of the features of an image. Raises: RequestError for a narrow one"""

    def pixels(self, width: int, height: int) -> int:
        rows, columns = self.grid(width, height)
        return rows * columns * self.unit * self.unit


@dataclass(frozen=True, slots=True, kw_only=True)
class Resizing(_Squares):
    """Images keep their shape: both edges become multiples of ``unit`` pixels.

    An image has at least ``least_pixels`` then and at most ``most_pixels``. Rotary positions count
    its rows and columns (M-RoPE).

    Source: Qwen2-VL (transformers' ``smart_resize``)
    """

    least_pixels: int
    most_pixels: int

    def grid(self, width: int, height: int) -> Grid:
        """Rows and columns of the features of an image. Raises: RequestError for a narrow one

        >>> Resizing(unit=28, least_pixels=3136, most_pixels=1003520).grid(640, 480)
        (17, 23)
        """
        if max(width, height) > MOST_RATIO * min(width, height):
            limit = f"one edge may be {MOST_RATIO} times as long as the other"
            raise _too_narrow(width, height, limit)
        rows, columns = round(height / self.unit), round(width / self.unit)
        area, pixels = self.unit * self.unit, width * height
        if rows * columns * area > self.most_pixels:
            ratio = sqrt(pixels / self.most_pixels)
            rows, columns = (max(1, floor(edge / ratio / self.unit)) for edge in (height, width))
        elif rows * columns * area < self.least_pixels:
            ratio = sqrt(self.least_pixels / pixels)
            rows, columns = (ceil(edge * ratio / self.unit) for edge in (height, width))
        return rows, columns

    def rotary_grid(self, width: int, height: int) -> Grid:
        return self.grid(width, height)

    def pattern(self, placeholder: int, width: int, height: int) -> tuple[int, ...]:
        rows, columns = self.grid(width, height)
        return (placeholder,) * (rows * columns)


@dataclass(frozen=True, slots=True, kw_only=True)
class Rows(_Squares):
    """Images are read row by row, with a token behind each row.

    Larger ones than ``longest_edge`` pixels are reduced; edges are filled up to whole squares.

    Source: Pixtral (transformers' ``get_resize_output_image_size``)
    """

    longest_edge: int
    row_end: int
    """Token behind each row but the last."""
    image_end: int
    """Token behind the last row."""

    def grid(self, width: int, height: int) -> Grid:
        ratio = max(height / self.longest_edge, width / self.longest_edge)
        reduced = [floor(edge / ratio) if ratio > 1 else edge for edge in (height, width)]
        if min(reduced) < 1:
            limit = f"nothing of it is left at {self.longest_edge} pixels"
            raise _too_narrow(width, height, limit)
        rows, columns = ((edge - 1) // self.unit + 1 for edge in reduced)
        return rows, columns

    def pattern(self, placeholder: int, width: int, height: int) -> tuple[int, ...]:
        return self.tokens_of(placeholder, self.grid(width, height))

    def tokens_of(self, placeholder: int, grid: Grid) -> tuple[int, ...]:
        """The tokens of an image with some rows and columns."""
        rows, columns = grid
        row = (placeholder,) * columns
        return (*((*row, self.row_end) * (rows - 1)), *row, self.image_end)


def _too_narrow(width: int, height: int, limit: str) -> RequestError:
    return RequestError(f"an image of {width} x {height} pixels: {limit}; cut it", "messages")


@dataclass(frozen=True, slots=True, kw_only=True)
class ImageLayout:
    """The tokens of images in prompts of one model."""

    placeholder: int
    """Token id that the chat template writes once for an image; in a prompt, one for a feature."""
    feature_bytes: int
    """Bytes of one feature."""
    rule: Fixed | Tiling | Resizing | Rows
    written: str = ""
    """What the chat template writes for an image if that is not ``placeholder``."""
    read_as: str = ""
    """What stands for ``written`` in the text that is tokenized, with one placeholder."""

    def pattern(self, width: int, height: int) -> tuple[int, ...]:
        """As ``ImageRule.pattern``."""
        return self.rule.pattern(self.placeholder, width, height)

    def features(self, width: int, height: int) -> int:
        """Number of features of an image of some size. Raises: RequestError, as ``pattern``"""
        return self.pattern(width, height).count(self.placeholder)

    def span(self, image: Image, pattern: Sequence[int], first: int) -> ImageSpan:
        """An image in a prompt in which its ``pattern`` begins at the position ``first``."""
        runs = _runs(pattern, self.placeholder, first)
        return ImageSpan(
            runs=runs,
            digest=image.digest,
            width=image.width,
            height=image.height,
            feature_bytes=self.feature_bytes * sum(count for _, count in runs),
            grid=self.rule.rotary_grid(image.width, image.height),
        )


def expand_images(
    tokens: Sequence[int], images: Sequence[Image], layout: ImageLayout
) -> tuple[list[int], tuple[ImageSpan, ...]]:
    """Replace the placeholder of each image by the tokens that stand for it.

    ``tokens``: a prompt with one placeholder for each image, in order.

    Raises: RequestError if there are more or fewer placeholders than images, or if the model cannot
        read an image
    """
    found = sum(token == layout.placeholder for token in tokens)
    if found != len(images):
        raise RequestError(
            f"the chat template made {found} image tokens of {len(images)} images: a text may not "
            "contain the image token, and an image must be in a message whose role may have some",
            "messages",
        )
    expanded, spans, rest = list[int](), list[ImageSpan](), iter(images)
    for token in tokens:
        if token != layout.placeholder:
            expanded.append(token)
            continue
        image = next(rest)
        pattern = layout.pattern(image.width, image.height)
        spans.append(layout.span(image, pattern, len(expanded)))
        expanded += pattern
    return expanded, tuple(spans)


def _runs(pattern: Sequence[int], placeholder: int, first: int) -> tuple[tuple[int, int], ...]:
    """Where consecutive placeholders begin, and how many they are.

    ``first``: position of the pattern in the prompt.

    >>> _runs([3, 9, 9, 4, 9], 9, 10)
    ((11, 2), (14, 1))
    """
    runs = list[tuple[int, int]]()
    for at, token in enumerate(pattern, first):
        if token != placeholder:
            continue
        if runs and sum(runs[-1]) == at:
            runs[-1] = (runs[-1][0], runs[-1][1] + 1)
        else:
            runs.append((at, 1))
    return tuple(runs)
