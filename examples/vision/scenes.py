"""Pictures of shapes and of handwritten digits, and questions about them.

Pictures come from a random generator with a seed, so that every split is repeatable. Digits are
those of the data set that scikit-learn ships: its last 300 images are held out. Shapes are held out
by combination: one in eight triples of shape, colour and cell is never drawn for training, and
every held-out picture of shapes has one.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from itertools import product
from typing import Literal
from zlib import crc32

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
HELD_OUT_DIGITS = 300
ONE_IN = 8


@dataclass(frozen=True, slots=True)
class Thing:
    """A shape, or a digit over the whole picture (row and column "middle" and "center")."""

    name: str
    colour: str
    row: str
    column: str

    @property
    def words(self) -> tuple[str, ...]:
        return (self.name, self.colour, self.row, self.column)

    @property
    def is_held_out(self) -> bool:
        return crc32(" ".join(self.words).encode()) % ONE_IN == 0


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
        return f"It is {self.answer}."


@dataclass(frozen=True)
class Picture:
    image: Image.Image
    things: tuple[Thing, ...]

    @property
    def count(self) -> str:
        return COUNTS[len(self.things) - 1]


def pictures(split: Split, seed: int) -> Iterator[Picture]:
    """Pictures without end: three of shapes, then one of a digit."""
    luck = np.random.default_rng([seed, split == "train"])
    while True:
        for _ in range(3):
            yield _shapes(split, luck)
        yield _digit(split, luck)


def questions(picture: Picture) -> list[Question]:
    """All questions about a picture that have one right answer."""
    things = picture.things
    if things[0].name.isdigit():
        (digit,) = things
        return [
            Question("digit", "Which digit is this?", digit.name),
            Question("colour", "Which color is the digit?", digit.colour),
        ]
    found = [Question("count", "How many shapes are there?", picture.count)]
    for thing in things:
        name, colour, row, column = thing.words
        if [one.name for one in things].count(name) == 1:
            found.append(Question("colour", f"Which color is the {name}?", colour))
        if [one.colour for one in things].count(colour) == 1:
            found.append(Question("shape", f"Which shape is {colour}?", name))
        if [(one.name, one.colour) for one in things].count((name, colour)) == 1:
            found.append(Question("row", f"In which row is the {colour} {name}?", row))
            found.append(Question("column", f"In which column is the {colour} {name}?", column))
    return found


def _shapes(split: Split, luck: np.random.Generator) -> Picture:
    while True:
        places = luck.permutation(list(product(ROWS, COLUMNS)))[: luck.integers(1, 6)]
        things = tuple(
            Thing(str(luck.choice(SHAPES)), str(luck.choice(list(COLOURS))), str(row), str(column))
            for row, column in places
        )
        if any(thing.is_held_out for thing in things) == (split == "held_out"):
            return Picture(_draw(things, luck), things)


def _draw(things: tuple[Thing, ...], luck: np.random.Generator) -> Image.Image:
    image = _background(luck)
    pen = ImageDraw.Draw(image)
    for thing in things:
        half = luck.uniform(5, 7.5)
        x = (COLUMNS.index(thing.column) + 0.5) * CELL + luck.uniform(-1, 1) * (8 - half)
        y = (ROWS.index(thing.row) + 0.5) * CELL + luck.uniform(-1, 1) * (8 - half)
        colour = COLOURS[thing.colour]
        match thing.name:
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
    return image


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
    return Picture(image, (Thing(str(names[number]), colour, "middle", "center"),))
