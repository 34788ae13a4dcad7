"""Visits every state that a small world can reach, each once."""

from collections.abc import Hashable, Iterable
from copy import deepcopy
from typing import Protocol


class World(Protocol):
    """Something small that can be copied, with all that may happen to it next."""

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
        options = list(world.moves())
        if not any(move in progress for move, _ in options):
            ends += 1
            deepcopy(world).check_end()
        for move, i in options:
            after = deepcopy(world)
            after.do(move, i)
            if (key := after.key()) not in seen:
                seen.add(key)
                waiting.append(after)
    return len(seen), ends
