"""The router's connections to all pools of its shard, on one node or several."""

import threading

from triptych.core.errors import PoolUnavailable
from triptych.core.messages import CacheMemoryBorrowed
from triptych.deployments.transport.addressing import Network
from triptych.kvpool import PageMap, PoolStats, PoolWatcher


class PoolGroup:
    """Reads the statistics of every pool, and expels dead workers from all. Calls block."""

    def __init__(self, address: str, network: Network | None) -> None:
        """``address``: the pool of this node, which is the only one without a network."""
        self._network, self._lock = network, threading.Lock()
        self._local = PoolWatcher(address)
        self._remote = dict[str, PoolWatcher]()
        """Pools of all nodes by address, if there is a network."""

    def stat(self) -> tuple[PoolStats | None, ...]:
        """Statistics of each pool; None for a pool that does not answer."""
        return tuple(watcher.stat() for watcher in self._present())

    def expel(self, worker: str) -> None:
        """Free the pages of a dead worker in all pools.

        Raises: PoolUnavailable if one of them did not answer
        """
        failure: PoolUnavailable | None = None
        for watcher in self._present():
            try:
                watcher.expel(worker)
            except PoolUnavailable as error:
                failure = error
        if failure:
            raise failure

    def map(self, max_entries: int) -> PageMap | None:
        """Owners of the pages of this node's pool; None if the pool does not answer."""
        return self._local.map(max_entries)

    def lend(self, nbytes: int) -> CacheMemoryBorrowed | None:
        """Set how many bytes of the prefix cache are lent to requests, in total.

        Does nothing and returns None with several pools: borrowing is not supported there.

        Raises: PoolUnavailable
        """
        return self._local.borrow_cache_memory(nbytes) if self._network is None else None

    def close(self) -> None:
        for watcher in (self._local, *self._remote.values()):
            watcher.close()

    def _present(self) -> list[PoolWatcher]:
        if self._network is None:
            return [self._local]
        addresses = {str(address) for address in self._network.pools().values()}
        with self._lock:
            for address in addresses - set(self._remote):
                self._remote[address] = PoolWatcher(address, access=self._network.access)
            for address in set(self._remote) - addresses:
                self._remote.pop(address).close()
            return list(self._remote.values())
