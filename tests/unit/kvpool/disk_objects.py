"""Objects for tests of the disk tier: their content follows from their number."""

import hashlib
from dataclasses import replace
from typing import Any

import numpy as np

from triptych.kvpool.diskobject import ObjectMeta, Pages

PAGE_BYTES = 256


def digest(text: str) -> bytes:
    return hashlib.sha256(text.encode()).digest()


def meta_of(number: int, pages: int = 5, page_bytes: int = PAGE_BYTES) -> ObjectMeta:
    return ObjectMeta(
        key=digest(f"key {number}"),
        parent=digest(f"key {number - 1}"),
        namespace=digest("namespace"),
        tokens=np.arange(number, number + 16, dtype="<i4").tobytes(),
        formats=("k8v4", "fp16"),
        counts=(pages - 1, 1),
        page_bytes=page_bytes,
        layout=digest("layout"),
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
