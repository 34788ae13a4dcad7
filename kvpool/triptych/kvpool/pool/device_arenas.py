"""Arenas in the memory of devices, which all processes of a pool map into a range of addresses.

Page ``p`` of a pool begins at ``address + p * page_bytes``, whatever memory it lies in. So kernels
read pages of another device, and write pages there, as they do with their own. Where devices cannot
access each other they are *apart*: each process maps the arenas of the host and of its own device,
and raw pages alone lie on devices.

``Driver`` is what this takes of the driver of the devices: ``cuda_driver`` has that of NVIDIA.
"""

import ctypes
import logging
import math
import os
import secrets
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from triptych.core.errors import PoolError
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
        """Why processes cannot share memory of these devices and of the host; empty: they can."""
        ...

    def cut(self, devices: Sequence[str]) -> str:
        """Which of these devices cannot access each other, in words; empty: all can.

        Raises: PoolError if the driver answers with an error
        """
        ...

    def create(self, device: str, nbytes: int) -> int:
        """Allocate memory of zeros on a device or the host, and return a descriptor of it.

        The memory lasts as long as a process has the descriptor or a mapping.

        Raises: PoolError if there is too little
        """
        ...

    def map(self, parts: Sequence[tuple[int | None, int]], device: str) -> int:
        """Map memory by (descriptor, bytes), one after another, for a device of this process.

        The host can read and write the first part only, and nobody those without a descriptor.
        Descriptors may be closed afterwards.

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
    are_apart: bool = False
    """Whether each device has access to the host and itself alone."""

    @classmethod
    def of(
        cls, driver: Driver, host_bytes: int, device_bytes: int, page_bytes: int,
        devices: Sequence[str], *, are_apart: bool = False,
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
        return cls((host, *(each for _ in devices)), page_bytes, tuple(devices), are_apart)

    @property
    def parts(self) -> list[tuple[str, int]]:
        """Device and bytes of each arena."""
        sizes = [pages * self.page_bytes for pages in self.pages]
        return list(zip((HOST, *self.devices), sizes, strict=True))

    def accessed(self, device: str, home: str) -> list[int]:
        """Indices of the arenas that a worker on a device reads and writes; ``home``: its own."""
        if device == HOST:
            return [0]
        if not self.are_apart:
            return list(range(len(self.pages)))
        return [0] if home == HOST else [0, self.index_of(home)]

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
        self, pool_id: str, shape: ArenaShape, driver: Driver, descriptors: Mapping[int, int],
        device: str = HOST, home: str | None = None,
    ) -> None:  # fmt: skip
        """``descriptors``: of the arenas that are mapped, by index. ``home``: the device of the
        arena where this process allocates; None: ``device``.

        Raises: PoolError if the driver refuses
        """
        self.id, self.shape, self.device = pool_id, shape, device
        self.pages, self.page_bytes = sum(shape.pages), shape.page_bytes
        self.driver = driver
        self.home = device if home is None else home
        sizes = [nbytes for _, nbytes in shape.parts]
        parts = [(descriptors.get(index), nbytes) for index, nbytes in enumerate(sizes)]
        self._address = driver.map(parts, device)
        self._nbytes = sum(sizes)

    @property
    def stores_at_host(self) -> bool:
        """Whether a process with a device has its home in host memory."""
        return self.device != HOST and self.home == HOST

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


class OwnedArenas:
    """Arenas of the pool process, and the descriptors with which workers map them.

    Memory of devices that are apart is allocated when a worker with its home there asks for it: no
    page lies on the device of a decode worker, which needs the memory for its copies.
    """

    def __init__(self, memory: DeviceMemory, shape: ArenaShape) -> None:
        """Raises: PoolError if there is too little memory, or the driver refuses."""
        self.driver, self._lock = memory.driver, threading.Lock()
        self._descriptors, self._shape = dict[int, int](), shape
        try:
            for index in range(1 if shape.are_apart else len(shape.pages)):
                self.descriptor(index)
            pool_id = f"triptych-{os.getuid()}-{secrets.token_hex(8)}"
            self.arenas = DeviceArenas(pool_id, shape, self.driver, self._descriptors)
        except PoolError:
            self.close()
            raise

    def descriptor(self, index: int) -> int:
        """The descriptor of an arena, which is allocated if it is not yet.

        Raises: PoolError if there is too little memory, or no such arena
        """
        if index >= len(self._shape.pages):
            raise PoolError(f"no arena {index}: the pool has {len(self._shape.pages)}")
        with self._lock:
            if index not in self._descriptors:
                device, nbytes = self._shape.parts[index]
                self._descriptors[index] = self.driver.create(device, nbytes)
                logger.info("an arena of %s bytes on %s", f"{nbytes:,}", device or "the host")
            return self._descriptors[index]

    def close(self) -> None:
        """Close the descriptors of this process."""
        with self._lock:
            for descriptor in self._descriptors.values():
                os.close(descriptor)
            self._descriptors.clear()


def open_arenas(
    memory: DeviceMemory, device_bytes: int, page_bytes: int, address: str, *, has_other_nodes: bool
) -> OwnedArenas | None:
    """Allocate an arena in host memory and one of ``device_bytes`` on each device.

    If devices cannot access each other, that of the host has as many bytes more, for all pages but
    raw ones. ``address``: that of the pool's socket; empty: a Unix socket. None if it cannot be
    done. A line in the log says what was chosen, and why.
    """
    refusal = memory.refusal(address or "unix:", has_other_nodes=has_other_nodes)
    if not refusal:
        try:
            cut = memory.driver.cut(memory.devices)
            host_bytes = memory.host_bytes + device_bytes * bool(cut)
            shape = ArenaShape.of(
                memory.driver, host_bytes, device_bytes, page_bytes, memory.devices,
                are_apart=bool(cut),
            )  # fmt: skip
            owned = OwnedArenas(memory, shape)
        except PoolError as error:
            refusal = str(error)
        else:
            sizes = ", ".join(f"{nbytes:,} on {name or 'the host'}" for name, nbytes in shape.parts)
            logger.info("pages are in arenas of %s bytes", sizes)
            if cut:
                logger.warning(
                    "pool.arena=device: raw pages stay on the GPU of their prefill worker, encoded "
                    "ones are in host memory, and decode workers keep copies, because %s",
                    cut,
                )
            return owned
    logger.warning(
        "pool.arena=device: pages are in host memory, and each GPU keeps copies, because %s",
        refusal,
    )
    return None
