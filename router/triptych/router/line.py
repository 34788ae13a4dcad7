"""The waiting line, in each of the orders in which policies read it."""

from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from triptych.router.ranking import Ranking
from triptych.router.snapshot import Waiting


class Line(Protocol):
    """Who waits. Each order is read lazily: a policy that stops early pays for what it read."""

    def __len__(self) -> int: ...

    def in_order(self) -> Iterator[Waiting]:
        """As they came; those that were in work before, at the front."""
        ...

    def oldest_first(self) -> Iterator[Waiting]:
        """Those that have waited longest first."""
        ...

    def smallest_first(self) -> Iterator[Waiting]:
        """Those that need least first; equal ones in order."""
        ...


@dataclass(frozen=True, slots=True)
class ListedLine:
    """A line that was written down: what each order means, in one line of code each."""

    waiting: Sequence[Waiting]
    """As they came."""

    def __len__(self) -> int:
        return len(self.waiting)

    def in_order(self) -> Iterator[Waiting]:
        return iter(self.waiting)

    def oldest_first(self) -> Iterator[Waiting]:
        return iter(sorted(self.waiting, key=lambda one: -one.waited_s))

    def smallest_first(self) -> Iterator[Waiting]:
        return iter(sorted(self.waiting, key=lambda one: one.bytes))


@dataclass(slots=True)
class Place:
    """One request in the line."""

    bytes: int
    arrived: float
    number: int
    """Its place among all that ever came; below 0 for those that were in work before."""


@dataclass
class WaitingLine:
    """Keeps all orders while requests come and go."""

    _places: OrderedDict[str, Place] = field(default_factory=OrderedDict[str, Place])
    _by_bytes: Ranking[tuple[int, int]] = field(default_factory=Ranking[tuple[int, int]])
    _by_age: Ranking[tuple[float, int]] = field(default_factory=Ranking[tuple[float, int]])
    _came: int = 0

    def __len__(self) -> int:
        return len(self._places)

    def add(self, name: str, size: int, arrived: float, *, in_front: bool) -> None:
        """Put a request that needs ``size`` bytes at the end of the line, or in front of it."""
        self._came += 1
        number = -self._came if in_front else self._came
        self._places[name] = Place(size, arrived, number)
        if in_front:
            self._places.move_to_end(name, last=False)
        self._by_bytes.put(name, (size, number))
        self._by_age.put(name, (arrived, number))

    def discard(self, name: str) -> None:
        """Take a request out, if it is in the line."""
        if self._places.pop(name, None) is not None:
            self._by_bytes.discard(name)
            self._by_age.discard(name)

    def oldest_arrival(self) -> float | None:
        """When the one that has waited longest came."""
        name = self._by_age.first()
        return None if name is None else self._places[name].arrived

    def at(self, now: float) -> "LineNow":
        """The line as a policy may read it, until it changes."""
        return LineNow(self, now)

    def read(
        self, order: Callable[["WaitingLine"], Iterator[str]], now: float
    ) -> Iterator[Waiting]:
        for name in order(self):
            place = self._places[name]
            yield Waiting(id=name, bytes=place.bytes, waited_s=now - place.arrived)

    def by_place(self) -> Iterator[str]:
        return iter(self._places)

    def by_bytes(self) -> Iterator[str]:
        return iter(self._by_bytes)

    def by_age(self) -> Iterator[str]:
        return iter(self._by_age)


@dataclass(frozen=True, slots=True)
class LineNow:
    """A waiting line at one moment."""

    line: WaitingLine
    now: float

    def __len__(self) -> int:
        return len(self.line)

    def in_order(self) -> Iterator[Waiting]:
        return self.line.read(WaitingLine.by_place, self.now)

    def oldest_first(self) -> Iterator[Waiting]:
        return self.line.read(WaitingLine.by_age, self.now)

    def smallest_first(self) -> Iterator[Waiting]:
        return self.line.read(WaitingLine.by_bytes, self.now)
