"""Pages and leases of a worker: allocate and free, hand requests off, attach and take them over."""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from triptych.core.errors import PoolError, StaleHandle
from triptych.core.handles import LeaseId, LeaseRef
from triptych.kvpool.pool.free_list import PageIds
from triptych.kvpool.pool.leases import NOTHING_TOLD, About, Commit
from triptych.kvpool.prefix.blocks import PinId
from triptych.kvpool.rpc import calls
from triptych.kvpool.rpc.client.registration import Registration
from triptych.kvpool.rpc.page_ranges import PageRanges


class PageLeases(Registration):
    """The pages that a worker holds, and the leases by which requests pass from stage to stage.

    ``allocate`` and ``free`` work on a local page cache and call the pool only when the cache
    has too few or too many pages.
    """

    def allocate(self, count: int, arena: str = "") -> PageIds:
        """Allocate pages to write into, at home unless another arena of the pool is named.

        Shapes:  -> (count,) ids
        Raises:  PoolExhausted, and nothing is lost; PoolUnavailable; NotRegistered
        """
        with self._lock:
            self._require_registered()
            if arena and arena != self.home:
                if not self.has(arena):
                    raise PoolError(f"arena {arena} is not accessed from {self.home}")
                asked = calls.AllocatePages(
                    worker=self._id, pages=count, at_least=count, arena=arena
                )
                ids = self._ask(asked).pages.ids(self._registered.pages)
                return self._page_cache.allocate_granted(ids)
            short = count - len(self._page_cache)
            if short > 0:
                pages = max(short, self._registered.extent_pages)
                asked = calls.AllocatePages(worker=self._id, pages=pages, at_least=short)
                allocated = self._ask(asked).pages.ids(self._registered.pages)
                # A pool in one process allocates exactly as many as are needed: the usual case.
                if allocated.size == count and not len(self._page_cache):
                    return self._page_cache.allocate_granted(allocated)
                self._page_cache.add(allocated)
            return self._page_cache.allocate(count)

    def free(self, ids: PageIds) -> None:
        """Free pages that were allocated here, or kept from a released lease.

        Raises: NotHeld if one was not, or comes twice; nothing changes
        """
        with self._lock:
            self._require_registered()
            if len(self._registered.sizes) > 1:
                ids = self._free_elsewhere(ids)
            self._page_cache.free(ids)
            extent = self._registered.extent_pages
            if len(self._page_cache) > 2 * extent:
                self._free_idle(len(self._page_cache) - extent)

    def _free_elsewhere(self, ids: PageIds) -> PageIds:
        """Free those of some pages that are not at home, and return the others."""
        at_home = (ids >= self._home.start) & (ids < self._home.stop)
        others = ids[~at_home]
        if others.size:
            self._page_cache.give_back(others)
            self._ask(calls.FreePages(worker=self._id, pages=PageRanges(others)))
        return ids[at_home]

    def handoff(
        self,
        commits: Sequence[Commit],
        releases: Sequence[LeaseId] = (),
        *,
        keep: bool = False,
        about: Sequence[About] = (),
        pins: Sequence[PinId | None] = (),
    ) -> list[LeaseRef]:
        """Put pages under new leases for the next stage, and end other leases, in one step.

        ``commits`` are (request, ids): pages allocated here, or of leases attached here, in any
        mix. The pages left in the released leases become free in the same step; with ``keep``
        they count as allocated here. Until another worker attaches a lease, ``release`` ends it.
        ``about`` gives the tenant and the page formats of each commit, or of none; the pool uses
        it for statistics only.

        The last pages of a commit may belong to a cached prefix: to one of ``pins``, which are
        pins of this worker, one per commit or none at all, or to a released lease of the same
        request. The pin moves on with the request, and must not be released here any more.

        Raises: NotHeld, StaleHandle, PoolError: nothing changed; PoolUnavailable; NotRegistered
        """
        told = about or [NOTHING_TOLD] * len(commits)
        pinned = pins or [None] * len(commits)
        with self._lock:
            self._require_registered()
            for _, ids in commits:
                self._page_cache.require_in_use(ids)
            asked = calls.HandOff(
                worker=self._id,
                commits=tuple(
                    calls.CommitPages(label, PageRanges(ids), each, pin)
                    for (label, ids), each, pin in zip(commits, told, pinned, strict=True)
                ),
                releases=tuple(releases),
                keep=keep,
            )
            lease_refs = self._ask(asked).exactly(len(commits))
            for lease_ref, (_, ids) in zip(lease_refs, commits, strict=True):
                self._page_cache.committed(lease_ref.lease, _own(lease_ref, ids))
            self._page_cache.released(releases, keep=keep)
            return lease_refs

    def attach(self, wanted: Sequence[tuple[LeaseRef, PageIds]]) -> list[LeaseRef]:
        """Take over leases that another worker handed off; returns the new references to them.

        ``wanted`` are references with all page ids of their handles, in any order, except that
        shared pages come last.

        Raises: StaleHandle, NotHeld: nothing changed; PoolUnavailable; NotRegistered
        """
        with self._lock:
            self._require_registered()
            for lease_ref, _ in wanted:
                if not self.has(lease_ref.arena):
                    raise StaleHandle(
                        lease_ref.lease, f"arena {lease_ref.arena} is not accessed from {self.home}"
                    )
            asked = calls.AttachLeases(
                worker=self._id,
                wanted=tuple(calls.LeasePages(each, PageRanges(ids)) for each, ids in wanted),
            )
            lease_refs = self._ask(asked).exactly(len(wanted))
            for lease_ref, (_, ids) in zip(lease_refs, wanted, strict=True):
                self._page_cache.attached(lease_ref.lease, _own(lease_ref, ids))
            return lease_refs

    def release(self, leases: Sequence[LeaseId], *, keep: bool = False) -> None:
        """End leases of this worker; their pages become free, or with ``keep`` allocated here.

        Raises: StaleHandle: nothing changed; PoolUnavailable; NotRegistered
        """
        with self._lock:
            self._call(calls.ReleaseLeases(worker=self._id, leases=tuple(leases), keep=keep))
            self._page_cache.released(leases, keep=keep)

    def withdraw(self, requests: Sequence[str]) -> None:
        """End all leases that this worker has for these requests, and free their pages.

        A lease that another worker has attached is not touched.

        Raises: PoolUnavailable; NotRegistered
        """
        asked = calls.WithdrawRequests(worker=self._id, labels=tuple(requests))
        with self._lock:
            self._page_cache.released(self._call(asked).leases, keep=False)

    def withdraw_all(self) -> None:
        """End all request leases of this worker, also those that nobody has attached yet.

        Raises: PoolUnavailable; NotRegistered
        """
        with self._lock:
            ended = self._call(calls.WithdrawAll(worker=self._id)).leases
            self._page_cache.released(ended, keep=False)

    def inherit(self, previous_worker: str) -> NDArray[np.uint8]:
        """Map the checkpoint of a dead worker. If the worker still runs, the pool ends it first.

        Raises: StaleHandle if there is none; PoolUnavailable
        """
        left = self._proxy.call(calls.InheritFrom(previous_worker=previous_worker))
        return self._open_checkpoint(left.checkpoint, left.checkpoint_bytes).data[0]

    def adopt(
        self, previous_worker: str, request: str, lease: LeaseId | None, ids: PageIds
    ) -> LeaseRef:
        """Take over one request of a dead worker with exactly these pages, shared ones last.

        None for ``lease``: the last lease that the pool has for the request.

        Raises: StaleHandle, NotHeld: nothing changed; PoolUnavailable; NotRegistered
        """
        asked = calls.AdoptRequest(
            worker=self._id,
            previous_worker=previous_worker,
            label=request,
            lease=lease,
            pages=PageRanges(ids),
        )
        with self._lock:
            (lease_ref,) = self._call(asked).exactly(1)
            self._page_cache.attached(lease_ref.lease, _own(lease_ref, ids))
            return lease_ref


def _own(lease_ref: LeaseRef, ids: PageIds) -> PageIds:
    """The pages of a lease that are not shared."""
    return ids[: ids.size - lease_ref.shared]
