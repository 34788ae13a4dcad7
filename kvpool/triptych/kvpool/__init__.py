"""Who owns which page, and until when: arenas, the pool's books, and access to both."""

from triptych.kvpool.blocks import Namespace, Publication
from triptych.kvpool.client import LocalPool, PoolClient, PoolWatcher, WorkerPool
from triptych.kvpool.disklevel import DiskSettings
from triptych.kvpool.ledger import DiskLine, Ledger, PrefixLine, WorkerLine
from triptych.kvpool.pagemap import OwnerLine, PageMap
from triptych.kvpool.prefixcache import PREFIX_WORKER, FoundPrefix, PrefixSettings
from triptych.kvpool.service import PoolServer

__all__ = [
    "PREFIX_WORKER",
    "DiskLine",
    "DiskSettings",
    "FoundPrefix",
    "Ledger",
    "LocalPool",
    "Namespace",
    "OwnerLine",
    "PageMap",
    "PoolClient",
    "PoolServer",
    "PoolWatcher",
    "PrefixLine",
    "PrefixSettings",
    "Publication",
    "WorkerLine",
    "WorkerPool",
]
