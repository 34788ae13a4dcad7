"""A pool that frees the raw pages of a prompt only when its request ends.

The ablation of zombie reclaim: FastCache's baseline without its memory pool keeps the cache from
before compression beside the compressed one.
"""

from collections.abc import Sequence
from typing import Any

from triptych.core.handles import LeaseId, LeaseRef
from triptych.kvpool import About, LocalPool, PinId
from triptych.kvpool.pool.leases import Commit


class KeptRawPages(LocalPool):
    """``LocalPool`` in which the leases that a compressor ends live as long as the new ones.

    The router does not know of them: it is for memory that is never short. A prefix cache and
    layerwise prefill, which free raw pages by other calls, must be off.

    Source: FastCache, sections 3.2 and 5.3 (pre-compression caches are reclaimed at once)
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        """As ``LocalPool``."""
        self._kept = dict[LeaseId, LeaseId]()
        """The raw lease beside each compressed one."""
        super().__init__(*args, **kwargs)

    def handoff(
        self,
        commits: Sequence[Commit],
        releases: Sequence[LeaseId] = (),
        *,
        keep: bool = False,
        about: Sequence[About] = (),
        pins: Sequence[PinId | None] = (),
    ) -> list[LeaseRef]:
        """As ``LocalPool``; ``releases``, one for each commit, are kept until it ends."""
        made = super().handoff(commits, (), keep=keep, about=about, pins=pins)
        if releases:
            pairs = zip(made, releases, strict=True)
            self._kept.update((ref.lease, raw) for ref, raw in pairs)
        return made

    def release(self, leases: Sequence[LeaseId], *, keep: bool = False) -> None:
        """End leases, and the raw ones that were kept beside them."""
        raw = [self._kept.pop(lease) for lease in leases if lease in self._kept]
        super().release([*leases, *raw], keep=keep)
