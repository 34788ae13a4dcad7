"""Who owns which page, and until when: arenas, the pool's books, and access to both."""

from triptych.kvpool.blocks import Namespace, Publication
from triptych.kvpool.client import LocalPool, PoolClient, PoolWatcher, WorkerPool
from triptych.kvpool.disklevel import DiskSettings
from triptych.kvpool.ledger import DiskLine, Ledger, PrefixLine, WorkerLine
from triptych.kvpool.prefixcache import FoundPrefix, PrefixSettings
from triptych.kvpool.service import PoolServer

__all__ = [
    "DiskLine",
    "DiskSettings",
    "FoundPrefix",
    "Ledger",
    "LocalPool",
    "Namespace",
    "PoolClient",
    "PoolServer",
    "PoolWatcher",
    "PrefixLine",
    "PrefixSettings",
    "Publication",
    "WorkerLine",
    "WorkerPool",
]
