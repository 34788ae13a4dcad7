"""The pool's calls over a socket."""

from collections.abc import Sequence
from typing import TypeVar

from triptych.core.errors import MessageError
from triptych.core.handles import LeaseId, LeaseRef
from triptych.core.messages import BorrowCacheMemory, CacheMemoryBorrowed, Message, pack, unpack
from triptych.kvpool.disk.tier import Coming
from triptych.kvpool.pool.free_list import PageIds
from triptych.kvpool.pool.leases import NOTHING_TOLD, About, Commit, WorkerId
from triptych.kvpool.pool.processes import ProcessKey
from triptych.kvpool.pool.stats import PageMap, PoolStats
from triptych.kvpool.prefix.blocks import Namespace, PinId, Publication, TokenIds, encode
from triptych.kvpool.prefix.cache import FoundPrefix
from triptych.kvpool.rpc import messages, page_ranges
from triptych.kvpool.rpc.channel import FrameChannel

A = TypeVar("A")


class PoolStub:
    """``PoolCalls`` over a channel. Errors of the pool are raised here with the same type."""

    def __init__(
        self, channel: FrameChannel, connect_timeout_s: float, *, wait: bool = True
    ) -> None:
        """``wait`` for a pool that is still starting, or fail at once if it is not there."""
        self._channel = channel
        self._wait = wait
        self._connect_timeout_s = connect_timeout_s
        self._timeout_s = connect_timeout_s
        self._pages = 0

    def register(
        self, name: str, process: ProcessKey, checkpoint_bytes: int
    ) -> messages.Registered:
        asked = messages.RegisterWorker(
            name=name, process=process, checkpoint_bytes=checkpoint_bytes
        )
        frame = self._channel.ask(pack([asked]), self._connect_timeout_s, wait=self._wait)
        made = _only(frame, messages.Registered)
        self._pages = made.pages
        # A worker that waited longer than this for an answer has lost its leases anyway.
        # A guest calls several pools: one that is stuck must not cost it its leases at others.
        self._timeout_s = made.lease_ttl_s if self._wait else made.lease_ttl_s / 4
        return made

    def renew(self, worker: WorkerId) -> int:
        asked = messages.RenewWorker(worker=worker)
        return self._ask(asked, messages.Renewed).lacking_pages

    def unregister(self, worker: WorkerId) -> None:
        self._ask(messages.UnregisterWorker(worker=worker), messages.PoolDone)

    def expel(self, name: str) -> bool:
        return self._ask(messages.ExpelWorker(name=name), messages.Expelled).was_there

    def allocate(self, worker: WorkerId, pages: int, at_least: int) -> PageIds:
        asked = messages.AllocatePages(worker=worker, pages=pages, at_least=at_least)
        return page_ranges.unpack(self._ask(asked, messages.PagesAllocated).pages, self._pages)

    def free(self, worker: WorkerId, ids: PageIds) -> None:
        asked = messages.FreePages(worker=worker, pages=page_ranges.pack(ids))
        self._ask(asked, messages.PoolDone)

    def handoff(
        self,
        worker: WorkerId,
        commits: Sequence[Commit],
        releases: Sequence[LeaseId],
        *,
        keep: bool,
        about: Sequence[About] = (),
        pins: Sequence[PinId | None] = (),
    ) -> list[LeaseRef]:
        told = about or [NOTHING_TOLD] * len(commits)
        held = pins or [None] * len(commits)
        asked = messages.HandOff(
            worker=worker,
            commits=tuple(
                messages.CommitPages(label, page_ranges.pack(ids), each, pin)
                for (label, ids), each, pin in zip(commits, told, held, strict=True)
            ),
            releases=tuple(releases),
            keep=keep,
        )
        return self._ask_claims(asked, len(commits))

    def attach(
        self, worker: WorkerId, wanted: Sequence[tuple[LeaseRef, PageIds]]
    ) -> list[LeaseRef]:
        pages = tuple(
            messages.LeasePages(lease_ref, page_ranges.pack(ids)) for lease_ref, ids in wanted
        )
        asked = messages.AttachLeases(worker=worker, wanted=pages)
        return self._ask_claims(asked, len(wanted))

    def release(self, worker: WorkerId, leases: Sequence[LeaseId], *, keep: bool) -> None:
        asked = messages.ReleaseLeases(worker=worker, leases=tuple(leases), keep=keep)
        self._ask(asked, messages.PoolDone)

    def withdraw(self, worker: WorkerId, labels: Sequence[str]) -> list[LeaseId]:
        asked = messages.WithdrawRequests(worker=worker, labels=tuple(labels))
        return list(self._ask(asked, messages.Withdrawn).leases)

    def withdraw_all(self, worker: WorkerId) -> list[LeaseId]:
        return list(self._ask(messages.WithdrawAll(worker=worker), messages.Withdrawn).leases)

    def inherit(self, previous_worker: str) -> messages.Inheritance:
        return self._ask(
            messages.InheritFrom(previous_worker=previous_worker), messages.Inheritance
        )

    def adopt(
        self,
        worker: WorkerId,
        previous_worker: str,
        label: str,
        lease: LeaseId | None,
        ids: PageIds,
    ) -> LeaseRef:
        asked = messages.AdoptRequest(
            worker=worker,
            previous_worker=previous_worker,
            label=label,
            lease=lease,
            pages=page_ranges.pack(ids),
        )
        (lease_ref,) = self._ask_claims(asked, 1)
        return lease_ref

    def find_prefix(
        self, worker: WorkerId, namespace: Namespace, tokens: TokenIds
    ) -> FoundPrefix | None:
        asked = messages.FindPrefix(worker=worker, namespace=namespace, tokens=encode(tokens))
        return self._ask(asked, messages.PrefixFound).found(self._pages)

    def pin_prefix(
        self, worker: WorkerId, namespace: Namespace, tokens: TokenIds
    ) -> FoundPrefix | None:
        asked = messages.PinPrefix(worker=worker, namespace=namespace, tokens=encode(tokens))
        return self._ask(asked, messages.PrefixFound).found(self._pages)

    def known_prefix(self, worker: WorkerId, namespace: Namespace, tokens: TokenIds) -> int:
        asked = messages.KnowPrefix(worker=worker, namespace=namespace, tokens=encode(tokens))
        return self._ask(asked, messages.PrefixBlocks).blocks

    def publish_prefix(self, worker: WorkerId, new: Publication) -> int:
        asked = messages.PublishPrefix(
            worker=worker,
            namespace=new.namespace,
            tokens=encode(new.tokens),
            blocks=tuple(map(page_ranges.pack, new.blocks)),
            seconds=new.seconds,
            tenant=new.tenant,
            formats=tuple(new.formats),
        )
        return self._ask(asked, messages.PrefixBlocks).blocks

    def restore_prefix(
        self, worker: WorkerId, namespace: Namespace, tokens: TokenIds, tenant: str
    ) -> Coming:
        asked = messages.RestorePrefix(
            worker=worker, namespace=namespace, tokens=encode(tokens), tenant=tenant
        )
        coming = self._ask(asked, messages.PrefixComing)
        return Coming(coming.blocks, coming.seconds)

    def keep_session(
        self,
        worker: WorkerId,
        namespace: Namespace,
        tokens: TokenIds,
        tenant: str,
        session: str,
    ) -> int:
        asked = messages.KeepSession(
            worker=worker,
            namespace=namespace,
            tokens=encode(tokens),
            tenant=tenant,
            session=session,
        )
        return self._ask(asked, messages.PrefixBlocks).blocks

    def release_prefix(self, worker: WorkerId, pin: PinId) -> None:
        self._ask(messages.ReleasePrefix(worker=worker, pin=pin), messages.PoolDone)

    def borrow_cache_memory(self, nbytes: int) -> CacheMemoryBorrowed:
        return self._ask(BorrowCacheMemory(bytes=nbytes), CacheMemoryBorrowed)

    def stat(self) -> PoolStats:
        return self._ask(messages.StatPool(), PoolStats)

    def map(self, max_cells: int) -> PageMap:
        return self._ask(messages.MapPages(max_cells=max_cells), PageMap)

    def check(self) -> list[str]:
        """Contradictions between the pool's tables; empty if there are none."""
        return list(self._ask(messages.CheckPool(), messages.Checked).faults)

    def read(self, worker: WorkerId, lease: LeaseId, ids: PageIds) -> bytes:
        """A ticket for pages of a lease that the worker has attached in another node's arena."""
        asked = messages.ReadPages(worker=worker, lease=lease, pages=page_ranges.pack(ids))
        return self._ask(asked, messages.PagesOffered).ticket

    def close(self) -> None:
        """Close the channel."""
        self._channel.close()

    def _ask(self, asked: Message, expected: type[A]) -> A:
        return _only(self._channel.ask(pack([asked]), self._timeout_s), expected)

    def _ask_claims(self, asked: Message, count: int) -> list[LeaseRef]:
        lease_refs = list(self._ask(asked, messages.LeaseRefs).lease_refs)
        if len(lease_refs) != count:
            raise MessageError(f"{len(lease_refs)} claims from the pool: expected {count}")
        return lease_refs


def _only(frame: bytes, expected: type[A]) -> A:
    match unpack(frame):
        case [messages.PoolRefused() as no]:
            raise messages.refused(no)
        case [answer] if isinstance(answer, expected):
            return answer
        case other:
            raise MessageError(f"the pool answered {other!r:.80}: expected {expected.__name__}")
