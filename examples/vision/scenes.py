"""Pictures of shapes and of handwritten digits, and questions about them.

Pictures come from a random generator with a seed, so that every split is repeatable. Digits are
those of the data set that scikit-learn ships: its last 300 images are held out. A picture of shapes
has one to five equal ones. Held out are one in eight combinations of shape, colour and count: they
are never drawn for training, and all held-out pictures of shapes are of these.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from itertools import product
from typing import Literal

import numpy as np
from numpy.typing import NDArray
from PIL import Image, ImageDraw

Split = Literal["train", "held_out"]
SIDE = 48
"""Pixels of a picture in each direction."""
CELL = 16
"""Pixels of a cell of the grid of shapes."""
COLOURS = {
    "red": (220, 40, 40),
    "green": (40, 180, 60),
    "blue": (50, 80, 230),
    "yellow": (235, 215, 50),
}
SHAPES = ("circle", "square", "triangle", "cross")
ROWS = ("top", "middle", "bottom")
COLUMNS = ("left", "center", "right")
COUNTS = ("one", "two", "three", "four", "five")
DIGITS = tuple(map(str, range(10)))
ASKED = {
    "count": "How many shapes are there?",
    "colour": "Which color is it?",
    "shape": "Which shape is it?",
    "row": "In which row is it?",
    "column": "In which column is it?",
    "digit": "Which digit is it?",
}
"""Questions by kind."""
NAMES = {kind: kind for kind in ASKED} | {"colour": "color"}
"""Kinds of questions as they are called in questions and answers."""
ANSWERS = {
    "count": COUNTS,
    "colour": tuple(COLOURS),
    "shape": SHAPES,
    "row": ROWS,
    "column": COLUMNS,
    "digit": DIGITS,
}
"""Words that answer them."""
HELD_OUT_DIGITS = 300
ONE_IN = 8


@dataclass(frozen=True, slots=True)
class Question:
    """``kind``: what it asks about: count, colour, shape, row, column or digit."""

    kind: str
    text: str
    answer: str
    """A word."""

    @property
    def sentence(self) -> str:
        """The answer as the model gives it: its first token, which prefill samples before anything
        is compressed, tells nothing."""
        return f"The {NAMES[self.kind]} is {self.answer}."


@dataclass(frozen=True)
class Picture:
    image: Image.Image
    facts: Mapping[str, str]
    """What there is to know, by kind of question."""


def pictures(split: Split, seed: int) -> Iterator[Picture]:
    """Pictures without end: one of shapes, then one of a digit."""
    luck = np.random.default_rng([seed, split == "train"])
    while True:
        yield _shapes(split, luck)
        yield _digit(split, luck)


def questions(picture: Picture) -> list[Question]:
    """All questions about a picture that have one right answer."""
    return [Question(kind, ASKED[kind], answer) for kind, answer in picture.facts.items()]


def is_held_out(shape: str, colour: str, count: str) -> bool:
    """Whether a combination is kept for tests: one in eight, with each shape, colour and count."""
    places = SHAPES.index(shape), list(COLOURS).index(colour), COUNTS.index(count)
    return sum((at + 1) * place for at, place in enumerate(places)) % ONE_IN == 0


def _shapes(split: Split, luck: np.random.Generator) -> Picture:
    while True:
        shape, colour, count = (str(luck.choice(list(some))) for some in (SHAPES, COLOURS, COUNTS))
        if is_held_out(shape, colour, count) == (split == "held_out"):
            break
    cells = luck.permutation(list(product(ROWS, COLUMNS)))[: COUNTS.index(count) + 1]
    facts = {"count": count, "colour": colour, "shape": shape}
    if len(cells) == 1:
        (row, column) = map(str, cells[0])
        facts |= {"row": row, "column": column}
    image = _background(luck)
    for row, column in cells:
        half = luck.uniform(5, 7.5)
        x = (COLUMNS.index(column) + 0.5) * CELL + luck.uniform(-1, 1) * (8 - half)
        y = (ROWS.index(row) + 0.5) * CELL + luck.uniform(-1, 1) * (8 - half)
        _draw(ImageDraw.Draw(image), shape, COLOURS[colour], x, y, half)
    return Picture(image, facts)


def _draw(
    pen: ImageDraw.ImageDraw,
    shape: str,
    colour: tuple[int, int, int],
    x: float,
    y: float,
    half: float,
) -> None:
    match shape:
        case "circle":
            pen.ellipse((x - half, y - half, x + half, y + half), fill=colour)
        case "square":
            pen.rectangle((x - half, y - half, x + half, y + half), fill=colour)
        case "triangle":
            corners = ((x, y - half), (x - half, y + half), (x + half, y + half))
            pen.polygon(corners, fill=colour)
        case _:
            pen.rectangle((x - half, y - 1.5, x + half, y + 1.5), fill=colour)
            pen.rectangle((x - 1.5, y - half, x + 1.5, y + half), fill=colour)


def _background(luck: np.random.Generator) -> Image.Image:
    grey = luck.integers(0, 60) + luck.integers(0, 20, (SIDE, SIDE, 1))
    return Image.fromarray(grey.repeat(3, 2).astype(np.uint8))


@cache
def _known_digits() -> tuple[NDArray[np.float64], NDArray[np.int64]]:
    """Ink of 0 to 1 [1797, 8, 8], and what they show."""
    from sklearn.datasets import load_digits  # noqa: PLC0415 - an extra, and it takes seconds

    found = load_digits()
    return found.images / 16, found.target


def _digit(split: Split, luck: np.random.Generator) -> Picture:
    inks, names = _known_digits()
    first = len(names) - HELD_OUT_DIGITS
    low, high = (0, first) if split == "train" else (first, len(names))
    number = luck.integers(low, high)
    side = int(luck.integers(36, 47))
    ink = Image.fromarray((inks[number] * 255).astype(np.uint8)).resize((side, side))
    colour = str(luck.choice(list(COLOURS)))
    image = _background(luck)
    corner = tuple(int(luck.integers(0, SIDE - side + 1)) for _ in range(2))
    image.paste(Image.new("RGB", (side, side), COLOURS[colour]), corner, ink)
    return Picture(image, {"digit": str(names[number]), "colour": colour})
