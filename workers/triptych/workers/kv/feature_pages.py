# pyright: reportUnknownMemberType=false
# torch.from_numpy has no type hints.
"""Features of images in pages of the pool: written by the encode stage, read by prefill."""

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from triptych.core.errors import MessageError
from triptych.core.handles import LeaseRef
from triptych.core.messages import FeatureHandle
from triptych.kvpool import WorkerPool
from triptych.kvpool.rpc import page_ranges

Ids = NDArray[np.int32]
ITEM_BYTES = 4
"""float32: what a model in 16 bits adds up stays exact."""


def label_of(request: str) -> str:
    """Label of the lease of a request's features, beside that of its keys and values."""
    return f"{request}:images"


def pages_of_image(rows: int, channels: int, page_bytes: int) -> int:
    """Pages that the features of an image take."""
    return -(-rows * channels * ITEM_BYTES // page_bytes)


def write_features(pool: WorkerPool, features: Tensor, pages: Ids) -> None:
    """Write the features of an image.

    Shapes:  features (rows, channels) float32; pages (``pages_of_image``,)
    """
    content = np.zeros((len(pages), pool.page_bytes), np.uint8)
    given = features.contiguous().numpy().view(np.uint8).reshape(-1)
    content.reshape(-1)[: given.size] = given
    pool.arena.data[pages] = content


def copy_features(pool: WorkerPool, source: Ids, target: Ids) -> None:
    """Copy the pages of an image."""
    pool.arena.data[target] = pool.arena.data[source]


def feature_handle(
    lease_ref: LeaseRef, pages: Sequence[Ids], rows: Sequence[int], channels: int
) -> FeatureHandle:
    """The handle of some images, each in pages of its own."""
    return FeatureHandle(
        lease_ref=lease_ref,
        pages=page_ranges.pack(np.concatenate(pages)),
        images=tuple(rows),
        channels=channels,
    )


def read_features(pool: WorkerPool, handle: FeatureHandle) -> Tensor:
    """Attach a handle, read all features and free the pages.

    Returns: features of all images, in order: (rows, channels) float32
    Raises:  StaleHandle, MessageError, PoolUnavailable, NotRegistered
    """
    counts = [pages_of_image(rows, handle.channels, pool.page_bytes) for rows in handle.images]
    ids = page_ranges.unpack(handle.pages, pool.capacity_pages)
    if handle.channels < 1 or min(handle.images, default=0) < 1 or sum(counts) != len(ids):
        raise MessageError(f"features of {handle.images} rows in {len(ids)} pages")
    (lease_ref,) = pool.attach([(handle.lease_ref, ids)])
    try:
        parts = [
            pool.arena.data[pages].reshape(-1)[: rows * handle.channels * ITEM_BYTES]
            for rows, pages in zip(
                handle.images, np.split(ids, np.cumsum(counts)[:-1]), strict=True
            )
        ]
        read = np.concatenate(parts).view(np.float32).reshape(-1, handle.channels)
    finally:
        if not pool.is_lost:
            pool.release([lease_ref.lease])
    return torch.from_numpy(read)
