"""How a worker comes to the bytes of pages that another one wrote."""

from typing import Protocol

from triptych.core.errors import StaleHandle
from triptych.core.handles import Claim
from triptych.kvpool.pool.arena import Arena
from triptych.kvpool.pool.free_list import PageIds


class Transport(Protocol):
    """Brings claimed pages within reach, and counts the bytes that it had to copy for it."""

    bytes_copied: int
    """Bytes of keys and values copied between stages so far."""

    @property
    def arena(self) -> Arena:
        """The memory in which fetched pages can be read and written."""
        ...

    def fetch(self, claim: Claim, ids: PageIds) -> PageIds:
        """Return the ids in ``arena`` under which the claimed pages can be read.

        Raises: StaleHandle if the claim's arena is out of reach
        """
        ...


class SharedMemory:
    """Both stages map the same memory: a page is where it was, and nothing is copied."""

    def __init__(self, arena: Arena) -> None:
        self.arena = arena
        self.bytes_copied = 0

    def fetch(self, claim: Claim, ids: PageIds) -> PageIds:
        if claim.arena != self.arena.id:
            raise StaleHandle(claim.lease, f"arena {claim.arena} is not {self.arena.id}")
        return ids
