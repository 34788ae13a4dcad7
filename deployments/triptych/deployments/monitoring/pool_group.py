"""The router's view of all pools, of one node or of several."""

import threading

from triptych.core.errors import PoolUnavailable
from triptych.core.messages import CacheMemoryBorrowed
from triptych.deployments.transport.addressing import Network
from triptych.kvpool import PageMap, PoolStats, PoolWatcher


class PoolGroup:
    """Reads every pool's books, and tells all of them who is dead. Calls block."""

    def __init__(self, address: str, network: Network | None) -> None:
        """``address``: the pool of this node; without a network, the only one."""
        self._network, self._lock = network, threading.Lock()
        self._near = PoolWatcher(address)
        self._far = dict[str, PoolWatcher]()
        """By address, if there is a network: that of this node too."""

    def stat(self) -> tuple[PoolStats | None, ...]:
        """The books of each; None for a pool that does not answer."""
        return tuple(watcher.stat() for watcher in self._present())

    def expel(self, worker: str) -> None:
        """Have what a dead worker left freed, wherever that is.

        Raises: PoolUnavailable if one of them did not hear
        """
        failure: PoolUnavailable | None = None
        for watcher in self._present():
            try:
                watcher.expel(worker)
            except PoolUnavailable as error:
                failure = error
        if failure:
            raise failure

    def map(self, max_cells: int) -> PageMap | None:
        """Whose each page of this node's pool is; None if it does not answer."""
        return self._near.map(max_cells)

    def borrow_cache_memory(self, nbytes: int) -> CacheMemoryBorrowed | None:
        """Have so much of the memory for prefixes lent to requests, in all.

        None if there are several pools: nobody says yet which of them is to lend.

        Raises: PoolUnavailable
        """
        return self._near.borrow_cache_memory(nbytes) if self._network is None else None

    def close(self) -> None:
        for watcher in (self._near, *self._far.values()):
            watcher.close()

    def _present(self) -> list[PoolWatcher]:
        if self._network is None:
            return [self._near]
        addresses = {str(address) for address in self._network.pools().values()}
        with self._lock:
            for address in addresses - set(self._far):
                self._far[address] = PoolWatcher(address, access=self._network.access)
            for address in set(self._far) - addresses:
                self._far.pop(address).close()
            return list(self._far.values())
