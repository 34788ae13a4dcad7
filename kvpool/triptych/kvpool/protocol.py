"""What the pool process and its workers say to each other: messages, answers and errors."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from triptych.core.errors import (
    MessageError,
    NotHeld,
    NotRegistered,
    PoolError,
    PoolExhausted,
    StaleHandle,
    TriptychError,
)
from triptych.core.handles import Claim, LeaseId
from triptych.core.messages import message
from triptych.kvpool.freelist import PageIds
from triptych.kvpool.ledger import Ledger
from triptych.kvpool.pool import Commit, WorkerId
from triptych.kvpool.processes import ProcessKey

MAX_NAME_CHARS = 256
MAX_JOURNAL_BYTES = 1 << 30


class PoolCalls(Protocol):
    """What a worker may ask of a pool, whichever side of a socket it is on.

    Meaning and errors are those of ``triptych.kvpool.pool.Pool``. Every call is also a sign
    of life of the worker that makes it.
    """

    def register(self, name: str, process: ProcessKey, journal_bytes: int) -> "Registered": ...
    def renew(self, worker: WorkerId) -> int: ...
    def unregister(self, worker: WorkerId) -> None: ...
    def expel(self, name: str) -> bool: ...
    def grant(self, worker: WorkerId, pages: int, at_least: int) -> PageIds: ...
    def give_back(self, worker: WorkerId, ids: PageIds) -> None: ...
    def handoff(
        self,
        worker: WorkerId,
        commits: Sequence[Commit],
        releases: Sequence[LeaseId],
        *,
        keep: bool,
    ) -> list[Claim]: ...
    def attach(self, worker: WorkerId, wanted: Sequence[tuple[Claim, PageIds]]) -> list[Claim]: ...
    def release(self, worker: WorkerId, leases: Sequence[LeaseId], *, keep: bool) -> None: ...
    def withdraw(self, worker: WorkerId, labels: Sequence[str]) -> list[LeaseId]: ...
    def inherit(self, former: str) -> "Inheritance": ...
    def adopt(
        self, worker: WorkerId, former: str, label: str, lease: LeaseId, ids: PageIds
    ) -> Claim: ...
    def stat(self) -> Ledger: ...


# ------------------------------------------------------------------ questions


@message
@dataclass(frozen=True, slots=True, kw_only=True)
class RegisterWorker:
    name: str
    process: ProcessKey
    journal_bytes: int = 0
    """Memory that it wants for what another worker must know to go on in its place."""

    def __post_init__(self) -> None:
        _require_short(self.name)
        if not 0 <= self.journal_bytes <= MAX_JOURNAL_BYTES:
            raise ValueError(f"journal_bytes={self.journal_bytes}: 0 to {MAX_JOURNAL_BYTES}")


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
class GrantPages:
    worker: WorkerId
    pages: int
    at_least: int

    def __post_init__(self) -> None:
        if not 0 <= self.at_least <= self.pages:
            raise ValueError(f"at_least={self.at_least}: expected 0 to pages={self.pages}")


@message
@dataclass(frozen=True, slots=True, kw_only=True)
class GiveBackPages:
    worker: WorkerId
    pages: bytes
    """Packed by ``triptych.kvpool.runs``, as everywhere below."""


@dataclass(frozen=True, slots=True)
class CommitPages:
    label: str
    pages: bytes

    def __post_init__(self) -> None:
        _require_short(self.label)


@message
@dataclass(frozen=True, slots=True, kw_only=True)
class HandOff:
    worker: WorkerId
    commits: tuple[CommitPages, ...]
    releases: tuple[LeaseId, ...]
    keep: bool


@dataclass(frozen=True, slots=True)
class ClaimedPages:
    claim: Claim
    pages: bytes


@message
@dataclass(frozen=True, slots=True, kw_only=True)
class AttachLeases:
    worker: WorkerId
    wanted: tuple[ClaimedPages, ...]


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
class InheritFrom:
    """Shut a dead worker out, and say where its journal is."""

    former: str


@message
@dataclass(frozen=True, slots=True, kw_only=True)
class AdoptRequest:
    worker: WorkerId
    former: str
    label: str
    lease: LeaseId
    pages: bytes

    def __post_init__(self) -> None:
        _require_short(self.label)


@message
@dataclass(frozen=True, slots=True, kw_only=True)
class StatPool:
    """The answer is a ``Ledger``."""


@message
@dataclass(frozen=True, slots=True, kw_only=True)
class CheckPool:
    """Compare the pool's books with each other."""


# ------------------------------------------------------------------ answers


@message
@dataclass(frozen=True, slots=True, kw_only=True)
class Checked:
    """Where the books contradict each other; empty: nowhere."""

    faults: tuple[str, ...]


@message
@dataclass(frozen=True, slots=True, kw_only=True)
class Withdrawn:
    leases: tuple[LeaseId, ...]


@message
@dataclass(frozen=True, slots=True, kw_only=True)
class Registered:
    """What a worker must know about the pool."""

    worker: WorkerId
    arena: str
    pages: int
    page_bytes: int
    lease_ttl_s: float
    extent_pages: int
    journal: str
    """Name of its journal's memory; empty if it wanted none."""


@message
@dataclass(frozen=True, slots=True, kw_only=True)
class Inheritance:
    """Where the journal of a dead worker is."""

    journal: str
    journal_bytes: int


@message
@dataclass(frozen=True, slots=True, kw_only=True)
class Renewed:
    lacking_pages: int
    """What other workers could not get; whoever has idle pages gives some back."""


@message
@dataclass(frozen=True, slots=True, kw_only=True)
class Expelled:
    was_there: bool


@message
@dataclass(frozen=True, slots=True, kw_only=True)
class Granted:
    pages: bytes


@message
@dataclass(frozen=True, slots=True, kw_only=True)
class Claims:
    claims: tuple[Claim, ...]


@message
@dataclass(frozen=True, slots=True, kw_only=True)
class PoolDone:
    """Done, and there is nothing to say about it."""


@message
@dataclass(frozen=True, slots=True, kw_only=True)
class PoolRefused:
    """Nothing was changed, and this is why."""

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
"""What may travel, and with what; nothing else is ever constructed from a peer's words."""


def refusal(error: TriptychError) -> PoolRefused:
    """Put an error into words; one without a place in the table becomes a ``PoolError``."""
    name = type(error).__name__
    if name not in _ERRORS:
        return PoolRefused(error=PoolError.__name__, details=(f"{name}: {error}",))
    return PoolRefused(error=name, details=error.args)


def refused(answer: PoolRefused) -> TriptychError:
    """The error that the other side raised.

    Raises: MessageError if the words are not of the table
    """
    kind, arguments = _ERRORS.get(answer.error, (TriptychError, ()))
    if not arguments or tuple(type(detail) for detail in answer.details) != arguments:
        raise MessageError(f"unknown refusal {answer.error!r} with {len(answer.details)} details")
    return kind(*answer.details)


def _require_short(text: str) -> None:
    if len(text) > MAX_NAME_CHARS:
        raise ValueError(f"a name of {len(text)} characters: the limit is {MAX_NAME_CHARS}")
