"""Consistent hashing, with one ring and with two."""

from bisect import bisect_right, insort
from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass, field
from hashlib import blake2b

POINTS = 64
"""Points of a member on each ring: shares then differ by about an eighth of their mean."""
SALTS = (b"first", b"second")
"""Of the two rings: they are independent, so keys that share one home hardly share the other."""


def point(salt: bytes, name: bytes) -> int:
    """Position of a name on a ring.

    >>> point(b"first", b"a") == point(b"first", b"a") != point(b"second", b"a")
    True
    """
    return int.from_bytes(blake2b(name, digest_size=8, key=salt).digest(), "little")


@dataclass
class HashRing:
    """One ring: a key belongs to the member whose point comes next.

    Source: Karger et al., 1997 (consistent hashing)
    """

    salt: bytes
    _points: list[tuple[int, str]] = field(default_factory=list[tuple[int, str]])

    def add(self, member: str) -> None:
        for own in self._points_of(member):
            insort(self._points, own)

    def discard(self, member: str) -> None:
        self._points = [one for one in self._points if one[1] != member]

    def home(self, key: bytes, but: Collection[str] = ()) -> str | None:
        """The member that a key belongs to, or that it would belong to without those in ``but``."""
        return next((member for member in self.walk(key) if member not in but), None)

    def walk(self, key: bytes) -> Iterator[str]:
        """The members from the key's position on; the first one is its home.

        Each member occurs once for each of its points.
        """
        count = len(self._points)
        at = bisect_right(self._points, (point(self.salt, key), ""))
        return (self._points[(at + step) % count][1] for step in range(count))

    def _points_of(self, member: str) -> list[tuple[int, str]]:
        return [(point(self.salt, f"{member}/{n}".encode()), member) for n in range(POINTS)]


@dataclass
class DualHashRing:
    """Two homes for each key, on two rings.

    Of n members that become n + 1, about one key in n + 1 changes its first home, and as many
    change their second one; no other key does.

    Source: DualMap (dual hash ring)
    """

    _members: set[str] = field(default_factory=set[str])
    _rings: tuple[HashRing, HashRing] = field(
        default_factory=lambda: (HashRing(SALTS[0]), HashRing(SALTS[1]))
    )

    def hold(self, members: Iterable[str]) -> None:
        """Set the members."""
        wanted = set(members)
        for ring in self._rings:
            for member in sorted(self._members - wanted):
                ring.discard(member)
            for member in sorted(wanted - self._members):
                ring.add(member)
        self._members = wanted

    def homes(self, key: bytes) -> tuple[str, ...]:
        """Both homes of a key, the first one first; fewer if there are fewer members."""
        first = self._rings[0].home(key)
        second = self._rings[1].home(key, but=(first,)) if first else None
        return tuple(home for home in (first, second) if home is not None)
