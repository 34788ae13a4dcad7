"""Who owns which page, and until when: arenas, the pool's books, and access to both."""

from triptych.kvpool.access import Access
from triptych.kvpool.arena import Arena
from triptych.kvpool.blocks import HoldId, Namespace, Publication
from triptych.kvpool.client import LocalPool, PoolClient, PoolWatcher, WorkerPool
from triptych.kvpool.disklevel import DiskSettings
from triptych.kvpool.fetch import Fetcher
from triptych.kvpool.ledger import DiskLine, Ledger, NetworkLine, PrefixLine, WorkerLine
from triptych.kvpool.outside import PoolAddress, bracketed, guest_name, is_guest
from triptych.kvpool.pagemap import OwnerLine, PageMap
from triptych.kvpool.pool import About
from triptych.kvpool.prefixcache import PREFIX_WORKER, FoundPrefix, PrefixSettings
from triptych.kvpool.service import PoolServer

__all__ = [
    "PREFIX_WORKER",
    "About",
    "Access",
    "Arena",
    "DiskLine",
    "DiskSettings",
    "Fetcher",
    "FoundPrefix",
    "HoldId",
    "Ledger",
    "LocalPool",
    "Namespace",
    "NetworkLine",
    "OwnerLine",
    "PageMap",
    "PoolAddress",
    "PoolClient",
    "PoolServer",
    "PoolWatcher",
    "PrefixLine",
    "PrefixSettings",
    "Publication",
    "WorkerLine",
    "WorkerPool",
    "bracketed",
    "guest_name",
    "is_guest",
]
