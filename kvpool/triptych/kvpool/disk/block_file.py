# msgpack has no type hints; nothing untyped leaves this module.
# pyright: reportUnknownMemberType=false
"""One object on disk: the pages of a prefix block, all layers, in one file that checks itself.

    header   magic, version, checksum of the header, its size, that of the metadata, of the file
             metadata: an ``ObjectMeta`` in msgpack
             a checksum for each part of the pages
             zeros up to a multiple of 4,096 bytes
    pages    back to back; a part is about 1 MiB of them

The checksums are CRC-32. They are there for torn writes and rotten disks, not for enemies: who can
write to a file of mode 0600 needs no collision. Of what the standard library has it is the fastest
(measured: 5 GB/s, SHA-1 2, BLAKE2 1), and a part of 1 MiB is summed while the processor still has
it in its cache. The header has a sum of its own, so that a scan reads headers alone.
"""

import math
import os
import struct
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import cast

import msgpack
import numpy as np
from numpy.typing import NDArray

from triptych.core.errors import PoolError
from triptych.core.layout import align
from triptych.core.schema import SchemaError, build
from triptych.kvpool.pool.free_list import PageIds

Pages = NDArray[np.uint8]
"""Whole pages, [pages, page_bytes], contiguous."""

Rows = Pages | memoryview
"""The same, or their bytes; ``page_runs`` makes the latter, which cost less."""

DIGEST_BYTES = 32
MAX_HEADER_BYTES = 4 << 20
PART_BYTES = 1 << 20
READ_PARTS = 8
"""Parts that are read at once, then checked."""
FLUSH_PARTS = 4
"""Parts after which the kernel is told to begin writing them out."""

_MAGIC = b"TRIPTYDO"
_VERSION = 1
_FIXED = struct.Struct("<8sIIIIQ")  # magic, version, crc, header, metadata and file bytes
_CRC = slice(12, 16)
_HEADER_ALIGN = 4096
_MAX_BUFFERS = 1024  # of one call: IOV_MAX of Linux

_Transfer = Callable[[int, Sequence[memoryview], int], int]


class Damaged(PoolError):
    """A file is not, or no longer, an object of this tier. It never leaves the tier."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ObjectMeta:
    """Description of an object: its block, namespace, tenant and size."""

    key: bytes
    """Of the block; SHA-256, as are the other digests."""
    parent: bytes
    """Key of the block before, or for a first block the digest of the namespace; of a window
    entry, that of its block."""
    namespace: bytes
    """Digest of tenant salt, model, revision and codec profile: who may read it, and what the
    bytes of its pages mean."""
    tokens: bytes
    """Token ids of the block, little-endian int32; of a window entry none."""
    tenant: str
    """The tenant whose quota it counts against."""
    pages: int
    page_bytes: int
    seconds: float = 0.0
    """Seconds that the block took to compute: used by the eviction policy."""

    def __post_init__(self) -> None:
        digests = (self.key, self.parent, self.namespace)
        if any(len(digest) != DIGEST_BYTES for digest in digests):
            raise ValueError(f"keys and digests have {DIGEST_BYTES} bytes")
        if self.pages < 0 or self.page_bytes < 1 or len(self.tokens) % 4:
            raise ValueError("expected a number of pages, and tokens of four bytes each")
        if not (math.isfinite(self.seconds) and self.seconds >= 0):
            raise ValueError(f"a block that took {self.seconds} s")

    @property
    def part_pages(self) -> int:
        """Whole pages in a part, and never more than one call can scatter."""
        return max(1, min(PART_BYTES // self.page_bytes, _MAX_BUFFERS))

    @property
    def parts(self) -> int:
        return -(-self.pages // self.part_pages)


@dataclass(frozen=True, slots=True)
class Header:
    """The header of an object that is as long as it says, and whose header is whole."""

    meta: ObjectMeta
    header_bytes: int
    checksums: tuple[int, ...]
    """CRC-32 of each part."""


def object_bytes(meta: ObjectMeta) -> int:
    """Size of the object's file.

    Raises: ValueError if its header would be too large
    """
    size = _header_bytes(len(_packed(meta)), meta.parts)
    if size > MAX_HEADER_BYTES:
        raise ValueError(f"an object with a header of {size} bytes: at most {MAX_HEADER_BYTES}")
    return size + meta.pages * meta.page_bytes


def page_runs(data: Pages, ids: PageIds) -> list[memoryview]:
    """The pages with these ids, in their order, as few views of ``data``: nothing is copied.

    Shapes: data (P, page_bytes), ids (N,) -> views of N x page_bytes bytes in all
    Raises: ValueError if an id is not in [0, P)
    """
    if ids.size == 0:
        return []
    if ids.min() < 0 or ids.max() >= len(data):
        raise ValueError(f"page ids outside of [0, {len(data)})")
    breaks = np.flatnonzero(np.diff(ids) != 1) + 1
    size = data.shape[1]
    starts = ids[np.r_[0, breaks]].astype(np.int64) * size
    ends = starts + np.diff(np.r_[0, breaks, ids.size]) * size
    flat = _bytes_of(data, size)
    return [flat[a:b] for a, b in zip(starts.tolist(), ends.tolist(), strict=True)]


# ------------------------------------------------------------------ write


def write_object(descriptor: int, meta: ObjectMeta, pages: Iterable[Rows]) -> None:
    """Write an object's pages and then its header; the file has room for both.

    What is written is soon given up to the page cache: it comes back late, if ever. That also
    makes the kernel write it out while we go on, instead of all at the end.

    Raises: ValueError unless these are exactly the pages that ``meta`` counts; OSError
    """
    packed, checksums = _packed(meta), list[int]()
    at = _header_bytes(len(packed), meta.parts)
    end = at + meta.pages * meta.page_bytes
    for part in _parts(pages, meta):
        size = sum(view.nbytes for view in part)
        if at + size > end:
            raise ValueError(f"more pages to store than the {meta.pages} announced")
        checksums.append(_sum_of(part))
        _transfer(os.pwritev, descriptor, part, at)
        at += size
        if len(checksums) % FLUSH_PARTS == 0:
            os.posix_fadvise(descriptor, 0, at, os.POSIX_FADV_DONTNEED)
    if at < end:
        raise ValueError(f"fewer pages to store than the {meta.pages} announced")
    _transfer(os.pwritev, descriptor, [memoryview(_pack_header(meta, packed, checksums))], 0)


def _pack_header(meta: ObjectMeta, packed: bytes, checksums: Sequence[int]) -> bytes:
    size = _header_bytes(len(packed), meta.parts)
    total = size + meta.pages * meta.page_bytes
    fixed = _FIXED.pack(_MAGIC, _VERSION, 0, size, len(packed), total)
    header = bytearray(fixed + packed + np.array(checksums, "<u4").tobytes())
    header += bytes(size - len(header))
    header[_CRC] = _sum_of([memoryview(header)]).to_bytes(4, "little")
    return bytes(header)


def _packed(meta: ObjectMeta) -> bytes:
    return cast("bytes", msgpack.packb(asdict(meta)))


def _header_bytes(meta_bytes: int, parts: int) -> int:
    return align(_FIXED.size + meta_bytes + 4 * parts, _HEADER_ALIGN)


# ------------------------------------------------------------------ read


def read_header(descriptor: int, page_bytes: int) -> Header:
    """Read and check the header of an object, trusting nothing in it.

    Raises: Damaged unless the file is as long as it says and its header is whole; OSError
    """
    size = os.fstat(descriptor).st_size
    head = os.pread(descriptor, _HEADER_ALIGN, 0)
    if len(head) < _HEADER_ALIGN:
        raise Damaged(f"{size} bytes are no object")
    magic, version, crc, header_bytes, meta_bytes, file_bytes = _FIXED.unpack_from(head)
    if (magic, version) != (_MAGIC, _VERSION):
        raise Damaged(f"magic {magic!r}, version {version}: expected {_MAGIC!r}, {_VERSION}")
    if not _HEADER_ALIGN <= header_bytes <= min(size, MAX_HEADER_BYTES) or file_bytes != size:
        raise Damaged(f"{size} bytes: it says {file_bytes}, {header_bytes} of them header")
    head += os.pread(descriptor, header_bytes - len(head), len(head))
    found = zlib.crc32(head[_CRC.stop :], zlib.crc32(bytes(4), zlib.crc32(head[: _CRC.start])))
    if len(head) != header_bytes or found != crc:
        raise Damaged("the header does not have its checksum")
    meta = _unpacked(head[_FIXED.size :][:meta_bytes])
    if meta.page_bytes != page_bytes:
        raise Damaged(f"pages of {meta.page_bytes} bytes: expected {page_bytes}")
    if header_bytes != _header_bytes(meta_bytes, meta.parts):
        raise Damaged("the header is not as large as its content")
    if size != header_bytes + meta.pages * page_bytes:
        raise Damaged(f"{size} bytes, with {meta.pages} pages of {page_bytes}")
    checksums = np.frombuffer(head, "<u4", meta.parts, _FIXED.size + meta_bytes)
    return Header(meta, header_bytes, tuple(checksums.tolist()))


def _unpacked(packed: bytes) -> ObjectMeta:
    try:
        body = cast("object", msgpack.unpackb(packed, strict_map_key=True, raw=False))
    except Exception as error:  # msgpack raises several unrelated types
        raise Damaged(f"the metadata is no msgpack: {error}") from error
    try:
        return build(ObjectMeta, body)
    except (SchemaError, ValueError) as error:
        raise Damaged(f"the metadata: {error}") from error


def read_pages(descriptor: int, header: Header, into: Iterable[Rows]) -> int:
    """Read all pages of an object into buffers and check them; returns the number of reads.

    Raises: Damaged if a part does not have its checksum: then the buffers hold anything;
        ValueError unless they have room for exactly these pages; OSError
    """
    meta, parts = header.meta, list(_parts(into, header.meta))
    room = sum(view.nbytes for part in parts for view in part if not view.readonly)
    if room != meta.pages * meta.page_bytes:
        raise ValueError(f"room for {room} bytes of {meta.pages} pages of {meta.page_bytes}")
    at, reads, first = header.header_bytes, 0, 0
    while first < len(parts):
        batch = parts[first : first + _parts_at_once(parts, first)]
        views = [view for part in batch for view in part]
        reads += _transfer(os.preadv, descriptor, views, at)
        at += sum(view.nbytes for view in views)
        for number, part in enumerate(batch, first):
            if _sum_of(part) != header.checksums[number]:
                raise Damaged(f"part {number} does not have its checksum")
        first += len(batch)
    return reads


def _parts_at_once(parts: Sequence[Sequence[memoryview]], first: int) -> int:
    """How many parts, at least one, one call can read."""
    buffers = 0
    for count, part in enumerate(parts[first : first + READ_PARTS]):
        buffers += len(part)
        if count and buffers > _MAX_BUFFERS:
            return count
    return READ_PARTS


# ------------------------------------------------------------------ both


def _parts(pages: Iterable[Rows], meta: ObjectMeta) -> Iterator[list[memoryview]]:
    """Cut buffers into parts, without a copy; the last part may be shorter."""
    size = meta.part_pages * meta.page_bytes
    part, room = list[memoryview](), size
    for rows in pages:
        view = _bytes_of(rows, meta.page_bytes)
        while view.nbytes:
            part.append(view[:room])
            view, room = view[room:], room - part[-1].nbytes
            if room == 0:
                yield part
                part, room = [], size
    if part:
        yield part


def _bytes_of(rows: Rows, page_bytes: int) -> memoryview:
    view = rows if isinstance(rows, memoryview) else rows.data
    if view.format != "B" or not view.c_contiguous or view.nbytes % page_bytes:
        raise ValueError(f"{rows!r}: expected contiguous uint8 in pages of {page_bytes} bytes")
    return view if view.ndim == 1 else view.cast("B") if view.nbytes else memoryview(b"")


def _sum_of(part: Iterable[memoryview]) -> int:
    crc = 0
    for view in part:
        crc = zlib.crc32(view, crc)
    return crc


def _transfer(call: _Transfer, descriptor: int, views: Sequence[memoryview], at: int) -> int:
    """Read or write all of the buffers; returns the number of system calls."""
    left, calls = views, 0
    while left:
        done = call(descriptor, left, at)
        if done == 0:
            raise Damaged("it ends early")
        left, at, calls = _after(left, done), at + done, calls + 1
    return calls


def _after(views: Sequence[memoryview], done: int) -> list[memoryview]:
    """The buffers without their first ``done`` bytes."""
    for at, view in enumerate(views):
        if done < view.nbytes:
            return [view[done:], *views[at + 1 :]]
        done -= view.nbytes
    return []
