"""The cache of prefixes with a disk below it: whatever happens, a chain has the bytes it was given.

The machine decides when the disk works, so a block may be evicted, evicted and published again,
or asked for, between any two of the disk's steps.
"""

import hashlib
import shutil
import tempfile
import threading
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from tests.effort import examples
from triptych.core.errors import PoolError
from triptych.kvpool.disk.store import DiskStore
from triptych.kvpool.disk.tier import Disk, DiskTier
from triptych.kvpool.pool.arena import shared_memory_dir
from triptych.kvpool.pool.page_pool import Pool
from triptych.kvpool.pool.processes import ProcessKey
from triptych.kvpool.prefix.blocks import Namespace, Publication
from triptych.kvpool.prefix.cache import PREFIX_WORKER, FoundPrefix, PrefixCache, PrefixSettings

PAGES, PAGE_BYTES = 40, 256
BLOCK, BLOCK_PAGES, SECONDS = 2, 2, 0.1
TOTAL_PAGES, TENANT_PAGES = 14, 10
OBJECT_BYTES = 4096 + BLOCK_PAGES * PAGE_BYTES
DISK_BYTES, DISK_TENANT_BYTES = 9 * OBJECT_BYTES, 6 * OBJECT_BYTES
LINE = 5

PROMPTS = st.sampled_from(
    [
        tokens
        for text in ("000000000", "001111", "11111111")
        for tokens in ([int(digit) for digit in text], [int(digit) for digit in text[:5]])
    ]
)
SALTS, TENANTS = st.sampled_from([b"a", b"b"]), st.sampled_from(["t", "u"])


def space(salt: bytes) -> Namespace:
    return Namespace(salt=salt, model="m", revision="", profile="p")


def content(salt: bytes, chain: list[int]) -> np.ndarray:
    """What the pages of the last block of a chain hold."""
    seed = np.frombuffer(hashlib.sha256(salt + bytes(chain)).digest(), np.uint8)
    return np.array([np.resize(seed, PAGE_BYTES) + page for page in range(BLOCK_PAGES)], np.uint8)


class Later:
    """Keeps work until the machine says when."""

    def __init__(self) -> None:
        self.urgent, self.others = deque[Callable[[], Any]](), deque[Callable[[], Any]]()

    def __len__(self) -> int:
        return len(self.urgent) + len(self.others)

    def submit(
        self, work: Callable[[], Any], nbytes: int, *, urgent: bool = False
    ) -> "Future[Any]":
        line = self.urgent if urgent else self.others
        if len(line) >= LINE:
            raise PoolError("the line is full")
        line.append(work)
        return Future()

    def work(self) -> None:
        (self.urgent or self.others).popleft()()

    def close(self) -> None:
        pass


class DiskLevelMachine(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.folder = Path(tempfile.mkdtemp(dir=shared_memory_dir()))
        self.content = dict[bytes, np.ndarray]()
        """By key."""
        self.start()

    def start(self) -> None:
        """Begin with an empty memory, and with what is in the folder."""
        self.pool = Pool(PAGES, PAGE_BYTES, "arena", 10.0)
        limits = PrefixSettings(
            block_tokens=BLOCK,
            total_bytes=TOTAL_PAGES * PAGE_BYTES,
            tenant_bytes=TENANT_PAGES * PAGE_BYTES,
        )
        self.cache = PrefixCache(self.pool, limits)
        self.data = np.zeros((PAGES, PAGE_BYTES), np.uint8)
        self.mover = Later()
        self.tier = DiskStore(self.folder / "tier", DISK_BYTES, PAGE_BYTES, DISK_TENANT_BYTES)
        disk = Disk(self.tier, self.mover, self.data)
        self.level = DiskTier(self.cache, disk, threading.Lock())
        self.worker = self.pool.register("w", ProcessKey(1, 1, "w"), 0.0)
        self.pins = list[tuple[bytes, list[int], FoundPrefix]]()
        self.lent_pages = 0

    def teardown(self) -> None:
        try:
            self.require_disk_content()
        finally:
            self.tier.close()
            shutil.rmtree(self.folder)

    def require_disk_content(self) -> None:
        """What the disk has is right, or found to be damaged."""
        into = np.empty((BLOCK_PAGES, PAGE_BYTES), np.uint8)
        for key in self.tier.keys():  # noqa: SIM118 - no mapping
            if self.tier.load(key, [into]):
                assert np.array_equal(into, self.content[key])

    # ---------------------------------------------------------- memory

    @rule(salt=SALTS, prompt=PROMPTS, tenant=TENANTS, at_once=st.booleans())
    def publish(self, salt: bytes, prompt: list[int], tenant: str, at_once: bool) -> None:
        blocks = len(prompt) // BLOCK
        first = self.cache.known(self.worker, space(salt), prompt)
        if first == blocks:
            return
        ids = np.split(
            self.pool.allocate(self.worker, BLOCK_PAGES * (blocks - first)), blocks - first
        )
        keys = self.cache.keys(space(salt), prompt)
        for place, pages in enumerate(ids, first + 1):
            self.data[pages] = content(salt, prompt[: place * BLOCK])
            self.content[keys[place - 1]] = self.data[pages]
        new = Publication(
            namespace=space(salt),
            tokens=prompt[: blocks * BLOCK],
            blocks=ids,
            seconds=SECONDS,
            tenant=tenant,
        )
        done = self.cache.publish(self.worker, new)
        self.level.evicted(done.evicted)
        self.level.published(done.new)
        for pages in ids[: len(ids) - done.added]:
            self.data[pages] = 0xEE
            self.pool.free(self.worker, pages)
        while at_once and self.mover:
            self.mover.work()

    @rule(pages=st.integers(0, TOTAL_PAGES + 1))
    def borrow_cache_memory(self, pages: int) -> None:
        lent, evicted = self.cache.borrow_cache_memory(pages * PAGE_BYTES)
        self.level.evicted(evicted)
        self.lent_pages = lent // PAGE_BYTES
        assert self.lent_pages * PAGE_BYTES == lent == self.cache.line().borrowed_bytes
        assert self.lent_pages <= min(pages, TOTAL_PAGES)
        if not self.pins and not self.mover.urgent:
            assert self.lent_pages == min(pages, TOTAL_PAGES)

    @rule(salt=SALTS, prompt=PROMPTS, keep=st.booleans())
    def find(self, salt: bytes, prompt: list[int], keep: bool) -> None:
        found = self.cache.find(self.worker, space(salt), prompt)
        if found is None:
            return
        self.require_content(salt, prompt, found)
        if keep and len(self.pins) < 2:
            self.pins.append((salt, prompt, found))
        else:
            self.cache.release(self.worker, found.pin)

    @precondition(lambda self: self.pins)
    @rule()
    def release(self) -> None:
        salt, prompt, found = self.pins.pop()
        self.require_content(salt, prompt, found)
        self.cache.release(self.worker, found.pin)

    def require_content(self, salt: bytes, prompt: list[int], found: FoundPrefix) -> None:
        for place, pages in enumerate(found.blocks, 1):
            assert np.array_equal(self.data[pages], content(salt, prompt[: place * BLOCK]))

    @rule()
    def the_pool_is_killed(self) -> None:
        self.require_disk_content()
        self.tier.close()
        self.start()

    # ---------------------------------------------------------- the disk

    @rule(salt=SALTS, prompt=PROMPTS, tenant=TENANTS, steps=st.integers(0, 9))
    def restore(self, salt: bytes, prompt: list[int], tenant: str, steps: int) -> None:
        usable = (len(prompt) - 1) // BLOCK
        before, loaded = self.resident(salt, prompt), self.tier.stat().loaded
        while (coming := self.level.restore(space(salt), prompt, tenant)).blocks and steps:
            assert self.resident(salt, prompt) + coming.blocks <= usable
            assert coming.seconds == pytest.approx(SECONDS * coming.blocks)
            self.mover.work()
            steps -= 1
        if self.tier.stat().loaded == loaded:
            assert self.resident(salt, prompt) <= before

    def resident(self, salt: bytes, prompt: list[int]) -> int:
        return self.cache.resident(space(salt), prompt[:-1])

    @precondition(lambda self: self.mover)
    @rule()
    def the_disk_works(self) -> None:
        self.mover.work()

    @rule(data=st.data())
    def a_file_rots(self, data: st.DataObject) -> None:
        keys = sorted(self.tier.keys())
        if keys:
            path = self.folder / "tier" / f"{data.draw(st.sampled_from(keys)).hex()}.kv"
            rotten = bytearray(path.read_bytes())
            rotten[data.draw(st.integers(0, len(rotten) - 1))] ^= 0x10
            path.write_bytes(rotten)

    # ---------------------------------------------------------- always

    @invariant()
    def the_books_agree_with_each_other(self) -> None:
        assert self.pool.check() == []
        assert self.cache.check() == []

    @invariant()
    def every_page_is_free_or_the_caches(self) -> None:
        ledger = self.pool.stat(0.0)
        (mine,) = (line for line in ledger.workers if line.name == PREFIX_WORKER)
        assert self.cache.line().bytes == mine.request_pages * PAGE_BYTES
        assert mine.request_pages + mine.extent_pages <= TOTAL_PAGES - self.lent_pages
        assert ledger.free_pages == PAGES - mine.request_pages - mine.extent_pages
        if not self.mover.urgent:
            assert mine.extent_pages == 0
            assert self.level.line().coming == 0
            assert self.cache.pins == len(self.pins)

    @invariant()
    def the_disk_is_within_its_limits(self) -> None:
        by_tenant = dict.fromkeys("tu", 0)
        for key in self.tier.keys():  # noqa: SIM118 - no mapping
            meta = self.tier.describe(key)
            assert meta
            by_tenant[meta.tenant] += OBJECT_BYTES
        assert sum(by_tenant.values()) == self.tier.stat().nbytes <= DISK_BYTES
        assert max(by_tenant.values()) <= DISK_TENANT_BYTES


DiskLevelMachine.TestCase.settings = settings(
    max_examples=examples(60), stateful_step_count=40, deadline=None
)
TestDiskLevel = DiskLevelMachine.TestCase
