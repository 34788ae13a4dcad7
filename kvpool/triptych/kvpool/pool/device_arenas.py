"""Arenas in the memory of devices, which all processes of a pool map into a range of addresses.

Page ``p`` of a pool begins at ``address + p * page_bytes``, whatever memory it lies in. So kernels
read pages of another device, and write pages there, as they do with their own.

``Driver`` is what this takes of the driver of the devices: ``cuda_driver`` has that of NVIDIA.
"""

import ctypes
import logging
import math
import os
import secrets
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from triptych.core.errors import PoolError
from triptych.core.handles import arena_id
from triptych.kvpool.pool.arena import Arena
from triptych.kvpool.pool.processes import ProcessKey

logger = logging.getLogger(__name__)

HOST = ""
"""The device of an arena in host memory."""


class Driver(Protocol):
    """Memory that devices and processes share. Sizes are multiples of ``granularity``."""

    granularity: int
    """Bytes."""

    def refusal(self, devices: Sequence[str]) -> str:
        """Why memory of these devices cannot be shared by all of them; empty: it can."""
        ...

    def create(self, device: str, nbytes: int) -> int:
        """Allocate memory of zeros on a device or the host, and return a descriptor of it.

        The memory lasts as long as a process has the descriptor or a mapping.

        Raises: PoolError if there is too little
        """
        ...

    def map(self, parts: Sequence[tuple[int, int]], device: str) -> int:
        """Map memory by (descriptor, bytes), one after another, for a device of this process.

        The host can read and write the first part only. Descriptors may be closed afterwards.

        Returns: the address of the first byte
        Raises: PoolError if the driver refuses
        """
        ...

    def unmap(self, address: int, nbytes: int) -> None:
        """Undo ``map``."""
        ...

    def revoke(self, process: ProcessKey) -> bool:
        """Whether no write of a dead process can reach any memory any more.

        Devices do what is queued for them, after the process that queued it has died as well.
        """
        ...


@dataclass(frozen=True, slots=True)
class ArenaShape:
    """Where the pages of a pool lie: one arena in host memory, and one on each device."""

    pages: tuple[int, ...]
    """Of each arena; that of the host is the first one."""
    page_bytes: int
    devices: tuple[str, ...]
    """Device of each arena behind the first one."""

    @classmethod
    def of(
        cls, driver: Driver, host_bytes: int, device_bytes: int, page_bytes: int,
        devices: Sequence[str],
    ) -> "ArenaShape":  # fmt: skip
        """At least ``host_bytes``, and at most ``device_bytes`` on each device.

        All arenas begin at a multiple of the granularity and of the page.

        Raises: PoolError if a device would have no page
        """
        step = driver.granularity // math.gcd(driver.granularity, page_bytes)
        least = -(-host_bytes // page_bytes)
        host = max(1, -(-least // step)) * step
        each = device_bytes // page_bytes // step * step
        if each < 1:
            raise PoolError(
                f"an arena of {device_bytes:,} bytes: raise pool.kv_cache_memory_bytes to at least "
                f"{step * page_bytes:,}"
            )
        return cls((host, *(each for _ in devices)), page_bytes, tuple(devices))

    @property
    def parts(self) -> list[tuple[str, int]]:
        """Device and bytes of each arena."""
        sizes = [pages * self.page_bytes for pages in self.pages]
        return list(zip((HOST, *self.devices), sizes, strict=True))

    def index_of(self, device: str) -> int:
        """Index of the arena on a device.

        Raises: PoolError if the pool has none there
        """
        if device == HOST:
            return 0
        if device not in self.devices:
            raise PoolError(f"the pool has no arena on {device}: it has {list(self.devices)}")
        return 1 + self.devices.index(device)


@dataclass(frozen=True, slots=True)
class DeviceMemory:
    """The driver, devices and host memory of a pool with an arena on each device."""

    driver: Driver
    devices: tuple[str, ...]
    host_bytes: int
    """Of the arena in host memory, for prefixes and features of images."""

    def refusal(self, address: str, *, has_other_nodes: bool) -> str:
        """Why a pool with this address cannot have such arenas; empty: it can."""
        if has_other_nodes:
            return "pages of several nodes are sent from host memory: use one node"
        if not address.startswith("unix:"):
            return f"descriptors of memory need a Unix socket, and the pool is at {address}"
        return self.driver.refusal(self.devices)


class DeviceArenas(Arena):
    """All arenas of a pool, mapped for one device of this process."""

    is_on_disk = False

    def __init__(
        self, pool_id: str, shape: ArenaShape, driver: Driver, descriptors: Sequence[int],
        device: str = HOST,
    ) -> None:  # fmt: skip
        """Raises: PoolError if the driver refuses."""
        self.id, self.shape, self.device = pool_id, shape, device
        self.pages, self.page_bytes = sum(shape.pages), shape.page_bytes
        self.driver = driver
        sizes = [nbytes for _, nbytes in shape.parts]
        self._address = driver.map(list(zip(descriptors, sizes, strict=True)), device)
        self._nbytes = sum(sizes)

    @property
    def home(self) -> str:
        """Id of the arena on its device."""
        return arena_id(self.id, self.shape.index_of(self.device))

    @property
    def address(self) -> int:
        """Address of page 0 for kernels of the device."""
        if not self._address:
            raise PoolError(f"arena {self.id} is closed")
        return self._address

    @property
    def data(self) -> NDArray[np.uint8]:
        """The pages of the host arena, which come first. Shapes: (host pages, page_bytes)."""
        pages = (ctypes.c_uint8 * self.shape.parts[0][1]).from_address(self.address)
        return np.frombuffer(memoryview(pages), np.uint8).reshape(-1, self.page_bytes)

    def arenas_of(self, ids: NDArray[np.int32]) -> NDArray[np.intp]:
        """Index of the arena of each page."""
        return np.searchsorted(np.cumsum(self.shape.pages), ids, side="right")

    def will_need(self, ids: NDArray[np.int32]) -> None:
        """Do nothing: all pages are there."""

    def reserve(self, first: int, end: int) -> None:
        """Do nothing: all pages are there."""

    def unlink(self) -> None:
        """Do nothing: there is no file."""

    def close(self) -> None:
        """Unmap the pages."""
        if self._address:
            self.driver.unmap(self._address, self._nbytes)
            self._address = 0


@dataclass(frozen=True, slots=True)
class OwnedArenas:
    """Arenas of the pool process, and what its workers need to map them."""

    arenas: DeviceArenas
    descriptors: tuple[int, ...]
    driver: Driver


def open_arenas(
    memory: DeviceMemory, device_bytes: int, page_bytes: int, address: str, *, has_other_nodes: bool
) -> OwnedArenas | None:
    """Allocate an arena in host memory and one of ``device_bytes`` on each device.

    ``address``: that of the pool's socket; empty: a Unix socket. None if it cannot be done; a line
    in the log says why.
    """
    refusal = memory.refusal(address or "unix:", has_other_nodes=has_other_nodes)
    descriptors = list[int]()
    if not refusal:
        try:
            shape = ArenaShape.of(
                memory.driver, memory.host_bytes, device_bytes, page_bytes, memory.devices
            )
            for device, nbytes in shape.parts:
                descriptors.append(memory.driver.create(device, nbytes))
            pool_id = f"triptych-{os.getuid()}-{secrets.token_hex(8)}"
            arenas = DeviceArenas(pool_id, shape, memory.driver, descriptors)
        except PoolError as error:
            refusal = str(error)
            for descriptor in descriptors:
                os.close(descriptor)
        else:
            sizes = ", ".join(f"{nbytes:,} on {name or 'the host'}" for name, nbytes in shape.parts)
            logger.info("pages are in arenas of %s bytes", sizes)
            return OwnedArenas(arenas, tuple(descriptors), memory.driver)
    logger.warning(
        "pool.arena=device: pages are in host memory, and each GPU keeps copies, because %s",
        refusal,
    )
    return None
