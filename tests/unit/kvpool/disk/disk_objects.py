"""Objects for tests of the disk tier: their content follows from their number."""

import hashlib
from dataclasses import replace
from typing import Any

import numpy as np

from triptych.kvpool.disk.block_file import ObjectMeta, Pages

PAGE_BYTES = 256


def digest(text: str) -> bytes:
    return hashlib.sha256(text.encode()).digest()


def meta_of(
    number: int, pages: int = 5, page_bytes: int = PAGE_BYTES, tenant: str = ""
) -> ObjectMeta:
    """A chain of its own for each number."""
    return ObjectMeta(
        key=digest(f"key {number}"),
        parent=digest(f"parent {number}"),
        namespace=digest("namespace"),
        tokens=np.arange(number, number + 16, dtype="<i4").tobytes(),
        tenant=tenant,
        pages=pages,
        page_bytes=page_bytes,
        seconds=0.25 * number,
    )


def pages_of(meta: ObjectMeta) -> Pages:
    seed = int.from_bytes(meta.key[:8], "little")
    shape = (meta.pages, meta.page_bytes)
    return np.random.default_rng(seed).integers(0, 256, shape, np.uint8)


def poisoned(pages: int, page_bytes: int = PAGE_BYTES) -> Pages:
    return np.full((pages, page_bytes), 0xA5, np.uint8)


def changed(meta: ObjectMeta, **fields: Any) -> ObjectMeta:
    """The same with other fields, none of them checked."""
    other = replace(meta)
    for name, value in fields.items():
        object.__setattr__(other, name, value)
    return other
