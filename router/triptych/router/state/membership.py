"""Registered workers and ingresses, their stages, and the age of their reports."""

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from math import inf

from triptych.core.messages import Register, Report, Stage

STALL_FACTOR = 20.0
"""Multiple of the longest measured step after which a worker counts as stuck."""
LONG_STEP_S = 60.0
"""Duration that any step may have: it may compile a kernel."""


@dataclass(eq=False)
class Peer:
    """A registered process."""

    registration: Register
    reported: float = -inf
    """When its last report came."""
    report: Report | None = None
    """The last one."""

    @property
    def name(self) -> str:
        return self.registration.name

    @property
    def address(self) -> str:
        return self.registration.address


@dataclass
class Membership:
    """All living peers by address. A worker without a fresh report counts as full."""

    report_bound_s: float
    """Age in seconds up to which a report is valid."""

    _peers: dict[str, Peer] = field(default_factory=dict[str, Peer])
    _addresses: dict[str, str] = field(default_factory=dict[str, str])
    """By name."""
    _left: dict[tuple[Stage, str], float] = field(default_factory=dict[tuple[Stage, str], float])
    """When the last worker of a stage in an arena died."""
    _there: Counter[tuple[Stage, str | None]] = field(
        default_factory=Counter[tuple[Stage, str | None]]
    )
    """Workers of each stage, in each arena and in all (None)."""

    def __iter__(self) -> Iterator[Peer]:
        return iter(self._peers.values())

    def __contains__(self, address: str) -> bool:
        return address in self._peers

    def is_worker(self, address: str) -> bool:
        """Whether the peer at an address has a stage; an ingress has none."""
        peer = self._peers.get(address)
        return peer is not None and bool(peer.registration.stages)

    def name_of(self, address: str) -> str:
        """The name of the peer at an address."""
        return self._peers[address].name

    def replaced_by(self, registration: Register) -> list[str]:
        """Addresses whose process must be dead if ``registration`` is true."""
        name, address = registration.name, registration.address
        there, before = self._peers.get(address), self._addresses.get(name)
        replaced = [address] if there is not None and there.name != name else []
        return replaced if before in (None, address) else [*replaced, before]

    def has_dropped_requests(self, registration: Register) -> bool:
        """Whether a registered process says that it has none of its requests any more."""
        peer = self._peers.get(registration.address)
        return (
            peer is not None
            and peer.name == registration.name
            and peer.registration.epoch != registration.epoch
        )

    def join(self, registration: Register) -> None:
        """Add a peer; one that registers again keeps its report."""
        peer = self._peers.get(registration.address)
        if peer is None:
            peer = self._peers[registration.address] = Peer(registration)
        else:
            self._count(peer.registration, -1)
            peer.registration = registration
        self._addresses[registration.name] = registration.address
        self._count(registration, +1)

    def note(self, report: Report, sender: str, now: float) -> bool:
        """Store a report; False if ``sender`` is not registered under its name."""
        peer = self._peers.get(sender)
        if peer is None or peer.name != report.name:
            return False
        peer.reported, peer.report = now, report
        return True

    def stalled(self, now: float, silent_s: float) -> list[Peer]:
        """Workers without a report for ``silent_s``, or in one step for far too long."""
        return [
            peer
            for peer in self
            if (report := peer.report) is not None
            and (now - peer.reported > silent_s or report.step_age_s > _longest_step_s(report))
        ]

    def forgive(self, now: float) -> list[Peer]:
        """Count every worker as reporting now, after this process was paused; returns them."""
        reporting = [peer for peer in self if peer.report is not None]
        for peer in reporting:
            peer.reported = max(peer.reported, now)
        return reporting

    def leave(self, address: str, now: float) -> Peer | None:
        """Remove a dead peer and return it."""
        peer = self._peers.pop(address, None)
        if peer is not None:
            self._addresses.pop(peer.name, None)
            self._count(peer.registration, -1)
        for stage in peer.registration.stages if peer else ():
            self._left[stage, peer.registration.arena if peer else ""] = now
        return peer

    def is_full(self, peer: Peer, now: float) -> bool:
        """Whether the peer gets no requests because its report is too old."""
        return now - peer.reported > self.report_bound_s

    def absent_since(self, stage: Stage, arena: str | None = None) -> float | None:
        """When the last worker of ``stage`` died; minus infinity if there never was one.

        None if one is alive. ``arena``: only workers that store there.
        """
        if self._there[stage, arena] > 0:
            return None
        times = (
            time
            for (left_stage, left_arena), time in self._left.items()
            if left_stage == stage and arena in (None, left_arena)
        )
        return max(times, default=-inf)

    def arenas_with(self, stage: Stage) -> list[str]:
        """The arenas in which a worker of ``stage`` stores."""
        return [
            arena
            for (of, arena), n in self._there.items()
            if of == stage and n and arena is not None
        ]

    def _count(self, registration: Register, change: int) -> None:
        for stage in registration.stages:
            self._there[stage, registration.arena] += change
            self._there[stage, None] += change


def _longest_step_s(report: Report) -> float:
    """Duration that a step of a worker may have, from its last ones."""
    return max(LONG_STEP_S, STALL_FACTOR * report.longest_step_s)
