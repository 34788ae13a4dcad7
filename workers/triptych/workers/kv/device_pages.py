"""The pages of the pool as an engine sees them: in place, or in copies that are nearer.

A CPU reads and writes the arena itself. A GPU could as well, over the bus, and stages that touch a
page once do. Decoding reads every page of a request at each step, so it keeps copies in the GPU's
own memory, under the same page ids. What it writes goes to both: the arena always has what the
checkpoint says, and whoever takes over reads it there.
"""

import logging
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from triptych.core.layout import PageLayout
from triptych.core.pages import NEAR_SHARE
from triptych.kernels.pages import segments
from triptych.kvpool import Arena
from triptych.workers.device import Device

logger = logging.getLogger(__name__)

Ids = NDArray[np.int32]

NO_PAGES: Ids = np.empty(0, np.int32)


@dataclass(frozen=True)
class DevicePages:
    """An arena, and what kernels are given in its place.

    Both are uint8 [pages, bytes of a page] on ``device``, and the same tensor if pages are read in
    place.
    """

    device: Device
    shared: Tensor
    """The arena, whoever else has it mapped."""
    near: Tensor
    """What the engine's kernels read and write."""

    @classmethod
    def in_place(cls, arena: Arena, device: Device) -> "DevicePages":
        """Read the arena where it is."""
        shared = device.share(arena.data)
        return cls(device, shared, shared)

    @classmethod
    def nearest(cls, arena: Arena, device: Device) -> "DevicePages":
        """Read copies in the device's own memory, if that is not the arena's and has the room."""
        memory, wanted, free = cls.in_place(arena, device), arena.data.nbytes, device.free_bytes
        if device.is_host:
            return memory
        if wanted > NEAR_SHARE * free:
            logger.warning(
                "each step reads pages over the bus: a copy of pool.kv_cache_memory_bytes=%s takes "
                "more than %.0f %% of the GPU's %s free bytes; lower it, or add shards "
                "(router.shards), which have a pool each",
                f"{wanted:,}",
                100 * NEAR_SHARE,
                f"{free:,}",
            )
            return memory
        return cls(device, memory.shared, torch.empty_like(memory.shared))

    @property
    def is_copied(self) -> bool:
        """Whether pages are read elsewhere than in the arena."""
        return self.near is not self.shared

    @property
    def behind(self) -> "DevicePages":
        """The same arena, read in place."""
        return DevicePages(self.device, self.shared, self.shared)

    @property
    def arenas(self) -> list[Tensor]:
        """All that is to be written."""
        return [self.near, self.shared] if self.is_copied else [self.shared]

    def fetch(self, ids: Ids) -> None:
        """Bring pages near that others have written."""
        if self.is_copied:
            _copy(self.shared, self.near, self._places(ids))

    def save(self, ids: Ids) -> None:
        """Have the arena show what was written to pages, before anybody is told of it."""
        if self.is_copied:
            _copy(self.near, self.shared, self._places(ids))
        self.device.wait()

    def save_scores(self, layout: PageLayout, ids: Ids) -> None:
        """The same for the scores of pages alone."""
        if self.is_copied:
            at = self._places(ids)
            kept, written = (segments(part, layout).scores for part in (self.shared, self.near))
            kept[at] = written[at]
        self.device.wait()

    def _places(self, ids: Ids) -> Tensor:
        return self.device.put(np.unique(ids).astype(np.int64))


def _copy(source: Tensor, target: Tensor, pages: Tensor) -> None:
    """Copy whole pages, eight bytes at a time."""
    target.view(torch.int64)[pages] = source.view(torch.int64)[pages]
