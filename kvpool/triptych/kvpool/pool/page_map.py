"""A map of the pool for people to look at: what each page is, and whose."""

from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from triptych.core.messages import message

MAX_CELLS = 65_535
"""Cells of the largest map: each may have an owner of its own, counted in 16 bits."""

FREE = 0
"""Owner of a page that nobody holds."""


@dataclass(frozen=True, slots=True, kw_only=True)
class OwnerPages:
    """Who holds pages, and as what."""

    kind: Literal["extent", "request"]
    """A worker's private stock, or what a request's lease names."""
    worker: str
    label: str
    """The request; empty for a stock."""


@message
@dataclass(frozen=True, slots=True, kw_only=True)
class PageMap:
    """Every ``stride``-th page of an arena: a map's size does not grow with the pool.

    A cell tells of one page, the first of ``stride``, and not of a mean of them: what it shows
    was true of that page.
    """

    arena: str
    pages: int
    stride: int
    owners: tuple[OwnerPages, ...]
    packed: bytes
    """A cell for page 0, ``stride``, 2 ``stride`` ...: uint16, little endian. 0: nobody holds it;
    n: it is of ``owners[n - 1]``."""

    def __post_init__(self) -> None:
        if self.stride < 1 or len(self.packed) != 2 * -(-self.pages // self.stride):
            raise ValueError(f"{len(self.packed)} bytes, stride {self.stride}: {self.pages} pages")
        if int(self.cells.max(initial=0)) > len(self.owners):
            raise ValueError(f"a cell of an owner behind the last of {len(self.owners)}")

    @property
    def cells(self) -> NDArray[np.uint16]:
        """The cells, unpacked: (N,)."""
        return np.frombuffer(self.packed, "<u2").astype(np.uint16)
