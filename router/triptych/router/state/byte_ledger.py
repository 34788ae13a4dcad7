"""What every request has booked, in bytes of each arena."""

from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from triptych.router.models.memory_estimate import RequestBytes

Lines = Mapping[str, int]
"""Bytes by arena."""


def lines_before_encoding(
    sizes: RequestBytes, raw_arena: str, work_arena: str, final_arena: str
) -> Lines:
    """What a request must have booked until its raw pages are free.

    It is all that it will ever need. So a request that was let in can always go on to its
    end without waiting for memory, and the stages cannot block each other.

    ``work_arena`` is the compressor's: raw pages of another one are fetched there, and the encoded
    pages are fetched from there.
    """
    lines = Counter({work_arena: sizes.raw + sizes.encoded})
    if work_arena == final_arena:
        lines[work_arena] = sizes.peak
    else:
        lines[final_arena] += sizes.moved().grown
    if raw_arena != work_arena:
        lines[raw_arena] += sizes.raw
    return lines


def lines_after_encoding(sizes: RequestBytes, work_arena: str, final_arena: str) -> Lines:
    """What stays booked while the request decodes: its pages and their growth to the end.

    Until they are fetched, they are in the compressor's arena as well.
    """
    if work_arena == final_arena:
        return {final_arena: sizes.grown}
    return {work_arena: sizes.compressed, final_arena: sizes.moved().grown}


def _nothing(_arena: str, _change: int) -> None:
    return


@dataclass
class ByteLedger:
    """Exact sums of promises, never of measurements: no arena is ever booked above capacity."""

    capacity_bytes: int
    """Page memory of each arena that requests may use, in bytes."""
    lent: dict[str, int] = field(default_factory=dict[str, int])
    """What they may use beyond that, by arena: memory for prefixes that its pool has lent."""

    on_change: Callable[[str, int], None] = _nothing
    """Told of each arena whose used bytes change, and by how much."""
    _lines: dict[str, Lines] = field(default_factory=dict[str, Lines])
    _booked: dict[str, int] = field(default_factory=dict[str, int])

    @property
    def arenas(self) -> dict[str, int]:
        """Bytes booked, by arena; arenas with nothing booked are left out."""
        return {arena: count for arena, count in self._booked.items() if count}

    def booked(self, arena: str) -> int:
        return self._booked.get(arena, 0)

    def free(self, arena: str) -> int:
        return self.capacity_bytes + self.lent.get(arena, 0) - self.booked(arena)

    def used(self, arena: str) -> int:
        """What is booked, less what is lent: free bytes count down from the capacity by this."""
        return self.booked(arena) - self.lent.get(arena, 0)

    def lend(self, arena: str, count: int) -> None:
        """Say how much of the memory for prefixes requests may use, in all."""
        change = self.lent.get(arena, 0) - count
        self.lent[arena] = count
        self.on_change(arena, change)

    def booked_by(self, request: str) -> int:
        return sum(self._lines.get(request, {}).values())

    def fits(self, request: str, lines: Lines) -> bool:
        """Whether ``lines`` could replace what the request has booked now."""
        own = self._lines.get(request, {})
        return all(count - own.get(arena, 0) <= self.free(arena) for arena, count in lines.items())

    def book(self, request: str, lines: Lines) -> bool:
        """Replace what the request has booked; False, and nothing changes, if it does not fit."""
        if any(count < 0 for count in lines.values()):
            raise ValueError(f"negative booking for {request}: {dict(lines)}")
        if not self.fits(request, lines):
            return False
        before = self._lines.get(request, {})
        self._lines[request] = lines
        for arena in {**before, **lines}:
            self._change(arena, lines.get(arena, 0) - before.get(arena, 0))
        return True

    def release(self, request: str) -> None:
        """Forget the request's bookings; one without any is left alone."""
        for arena, count in self._lines.pop(request, {}).items():
            self._change(arena, -count)

    def _change(self, arena: str, count: int) -> None:
        if count:
            self._booked[arena] = self.booked(arena) + count
            self.on_change(arena, count)
