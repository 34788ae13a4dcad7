"""Reads the headers of safetensors files, without weights."""

import json
import struct
from dataclasses import dataclass
from pathlib import Path

from triptych.core.errors import ModelError

MAX_HEADER_BYTES = 100_000_000
"""Limit of the safetensors format."""


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """A tensor as the header of a file describes it."""

    dtype: str
    shape: tuple[int, ...]


def read_tensors(file: Path) -> dict[str, StoredTensor]:
    """Tensors of a safetensors file, by name.

    Raises: ModelError if the file is cut short or something else
    """
    try:
        with file.open("rb") as stream:
            (length,) = struct.unpack("<Q", stream.read(8))
            if length > MAX_HEADER_BYTES:
                raise ValueError(f"a header of {length} bytes")
            header = json.loads(stream.read(length))
        tensors = {name: entry for name, entry in header.items() if name != "__metadata__"}
        ends = [int(entry["data_offsets"][1]) for entry in tensors.values()]
        found = {
            name: StoredTensor(str(entry["dtype"]), tuple(entry["shape"]))
            for name, entry in tensors.items()
        }
    except (OSError, ValueError, KeyError, TypeError, AttributeError, struct.error) as error:
        raise ModelError(f"{file}: not a safetensors file, or cut short ({error})") from error
    whole, here = 8 + length + max(ends, default=0), file.stat().st_size
    if here != whole:
        raise ModelError(f"{file}: has {here} bytes, expected {whole}: download it again")
    return found
