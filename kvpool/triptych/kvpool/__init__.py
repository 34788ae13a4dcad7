"""Who owns which page, and until when: arenas, the pool's books, and access to both."""

from triptych.kvpool.client import LocalPool, PoolClient, PoolWatcher, WorkerPool
from triptych.kvpool.ledger import Ledger, WorkerLine
from triptych.kvpool.service import PoolServer

__all__ = [
    "Ledger",
    "LocalPool",
    "PoolClient",
    "PoolServer",
    "PoolWatcher",
    "WorkerLine",
    "WorkerPool",
]
