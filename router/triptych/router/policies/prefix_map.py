"""Which arena probably keeps which beginnings of prompts, as far as the router can know."""

from collections import OrderedDict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field


@dataclass(slots=True)
class BlockCache:
    """Blocks of one arena: what was not used for longest goes first, ends before beginnings."""

    capacity: int
    """Blocks that it keeps."""
    _blocks: OrderedDict[bytes, None] = field(default_factory=OrderedDict[bytes, None])

    def __len__(self) -> int:
        return len(self._blocks)

    def __contains__(self, key: bytes) -> bool:
        return key in self._blocks

    def __iter__(self) -> Iterator[bytes]:
        return iter(self._blocks)

    def known(self, keys: Sequence[bytes]) -> int:
        """How many blocks of a chain are here, from its first on."""
        for count, key in enumerate(keys):
            if key not in self._blocks:
                return count
        return len(keys)

    def keep(self, keys: Sequence[bytes]) -> list[bytes]:
        """Take in a chain, or use it again; returns what had to go."""
        for key in reversed(keys[: self.capacity]):
            self._blocks[key] = None
            self._blocks.move_to_end(key)
        gone = list[bytes]()
        while len(self._blocks) > self.capacity:
            gone.append(self._blocks.popitem(last=False)[0])
        return gone


@dataclass
class PrefixMap:
    """What was sent where, and so will be kept there: a belief, not a fact.

    The pool may keep something else, as it evicts by cost, by quota and by conversation. A wrong
    belief costs one prompt that is computed where it was expected to be known; what it leaves there
    makes the belief true.
    """

    capacity: int
    """Blocks that an arena keeps."""
    _caches: dict[str, BlockCache] = field(default_factory=dict[str, BlockCache])
    _holders: dict[bytes, set[str]] = field(default_factory=dict[bytes, set[str]])

    def keep(self, arena: str, keys: Sequence[bytes]) -> None:
        """A prompt is read at an arena: its blocks will be kept there."""
        cache = self._caches.setdefault(arena, BlockCache(self.capacity))
        for key in keys[: self.capacity]:
            self._holders.setdefault(key, set()).add(arena)
        for key in cache.keep(keys):
            self._let_go(arena, key)

    def forget(self, arenas: Iterable[str]) -> None:
        """Arenas are gone."""
        for arena in arenas:
            for key in self._caches.pop(arena, BlockCache(0)):
                self._let_go(arena, key)

    @property
    def arenas(self) -> set[str]:
        return set(self._caches)

    def known(self, arena: str, keys: Sequence[bytes]) -> int:
        """How many blocks of a chain an arena has, from its first on."""
        cache = self._caches.get(arena)
        return cache.known(keys) if cache else 0

    def holders(self, keys: Sequence[bytes]) -> Mapping[str, int]:
        """Arenas that have the first block of a chain, and how many blocks each has."""
        found = dict[str, int]()
        left = set(self._holders.get(keys[0], ())) if keys else set[str]()
        for count, key in enumerate(keys):
            still = left & self._holders.get(key, set())
            found.update(dict.fromkeys(left - still, count))
            left = still
            if not left:
                break
        return found | dict.fromkeys(left, len(keys))

    def _let_go(self, arena: str, key: bytes) -> None:
        there = self._holders[key]
        there.discard(arena)
        if not there:
            del self._holders[key]
