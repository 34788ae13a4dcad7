"""A worker's access to the pool process of its device."""

import logging
import os
import threading
from pathlib import Path

from triptych.core.errors import PoolError
from triptych.kvpool.pool.arena import Arena
from triptych.kvpool.pool.descriptors import descriptors_path, receive
from triptych.kvpool.pool.device_arenas import HOST, ArenaShape, DeviceArenas, Driver
from triptych.kvpool.rpc.channel import FrameChannel
from triptych.kvpool.rpc.client.registration import index_of_home
from triptych.kvpool.rpc.client.worker_pool import WorkerPool
from triptych.kvpool.rpc.messages import Registered
from triptych.kvpool.rpc.stub import PoolStub

logger = logging.getLogger(__name__)

HEARTBEAT_PERIOD_S = 1.0
CONNECT_TIMEOUT_S = 30.0


class PoolClient(WorkerPool):
    """A worker's access to the pool process of its device, with a heartbeat of its own."""

    def __init__(
        self,
        address: str,
        worker: str,
        *,
        directory: Path | None = None,
        arena_directory: Path | None = None,
        connect_timeout_s: float = CONNECT_TIMEOUT_S,
        checkpoint_bytes: int = 0,
        device: tuple[Driver, str] | None = None,
        keeps_copies: bool = False,
    ) -> None:
        """Connect, wait until the pool is there, and map its arenas.

        ``worker`` names one start of one process: the next registration under it replaces this
        one. ``directory`` is the pool's directory of shared memory, and ``arena_directory`` that
        of its arena, if it is another one. With ``checkpoint_bytes`` there is a checkpoint, and
        the leases of this worker wait for a takeover worker when it dies. ``device``: where this
        worker computes, and the driver that maps pages there; None: on the host. ``keeps_copies``:
        where devices cannot access each other, this worker's pages are in host memory, with copies
        on its device.

        Raises: PoolUnavailable if the pool does not answer in time; PoolError if its pages are on
            devices, and this worker computes on none
        """
        self._remote = PoolStub(FrameChannel(address), connect_timeout_s)
        self._leaving = threading.Event()

        def map_arena(pool: Registered) -> Arena:
            if pool.devices:
                return _map_devices(pool, address, device)
            shape = (pool.pages, pool.page_bytes)
            return Arena.open(pool.arena, shape, arena_directory or directory)

        def open_checkpoint(name: str, size: int) -> Arena:
            return Arena.open(name, (1, size), directory)

        try:
            super().__init__(
                self._remote,
                worker,
                map_arena,
                open_checkpoint,
                checkpoint_bytes,
                device[1] if device else HOST,
                keeps_copies=keeps_copies,
            )
        except BaseException:
            self._remote.close()
            raise
        self._heart = threading.Thread(target=self._beat, name="pool-heartbeat", daemon=True)
        self._heart.start()

    def close(self) -> None:
        self._leaving.set()
        super().close()
        self._heart.join()
        self._remote.close()
        self.arena.close()

    def _beat(self) -> None:
        period_s = min(HEARTBEAT_PERIOD_S, self._registered.lease_ttl_s / 4)
        while self._lost is None and not self._leaving.wait(period_s):
            try:
                self._renew()
            except PoolError as error:
                if not self._leaving.is_set():
                    logger.warning("worker %s lost its pool: %s", self.worker, error)


def _map_devices(pool: Registered, address: str, device: tuple[Driver, str] | None) -> DeviceArenas:
    if device is None:
        raise PoolError("the pages of the pool are on devices, and this worker computes on none")
    shape = ArenaShape(pool.sizes, pool.page_bytes, pool.devices, pool.are_apart)
    driver, name = device
    home = (HOST, *pool.devices)[index_of_home(pool)]
    descriptors = receive(descriptors_path(address), shape.accessed(name, home))
    try:
        return DeviceArenas(pool.arena, shape, driver, descriptors, name, home)
    finally:
        for descriptor in descriptors.values():
            os.close(descriptor)
