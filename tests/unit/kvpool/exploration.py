"""Visits every state that a small world can reach, each once."""

from collections.abc import Hashable, Iterable
from pickle import dumps, loads
from typing import Protocol


class World(Protocol):
    """Something small that can be pickled, with all that may happen to it next."""

    def moves(self) -> Iterable[tuple[str, int]]: ...
    def do(self, move: str, i: int) -> None: ...
    def check(self) -> None:
        """Raise AssertionError for a bad state."""
        ...

    def check_end(self) -> None:
        """Raise AssertionError for a bad end; may change the world."""
        ...

    def key(self) -> Hashable:
        """What makes two states the same."""
        ...


def explore(start: World, progress: set[str]) -> tuple[int, int]:
    """Check every state; how many there are, and how many are ends: no move is ``progress``."""
    seen, waiting, ends = {start.key()}, [start], 0
    while waiting:
        world = waiting.pop()
        world.check()
        options, copy = list(world.moves()), dumps(world)  # read several times faster than deepcopy
        if not any(move in progress for move, _ in options):
            ends += 1
            loads(copy).check_end()
        for move, i in options:
            after = loads(copy)
            after.do(move, i)
            if (key := after.key()) not in seen:
                seen.add(key)
                waiting.append(after)
    return len(seen), ends
