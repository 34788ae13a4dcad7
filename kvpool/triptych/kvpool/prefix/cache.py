"""The prefix cache: blocks of the prefix index, stored in pages of the pool."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Self

import numpy as np

from triptych.core.config import PoolConfig
from triptych.core.errors import NotRegistered, PoolError
from triptych.core.handles import LeaseId, LeaseRef
from triptych.core.pages import PagePlan
from triptych.kvpool.plugins import EVICTION_POLICIES
from triptych.kvpool.pool.free_list import PageIds
from triptych.kvpool.pool.leases import About, Commit, SharedPages, WorkerId
from triptych.kvpool.pool.page_pool import Pool
from triptych.kvpool.pool.processes import this_process
from triptych.kvpool.pool.stats import PrefixStats
from triptych.kvpool.prefix.blocks import (
    Block,
    BlockKey,
    Limits,
    Namespace,
    Payload,
    Pin,
    PinId,
    Publication,
    Published,
    TokenIds,
    child_key,
)
from triptych.kvpool.prefix.index import PrefixIndex
from triptych.kvpool.prefix.sessions import SessionKey, SessionTable

PREFIX_WORKER = "prefix"
"""The pool's own worker, which has the leases of cached blocks; also their label."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PrefixSettings:
    """Limits of the prefix cache, resolved."""

    block_tokens: int
    total_bytes: int
    tenant_bytes: int
    eviction: str = "cost"
    """Name of an eviction policy."""
    session_ttl_s: float = 0.0
    """Seconds after its last turn for which a conversation's blocks are evicted last; 0: none."""
    session_tenant_bytes: int = 0
    """The most bytes that one tenant's conversations have of that."""

    @classmethod
    def of(cls, config: PoolConfig, plan: PagePlan) -> Self | None:
        """The settings of a pool; None if it keeps no prefixes.

        One block's worth of the memory is for the block that is being published.
        """
        if plan.prefix_bytes == 0:
            return None
        block_pages = max(one.block_pages(0) for one in plan.by_method.values())
        total = plan.prefix_bytes - block_pages * plan.page_bytes
        own, sessions = config.prefix_tenant_bytes, config.session_tenant_bytes
        tenant_bytes = total if own == "auto" else own
        return cls(
            block_tokens=plan.block_tokens,
            total_bytes=total,
            tenant_bytes=tenant_bytes,
            eviction=config.prefix_eviction,
            session_ttl_s=config.session_ttl_s,
            session_tenant_bytes=tenant_bytes // 2 if sessions == "auto" else sessions,
        )


@dataclass(frozen=True, slots=True, eq=False)
class FoundPrefix:
    """A cached prefix whose pages stay resident until the pin is released."""

    pin: PinId
    tokens: int
    """Tokens of the prompt that the blocks cover."""
    blocks: tuple[PageIds, ...]
    """Pages of each block, in the publisher's order."""
    windows: tuple[PageIds, ...] = ()
    """Pages of the window entries of the last blocks, as many as a request needs."""


class PrefixCache:
    """A prefix index whose blocks have leases in the pool. No lock, no clock, no bytes.

    Each resident block has a request lease of a worker of the pool's own, which never dies. So
    the pool accounts for every page, and a block survives its publisher. A pin belongs to the
    worker that made it, and ends with its registration; or it is handed off with a request that
    reads some of its pages, and ends with the request's last lease.

    A call that is refused or raises has changed nothing.
    """

    def __init__(self, pool: Pool, settings: PrefixSettings) -> None:
        self._pool, self._settings = pool, settings
        limits = Limits(total_bytes=settings.total_bytes, tenant_bytes=settings.tenant_bytes)
        policy = EVICTION_POLICIES.load(settings.eviction)()
        self._index = PrefixIndex(settings.block_tokens, limits, policy)
        self._worker = pool.register(PREFIX_WORKER, this_process(), math.inf)
        self._leases = dict[BlockKey, LeaseId]()
        self._worker_pins = dict[PinId, WorkerId]()
        self._disk_pins = set[PinId]()
        """Pins of the disk tier."""
        self._shared = set[PinId]()
        """Pins of requests."""
        pool.let_go = self._let_go
        self._sessions = SessionTable(
            ttl_s=settings.session_ttl_s,
            tenant_bytes=settings.session_tenant_bytes,
            total_bytes=settings.total_bytes // 2,
        )

    # -------------------------------------------------------------- calls of workers

    def find(self, worker: WorkerId, namespace: Namespace, tokens: TokenIds) -> FoundPrefix | None:
        """Find the longest cached prefix and pin it; the last token is never part of it.

        Raises: NotRegistered
        """
        self._require_registered(worker)
        return self._found(worker, namespace, self._index.acquire(namespace, tokens))

    def pin_all(
        self, worker: WorkerId, namespace: Namespace, tokens: TokenIds
    ) -> FoundPrefix | None:
        """Pin all whole blocks of these tokens, or none if one is not cached; not counted as a use.

        Window entries are neither needed nor pinned.

        Raises: NotRegistered
        """
        self._require_registered(worker)
        return self._found(worker, namespace, self._index.pin_all(namespace, tokens))

    def _found(self, worker: WorkerId, namespace: Namespace, pin: Pin | None) -> FoundPrefix | None:
        if pin is None:
            return None
        self._worker_pins[pin.id] = worker
        blocks, windows = (
            tuple(block.pages for block in entries) for entries in (pin.blocks, pin.windows)
        )
        tokens = len(blocks) * self._index.block_tokens_of(namespace)
        return FoundPrefix(pin.id, tokens, blocks, windows)

    def known(self, worker: WorkerId, namespace: Namespace, tokens: TokenIds) -> int:
        """The number of cached blocks of these tokens, which need not be published.

        Raises: NotRegistered
        """
        self._require_registered(worker)
        return self._index.resident(namespace, tokens)

    def known_windows(
        self, worker: WorkerId, namespace: Namespace, tokens: TokenIds
    ) -> tuple[bool, ...]:
        """Of each cached block of these tokens, whether its window entry is cached too.

        Raises: NotRegistered
        """
        self._require_registered(worker)
        return self._index.windows(namespace, tokens)

    def release(self, worker: WorkerId, pin: PinId) -> None:
        """Release a pin.

        Raises: PoolError if the worker does not have it
        """
        self._require_pin(worker, pin)
        del self._worker_pins[pin]
        self._index.release(pin)

    def handoff(
        self,
        worker: WorkerId,
        commits: Sequence[Commit],
        releases: Sequence[LeaseId],
        *,
        keep: bool,
        about: Sequence[About],
        pins: Sequence[PinId | None],
    ) -> list[LeaseRef]:
        """Hand requests off as ``Pool.handoff`` does; each may read pages of a pin of the worker.

        From then on the pin belongs to the request.

        Raises: PoolError if the worker does not have a pin; NotHeld, StaleHandle, NotRegistered
        """
        shares = [None if pin is None else self._share_of(worker, pin) for pin in pins]
        lease_refs = self._pool.handoff(
            worker, commits, releases, keep=keep, about=about, shares=shares
        )
        for pin in pins:
            if pin is not None:
                del self._worker_pins[pin]
                self._shared.add(pin)
        return lease_refs

    def _share_of(self, worker: WorkerId, pin: PinId) -> SharedPages:
        self._require_pin(worker, pin)
        return SharedPages(pin, np.concatenate([block.pages for block in self._index.held(pin)]))

    def _require_pin(self, worker: WorkerId, pin: PinId) -> None:
        if self._worker_pins.get(pin) != worker:
            raise PoolError(f"hold {pin} of a prefix: {worker!r} does not have it")

    def _let_go(self, pin: PinId) -> None:
        """Release the pin of a request whose last lease has ended."""
        self._shared.remove(pin)
        self._index.release(pin)

    def publish(self, worker: WorkerId, new: Publication) -> Published:
        """Keep blocks for later requests.

        The pages of all blocks are of the worker's extent. Those of the last ones, as many as
        were added, are the cache's from now on; the others stay the worker's: their blocks were
        known already, or all were refused. Nothing is held. The pages of evicted blocks are
        free, and stay as they are until somebody asks for pages.

        Raises: PoolError if tokens and blocks do not fit together; NotHeld, NotRegistered
        """
        done = self._keep(worker, new)
        if done.pin:
            self._index.release(done.pin.id)
        return done

    def _keep(self, worker: WorkerId, new: Publication) -> Published:
        if not new.blocks:
            raise PoolError("no block to publish")
        if len(new.formats) not in (0, len(new.blocks)):
            raise PoolError(f"formats of {len(new.formats)} blocks: there are {len(new.blocks)}")
        self._pool.require_extent(worker, np.concatenate(new.blocks))
        try:
            payloads = [Payload(ids, self._bytes_of([ids]), new.seconds) for ids in new.blocks]
            publish = self._index.publish_windows if new.are_windows else self._index.publish
            done = publish(new.namespace, new.tokens, payloads, tenant=new.tenant)
        except ValueError as error:
            raise PoolError(str(error)) from error
        self._free(done.evicted)
        moved = [(PREFIX_WORKER, block.pages) for block in done.new]
        formats = new.formats[-done.added :] if new.formats and done.added else [()] * done.added
        about = [About(new.tenant, each) for each in formats]
        lease_refs = self._pool.handoff(worker, moved, about=about)
        pages = (block.pages for block in done.new)
        self._pool.attach(self._worker, list(zip(lease_refs, pages, strict=True)))
        for block, lease_ref in zip(done.new, lease_refs, strict=True):
            self._leases[block.key] = lease_ref.lease
        return done

    def keep_session(
        self,
        worker: WorkerId,
        namespace: Namespace,
        tokens: TokenIds,
        tenant: str,
        session: str,
        now: float,
    ) -> int:
        """Soft-pin the resident blocks of a conversation for its TTL, and no others of it.

        Guarded blocks are evicted after all others, so that they stay while there is anything
        else to evict, and never keep a request or another prefix from memory.

        Returns: how many blocks are guarded
        Raises:  NotRegistered
        """
        self._require_registered(worker)
        own = child_key(namespace.digest(), tenant.encode())
        key = SessionKey(child_key(own, session.encode()))
        soft_pin = self._index.soft_pin(namespace, tokens, self._sessions.most_bytes)
        ended = (
            self._sessions.open(key, tenant, soft_pin, now)
            if soft_pin
            else self._sessions.close(key)
        )
        for each in ended:
            self._index.soft_unpin(each)
        return soft_pin.blocks if soft_pin else 0

    # -------------------------------------------------------------- calls of the level below

    def block_tokens_of(self, namespace: Namespace) -> int:
        """Tokens of a block of a namespace."""
        return self._index.block_tokens_of(namespace)

    def has_pins(self, worker: WorkerId) -> bool:
        """Whether a worker holds pins."""
        return worker in self._worker_pins.values()

    @property
    def pins(self) -> int:
        """Number of pins."""
        return len(self._worker_pins) + len(self._disk_pins) + len(self._shared)

    def cut(self, namespace: Namespace, tokens: TokenIds) -> list[bytes]:
        """The whole blocks of tokens, encoded."""
        return self._index.cut(namespace, tokens)

    def keys(self, namespace: Namespace, tokens: TokenIds) -> list[BlockKey]:
        """The keys of all whole blocks, resident or not."""
        return self._index.keys(namespace, tokens)

    def window_key(self, block: BlockKey) -> BlockKey:
        """The key of the window entry of a block, resident or not."""
        return self._index.window_key(block)

    def resident(self, namespace: Namespace, tokens: TokenIds) -> int:
        """How many blocks of these tokens are resident, in a chain from the first."""
        return self._index.resident(namespace, tokens)

    def windows(self, namespace: Namespace, tokens: TokenIds) -> tuple[bool, ...]:
        """Of each resident block of these tokens, whether its window entry is."""
        return self._index.windows(namespace, tokens)

    def pin(self, key: BlockKey) -> Pin | None:
        """Keep the chain that ends with a block resident; None if the block is not."""
        return self._pinned(self._index.pin(key))

    def keeps(self, block: Block) -> bool:
        """Whether this very block is resident; not if it went, and an equal one came."""
        return self._index.block(block.key) is block

    def unpin(self, pin: Pin) -> None:
        """Release a pin of ``pin`` or ``arrive``."""
        self._disk_pins.remove(pin.id)
        self._index.release(pin.id)

    def expect(self, tenant: str, counts: Sequence[int]) -> tuple[list[PageIds], tuple[Block, ...]]:
        """Set pages aside for the first blocks of a run, as many as find room.

        ``counts`` are the pages of each block. Returns the pages of each, and the blocks that
        were evicted for them, whose pages stay as they are until somebody writes to them.
        """
        size, room = self._pool.page_bytes, self._index.room(tenant)
        ends = np.cumsum(counts, dtype=np.int64)
        fitting = int(np.searchsorted(ends * size, room, side="right"))
        if fitting == 0:
            return [], ()
        total = int(ends[fitting - 1])
        evicted = self._index.reserve(tenant, total * size)
        if evicted is None:
            return [], ()
        self._free(evicted)
        if total > self._pool.free_at_home(self._worker):
            self._index.unreserve(tenant, total * size)
            return [], evicted
        ids = self._pool.allocate(self._worker, total)
        return np.split(ids, ends[: fitting - 1]), evicted

    def arrive(self, new: Publication) -> Pin | None:
        """Make an expected block or window entry resident, after its pages are written, and pin it.

        If an equal block came by another way, that one is held, and the pages are free.
        """
        self._index.unreserve(new.tenant, self._bytes_of(new.blocks))
        done = self._keep(self._worker, new)
        for ids in new.blocks[: len(new.blocks) - done.added]:
            self._pool.free(self._worker, ids)
        return self._pinned(done.pin)

    def expect_no_more(self, tenant: str, blocks: Sequence[PageIds]) -> None:
        """Free the pages that were set aside for blocks that do not come."""
        if blocks:
            self._index.unreserve(tenant, self._bytes_of(blocks))
            self._pool.free(self._worker, np.concatenate(blocks))

    def _pinned(self, pin: Pin | None) -> Pin | None:
        if pin:
            self._disk_pins.add(pin.id)
        return pin

    def _bytes_of(self, blocks: Sequence[PageIds]) -> int:
        return sum(ids.size for ids in blocks) * self._pool.page_bytes

    def _free(self, evicted: Sequence[Block]) -> None:
        self._pool.release(self._worker, [self._leases.pop(block.key) for block in evicted])

    # -------------------------------------------------------------- calls of the router

    def borrow_cache_memory(self, nbytes: int) -> tuple[int, tuple[Block, ...]]:
        """Set how many bytes of the cache's memory requests may use in all; pinned blocks stay.

        Returns: bytes that are given up, and the blocks that were evicted for it
        """
        total = self._settings.total_bytes
        evicted = self._index.limit(total - min(max(0, nbytes), total))
        self._free(evicted)
        return self._lent_bytes, evicted

    @property
    def _lent_bytes(self) -> int:
        return self._settings.total_bytes - self._index.limits.total_bytes

    # -------------------------------------------------------------- upkeep

    def end_sessions(self, now: float) -> None:
        """Remove the soft pins of conversations whose TTL has passed."""
        for soft_pin in self._sessions.expire(now):
            self._index.soft_unpin(soft_pin)

    def forget_lost(self) -> None:
        """Release the pins of workers that are no longer registered."""
        lost = [pin for pin, who in self._worker_pins.items() if not self._pool.is_registered(who)]
        for pin in lost:
            del self._worker_pins[pin]
            self._index.release(pin)

    def line(self) -> PrefixStats:
        """The numbers as they are."""
        stat = self._index.stat()
        return PrefixStats(
            blocks=stat.blocks,
            windows=stat.windows,
            bytes=stat.nbytes,
            borrowed_bytes=self._lent_bytes,
            hits=stat.hits,
            misses=stat.misses,
            asked_tokens=stat.asked_tokens,
            hit_tokens=stat.hit_tokens,
            evictions=stat.evictions,
            refused=sum(stat.refused.values()),
            sessions=len(self._sessions),
            session_bytes=self._sessions.nbytes,
            readers=len(self._shared),
            shared_bytes=self._bytes_of([share.pages for share in self._pool.shares]),
        )

    def check(self) -> list[str]:
        """Contradictions between index, leases and pins; empty if there are none."""
        wrong, stat = self._index.check(), self._index.stat()
        ledger = self._pool.stat(0.0)
        (mine,) = (line for line in ledger.workers if line.name == PREFIX_WORKER)
        recorded = stat.blocks + stat.windows, stat.nbytes
        if recorded != (mine.requests, mine.request_pages * ledger.page_bytes):
            wrong.append(f"blocks, bytes of the index are {recorded}: its worker holds {mine}")
        kept = {
            name: n - stat.reserved_by_tenant.get(name, 0)
            for name, n in stat.bytes_by_tenant.items()
        }
        leased = {
            name: pages * ledger.page_bytes
            for name, pages in self._pool.pages_by_tenant(PREFIX_WORKER).items()
        }
        if leased != {name: n for name, n in kept.items() if n}:
            wrong.append(f"bytes by tenant of the index are {kept}: its leases say {leased}")
        if len(self._leases) != stat.blocks + stat.windows:
            wrong.append("blocks and leases do not name each other")
        if mine.extent_pages * ledger.page_bytes != stat.reserved_bytes:
            wrong.append(f"{stat.reserved_bytes} bytes are reserved: its worker holds {mine}")
        if self.pins != stat.pins:
            wrong.append(f"the index has {stat.pins} holds, workers and the disk {self.pins}")
        if self._index.soft_pins != self._sessions.soft_pins():
            wrong.append("guards and sessions do not name each other")
        return wrong + self._check_shares()

    def _check_shares(self) -> list[str]:
        shares = self._pool.shares
        if sorted(share.pin for share in shares) != sorted(self._shared):
            return ["leases and holds of requests do not name each other"]
        wrong = list[str]()
        for share in shares:
            held = np.concatenate([block.pages for block in self._index.held(share.pin)])
            if not np.isin(share.pages, held).all():
                wrong.append(f"hold {share.pin} does not keep the pages that are read with it")
        return wrong

    def _require_registered(self, worker: WorkerId) -> None:
        if not self._pool.is_registered(worker):
            raise NotRegistered(worker)
