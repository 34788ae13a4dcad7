"""Pages of the pool as kernels access them: in the arenas, or as copies in GPU memory.

If the pool has arenas on GPUs that access each other, kernels use all of them in place. Where these
do not, so do prefill and compression, and decode has its pages in host memory. The rest is about
those. A CPU reads and writes the arena itself. On a GPU, prefill and compression access the arena
over the bus, since they touch a page once. Decode reads every page of a request at each step, so it
keeps copies in GPU memory under the same page ids. It writes to both, so the arena always agrees
with the checkpoint and a takeover worker can read it.
"""

import logging
from collections import Counter
from dataclasses import dataclass, field
from typing import Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from triptych.core.pages.page_plan import NEAR_SHARE
from triptych.kvpool import Arena, DeviceArenas
from triptych.workers.device import Device

logger = logging.getLogger(__name__)

Ids = NDArray[np.int32]
Link = Literal["own", "peer", "bus"]
"""What a page crosses between its memory and an engine: nothing, a link of devices, the bus."""

NO_PAGES: Ids = np.empty(0, np.int32)


@dataclass(frozen=True)
class DevicePages:
    """An arena and the tensor that kernels use for it.

    Both are uint8 [pages, bytes of a page] on ``device``, and the same tensor if kernels use the
    arena itself.
    """

    device: Device
    shared: Tensor
    """The arena, which other processes map too."""
    near: Tensor
    """The tensor that the engine's kernels read and write."""
    on_devices: DeviceArenas | None = None
    """The arenas, if they are on devices; None: pages are in host memory."""
    traffic: Counter[Link] = field(default_factory=Counter[Link])
    """Bytes of whole pages that the engine reported as read or written, by what they crossed."""

    @classmethod
    def in_place(cls, arena: Arena, device: Device) -> "DevicePages":
        """Use the arena itself."""
        shared = device.share_arena(arena)
        return cls(device, shared, shared, arena if isinstance(arena, DeviceArenas) else None)

    @classmethod
    def nearest(cls, arena: Arena, device: Device) -> "DevicePages":
        """Use copies in device memory if the device is not the host and has room for them."""
        memory = cls.in_place(arena, device)
        arenas = memory.on_devices
        if device.is_host or (arenas is not None and not arenas.stores_at_host):
            return memory
        wanted, free = arena.data.nbytes, device.free_bytes
        if wanted > NEAR_SHARE * free:
            logger.warning(
                "pages are read over the bus at each step: copies of pool.kv_cache_memory_bytes=%s "
                "take more than %.0f %% of the GPU's %s free bytes; lower it, or add router shards "
                "(router.shards), which have a pool each",
                f"{wanted:,}",
                100 * NEAR_SHARE,
                f"{free:,}",
            )
            return memory
        at_host = memory.shared[: len(arena.data)]
        return cls(device, at_host, torch.empty_like(at_host), arenas)

    @property
    def is_copied(self) -> bool:
        """Whether kernels use copies instead of the arena."""
        return self.near is not self.shared

    @property
    def behind(self) -> "DevicePages":
        """The same arena without copies."""
        return DevicePages(self.device, self.shared, self.shared, self.on_devices, self.traffic)

    @property
    def mirror(self) -> Tensor | None:
        """The arena, where kernels that write to the copies write too; None without copies."""
        return self.shared if self.is_copied else None

    def fetch(self, ids: Ids) -> None:
        """Copy pages that other processes have written to the device."""
        if self.is_copied:
            self.touch(np.unique(ids))
            _copy(self.shared, self.near, self._places(ids))

    def save(self, ids: Ids) -> None:
        """Copy written pages to the arena; call it before other processes learn of them."""
        self.queue_save(ids)
        self.device.wait()

    def queue_save(self, ids: Ids) -> None:
        """Have the device copy written pages to the arena after what is queued so far."""
        if self.is_copied:
            self.touch(np.unique(ids))
            _copy(self.near, self.shared, self._places(ids))

    def touch(self, ids: Ids) -> None:
        """Count whole pages that the engine reads, or writes, outside of decode steps.

        Each is counted by where it lies: in the memory of the engine's device (``own``), of another
        device (``peer``), or of the host (``bus``), which is that of a CPU.
        """
        for link, pages in self._by_link(ids).items():
            self.traffic[link] += pages * self.near.shape[1]

    def _by_link(self, ids: Ids) -> dict[Link, int]:
        if self.device.is_host:
            return {"own": ids.size}
        arenas = self.on_devices
        if arenas is None:
            return {"bus": ids.size}
        counts = np.bincount(arenas.arenas_of(ids), minlength=len(arenas.shape.pages))
        home = arenas.shape.index_of(arenas.device)
        own, bus = int(counts[home]), int(counts[0])
        return {"own": own, "peer": ids.size - own - bus, "bus": bus}

    def _places(self, ids: Ids) -> Tensor:
        return self.device.put(np.unique(ids).astype(np.int64))


def _copy(source: Tensor, target: Tensor, pages: Tensor) -> None:
    """Copy whole pages, eight bytes at a time."""
    target.view(torch.int64)[pages] = source.view(torch.int64)[pages]
