"""The pool of KV pages: arenas, leases over pages, and access to both."""

from triptych.kvpool.disk.tier import DiskSettings
from triptych.kvpool.pool.arena import Arena
from triptych.kvpool.pool.cuda_driver import CudaDriver
from triptych.kvpool.pool.device_arenas import HOST, DeviceArenas, DeviceMemory, Driver
from triptych.kvpool.pool.leases import About
from triptych.kvpool.pool.stats import (
    DiskStats,
    NetworkStats,
    OwnerPages,
    PageMap,
    PoolStats,
    PrefixStats,
    WorkerStats,
)
from triptych.kvpool.prefix.blocks import Namespace, PinId, Publication
from triptych.kvpool.prefix.cache import PREFIX_WORKER, FoundPrefix, PrefixSettings
from triptych.kvpool.rpc.auth import Access
from triptych.kvpool.rpc.client.in_process import LocalPool
from triptych.kvpool.rpc.client.pool_client import PoolClient
from triptych.kvpool.rpc.client.watcher import PoolWatcher
from triptych.kvpool.rpc.client.worker_pool import WorkerPool
from triptych.kvpool.rpc.gateway import PoolAddress, guest_name, is_guest
from triptych.kvpool.rpc.local_pool import OWN_WORKERS
from triptych.kvpool.rpc.server import PoolServer
from triptych.kvpool.transfer.fetcher import Fetcher
from triptych.kvpool.transfer.page_stream import bracketed

__all__ = [
    "HOST",
    "OWN_WORKERS",
    "PREFIX_WORKER",
    "About",
    "Access",
    "Arena",
    "CudaDriver",
    "DeviceArenas",
    "DeviceMemory",
    "DiskSettings",
    "DiskStats",
    "Driver",
    "Fetcher",
    "FoundPrefix",
    "LocalPool",
    "Namespace",
    "NetworkStats",
    "OwnerPages",
    "PageMap",
    "PinId",
    "PoolAddress",
    "PoolClient",
    "PoolServer",
    "PoolStats",
    "PoolWatcher",
    "PrefixSettings",
    "PrefixStats",
    "Publication",
    "WorkerPool",
    "WorkerStats",
    "bracketed",
    "guest_name",
    "is_guest",
]
