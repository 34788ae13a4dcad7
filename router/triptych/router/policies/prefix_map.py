"""Prefix map: the prefixes that each arena probably has cached, as the router estimates."""

from collections import OrderedDict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field


@dataclass(slots=True)
class BlockCache:
    """LRU estimate of the cached blocks of one arena; last blocks of a prompt go first."""

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
        """Number of blocks of a chain that are cached, from its first on."""
        for count, key in enumerate(keys):
            if key not in self._blocks:
                return count
        return len(keys)

    def keep(self, keys: Sequence[bytes]) -> list[bytes]:
        """Add or touch a chain; returns evicted blocks."""
        for key in reversed(keys[: self.capacity]):
            self._blocks[key] = None
            self._blocks.move_to_end(key)
        gone = list[bytes]()
        while len(self._blocks) > self.capacity:
            gone.append(self._blocks.popitem(last=False)[0])
        return gone


@dataclass
class PrefixMap:
    """Estimate of the cached prefixes of each arena, from the prompts that were sent there.

    The pool may evict other blocks. A wrong estimate costs one prompt that is computed although its
    prefix was expected in the cache; afterwards the prefix is there.
    """

    capacity: int
    """Blocks that an arena keeps."""
    _caches: dict[str, BlockCache] = field(default_factory=dict[str, BlockCache])
    _holders: dict[bytes, set[str]] = field(default_factory=dict[bytes, set[str]])

    def keep(self, arena: str, keys: Sequence[bytes]) -> None:
        """A prompt was sent to an arena, which will cache its blocks."""
        cache = self._caches.setdefault(arena, BlockCache(self.capacity))
        for key in keys[: self.capacity]:
            self._holders.setdefault(key, set()).add(arena)
        for key in cache.keep(keys):
            self._let_go(arena, key)

    def forget(self, arenas: Iterable[str]) -> None:
        """Remove arenas."""
        for arena in arenas:
            for key in self._caches.pop(arena, BlockCache(0)):
                self._let_go(arena, key)

    @property
    def arenas(self) -> set[str]:
        return set(self._caches)

    def known(self, arena: str, keys: Sequence[bytes]) -> int:
        """Number of blocks of a chain that an arena has, from its first on."""
        cache = self._caches.get(arena)
        return cache.known(keys) if cache else 0

    def holders(self, keys: Sequence[bytes]) -> Mapping[str, int]:
        """Arenas that have the first block of a chain, and the number of blocks each has."""
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
