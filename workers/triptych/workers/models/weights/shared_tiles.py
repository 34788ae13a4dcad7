"""Weights in 4 bits in a file for each model, which all processes of a machine map.

Prefill and decode workers multiply the same tiles. Mapped from one file they are in memory once,
and to find the grids of the weights again, seconds for each process, is not necessary. Files are in
the cache, ``tiles/``; one that is missing, truncated or of another version is written anew.
"""

import hashlib
import json
import logging
import mmap
import os
import tempfile
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import torch

from triptych.core.config.cache_dirs import writable_cache_dir
from triptych.kernels import Int4Tiles
from triptych.kernels.int4 import layout as int4_layout
from triptych.workers.models.store.metadata_cache import source_digest
from triptych.workers.models.store.safe_files import locked

logger = logging.getLogger(__name__)
T = TypeVar("T")

MAGIC = b"triptych tiles 1\n"
ALIGNMENT = 4096
"""Tiles of a product begin at a multiple of so many bytes."""
MOST_BYTES = 16 << 30
"""Of all files; those that were used longest ago are removed. The newest one stays."""
MOST_FILES = 64
PARTIAL = ".new-"
"""How names of files begin that are being written."""

Tiles = Mapping[str, Int4Tiles | None]
"""Products by name; None: its weights do not lie on grids of 4 bits."""


def tiles_key(revision: str, packing: str, dtype: torch.dtype) -> str:
    """Name of the file of a model: a hash of what decides the bytes of its tiles.

    ``revision``: of the checkpoint; ``dtype``: in which its weights were read. The code that finds
    grids and lays out tiles is part of it.
    """
    layout = Path(int4_layout.__file__).read_bytes()
    known = repr((revision, packing, dtype, source_digest())).encode()
    return hashlib.sha256(known + layout).hexdigest()[:32]


class TileSource:
    """Gives the tiles of products: those that were found, or packs them."""

    def __init__(self, found: Tiles | None = None) -> None:
        self._found = found
        self.packed = dict[str, Int4Tiles | None]()

    def get(self, name: str, pack: Callable[[], Int4Tiles | None]) -> Int4Tiles | None:
        """The tiles of a product; None if it cannot be kept in 4 bits."""
        if self._found is not None:
            return self._found[name]
        self.packed[name] = tiles = pack()
        return tiles


def with_shared_tiles(
    key: str, build: Callable[[TileSource], T], directory: Path | None = None
) -> T:
    """``build`` with the tiles of the file of this key, which the first process writes.

    Others wait for it. Where the file cannot be written, each process has its own tiles.
    """
    directory = directory or writable_cache_dir() / "tiles"
    path, built, found = directory / f"{key}.tiles", None, None
    try:
        with locked(directory / "lock"):
            found = read_tiles(path)
            if found is None:
                source = TileSource()
                built = build(source)
                write_tiles(path, source.packed)
                found = read_tiles(path)
    except OSError as error:
        logger.warning("%s: weights are not shared between processes: %s", path, error)
    if found is not None:
        return build(TileSource(found))
    return build(TileSource()) if built is None else built


class Place(NamedTuple):
    """Where the tiles of a product are in a file."""

    at: int
    """Bytes behind the first product's."""
    tiles: int
    tile_bytes: int
    groups: int
    is_gated: bool

    @property
    def end(self) -> int:
        return _aligned(self.at + self.tiles * self.tile_bytes)


Places = Mapping[str, Place | None]


def read_tiles(path: Path) -> Tiles | None:
    """Map a file; None if there is none, or it is not whole.

    Pages are shared by all processes that map the file and do not write to them.
    """
    try:
        with path.open("rb") as file:
            if file.readline() != MAGIC:
                return None
            given: dict[str, list[Any] | None] = json.loads(file.readline())
            places = {name: Place(*each) if each else None for name, each in given.items()}
            first, size = _aligned(file.tell()), os.fstat(file.fileno()).st_size
            if size != first + _size_of(places):
                return None
            whole = mmap.mmap(file.fileno(), size, access=mmap.ACCESS_COPY)
    except (FileNotFoundError, ValueError, TypeError, AttributeError):
        return None
    with suppress(OSError):  # a cache that may only be read
        os.utime(path)
    return {name: place and _mapped(whole, first, place) for name, place in places.items()}


def write_tiles(path: Path, tiles: Tiles) -> None:
    """Write a file, whole or not at all, and remove those that were not used for longest.

    Raises: OSError if it cannot be written
    """
    places = _places_of(tiles)
    text = MAGIC + json.dumps(places).encode() + b"\n"
    first = _aligned(len(text))
    descriptor, partial = tempfile.mkstemp(dir=path.parent, prefix=PARTIAL)
    try:
        with os.fdopen(descriptor, "wb") as file:
            os.posix_fallocate(descriptor, 0, first + _size_of(places))  # a full disk ends it here
            file.write(text)
            for name, place in places.items():
                product = tiles[name]
                if place is not None and product is not None:
                    file.seek(first + place.at)
                    file.write(product.tiles.contiguous().numpy().data)
            file.flush()
            os.fsync(descriptor)
        os.replace(partial, path)
    finally:
        Path(partial).unlink(missing_ok=True)
    _remove_old(path)


def _places_of(tiles: Tiles) -> dict[str, Place | None]:
    places, end = dict[str, Place | None](), 0
    for name, product in tiles.items():
        place = None
        if product is not None:
            number, tile_bytes = product.tiles.shape
            place = Place(end, number, tile_bytes, product.groups, product.is_gated)
            end = place.end
        places[name] = place
    return places


def _size_of(places: Places) -> int:
    """Bytes of all products, as they lie in a file."""
    return max((place.end for place in places.values() if place is not None), default=0)


def _aligned(size: int) -> int:
    return -(-size // ALIGNMENT) * ALIGNMENT


def _mapped(whole: mmap.mmap, first: int, place: Place) -> Int4Tiles:
    count = place.tiles * place.tile_bytes
    flat = torch.frombuffer(whole, dtype=torch.uint8, count=count, offset=first + place.at)
    return Int4Tiles(flat.view(place.tiles, place.tile_bytes), place.groups, place.is_gated)


def _remove_old(newest: Path) -> None:
    """Keep the files that were used last, within ``MOST_BYTES`` and ``MOST_FILES``."""
    left, total = MOST_FILES, 0
    for partial in newest.parent.glob(f"{PARTIAL}*"):  # of processes that were killed
        partial.unlink(missing_ok=True)
    stats = {path: path.stat() for path in newest.parent.glob("*.tiles")}
    for path in sorted(
        stats, key=lambda path: (path == newest, stats[path].st_mtime), reverse=True
    ):
        left, total = left - 1, total + stats[path].st_size
        if path != newest and (left < 0 or total > MOST_BYTES):
            path.unlink(missing_ok=True)
