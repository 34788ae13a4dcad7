"""Replies of the pool process to its workers, and its errors as messages."""

from dataclasses import dataclass
from typing import Self

from triptych.core.errors import (
    MessageError,
    NotHeld,
    NotRegistered,
    PoolError,
    PoolExhausted,
    StaleHandle,
    TriptychError,
    WritesPending,
)
from triptych.core.handles import LeaseId, LeaseRef
from triptych.core.messages import message
from triptych.kvpool.pool.leases import WorkerId
from triptych.kvpool.prefix.blocks import PinId
from triptych.kvpool.prefix.cache import FoundPrefix
from triptych.kvpool.rpc.page_ranges import PageRanges

# ------------------------------------------------------------------ replies


@message
@dataclass(frozen=True, slots=True, kw_only=True)
class Checked:
    """Contradictions between the tables; empty: none."""

    faults: tuple[str, ...]


@message
@dataclass(frozen=True, slots=True, kw_only=True)
class Withdrawn:
    leases: tuple[LeaseId, ...]


@message
@dataclass(frozen=True, slots=True, kw_only=True)
class Registered:
    """The reply to a registration: the worker's id, and shape and limits of the pool."""

    worker: WorkerId
    arena: str
    pages: int
    page_bytes: int
    lease_ttl_s: float
    extent_pages: int
    checkpoint: str
    """Name of its checkpoint's memory; empty: no checkpoint."""
    restores: bool
    """Whether the prefix cache has a disk tier to load from."""
    home: str
    """The arena of the worker's device."""
    sizes: tuple[int, ...]
    """Pages of each arena."""
    devices: tuple[str, ...]
    """Device of each arena behind the first one, which is in host memory."""
    are_apart: bool
    """Whether each device has access to the host and itself alone."""


@message
@dataclass(frozen=True, slots=True, kw_only=True)
class Inheritance:
    """Where the checkpoint of a dead worker is."""

    checkpoint: str
    checkpoint_bytes: int


@message
@dataclass(frozen=True, slots=True, kw_only=True)
class Renewed:
    lacking_pages: int
    """Pages that other workers could not get; a worker with idle pages frees some."""


@message
@dataclass(frozen=True, slots=True, kw_only=True)
class Expelled:
    was_there: bool


@message
@dataclass(frozen=True, slots=True, kw_only=True)
class PagesAllocated:
    pages: PageRanges


@message
@dataclass(frozen=True, slots=True, kw_only=True)
class LeaseRefs:
    lease_refs: tuple[LeaseRef, ...]

    def exactly(self, count: int) -> list[LeaseRef]:
        """The references, of which ``count`` were asked for.

        Raises: MessageError if there are more or fewer
        """
        if len(self.lease_refs) != count:
            raise MessageError(f"{len(self.lease_refs)} claims from the pool: expected {count}")
        return list(self.lease_refs)


@message
@dataclass(frozen=True, slots=True, kw_only=True)
class PrefixFound:
    """A pin, and the pages of each block; no blocks: nothing is cached, and nothing pinned."""

    pin: PinId
    tokens: int
    blocks: tuple[PageRanges, ...]
    windows: tuple[PageRanges, ...] = ()
    """Pages of the window entries of the last blocks."""

    @classmethod
    def of(cls, found: FoundPrefix | None) -> Self:
        if found is None:
            return cls(pin=PinId(0), tokens=0, blocks=())
        blocks, windows = (tuple(map(PageRanges, pages)) for pages in (found.blocks, found.windows))
        return cls(pin=found.pin, tokens=found.tokens, blocks=blocks, windows=windows)

    def found(self, pages: int) -> FoundPrefix | None:
        """Undo ``of``, for a pool of so many pages.

        Raises: MessageError if a page is not one of the pool's
        """
        blocks = tuple(block.ids(pages) for block in self.blocks)
        windows = tuple(window.ids(pages) for window in self.windows)
        return FoundPrefix(self.pin, self.tokens, blocks, windows) if blocks else None


@message
@dataclass(frozen=True, slots=True, kw_only=True)
class PrefixBlocks:
    """The number of blocks that are cached, were added, or have a soft pin."""

    blocks: int


@message
@dataclass(frozen=True, slots=True, kw_only=True)
class PrefixWindows:
    """Of each cached block of some tokens, whether its window entry is cached too."""

    are_cached: tuple[bool, ...]


@message
@dataclass(frozen=True, slots=True, kw_only=True)
class PrefixComing:
    """Blocks that are being loaded from disk, and the seconds that it takes to compute them."""

    blocks: int
    seconds: float


@message
@dataclass(frozen=True, slots=True, kw_only=True)
class PagesOffered:
    """A ticket that is good for one transfer of these pages from the pool's page port."""

    ticket: bytes


@message
@dataclass(frozen=True, slots=True, kw_only=True)
class PoolDone:
    """The call succeeded and returns nothing."""


DONE = PoolDone()


@message
@dataclass(frozen=True, slots=True, kw_only=True)
class PoolRefused:
    """The call failed and changed nothing; the error."""

    error: str
    details: tuple[int | str, ...]


# ------------------------------------------------------------------ errors

_ERRORS: dict[str, tuple[type[TriptychError], tuple[type, ...]]] = {
    kind.__name__: (kind, arguments)
    for kind, arguments in (
        (PoolExhausted, (int, int)),
        (StaleHandle, (int, str)),
        (NotHeld, (str, int)),
        (NotRegistered, (str,)),
        (WritesPending, (str,)),
        (MessageError, (str,)),
        (PoolError, (str,)),
    )
}
"""The errors that a peer may send, with the types of their arguments; others are refused."""


def refusal(error: TriptychError) -> PoolRefused:
    """The message for an error; one that is not in the table becomes a ``PoolError``."""
    name = type(error).__name__
    if name not in _ERRORS:
        return PoolRefused(error=PoolError.__name__, details=(f"{name}: {error}",))
    return PoolRefused(error=name, details=error.args)


def refused(answer: PoolRefused) -> TriptychError:
    """The error that the other side raised.

    Raises: MessageError if the error is not in the table
    """
    kind, arguments = _ERRORS.get(answer.error, (TriptychError, ()))
    if not arguments or tuple(type(detail) for detail in answer.details) != arguments:
        raise MessageError(f"unknown refusal {answer.error!r} with {len(answer.details)} details")
    return kind(*answer.details)
