"""The pool process: it owns the arena and the leases, and serves workers over a socket."""

import logging
import os
import shutil
import stat
import tempfile
import threading
from pathlib import Path
from typing import Self

from triptych.core.config import PoolConfig
from triptych.core.errors import ConfigError, PoolError
from triptych.kvpool.disk.tier import Disk, DiskSettings
from triptych.kvpool.pool.arena import Arena, remove_orphans, shared_memory_dir
from triptych.kvpool.pool.descriptors import DescriptorServer, descriptors_path
from triptych.kvpool.pool.device_arenas import DeviceMemory, open_arenas
from triptych.kvpool.pool.page_pool import Pool
from triptych.kvpool.pool.processes import is_alive
from triptych.kvpool.pool.reservation import LateReservation, pages_at_once
from triptych.kvpool.pool.stats import PoolStats
from triptych.kvpool.prefix.cache import PrefixSettings
from triptych.kvpool.rpc.auth import Access
from triptych.kvpool.rpc.channel import FrameServer
from triptych.kvpool.rpc.dispatch import answer
from triptych.kvpool.rpc.gateway import PeerPorts, PoolAddress
from triptych.kvpool.rpc.local_pool import LockedPool, has_no_queue

logger = logging.getLogger(__name__)

SWEEP_PERIOD_S = 0.5
_SOCKET_PATH_LIMIT = 107


class PoolServer:
    """One node's page pool: arena, leases, socket, and a sweep for dead workers."""

    def __init__(
        self,
        config: PoolConfig,
        page_bytes: int,
        *,
        address: str = "",
        directory: Path | None = None,
        prefixes: PrefixSettings | None = None,
        outside: tuple[str, Access] | None = None,
        device_memory: DeviceMemory | None = None,
    ) -> None:
        """Reserve page memory: what there is above 1 GiB after the start.

        ``address`` is ``unix:/path`` or ``127.0.0.1:port``; empty: a socket in a new private
        directory. ``directory`` is where memory is shared, ``/dev/shm`` unless given; the arena
        lies there, or in ``config.arena_path``. Without ``prefixes`` there is no cache.
        ``outside`` is this node's host for other nodes, and the credentials that they need. With
        ``device_memory`` there is an arena of ``config.kv_cache_memory_bytes`` on each device,
        unless that cannot be had.

        Raises: ConfigError if not one page fits; PoolError if there is not enough memory
        """
        pages = config.kv_cache_memory_bytes // page_bytes
        if pages < 1:
            raise ConfigError(
                f"pool.kv_cache_memory_bytes={config.kv_cache_memory_bytes}: "
                "expected at least one page "
                f"({page_bytes} bytes)"
            )
        directory = directory or shared_memory_dir()
        folder = config.arena_directory or directory
        for orphan in {*remove_orphans(directory), *remove_orphans(folder)}:
            shutil.rmtree(_socket_dir(orphan), ignore_errors=True)
        reserved = pages_at_once(pages, page_bytes)
        size = config.kv_cache_memory_bytes
        owned = (
            open_arenas(device_memory, size, page_bytes, address, has_other_nodes=bool(outside))
            if device_memory
            else None
        )
        self._memory = owned
        self._arena = (
            owned.arenas if owned else Arena.create(pages, page_bytes, folder, reserved=reserved)
        )
        sizes = owned.arenas.shape.pages if owned else (pages,)
        are_apart = owned is not None and owned.arenas.shape.are_apart
        pool = Pool(sizes, page_bytes, self._arena.id, config.lease_ttl_s, are_apart=are_apart)
        self._disk, disk_fault = _open_disk(config, self._arena) if prefixes else (None, "")
        self._pool = LockedPool(
            pool,
            config.extent_pages,
            lambda pages, size: Arena.create(pages, size, directory),
            prefixes=prefixes,
            disk=self._disk,
            disk_fault=disk_fault,
            devices=owned.arenas.shape.devices if owned else (),
            revoke=owned.driver.revoke if owned else has_no_queue,
        )
        self._reservation = (
            LateReservation(pool, self._pool.lock, self._arena, reserved)
            if reserved < pages and not owned
            else None
        )
        self._exports: DescriptorServer | None = None
        self._address = address or f"unix:{_socket_dir(self._arena.id)}/pool.sock"
        self._server: FrameServer | None = None
        self._outside = outside
        self._door: PeerPorts | None = None
        self._stopping = threading.Event()
        self._sweeper = threading.Thread(target=self._sweep, name="pool-sweeper", daemon=True)

    def start(self) -> str:
        """Start to serve, and return the address.

        Raises: PoolError if the address cannot be had
        """
        try:
            _prepare_socket(self._address)
            if self._memory:
                path = descriptors_path(self._address)
                self._exports = DescriptorServer(path, self._memory.descriptor)
            self._server = FrameServer(lambda frame: answer(self._pool, frame), self._address)
            if self._outside:
                self._door = PeerPorts(self._pool, self._arena, *self._outside)
        except PoolError:
            self.stop()
            raise
        self._sweeper.start()
        if self._reservation:
            self._reservation.start()
        logger.info("pool of %d pages at %s", self._pool.pages, self._server.address)
        return self._server.address

    def stop(self) -> None:
        """Stop serving and remove the arena; workers keep their mappings until they close."""
        self._stopping.set()
        if self._reservation:
            self._reservation.stop()
        if self._door:
            self._door.close()
        if self._server:
            self._server.stop()
        if self._exports:
            self._exports.close()
        if self._memory:
            self._memory.close()
        if self._sweeper.is_alive():
            self._sweeper.join()
        self._pool.close()
        if self._disk:
            self._disk.close()
            self._disk = None
        self._arena.unlink()
        self._arena.close()
        shutil.rmtree(_socket_dir(self._arena.id), ignore_errors=True)

    def stat(self) -> PoolStats:
        """Statistics of the pool."""
        return self._pool.stat()

    def check(self) -> list[str]:
        """Contradictions between the tables; empty if there are none."""
        return self._pool.check()

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    @property
    def address(self) -> str:
        """The pool's address for workers; known once it has started."""
        return self._server.address if self._server else self._address

    @property
    def outside(self) -> PoolAddress | None:
        """The pool's address for other nodes; None if there is none, or before it has started."""
        return self._door.address if self._door else None

    @property
    def arena(self) -> str:
        """Name of the pool's arena."""
        return self._arena.id

    def _sweep(self) -> None:
        while not self._stopping.wait(SWEEP_PERIOD_S):
            try:
                lost = self._pool.sweep(is_alive)
            except Exception:  # it must not end the thread: then pages would stay with the dead
                logger.exception("a sweep failed; the next one tries again")
                continue
            for worker in lost:
                logger.warning("worker %s is lost: its pages were taken back", worker)


def _open_disk(config: PoolConfig, arena: Arena) -> tuple[Disk | None, str]:
    """The disk tier, or why there is none: a pool without one is better than no pool."""
    settings = DiskSettings.of(config)
    try:
        return (Disk.open(settings, arena.data) if settings else None), ""
    except PoolError as error:
        logger.error("prefixes are not kept on disk: %s", error)
        return None, str(error)


def _socket_dir(arena: str) -> Path:
    return Path(tempfile.gettempdir(), arena)


def _prepare_socket(address: str) -> None:
    """Make the directory of a unix socket, for this user alone."""
    if not address.startswith("unix:"):
        return
    path = Path(address.removeprefix("unix:"))
    if len(os.fsencode(path)) > _SOCKET_PATH_LIMIT:
        raise PoolError(f"socket path {path}: longer than {_SOCKET_PATH_LIMIT} bytes")
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    status = path.parent.stat()
    if status.st_uid != os.getuid() or stat.S_IMODE(status.st_mode) & 0o077:
        raise PoolError(f"socket directory {path.parent}: expected it to be yours, with mode 0700")
