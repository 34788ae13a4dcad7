"""Pages of the pool as kernels access them: in the arena, or as copies in GPU memory.

A CPU reads and writes the arena itself. On a GPU, prefill and compression access the arena over
the bus, since they touch a page once. Decode reads every page of a request at each step, so it
keeps copies in GPU memory under the same page ids. It writes to both, so the arena always agrees
with the checkpoint and a takeover worker can read it.
"""

import logging
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from triptych.core.pages import NEAR_SHARE
from triptych.kvpool import Arena
from triptych.workers.device import Device

logger = logging.getLogger(__name__)

Ids = NDArray[np.int32]

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

    @classmethod
    def in_place(cls, arena: Arena, device: Device) -> "DevicePages":
        """Use the arena itself."""
        shared = device.share(arena.data)
        return cls(device, shared, shared)

    @classmethod
    def nearest(cls, arena: Arena, device: Device) -> "DevicePages":
        """Use copies in device memory if the device is not the host and has room for them."""
        memory, wanted, free = cls.in_place(arena, device), arena.data.nbytes, device.free_bytes
        if device.is_host:
            return memory
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
        return cls(device, memory.shared, torch.empty_like(memory.shared))

    @property
    def is_copied(self) -> bool:
        """Whether kernels use copies instead of the arena."""
        return self.near is not self.shared

    @property
    def behind(self) -> "DevicePages":
        """The same arena without copies."""
        return DevicePages(self.device, self.shared, self.shared)

    @property
    def mirror(self) -> Tensor | None:
        """The arena, where kernels that write to the copies write too; None without copies."""
        return self.shared if self.is_copied else None

    def fetch(self, ids: Ids) -> None:
        """Copy pages that other processes have written to the device."""
        if self.is_copied:
            _copy(self.shared, self.near, self._places(ids))

    def save(self, ids: Ids) -> None:
        """Copy written pages to the arena; call it before other processes learn of them."""
        if self.is_copied:
            _copy(self.near, self.shared, self._places(ids))
        self.device.wait()

    def _places(self, ids: Ids) -> Tensor:
        return self.device.put(np.unique(ids).astype(np.int64))


def _copy(source: Tensor, target: Tensor, pages: Tensor) -> None:
    """Copy whole pages, eight bytes at a time."""
    target.view(torch.int64)[pages] = source.view(torch.int64)[pages]
