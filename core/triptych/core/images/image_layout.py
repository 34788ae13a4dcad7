"""Which tokens stand for an image in the prompts of a model, by the size of the image."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from math import ceil, floor, sqrt

from triptych.core.errors import RequestError
from triptych.core.images.image_spans import Image, ImageSpan

Grid = tuple[int, int]
"""Rows and columns of the tiles of an image, or of its features; (0, 0): it is not split."""
WHOLE: Grid = (0, 0)
MOST_RATIO = 200
"""How many times longer one edge of a resized image may be than the other."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Tiling:
    """How large images are split: the model reads square tiles, and then the whole image.

    An image is resized so that its longest edge has ``longest_edge`` pixels, and then so that both
    edges are multiples of ``tile`` pixels.

    Source: Idefics3, SmolVLM (transformers' ``get_number_of_image_patches``)
    """

    longest_edge: int
    tile: int

    def grid(self, width: int, height: int) -> Grid:
        """The tiles of an image of some size, in pixels.

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
            return WHOLE
        return (down, across) if width >= height else (across, down)

    def pixels(self, grid: Grid) -> int:
        """Pixels that are read of an image with this grid."""
        rows, columns = grid
        return (rows * columns + 1) * self.tile * self.tile

    @property
    def grids(self) -> list[Grid]:
        """All that images can have."""
        most = ceil(self.longest_edge / self.tile)
        if most == 1:
            return [WHOLE]
        flat = [(down, most) for down in range(1, most + 1)]
        return [*flat, *((most, down) for down in range(1, most))]


def _other_edge(longest: int, width: int, height: int) -> int:
    """The shorter edge of an image whose longest one gets ``longest`` pixels.

    The rounding of floats is that of transformers, which multiplies in one case only.
    """
    ratio = width / height
    return int(longest / ratio) if width >= height else int(longest * ratio)


@dataclass(frozen=True, slots=True, kw_only=True)
class Resizing:
    """How images keep their shape: both edges become multiples of ``unit`` pixels.

    An image has at least ``least_pixels`` then and at most ``most_pixels``, and a feature for each
    square of ``unit`` pixels.

    Source: Qwen2-VL (transformers' ``smart_resize``)
    """

    unit: int
    least_pixels: int
    most_pixels: int

    def grid(self, width: int, height: int) -> Grid:
        """Rows and columns of the features of an image of some size, in pixels.

        Raises: RequestError for one that is too narrow

        >>> Resizing(unit=28, least_pixels=3136, most_pixels=1003520).grid(640, 480)
        (17, 23)
        """
        if max(width, height) > MOST_RATIO * min(width, height):
            size = f"an image of {width} x {height} pixels"
            limit = f"one edge may be {MOST_RATIO} times as long as the other"
            raise RequestError(f"{size}: {limit}; cut it", "messages")
        rows, columns = round(height / self.unit), round(width / self.unit)
        area, pixels = self.unit * self.unit, width * height
        if rows * columns * area > self.most_pixels:
            ratio = sqrt(pixels / self.most_pixels)
            rows, columns = (max(1, floor(edge / ratio / self.unit)) for edge in (height, width))
        elif rows * columns * area < self.least_pixels:
            ratio = sqrt(self.least_pixels / pixels)
            rows, columns = (ceil(edge * ratio / self.unit) for edge in (height, width))
        return rows, columns

    def pixels(self, grid: Grid) -> int:
        """Pixels that are read of an image with this grid."""
        rows, columns = grid
        return rows * columns * self.unit * self.unit


@dataclass(frozen=True, slots=True, kw_only=True)
class Rows:
    """How images that are no larger than a limit are read row by row, each with a token behind it.

    A feature stands for a square of ``unit`` pixels; edges are filled up to whole squares.

    Source: Pixtral (transformers' ``get_resize_output_image_size``)
    """

    unit: int
    longest_edge: int
    """Pixels. Larger images are reduced."""
    row_end: int
    """Token behind each row but the last."""
    image_end: int
    """Token behind the last row."""

    def grid(self, width: int, height: int) -> Grid:
        """Rows and columns of the features of an image of some size, in pixels.

        Raises: RequestError for one that is too narrow
        """
        ratio = max(height / self.longest_edge, width / self.longest_edge)
        reduced = [floor(edge / ratio) if ratio > 1 else edge for edge in (height, width)]
        if min(reduced) < 1:
            size = f"an image of {width} x {height} pixels"
            limit = f"nothing of it is left at {self.longest_edge} pixels"
            raise RequestError(f"{size}: {limit}; cut it", "messages")
        rows, columns = ((edge - 1) // self.unit + 1 for edge in reduced)
        return rows, columns

    def pixels(self, grid: Grid) -> int:
        """Pixels that are read of an image with this grid."""
        rows, columns = grid
        return rows * columns * self.unit * self.unit

    def pattern(self, placeholder: int, grid: Grid) -> tuple[int, ...]:
        """The tokens of an image with this grid."""
        rows, columns = grid
        row = (placeholder,) * columns
        return (*((*row, self.row_end) * (rows - 1)), *row, self.image_end)


@dataclass(frozen=True, slots=True, kw_only=True)
class ImageLayout:
    """The tokens of images in prompts of one model."""

    placeholder: int
    """Token id that the chat template writes once for an image."""
    feature_bytes: int
    """Bytes of one feature. A placeholder of a prompt stands for one."""
    patterns: Mapping[str, tuple[int, ...]] = field(default_factory=dict[str, tuple[int, ...]])
    """The tokens of an image by its grid of tiles, as in ``"2x3"``: placeholders, and what is
    around them and between those of two tiles. Only for tiles, and if there is no rule."""
    rule: Tiling | Resizing | Rows | None = None
    """What the size of an image decides; None: nothing."""
    has_grid_positions: bool = False
    """Whether rotary positions of an image count rows and columns (M-RoPE of Qwen2-VL)."""

    def pattern(self, width: int, height: int) -> tuple[int, ...]:
        """The tokens of an image of some size.

        Raises: RequestError for an image that this model cannot read
        """
        grid = rows, columns = self._grid(width, height)
        match self.rule:
            case Resizing():
                return (self.placeholder,) * (rows * columns)
            case Rows():
                return self.rule.pattern(self.placeholder, grid)
            case _:
                return self.patterns[f"{rows}x{columns}"]

    def features(self, width: int, height: int) -> int:
        """Number of features of an image of some size. Raises: RequestError, as ``pattern``"""
        return self.pattern(width, height).count(self.placeholder)

    def pixels(self, width: int, height: int) -> int:
        """Pixels that the vision tower reads of an image of some size; without a rule, its own.

        Raises: RequestError, as ``pattern``
        """
        if self.rule is None:
            return width * height
        return self.rule.pixels(self.rule.grid(width, height))

    def span(self, image: Image, first: int) -> ImageSpan:
        """The features of an image whose pattern begins at a position of a prompt.

        Raises: RequestError, as ``pattern``
        """
        pattern = self.pattern(image.width, image.height)
        runs = _runs(pattern, self.placeholder, first)
        return ImageSpan(
            runs=runs,
            digest=image.digest,
            width=image.width,
            height=image.height,
            feature_bytes=self.feature_bytes * sum(count for _, count in runs),
            grid=self._grid(image.width, image.height) if self.has_grid_positions else (0, 0),
        )

    def _grid(self, width: int, height: int) -> Grid:
        return WHOLE if self.rule is None else self.rule.grid(width, height)


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
        spans.append(layout.span(image, len(expanded)))
        expanded += layout.pattern(image.width, image.height)
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
