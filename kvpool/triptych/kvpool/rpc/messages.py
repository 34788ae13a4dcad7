"""Messages between the pool process and its workers: requests, replies and errors."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol, Self

from triptych.core.errors import (
    MessageError,
    NotHeld,
    NotRegistered,
    PoolError,
    PoolExhausted,
    StaleHandle,
    TriptychError,
)
from triptych.core.handles import LeaseId, LeaseRef
from triptych.core.messages import message
from triptych.kvpool.disk.tier import Coming
from triptych.kvpool.pool.free_list import PageIds
from triptych.kvpool.pool.leases import NOTHING_TOLD, About, Commit, WorkerId
from triptych.kvpool.pool.processes import ProcessKey
from triptych.kvpool.pool.stats import MAX_CELLS, PageMap, PoolStats
from triptych.kvpool.prefix.blocks import (
    FormatPages,
    Namespace,
    PinId,
    Publication,
    TokenIds,
    decode,
)
from triptych.kvpool.prefix.cache import FoundPrefix
from triptych.kvpool.rpc import page_ranges

MAX_NAME_CHARS = 256
MAX_CHECKPOINT_BYTES = 1 << 30
MAX_PREFIX_TOKENS = 1 << 20
MAX_SALT_BYTES = 4096
MAX_FORMATS = 16


class PoolCalls(Protocol):
    """The calls of the pool, on either side of a socket.

    Meaning and errors are those of ``pool.page_pool.Pool``, and for prefixes those of
    ``prefix.cache.PrefixCache`` and ``disk.tier.DiskTier``.
    Every call also extends the leases of the worker that makes it.
    """

    def register(self, name: str, process: ProcessKey, checkpoint_bytes: int) -> "Registered": ...
    def renew(self, worker: WorkerId) -> int: ...
    def unregister(self, worker: WorkerId) -> None: ...
    def expel(self, name: str) -> bool: ...
    def allocate(self, worker: WorkerId, pages: int, at_least: int) -> PageIds: ...
    def free(self, worker: WorkerId, ids: PageIds) -> None: ...
    def handoff(
        self,
        worker: WorkerId,
        commits: Sequence[Commit],
        releases: Sequence[LeaseId],
        *,
        keep: bool,
        about: Sequence[About] = (),
        pins: Sequence[PinId | None] = (),
    ) -> list[LeaseRef]: ...
    def attach(
        self, worker: WorkerId, wanted: Sequence[tuple[LeaseRef, PageIds]]
    ) -> list[LeaseRef]: ...
    def release(self, worker: WorkerId, leases: Sequence[LeaseId], *, keep: bool) -> None: ...
    def withdraw(self, worker: WorkerId, labels: Sequence[str]) -> list[LeaseId]: ...
    def withdraw_all(self, worker: WorkerId) -> list[LeaseId]: ...
    def inherit(self, previous_worker: str) -> "Inheritance": ...
    def adopt(
        self,
        worker: WorkerId,
        previous_worker: str,
        label: str,
        lease: LeaseId | None,
        ids: PageIds,
    ) -> LeaseRef: ...
    def find_prefix(
        self, worker: WorkerId, namespace: Namespace, tokens: TokenIds
    ) -> FoundPrefix | None: ...
    def pin_prefix(
        self, worker: WorkerId, namespace: Namespace, tokens: TokenIds
    ) -> FoundPrefix | None: ...
    def known_prefix(self, worker: WorkerId, namespace: Namespace, tokens: TokenIds) -> int: ...
    def publish_prefix(self, worker: WorkerId, new: Publication) -> int: ...
    def restore_prefix(
        self, worker: WorkerId, namespace: Namespace, tokens: TokenIds, tenant: str
    ) -> Coming: ...
    def keep_session(
        self,
        worker: WorkerId,
        namespace: Namespace,
        tokens: TokenIds,
        tenant: str,
        session: str,
    ) -> int: ...
    def release_prefix(self, worker: WorkerId, pin: PinId) -> None: ...
    def stat(self) -> PoolStats: ...
    def map(self, max_cells: int) -> PageMap: ...


# ------------------------------------------------------------------ requests


@message
@dataclass(frozen=True, slots=True, kw_only=True)
class RegisterWorker:
    name: str
    process: ProcessKey
    checkpoint_bytes: int = 0
    """Size of the memory for its checkpoint."""

    def __post_init__(self) -> None:
        _require_short(self.name)
        if not 0 <= self.checkpoint_bytes <= MAX_CHECKPOINT_BYTES:
            raise ValueError(
                f"checkpoint_bytes={self.checkpoint_bytes}: 0 to {MAX_CHECKPOINT_BYTES}"
            )


@message
@dataclass(frozen=True, slots=True, kw_only=True)
class RenewWorker:
    worker: WorkerId


@message
@dataclass(frozen=True, slots=True, kw_only=True)
class UnregisterWorker:
    worker: WorkerId


@message
@dataclass(frozen=True, slots=True, kw_only=True)
class ExpelWorker:
    name: str


@message
@dataclass(frozen=True, slots=True, kw_only=True)
class AllocatePages:
    worker: WorkerId
    pages: int
    at_least: int

    def __post_init__(self) -> None:
        if not 0 <= self.at_least <= self.pages:
            raise ValueError(f"at_least={self.at_least}: expected 0 to pages={self.pages}")


@message
@dataclass(frozen=True, slots=True, kw_only=True)
class FreePages:
    worker: WorkerId
    pages: bytes
    """Packed by ``triptych.kvpool.rpc.page_ranges``, as everywhere below."""


@dataclass(frozen=True, slots=True)
class CommitPages:
    label: str
    pages: bytes
    about: About = NOTHING_TOLD
    pin: PinId | None = None
    """A pin of the worker; the last pages are the pinned prefix's."""

    def __post_init__(self) -> None:
        _require_short(self.label)
        _require_short(self.about.tenant)
        _require_formats(self.about.formats)


@message
@dataclass(frozen=True, slots=True, kw_only=True)
class HandOff:
    worker: WorkerId
    commits: tuple[CommitPages, ...]
    releases: tuple[LeaseId, ...]
    keep: bool


@dataclass(frozen=True, slots=True)
class LeasePages:
    lease_ref: LeaseRef
    pages: bytes


@message
@dataclass(frozen=True, slots=True, kw_only=True)
class AttachLeases:
    worker: WorkerId
    wanted: tuple[LeasePages, ...]


@message
@dataclass(frozen=True, slots=True, kw_only=True)
class ReleaseLeases:
    worker: WorkerId
    leases: tuple[LeaseId, ...]
    keep: bool


@message
@dataclass(frozen=True, slots=True, kw_only=True)
class WithdrawRequests:
    worker: WorkerId
    labels: tuple[str, ...]


@message
@dataclass(frozen=True, slots=True, kw_only=True)
class WithdrawAll:
    worker: WorkerId


@message
@dataclass(frozen=True, slots=True, kw_only=True)
class InheritFrom:
    """End a dead worker's registration, and return its checkpoint."""

    previous_worker: str


@message
@dataclass(frozen=True, slots=True, kw_only=True)
class AdoptRequest:
    worker: WorkerId
    previous_worker: str
    label: str
    lease: LeaseId | None
    pages: bytes

    def __post_init__(self) -> None:
        _require_short(self.label)


@message
@dataclass(frozen=True, slots=True, kw_only=True)
class FindPrefix:
    """Pin the longest cached prefix of a prompt."""

    worker: WorkerId
    namespace: Namespace
    tokens: bytes
    """Packed by ``triptych.kvpool.prefix.blocks.encode``, as everywhere below."""

    def __post_init__(self) -> None:
        _require_prefix(self.namespace, self.tokens)


@message
@dataclass(frozen=True, slots=True, kw_only=True)
class PinPrefix:
    """Pin all whole blocks of these tokens; the reply is a ``PrefixFound``."""

    worker: WorkerId
    namespace: Namespace
    tokens: bytes

    def __post_init__(self) -> None:
        _require_prefix(self.namespace, self.tokens)


@message
@dataclass(frozen=True, slots=True, kw_only=True)
class KnowPrefix:
    """Count the blocks of these tokens that are cached."""

    worker: WorkerId
    namespace: Namespace
    tokens: bytes

    def __post_init__(self) -> None:
        _require_prefix(self.namespace, self.tokens)


@message
@dataclass(frozen=True, slots=True, kw_only=True)
class PublishPrefix:
    """Add the last blocks of these tokens to the cache."""

    worker: WorkerId
    namespace: Namespace
    tokens: bytes
    blocks: tuple[bytes, ...]
    """Pages of each block."""
    seconds: float
    """What each took to compute."""
    tenant: str
    formats: tuple[FormatPages, ...] = ()
    """Pages of each block by format."""

    def __post_init__(self) -> None:
        _require_prefix(self.namespace, self.tokens)
        _require_short(self.tenant)
        for formats in self.formats:
            _require_formats(formats)
        if 4 * len(self.blocks) > len(self.tokens):
            raise ValueError(f"{len(self.blocks)} blocks of {len(self.tokens) // 4} tokens")


@message
@dataclass(frozen=True, slots=True, kw_only=True)
class RestorePrefix:
    """Load from disk the blocks that continue the cached prefix of a prompt."""

    worker: WorkerId
    namespace: Namespace
    tokens: bytes
    tenant: str

    def __post_init__(self) -> None:
        _require_prefix(self.namespace, self.tokens)
        _require_short(self.tenant)


@message
@dataclass(frozen=True, slots=True, kw_only=True)
class KeepSession:
    """Evict the cached blocks of these tokens last, while the conversation's TTL runs."""

    worker: WorkerId
    namespace: Namespace
    tokens: bytes
    tenant: str
    session: str

    def __post_init__(self) -> None:
        _require_prefix(self.namespace, self.tokens)
        _require_short(self.tenant)
        _require_short(self.session)


@message
@dataclass(frozen=True, slots=True, kw_only=True)
class ReleasePrefix:
    worker: WorkerId
    pin: PinId


@message
@dataclass(frozen=True, slots=True, kw_only=True)
class ReadPages:
    """Get a ticket for the bytes of these pages of a lease, in this order."""

    worker: WorkerId
    lease: LeaseId
    pages: bytes


@message
@dataclass(frozen=True, slots=True, kw_only=True)
class StatPool:
    """The answer is a ``PoolStats``."""


@message
@dataclass(frozen=True, slots=True, kw_only=True)
class MapPages:
    """The answer is a ``PageMap`` of so many cells at most."""

    max_cells: int

    def __post_init__(self) -> None:
        if not 1 <= self.max_cells <= MAX_CELLS:
            raise ValueError(f"max_cells={self.max_cells}: expected 1 to {MAX_CELLS}")


@message
@dataclass(frozen=True, slots=True, kw_only=True)
class CheckPool:
    """Compare the pool's tables with each other."""


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
    """What a worker needs to know about the pool."""

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
    pages: bytes


@message
@dataclass(frozen=True, slots=True, kw_only=True)
class LeaseRefs:
    lease_refs: tuple[LeaseRef, ...]


@message
@dataclass(frozen=True, slots=True, kw_only=True)
class PrefixFound:
    """A pin, and the pages of each block; no blocks: nothing is cached, and nothing pinned."""

    pin: PinId
    tokens: int
    blocks: tuple[bytes, ...]

    @classmethod
    def of(cls, found: FoundPrefix | None) -> Self:
        if found is None:
            return cls(pin=PinId(0), tokens=0, blocks=())
        blocks = tuple(map(page_ranges.pack, found.blocks))
        return cls(pin=found.pin, tokens=found.tokens, blocks=blocks)

    def found(self, pages: int) -> FoundPrefix | None:
        """Undo ``of``, for a pool of so many pages.

        Raises: MessageError if a page is not one of the pool's
        """
        blocks = tuple(page_ranges.unpack(packed, pages) for packed in self.blocks)
        return FoundPrefix(self.pin, self.tokens, blocks) if blocks else None


@message
@dataclass(frozen=True, slots=True, kw_only=True)
class PrefixBlocks:
    """The number of blocks that are cached, were added, or have a soft pin."""

    blocks: int


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


def _require_short(text: str) -> None:
    if len(text) > MAX_NAME_CHARS:
        raise ValueError(f"a name of {len(text)} characters: the limit is {MAX_NAME_CHARS}")


def _require_formats(formats: FormatPages) -> None:
    if len(formats) > MAX_FORMATS:
        raise ValueError(f"pages of {len(formats)} formats: the limit is {MAX_FORMATS}")
    for name, pages in formats:
        _require_short(name)
        if pages < 0:
            raise ValueError(f"{pages} pages of format {name!r}")


def _require_prefix(namespace: Namespace, tokens: bytes) -> None:
    for text in (namespace.model, namespace.revision, namespace.profile):
        _require_short(text)
    if len(namespace.salt) > MAX_SALT_BYTES:
        raise ValueError(f"a salt of {len(namespace.salt)} bytes: the limit is {MAX_SALT_BYTES}")
    if len(tokens) > 4 * MAX_PREFIX_TOKENS:
        raise ValueError(f"{len(tokens) // 4} tokens: the limit is {MAX_PREFIX_TOKENS}")
    decode(tokens)
