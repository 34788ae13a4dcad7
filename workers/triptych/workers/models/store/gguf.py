"""Reads the header of a GGUF file from untrusted sources.

Every count and offset is checked against a limit or the size of the file before it is used.
Source: the GGUF specification, versions 2 and 3; CVE-2024-23605, CVE-2024-21802
"""

import mmap
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from math import prod
from pathlib import Path

from gguf import GGML_QUANT_SIZES, GGMLQuantizationType

from triptych.core.errors import ModelError

MAX_METADATA = 4096
MAX_TENSORS = 1 << 16
MAX_DIMS = 4
MAX_NAME_BYTES = 1 << 10
MAX_STRING_BYTES = 1 << 24
MAX_ARRAY_ITEMS = 1 << 22
MAX_HEADER_BYTES = 1 << 28
MAX_ALIGNMENT = 1 << 16

_STRING, _ARRAY = 8, 9
_SCALARS = {
    0: "B",
    1: "b",
    2: "H",
    3: "h",
    4: "I",
    5: "i",
    6: "f",
    7: "?",
    10: "Q",
    11: "q",
    12: "d",
}

Scalar = int | float | bool | str


@dataclass(frozen=True, slots=True)
class GgufTensor:
    """One tensor: ``shape`` as torch has it (the file lists the fastest dimension first)."""

    name: str
    shape: tuple[int, ...]
    type: GGMLQuantizationType
    offset: int
    """First byte, counted from the start of the file."""
    size_bytes: int


@dataclass(frozen=True, slots=True)
class GgufHeader:
    """Scalars of a GGUF's metadata (arrays are skipped) and its tensors."""

    metadata: Mapping[str, Scalar]
    tensors: Mapping[str, GgufTensor]

    def text(self, key: str) -> str:
        """A string of the metadata; empty if it is missing or something else."""
        value = self.metadata.get(key)
        return value if isinstance(value, str) else ""


def read_header(path: Path) -> GgufHeader:
    """Read and check the header.

    Raises: ModelError naming what is wrong
    """
    try:
        with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
            return _Header(data).read()
    except (OSError, ValueError, struct.error) as error:  # ValueError: mmap of an empty file
        raise ModelError(f"{path}: cannot be read as GGUF: {error}") from error
    except ModelError as error:
        raise ModelError(f"{path}: {error}") from error


class _Header:
    """A cursor over the header; never moves past ``MAX_HEADER_BYTES`` or the file's end."""

    def __init__(self, data: mmap.mmap) -> None:
        self._data, self._at = data, 0
        self._end = min(len(data), MAX_HEADER_BYTES)

    def read(self) -> GgufHeader:
        if self._bytes(4) != b"GGUF":
            raise ModelError("not a GGUF file")
        version = self._integer("I")
        if version not in (2, 3):
            raise ModelError(f"GGUF version {version}: little-endian 2 and 3 are read")
        tensors = self._count("tensors", MAX_TENSORS)
        entries = self._count("metadata entries", MAX_METADATA)
        metadata = self._metadata(entries)
        infos = [self._tensor_info() for _ in range(tensors)]
        return GgufHeader(metadata, self._place(infos, metadata))

    def _metadata(self, entries: int) -> dict[str, Scalar]:
        metadata, seen = dict[str, Scalar](), set[str]()
        for _ in range(entries):
            key = self._string(MAX_NAME_BYTES)
            if key in seen:
                raise ModelError(f"metadata key {key!r} twice")
            seen.add(key)
            value = self._value(self._integer("I"))
            if value is not None:
                metadata[key] = value
        return metadata

    def _value(self, kind: int) -> Scalar | None:
        if kind == _STRING:
            return self._string(MAX_STRING_BYTES)
        if kind == _ARRAY:
            return self._skip_array()
        return self._scalar(_letter(kind))

    def _skip_array(self) -> None:
        kind = self._integer("I")
        count = self._count("array items", MAX_ARRAY_ITEMS)
        if kind != _STRING:
            self._skip(count * struct.calcsize(_letter(kind)))
            return
        for _ in range(count):
            self._skip(self._count("string bytes", MAX_STRING_BYTES))

    def _tensor_info(self) -> tuple[str, tuple[int, ...], int, int]:
        name = self._string(MAX_NAME_BYTES)
        dims = self._integer("I")
        if not 1 <= dims <= MAX_DIMS:
            raise ModelError(f"tensor {name!r} has {dims} dimensions: 1 to {MAX_DIMS} are read")
        shape = tuple(self._integer("Q") for _ in range(dims))
        return name, shape[::-1], self._integer("I"), self._integer("Q")

    def _place(
        self, infos: list[tuple[str, tuple[int, ...], int, int]], metadata: Mapping[str, Scalar]
    ) -> dict[str, GgufTensor]:
        alignment = metadata.get("general.alignment", 32)
        if not isinstance(alignment, int) or not 8 <= alignment <= MAX_ALIGNMENT:
            raise ModelError(f"alignment {alignment}: expected 8 to {MAX_ALIGNMENT}")
        start = -(-self._at // alignment) * alignment
        tensors = dict[str, GgufTensor]()
        for name, shape, kind, offset in infos:
            if name in tensors:
                raise ModelError(f"tensor {name!r} twice")
            if offset % alignment:
                raise ModelError(f"tensor {name!r} at offset {offset}: not aligned to {alignment}")
            size = _size_bytes(name, shape, kind)
            place = GgufTensor(name, shape, GGMLQuantizationType(kind), start + offset, size)
            if place.offset + size > len(self._data):
                raise ModelError(f"tensor {name!r} reaches past the end of the file")
            tensors[name] = place
        _refuse_overlaps(tensors)
        return tensors

    def _skip(self, count: int) -> None:
        if count > self._end - self._at:
            raise ModelError("the header is cut short, or larger than any we read")
        self._at += count

    def _bytes(self, count: int) -> bytes:
        self._skip(count)
        return self._data[self._at - count : self._at]

    def _scalar(self, letter: str) -> int | float | bool:
        return struct.unpack("<" + letter, self._bytes(struct.calcsize("<" + letter)))[0]

    def _integer(self, letter: str) -> int:
        return int(self._scalar(letter))

    def _count(self, what: str, limit: int) -> int:
        count = self._integer("Q")
        if count > limit:
            raise ModelError(f"{count} {what}: the limit is {limit}")
        return count

    def _string(self, limit: int) -> str:
        raw = self._bytes(self._count("string bytes", limit))
        return raw.decode("utf-8", errors="replace")


def _letter(kind: int) -> str:
    letter = _SCALARS.get(kind)
    if letter is None:
        raise ModelError(f"metadata of type {kind}")
    return letter


def _size_bytes(name: str, shape: tuple[int, ...], kind: int) -> int:
    sizes = {int(key): value for key, value in GGML_QUANT_SIZES.items()}
    if kind not in sizes:
        raise ModelError(f"tensor {name!r} has type {kind}")
    block, block_bytes = sizes[kind]
    if min(shape) < 1 or shape[-1] % block:
        raise ModelError(f"tensor {name!r} of shape {shape} does not fill blocks of {block}")
    return prod(shape) // block * block_bytes


def _refuse_overlaps(tensors: Mapping[str, GgufTensor]) -> None:
    end = 0
    for tensor in sorted(tensors.values(), key=lambda tensor: tensor.offset):
        if tensor.offset < end:
            raise ModelError(f"tensor {tensor.name!r} overlaps another")
        end = tensor.offset + tensor.size_bytes
