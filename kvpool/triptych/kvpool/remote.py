"""The pool as a worker sees it through a socket."""

from collections.abc import Sequence
from typing import TypeVar

from triptych.core.errors import MessageError
from triptych.core.handles import Claim, LeaseId
from triptych.core.messages import Lend, Lent, Message, pack, unpack
from triptych.kvpool import protocol, runs
from triptych.kvpool.blocks import HoldId, Namespace, Publication, TokenIds, encode
from triptych.kvpool.disklevel import Coming
from triptych.kvpool.freelist import PageIds
from triptych.kvpool.ledger import Ledger
from triptych.kvpool.pagemap import PageMap
from triptych.kvpool.pool import NOTHING_TOLD, About, Commit, WorkerId
from triptych.kvpool.prefixcache import FoundPrefix
from triptych.kvpool.processes import ProcessKey
from triptych.kvpool.wire import FrameChannel

A = TypeVar("A")


class RemotePool:
    """``PoolCalls`` over a channel. Errors of the pool are raised here as what they are there."""

    def __init__(
        self, channel: FrameChannel, connect_timeout_s: float, *, wait: bool = True
    ) -> None:
        """``wait`` for a pool that is still starting, or take a closed door for an answer."""
        self._channel = channel
        self._wait = wait
        self._connect_timeout_s = connect_timeout_s
        self._timeout_s = connect_timeout_s
        self._pages = 0

    def register(self, name: str, process: ProcessKey, journal_bytes: int) -> protocol.Registered:
        asked = protocol.RegisterWorker(name=name, process=process, journal_bytes=journal_bytes)
        frame = self._channel.ask(pack([asked]), self._connect_timeout_s, wait=self._wait)
        made = _only(frame, protocol.Registered)
        self._pages = made.pages
        # A worker that waited longer than this for an answer has lost its lease anyway.
        # A guest asks several pools, and must not let one that is stuck cost it the others.
        self._timeout_s = made.lease_ttl_s if self._wait else made.lease_ttl_s / 4
        return made

    def renew(self, worker: WorkerId) -> int:
        asked = protocol.RenewWorker(worker=worker)
        return self._ask(asked, protocol.Renewed).lacking_pages

    def unregister(self, worker: WorkerId) -> None:
        self._ask(protocol.UnregisterWorker(worker=worker), protocol.PoolDone)

    def expel(self, name: str) -> bool:
        return self._ask(protocol.ExpelWorker(name=name), protocol.Expelled).was_there

    def grant(self, worker: WorkerId, pages: int, at_least: int) -> PageIds:
        asked = protocol.GrantPages(worker=worker, pages=pages, at_least=at_least)
        return runs.unpack(self._ask(asked, protocol.Granted).pages, self._pages)

    def give_back(self, worker: WorkerId, ids: PageIds) -> None:
        asked = protocol.GiveBackPages(worker=worker, pages=runs.pack(ids))
        self._ask(asked, protocol.PoolDone)

    def handoff(
        self,
        worker: WorkerId,
        commits: Sequence[Commit],
        releases: Sequence[LeaseId],
        *,
        keep: bool,
        about: Sequence[About] = (),
        holds: Sequence[HoldId | None] = (),
    ) -> list[Claim]:
        told = about or [NOTHING_TOLD] * len(commits)
        held = holds or [None] * len(commits)
        asked = protocol.HandOff(
            worker=worker,
            commits=tuple(
                protocol.CommitPages(label, runs.pack(ids), each, hold)
                for (label, ids), each, hold in zip(commits, told, held, strict=True)
            ),
            releases=tuple(releases),
            keep=keep,
        )
        return self._ask_claims(asked, len(commits))

    def attach(self, worker: WorkerId, wanted: Sequence[tuple[Claim, PageIds]]) -> list[Claim]:
        pages = tuple(protocol.ClaimedPages(claim, runs.pack(ids)) for claim, ids in wanted)
        asked = protocol.AttachLeases(worker=worker, wanted=pages)
        return self._ask_claims(asked, len(wanted))

    def release(self, worker: WorkerId, leases: Sequence[LeaseId], *, keep: bool) -> None:
        asked = protocol.ReleaseLeases(worker=worker, leases=tuple(leases), keep=keep)
        self._ask(asked, protocol.PoolDone)

    def withdraw(self, worker: WorkerId, labels: Sequence[str]) -> list[LeaseId]:
        asked = protocol.WithdrawRequests(worker=worker, labels=tuple(labels))
        return list(self._ask(asked, protocol.Withdrawn).leases)

    def withdraw_all(self, worker: WorkerId) -> list[LeaseId]:
        return list(self._ask(protocol.WithdrawAll(worker=worker), protocol.Withdrawn).leases)

    def inherit(self, former: str) -> protocol.Inheritance:
        return self._ask(protocol.InheritFrom(former=former), protocol.Inheritance)

    def adopt(
        self, worker: WorkerId, former: str, label: str, lease: LeaseId | None, ids: PageIds
    ) -> Claim:
        asked = protocol.AdoptRequest(
            worker=worker, former=former, label=label, lease=lease, pages=runs.pack(ids)
        )
        (claim,) = self._ask_claims(asked, 1)
        return claim

    def find_prefix(
        self, worker: WorkerId, namespace: Namespace, tokens: TokenIds
    ) -> FoundPrefix | None:
        asked = protocol.FindPrefix(worker=worker, namespace=namespace, tokens=encode(tokens))
        return self._ask(asked, protocol.PrefixFound).found(self._pages)

    def hold_prefix(
        self, worker: WorkerId, namespace: Namespace, tokens: TokenIds
    ) -> FoundPrefix | None:
        asked = protocol.HoldPrefix(worker=worker, namespace=namespace, tokens=encode(tokens))
        return self._ask(asked, protocol.PrefixFound).found(self._pages)

    def known_prefix(self, worker: WorkerId, namespace: Namespace, tokens: TokenIds) -> int:
        asked = protocol.KnowPrefix(worker=worker, namespace=namespace, tokens=encode(tokens))
        return self._ask(asked, protocol.PrefixBlocks).blocks

    def publish_prefix(self, worker: WorkerId, new: Publication) -> int:
        asked = protocol.PublishPrefix(
            worker=worker,
            namespace=new.namespace,
            tokens=encode(new.tokens),
            blocks=tuple(map(runs.pack, new.blocks)),
            seconds=new.seconds,
            tenant=new.tenant,
            formats=tuple(new.formats),
        )
        return self._ask(asked, protocol.PrefixBlocks).blocks

    def restore_prefix(
        self, worker: WorkerId, namespace: Namespace, tokens: TokenIds, tenant: str
    ) -> Coming:
        asked = protocol.RestorePrefix(
            worker=worker, namespace=namespace, tokens=encode(tokens), tenant=tenant
        )
        coming = self._ask(asked, protocol.PrefixComing)
        return Coming(coming.blocks, coming.seconds)

    def keep_session(
        self,
        worker: WorkerId,
        namespace: Namespace,
        tokens: TokenIds,
        tenant: str,
        session: str,
    ) -> int:
        asked = protocol.KeepSession(
            worker=worker,
            namespace=namespace,
            tokens=encode(tokens),
            tenant=tenant,
            session=session,
        )
        return self._ask(asked, protocol.PrefixBlocks).blocks

    def release_prefix(self, worker: WorkerId, hold: HoldId) -> None:
        self._ask(protocol.ReleasePrefix(worker=worker, hold=hold), protocol.PoolDone)

    def lend(self, nbytes: int) -> Lent:
        return self._ask(Lend(bytes=nbytes), Lent)

    def stat(self) -> Ledger:
        return self._ask(protocol.StatPool(), Ledger)

    def map(self, max_cells: int) -> PageMap:
        return self._ask(protocol.MapPages(max_cells=max_cells), PageMap)

    def check(self) -> list[str]:
        """Contradictions in the pool's books; empty if there are none."""
        return list(self._ask(protocol.CheckPool(), protocol.Checked).faults)

    def read(self, worker: WorkerId, lease: LeaseId, ids: PageIds) -> bytes:
        """A ticket for pages that the worker holds in another node's arena."""
        asked = protocol.ReadPages(worker=worker, lease=lease, pages=runs.pack(ids))
        return self._ask(asked, protocol.PagesOffered).ticket

    def close(self) -> None:
        """Close the channel."""
        self._channel.close()

    def _ask(self, asked: Message, expected: type[A]) -> A:
        return _only(self._channel.ask(pack([asked]), self._timeout_s), expected)

    def _ask_claims(self, asked: Message, count: int) -> list[Claim]:
        claims = list(self._ask(asked, protocol.Claims).claims)
        if len(claims) != count:
            raise MessageError(f"{len(claims)} claims from the pool: expected {count}")
        return claims


def _only(frame: bytes, expected: type[A]) -> A:
    match unpack(frame):
        case [protocol.PoolRefused() as no]:
            raise protocol.refused(no)
        case [answer] if isinstance(answer, expected):
            return answer
        case other:
            raise MessageError(f"the pool answered {other!r:.80}: expected {expected.__name__}")
