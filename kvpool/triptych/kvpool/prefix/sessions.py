"""Sessions whose cached prefixes have soft pins, with expiry: no lock, no clock, no bytes."""

from collections import Counter, OrderedDict
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import NewType

from triptych.kvpool.prefix.blocks import SoftPin, SoftPinId

SessionKey = NewType("SessionKey", bytes)
"""Of a namespace and the name that its client gave: no two clients' sessions are the same one."""


@dataclass(frozen=True, slots=True)
class Session:
    """One conversation."""

    tenant: str
    soft_pin: SoftPin
    until: float
    """When it ends unless there is another turn, in seconds of the pool's clock."""


@dataclass
class SessionTable:
    """All sessions, those that end first in front.

    A tenant's sessions guard no more than ``tenant_bytes``, and all together no more than
    ``total_bytes``, each counted with its whole chain, shared or not. Whoever opens one more has
    others end early: those that would have ended first, its own before anybody else's.

    Source: Continuum (pages of a conversation are kept for a time-to-live); that they are kept by
        order of eviction, and not by a lock, is ours
    """

    ttl_s: float
    tenant_bytes: int
    total_bytes: int
    _open: OrderedDict[SessionKey, Session] = field(
        default_factory=OrderedDict[SessionKey, Session]
    )
    _bytes: Counter[str] = field(default_factory=Counter[str])
    """By tenant."""

    @property
    def nbytes(self) -> int:
        """Bytes with soft pins; blocks that two sessions share count twice."""
        return self._bytes.total()

    @property
    def most_bytes(self) -> int:
        """The most bytes that one session may soft-pin; 0: there are no sessions."""
        return min(self.tenant_bytes, self.total_bytes) if self.ttl_s > 0 else 0

    def __len__(self) -> int:
        return len(self._open)

    def open(self, key: SessionKey, tenant: str, soft_pin: SoftPin, now: float) -> list[SoftPinId]:
        """Begin a session, or go on with it: its time begins anew.

        Returns: guards that are to end now, its former one among them
        """
        ended = self.close(key)
        self._open[key] = Session(tenant, soft_pin, now + self.ttl_s)
        self._bytes[tenant] += soft_pin.nbytes
        while self._bytes[tenant] > self.tenant_bytes:
            ended += self._close_first(key, tenant)
        while self.nbytes > self.total_bytes:
            ended += self._close_first(key, None)
        return ended

    def close(self, key: SessionKey) -> list[SoftPinId]:
        """End a session, if there is one; returns its soft pin."""
        session = self._open.pop(key, None)
        if session is None:
            return []
        self._bytes[session.tenant] -= session.soft_pin.nbytes
        if not self._bytes[session.tenant]:
            del self._bytes[session.tenant]
        return [session.soft_pin.id]

    def expire(self, now: float) -> list[SoftPinId]:
        """End the sessions whose TTL has passed; returns their soft pins."""
        return [soft_pin for key in list(self._over(now)) for soft_pin in self.close(key)]

    def soft_pins(self) -> set[SoftPinId]:
        """Those of all sessions."""
        return {session.soft_pin.id for session in self._open.values()}

    def _over(self, now: float) -> Iterator[SessionKey]:
        for key, session in self._open.items():
            if session.until > now:
                return
            yield key

    def _close_first(self, but: SessionKey, tenant: str | None) -> list[SoftPinId]:
        """End the session that would end first, of one tenant or of all, but for one.

        There is one: what a single session guards is within both limits.
        """
        first = next(
            key
            for key, session in self._open.items()
            if key != but and (tenant is None or session.tenant == tenant)
        )
        return self.close(first)
