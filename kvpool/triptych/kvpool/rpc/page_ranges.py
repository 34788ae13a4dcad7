"""Page ids on the wire: runs of consecutive ids, a few hundred bytes for a whole request."""

from typing import Self

import numpy as np

from triptych.core.errors import MessageError
from triptych.core.schema import PackedField
from triptych.kvpool.pool.free_list import PageIds

_RUN_BYTES = 8


def pack(ids: PageIds) -> bytes:
    """Encode ids, in their order, as (start, length) pairs of little-endian int32.

    Shapes:  ids (N,) -> 8 bytes per run of consecutive ids
    Promise: ``unpack(pack(ids), limit)`` gives ``ids`` back if all are in [0, limit)
    """
    if ids.size == 0:
        return b""
    breaks = np.flatnonzero(np.diff(ids) != 1) + 1
    pairs = np.empty((breaks.size + 1, 2), dtype="<i4")
    pairs[0, 0], pairs[1:, 0] = ids[0], ids[breaks]
    pairs[:, 1] = np.diff(breaks, prepend=0, append=ids.size)
    return pairs.tobytes()


def unpack(packed: bytes, limit: int) -> PageIds:
    """Decode runs from a peer, trusting nothing in them.

    Shapes:  -> (N,), N <= limit
    Raises:  MessageError unless all runs have a length and lie in [0, limit), and all of
             them together name at most ``limit`` pages
    """
    if len(packed) % _RUN_BYTES:
        raise MessageError(f"page runs of {len(packed)} bytes: expected pairs of int32")
    pairs = np.frombuffer(packed, dtype="<i4").reshape(-1, 2).astype(np.int64)
    starts, lengths = pairs[:, 0], pairs[:, 1]
    if np.any(starts < 0) or np.any(lengths < 1) or np.any(starts + lengths > limit):
        raise MessageError(f"page runs outside of [0, {limit})")
    ends = np.cumsum(lengths)
    total = int(lengths.sum())
    if total > limit:
        raise MessageError(f"page runs name {total} pages of {limit}")
    return (np.repeat(starts - ends + lengths, lengths) + np.arange(total)).astype(np.int32)


class PageRanges(PackedField):
    """Page ids as a field of a message: an array where it was made, ranges on the wire.

    A call within one process packs nothing. Ranges of a peer are checked when ``ids`` unpacks them.
    """

    __slots__ = ("_ids",)

    def __init__(self, ids: PageIds | bytes) -> None:
        """``ids``: an array, or the bytes that ``pack`` made of one."""
        self._ids = ids

    def ids(self, limit: int) -> PageIds:
        """The ids, for a pool of ``limit`` pages; an array is returned as it is.

        Raises: MessageError if they came from a peer and ``unpack`` refuses them
        """
        return unpack(self._ids, limit) if isinstance(self._ids, bytes) else self._ids

    def pack(self) -> bytes:
        return self._ids if isinstance(self._ids, bytes) else pack(self._ids)

    @classmethod
    def of_peer(cls, packed: bytes) -> Self:
        return cls(packed)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, PageRanges) and self.pack() == other.pack()

    def __hash__(self) -> int:
        return hash(self.pack())
