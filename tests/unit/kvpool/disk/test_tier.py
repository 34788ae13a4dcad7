"""Prefixes that outlive memory and their pool, as workers see them."""

import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from triptych.core.errors import PoolError
from triptych.kvpool import LocalPool, Namespace, PoolClient, PrefixSettings, Publication
from triptych.kvpool.disk import tier
from triptych.kvpool.disk.store import DiskStore
from triptych.kvpool.disk.tier import Disk, DiskSettings, DiskTier
from triptych.kvpool.pool.page_pool import Pool
from triptych.kvpool.pool.processes import ProcessKey
from triptych.kvpool.pool.stats import DISK_SKIPS, DiskStats
from triptych.kvpool.prefix.blocks import chain_keys, cut, encode
from triptych.kvpool.prefix.cache import PrefixCache
from triptych.kvpool.rpc.client.worker_pool import WorkerPool

NO_SKIPS = dict.fromkeys(DISK_SKIPS, 0)

BLOCK, SIZE, PAGE_BYTES = 4, 3, 256
ROOM = 64 * PAGE_BYTES
PREFIXES = PrefixSettings(block_tokens=BLOCK, total_bytes=ROOM, tenant_bytes=ROOM)
SPACE = Namespace(salt=b"s", model="m", revision="", profile="p")
OTHER = Namespace(salt=b"x", model="m", revision="", profile="p")
CHILD = "tests.unit.kvpool.rpc.pool_process"


def settings(folder: Path, capacity_bytes: int = 1 << 20) -> DiskSettings:
    return DiskSettings(
        path=folder / "tier",
        capacity_bytes=capacity_bytes,
        tenant_bytes=capacity_bytes,
        write_bytes_s=1e9,
    )


SLIDING = replace(SPACE, profile="w", window_blocks=2)


def publish(
    pool: WorkerPool,
    tokens: list[int],
    tenant: str = "t",
    space: Namespace = SPACE,
    *,
    are_windows: bool = False,
) -> int:
    """Publish all blocks, each page filled with its block's first token."""
    blocks = len(tokens) // BLOCK
    pages = np.split(pool.allocate(blocks * SIZE), blocks)
    for place, ids in enumerate(pages):
        pool.arena.data[ids] = tokens[place * BLOCK] % 251 + are_windows
    new = Publication(
        namespace=space,
        tokens=tokens,
        blocks=pages,
        seconds=0.5,
        tenant=tenant,
        are_windows=are_windows,
    )
    added = pool.publish_prefix(new)
    for ids in pages[: blocks - added]:
        pool.free(ids)
    return added


def restore(pool: WorkerPool, tokens: list[int], space: Namespace = SPACE) -> int:
    """Wait until nothing more comes; how many blocks are then known."""
    while pool.restore_prefix(space, tokens, "t").blocks:
        time.sleep(0.001)
    return pool.known_prefix(space, tokens)


def require_content(pool: WorkerPool, tokens: list[int], blocks: int) -> None:
    found = pool.find_prefix(SPACE, tokens)
    assert found is not None
    assert len(found.blocks) == blocks
    for place, ids in enumerate(found.blocks):
        assert np.all(pool.arena.data[ids] == tokens[place * BLOCK] % 251)
    pool.release_prefix(found.pin)


def settled(pool: WorkerPool, objects: int) -> DiskStats:
    """The disk's books once so many objects are stored."""
    while (disk := pool.stat().disk).objects < objects or disk.waiting:
        time.sleep(0.001)
    return disk


def keys(tokens: list[int], space: Namespace = SPACE) -> list[bytes]:
    return list(chain_keys(space, cut(encode(tokens), BLOCK)))[1:]


def prompt(start: int, blocks: int = 20) -> list[int]:
    """A prompt of so many blocks, and one token."""
    return list(range(start, start + blocks * BLOCK + 1))


def test_of_window_entries_only_those_come_back_that_a_prompt_needs(tmp_path: Path) -> None:
    tokens = prompt(0, 9)
    with LocalPool(4096, PAGE_BYTES, "w", PREFIXES, settings(tmp_path)) as pool:
        assert publish(pool, tokens[:-1], space=SLIDING) == 9
        assert publish(pool, tokens[:-1], space=SLIDING, are_windows=True) == 9
        settled(pool, 18)
    (tmp_path / "tier" / f"{keys(tokens, SLIDING)[8].hex()}.kv").unlink()
    with LocalPool(4096, PAGE_BYTES, "w", PREFIXES, settings(tmp_path)) as pool:
        assert restore(pool, tokens, SLIDING) == 8
        assert pool.known_windows(SLIDING, tokens) == (*[False] * 6, True, True)
        found = pool.find_prefix(SLIDING, tokens)
        assert found is not None
        assert (found.tokens, len(found.windows)) == (8 * BLOCK, 2)
        for place, ids in enumerate(found.windows, 6):
            assert np.all(pool.arena.data[ids] == tokens[place * BLOCK] % 251 + 1)
        pool.release_prefix(found.pin)
        assert restore(pool, tokens[: 4 * BLOCK + 1], SLIDING) == 4
        assert pool.known_windows(SLIDING, tokens[: 4 * BLOCK]) == (False, False, True, True)
        assert pool.stat().disk.loaded == 12
        assert pool.check() == []


@pytest.fixture
def spawn(tmp_path: Path) -> Iterator[Callable[[str], tuple["subprocess.Popen[str]", PoolClient]]]:
    """Starts a pool process of some mode and joins it."""
    children, clients = list[subprocess.Popen[str]](), list[PoolClient]()

    def start(mode: str) -> tuple["subprocess.Popen[str]", PoolClient]:
        child = subprocess.Popen(
            [sys.executable, "-m", CHILD, str(tmp_path), mode],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        children.append(child)
        assert child.stdout
        clients.append(PoolClient(child.stdout.readline().strip(), "w", directory=tmp_path))
        return child, clients[-1]

    yield start
    for client in clients:
        client.close()
    for child in children:
        child.kill()
        child.communicate()


# ------------------------------------------------------------------ a whole pool


def test_what_was_evicted_comes_back(tmp_path: Path) -> None:
    with LocalPool(4096, PAGE_BYTES, "w", PREFIXES, settings(tmp_path)) as pool:
        assert pool.restores
        first, second = prompt(0), prompt(1000)
        assert publish(pool, first[:-1]) == 20
        assert publish(pool, second[:-1]) == 20
        assert pool.known_prefix(SPACE, first) < 20
        settled(pool, 40)
        assert restore(pool, first) == 20
        require_content(pool, first, 20)
        assert restore(pool, second) == 20
        require_content(pool, second, 20)
        assert restore(pool, [7, *first]) == 0
        assert restore(pool, first, OTHER) == 0
        ledger = pool.stat()
        assert ledger.disk.stored == 40
        assert ledger.disk.loaded >= 20
        assert ledger.disk.loaded_bytes == ledger.disk.loaded * SIZE * PAGE_BYTES
        assert not any(ledger.disk.skipped.values())
        assert pool.check() == []


def test_what_has_come_back_may_be_evicted_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before the thread that read it has tidied up, which here it never does."""
    with LocalPool(4096, PAGE_BYTES, "w", PREFIXES, settings(tmp_path)) as pool:
        first, second = prompt(0), prompt(1000)
        publish(pool, first[:-1])
        publish(pool, second[:-1])
        settled(pool, 40)
        monkeypatch.setattr(DiskTier, "_give_up", lambda *_: None)
        assert restore(pool, first) == 20
        assert restore(pool, second) == 20


def test_the_last_token_is_left_to_compute(tmp_path: Path) -> None:
    tokens = prompt(0)[:-1]
    with LocalPool(4096, PAGE_BYTES, "w", PREFIXES, settings(tmp_path)) as pool:
        publish(pool, tokens)
    with LocalPool(4096, PAGE_BYTES, "w", PREFIXES, settings(tmp_path)) as pool:
        assert restore(pool, tokens) == 19
        require_content(pool, tokens, 19)


def test_a_killed_pool_finds_its_prefixes(
    spawn: Callable[[str], tuple["subprocess.Popen[str]", PoolClient]],
) -> None:
    tokens = prompt(0)
    child, client = spawn("disk")
    publish(client, tokens[:-1])
    settled(client, 20)
    child.kill()
    child.wait()
    _, client = spawn("disk")
    assert client.known_prefix(SPACE, tokens) == 0
    assert restore(client, tokens) == 20
    require_content(client, tokens, 20)
    assert client.stat().disk.objects == 20


def test_a_disk_that_takes_nothing_costs_no_more_than_the_disk(
    spawn: Callable[[str], tuple["subprocess.Popen[str]", PoolClient]],
) -> None:
    """No file may be larger than its header there: the disk is full for every block."""
    tokens = prompt(0)
    _, client = spawn("starve")
    assert publish(client, tokens[:-1]) == 20
    while (disk := client.stat().disk).failed < 20:
        time.sleep(0.001)
    assert disk.objects == 0
    assert "change pool.disk_bytes" in disk.fault
    assert restore(client, tokens) == 20
    require_content(client, tokens, 20)


def test_a_damaged_block_and_those_behind_it_are_computed_anew(tmp_path: Path) -> None:
    tokens = prompt(0)
    with LocalPool(4096, PAGE_BYTES, "w", PREFIXES, settings(tmp_path)) as pool:
        publish(pool, tokens[:-1])
        settled(pool, 20)
    path = tmp_path / "tier" / f"{keys(tokens)[12].hex()}.kv"
    rotten = bytearray(path.read_bytes())
    rotten[-1] ^= 1
    path.write_bytes(rotten)
    with LocalPool(4096, PAGE_BYTES, "w", PREFIXES, settings(tmp_path)) as pool:
        assert restore(pool, tokens) == 12
        require_content(pool, tokens, 12)
        assert pool.stat().disk.damaged == 1
        assert publish(pool, tokens[:-1]) == 8
        assert settled(pool, 20).objects == 20
        assert pool.check() == []


def test_a_pool_without_its_directory_goes_on_and_says_so(
    tmp_path: Path,
    make_server: Callable[..., Any],
    make_client: Callable[..., PoolClient],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    folder = tmp_path / "tier"
    monkeypatch.setattr(tier, "LOCK_WAIT_S", 0.0)
    with DiskStore(folder, 1 << 20, PAGE_BYTES):
        server = make_server(prefixes=PREFIXES, disk_path=str(folder), disk_bytes=1 << 20)
        client = make_client(server, "w")
        assert not client.restores
        assert "another pool has its disk tier in" in client.stat().disk.fault
        assert publish(client, prompt(0)[:-1]) == 20
        assert restore(client, prompt(0)) == 20


def test_a_tenant_pays_for_what_it_has_brought_back(tmp_path: Path) -> None:
    half = PrefixSettings(block_tokens=BLOCK, total_bytes=ROOM, tenant_bytes=ROOM // 2)
    first = prompt(0, 10)
    with LocalPool(4096, PAGE_BYTES, "w", half, settings(tmp_path)) as pool:
        publish(pool, first[:-1])
        settled(pool, 10)
    with LocalPool(4096, PAGE_BYTES, "w", half, settings(tmp_path)) as pool:
        assert publish(pool, prompt(500, 10)[:-1], tenant="u") == 10
        assert restore(pool, first) == 10
        assert pool.known_prefix(SPACE, prompt(500, 10)) == 10
        assert publish(pool, prompt(900, 10)[:-1]) == 10
        assert pool.known_prefix(SPACE, prompt(500, 10)) == 10


# ------------------------------------------------------------------ step by step


class Later:
    """Runs nothing until it is told to."""

    def __init__(self, room: int = 100) -> None:
        self.line, self.room = deque[Callable[[], Any]](), room

    def __len__(self) -> int:
        return len(self.line)

    def submit(
        self, work: Callable[[], Any], nbytes: int, *, urgent: bool = False
    ) -> "Future[Any]":
        if len(self.line) == self.room:
            raise PoolError("full")
        self.line.append(work)
        return Future()

    def close(self) -> None:
        pass


class Bench:
    """A cache of one block over a disk that works when it is told to."""

    def __init__(self, folder: Path, room: int = 100, pages: int = 2, page_bytes: int = 256):
        self.pool = Pool(8 * pages, page_bytes, "arena", 10.0)
        nbytes = pages * page_bytes
        limits = PrefixSettings(block_tokens=1, total_bytes=nbytes, tenant_bytes=nbytes)
        self.cache, self.pages = PrefixCache(self.pool, limits), pages
        self.data = np.zeros((8 * pages, page_bytes), np.uint8)
        self.worker = self.pool.register("w", ProcessKey(1, 1, "w"), 0.0)
        self.tier, self.mover = DiskStore(folder, 1 << 30, page_bytes), Later(room)
        disk = Disk(self.tier, self.mover, self.data)
        self.level = DiskTier(self.cache, disk, threading.Lock())

    def publish(self, token: int) -> None:
        ids = self.pool.allocate(self.worker, self.pages)
        self.data[ids] = token
        new = Publication(namespace=SPACE, tokens=[token], blocks=[ids], seconds=1.0, tenant="t")
        done = self.cache.publish(self.worker, new)
        assert done.added == 1
        self.level.evicted(done.evicted)
        self.level.published(done.new)

    def scribble(self) -> None:
        """Write to all pages that are free."""
        ids = self.pool.allocate(self.worker, self.pool.free_pages)
        self.data[ids] = 0xEE
        self.pool.free(self.worker, ids)

    def work(self) -> None:
        while self.mover.line:
            self.mover.line.popleft()()

    def require_stored(self, *tokens: int) -> None:
        for token in tokens:
            (key,) = list(chain_keys(SPACE, [encode([token])]))[1:]
            into = np.zeros((self.pages, self.data.shape[1]), np.uint8)
            assert self.tier.load(key, [into])
            assert np.all(into == token)
        self.tier.close()


def test_a_block_that_was_evicted_before_its_turn_is_written(tmp_path: Path) -> None:
    bench = Bench(tmp_path)
    bench.publish(1)
    bench.publish(2)
    bench.scribble()
    bench.work()
    bench.require_stored(1, 2)


def test_a_block_that_went_and_came_again_is_written_as_it_is(tmp_path: Path) -> None:
    """What waits first for its turn is the block whose pages are others' by now."""
    bench = Bench(tmp_path)
    for token in (1, 2, 1):
        bench.publish(token)
    bench.scribble()
    bench.work()
    bench.require_stored(1, 2)


def test_what_finds_no_place_in_the_line_is_counted(tmp_path: Path) -> None:
    bench = Bench(tmp_path, room=1)
    bench.publish(1)
    bench.publish(2)
    assert bench.level.line().skipped == {**NO_SKIPS, "queue_full": 2}
    bench.work()
    assert bench.level.line().objects == 0  # the first was evicted, and its copy found no place


def test_copies_of_evicted_blocks_have_a_limit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    bench = Bench(tmp_path, pages=1)
    monkeypatch.setattr(tier, "STAGED_BYTES", 2 * PAGE_BYTES)
    for token in range(4):
        bench.publish(token)
    assert bench.level.line().skipped == {**NO_SKIPS, "staging_full": 1}
    bench.work()
    bench.publish(5)
    bench.publish(6)
    assert bench.level.line().skipped == {**NO_SKIPS, "staging_full": 1}
    bench.work()
    bench.require_stored(0, 1, 3, 5, 6)
