"""The cache of prefixes over the pool's books, against dictionaries: who holds which page."""

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from tests.effort import examples
from triptych.core.errors import NotHeld, NotRegistered, PoolError
from triptych.kvpool.pool.free_list import PageIds
from triptych.kvpool.pool.leases import WorkerId
from triptych.kvpool.pool.page_pool import Pool
from triptych.kvpool.pool.processes import ProcessKey
from triptych.kvpool.prefix.blocks import Namespace, PinId, Publication
from triptych.kvpool.prefix.cache import PREFIX_WORKER, PrefixCache, PrefixSettings

PAGES, PAGE_BYTES, TTL_S = 40, 256, 10.0
BLOCK, TOTAL_PAGES, TENANT_PAGES = 2, 20, 14
SESSION_S, SESSION_PAGES = 1e6, 6
NAMES = ("prefill", "compress", "other")
SLIDING = b"s"
"""Of the namespace whose blocks have window entries."""
SALTS = st.sampled_from([b"a", b"b", SLIDING])
TOKENS = st.lists(st.integers(0, 1), max_size=11)


def space(salt: bytes) -> Namespace:
    windows = 2 if salt == SLIDING else 0
    return Namespace(salt=salt, model="m", revision="", profile="p", window_blocks=windows)


def publication(
    salt: bytes,
    tokens: list[int],
    blocks: list[PageIds],
    seconds: float = 0.1,
    tenant: str = "t",
    *,
    are_windows: bool = False,
) -> Publication:
    return Publication(
        namespace=space(salt),
        tokens=tokens,
        blocks=blocks,
        seconds=seconds,
        tenant=tenant,
        are_windows=are_windows,
    )


class PrefixCacheMachine(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.pool = Pool(PAGES, PAGE_BYTES, "arena", TTL_S)
        limits = {
            "total_bytes": TOTAL_PAGES * PAGE_BYTES,
            "tenant_bytes": TENANT_PAGES * PAGE_BYTES,
        }
        sessions = {"session_ttl_s": SESSION_S, "session_tenant_bytes": SESSION_PAGES * PAGE_BYTES}
        self.cache = PrefixCache(
            self.pool, PrefixSettings(block_tokens=BLOCK, **limits, **sessions)
        )
        self.now = 0.0
        self.workers = dict[str, WorkerId]()
        self.extents = dict[str, list[int]]()
        self.pins = dict[PinId, tuple[str, list[int]]]()
        """Whose each is, and the pages of its blocks."""
        self.content = dict[tuple[bytes, tuple[int, ...], bool], list[int]]()
        """Pages that were last added for a chain, or for its last window entry; they may be evicted
        since."""

    # ---------------------------------------------------------- workers

    @rule(name=st.sampled_from(NAMES))
    def register(self, name: str) -> None:
        self.workers[name] = self.pool.register(name, ProcessKey(1, 1, name), self.now)
        self.forget(name)
        self.extents[name] = []

    @precondition(lambda self: self.workers)
    @rule(data=st.data(), way=st.sampled_from(["unregister", "expel", "sweep"]))
    def leave(self, data: st.DataObject, way: str) -> None:
        name = data.draw(st.sampled_from(sorted(self.workers)))
        worker = self.workers.pop(name)
        if way == "unregister":
            self.pool.unregister(worker)
        elif way == "expel":
            assert self.pool.expel(name)
        else:
            assert self.pool.sweep(self.now, lambda process: process.space != name) == [name]
        self.forget(name)
        with pytest.raises(NotRegistered):
            self.cache.find(worker, space(b"a"), [1, 1, 1])

    def forget(self, name: str) -> None:
        self.extents.pop(name, None)
        self.pins = {hold: entry for hold, entry in self.pins.items() if entry[0] != name}
        self.cache.forget_lost()

    @rule()
    def time_passes_and_the_cache_lives(self) -> None:
        self.now += 1e6
        for worker in self.workers.values():
            self.pool.renew(worker, self.now)
        assert self.pool.sweep(self.now, lambda _: True, self.pool.silent(self.now)) == []
        self.cache.end_sessions(self.now)
        assert self.cache.line().sessions == 0

    # ---------------------------------------------------------- prefixes

    @precondition(lambda self: self.workers)
    @rule(data=st.data(), salt=SALTS, tokens=TOKENS)
    def find(self, data: st.DataObject, salt: bytes, tokens: list[int]) -> None:
        name = data.draw(st.sampled_from(sorted(self.workers)))
        known = self.cache.known(self.workers[name], space(salt), tokens)
        windows = self.cache.known_windows(self.workers[name], space(salt), tokens)
        found = self.cache.find(self.workers[name], space(salt), tokens)
        usable = min(known, max(0, len(tokens) - 1) // BLOCK)
        needed = space(salt).window_blocks
        while not all(windows[max(0, usable - needed) : usable] if needed else ()):
            usable -= 1
        if found is None:
            assert usable == 0
            return
        assert found.tokens == usable * BLOCK == len(found.blocks) * BLOCK
        assert found.pin not in self.pins
        assert len(found.windows) == min(usable, needed)
        entries = [*enumerate(found.blocks, 1)]
        entries += enumerate(found.windows, usable - len(found.windows) + 1)
        for at, (end, pages) in enumerate(entries):
            chain = tuple(tokens[: end * BLOCK])
            assert pages.tolist() == self.content[salt, chain, at >= usable]
        held = [page for _, pages in entries for page in pages.tolist()]
        self.pins[found.pin] = (name, held)

    @precondition(lambda self: self.pins)
    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        hold = data.draw(st.sampled_from(sorted(self.pins)))
        name, _ = self.pins[hold]
        for other in self.workers.values():
            if other != self.workers[name]:
                with pytest.raises(PoolError):
                    self.cache.release(other, hold)
        self.cache.release(self.workers[name], hold)
        del self.pins[hold]
        with pytest.raises(PoolError):
            self.cache.release(self.workers[name], hold)

    @precondition(lambda self: self.workers)
    @rule(data=st.data(), salt=SALTS, tokens=TOKENS, size=st.integers(1, 3))
    def publish(self, data: st.DataObject, salt: bytes, tokens: list[int], size: int) -> None:
        name = data.draw(st.sampled_from(sorted(self.workers)))
        worker = self.workers[name]
        blocks = len(tokens) // BLOCK
        whole, count = tokens[: blocks * BLOCK], data.draw(st.integers(0, blocks))
        free = self.pool.stat(self.now).free_pages
        if count == 0 or count * size > free:
            return
        pages = np.split(self.pool.allocate(worker, count * size), count)
        tenant = data.draw(st.sampled_from(["t", "u"]))
        are_windows = salt == SLIDING and data.draw(st.booleans())
        new = publication(salt, whole, pages, tenant=tenant, are_windows=are_windows)
        added = self.cache.publish(worker, new).added
        assert 0 <= added <= count
        for back in range(added):
            chain = tuple(whole[: (blocks - back) * BLOCK])
            self.content[salt, chain, are_windows] = pages[count - 1 - back].tolist()
        mine = [page for ids in pages[: count - added] for page in ids.tolist()]
        self.extents[name] += mine

    @precondition(lambda self: self.workers)
    @rule(
        data=st.data(),
        salt=SALTS,
        tokens=TOKENS,
        tenant=st.sampled_from(["t", "u"]),
        name=st.sampled_from(["one", "two", "three"]),
    )
    def keep_session(
        self, data: st.DataObject, salt: bytes, tokens: list[int], tenant: str, name: str
    ) -> None:
        worker = self.workers[data.draw(st.sampled_from(sorted(self.workers)))]
        known = self.cache.known(worker, space(salt), tokens)
        kept = self.cache.keep_session(worker, space(salt), tokens, tenant, name, self.now)
        line = self.cache.line()
        assert kept <= known
        assert (kept > 0) <= (line.sessions > 0)
        assert line.session_bytes <= TOTAL_PAGES * PAGE_BYTES // 2

    @precondition(lambda self: any(self.extents.values()))
    @rule(data=st.data())
    def free(self, data: st.DataObject) -> None:
        name = data.draw(st.sampled_from([n for n, ids in self.extents.items() if ids]))
        self.pool.free(self.workers[name], np.array(self.extents[name], np.int32))
        self.extents[name] = []

    @precondition(lambda self: self.workers)
    @rule(data=st.data(), stolen=st.lists(st.integers(-1, PAGES), min_size=1, max_size=3))
    def pages_of_others_are_refused(self, data: st.DataObject, stolen: list[int]) -> None:
        name = data.draw(st.sampled_from(sorted(self.workers)))
        if set(stolen) <= set(self.extents[name]) and len(set(stolen)) == len(stolen):
            return
        pages = [np.array([page], np.int32) for page in stolen]
        tokens = [0, 0] * len(stolen)
        with pytest.raises(NotHeld):
            self.cache.publish(self.workers[name], publication(b"a", tokens, pages))

    @precondition(lambda self: any(self.extents.values()))
    @rule(data=st.data(), seconds=st.sampled_from([0.1, -1.0, float("nan")]))
    def what_makes_no_sense_is_refused(self, data: st.DataObject, seconds: float) -> None:
        name = data.draw(st.sampled_from([n for n, ids in self.extents.items() if ids]))
        page = np.array(self.extents[name][:1], np.int32)
        tokens = [1] if seconds > 0 else [1, 1]
        with pytest.raises(PoolError):
            self.cache.publish(self.workers[name], publication(b"a", tokens, [page], seconds))

    # ---------------------------------------------------------- always

    @invariant()
    def the_books_agree_with_each_other(self) -> None:
        assert self.pool.check() == []
        assert self.cache.check() == []

    @invariant()
    def every_page_is_free_or_somebodys(self) -> None:
        ledger, line = self.pool.stat(self.now), self.cache.line()
        lines = {entry.name: entry for entry in ledger.workers}
        assert set(lines) == {*self.workers, PREFIX_WORKER}
        for name, ids in self.extents.items():
            assert lines[name].extent_pages == len(ids)
            assert lines[name].request_pages == 0
        kept = lines[PREFIX_WORKER].request_pages
        assert line.bytes == kept * PAGE_BYTES <= TOTAL_PAGES * PAGE_BYTES
        taken = sum(map(len, self.extents.values())) + kept
        assert ledger.free_pages == PAGES - taken

    @invariant()
    def what_is_held_is_not_handed_out(self) -> None:
        held = {page for _, pages in self.pins.values() for page in pages}
        assert not held & {page for ids in self.extents.values() for page in ids}


PrefixCacheMachine.TestCase.settings = settings(
    max_examples=examples(60), stateful_step_count=40, deadline=None
)
TestPrefixCache = PrefixCacheMachine.TestCase
