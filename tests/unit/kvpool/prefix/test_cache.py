"""Prefixes as workers see them, the same in one process and through a socket."""

import threading
from collections.abc import Callable

import numpy as np
import pytest

from triptych.core.errors import MessageError, NotHeld, PoolError, StaleHandle
from triptych.core.messages import CacheMemoryBorrowed, pack, unpack
from triptych.kvpool import (
    LocalPool,
    Namespace,
    PoolServer,
    PoolWatcher,
    PrefixSettings,
    Publication,
)
from triptych.kvpool.pool.free_list import PageIds
from triptych.kvpool.pool.leases import WorkerId
from triptych.kvpool.prefix.blocks import PinId, encode
from triptych.kvpool.rpc.client.worker_pool import WorkerPool
from triptych.kvpool.rpc.page_ranges import PageRanges
from triptych.kvpool.rpc.prefix_calls import FindPrefix, PublishPrefix

Join = Callable[[str], WorkerPool]
SPACE = Namespace(salt=b"s", model="m", revision="", profile="p")
BLOCK, SIZE = 4, 3
"""Tokens and pages of a block; the fixtures have room for 64 pages."""


def publication(
    tokens: list[int], blocks: list[PageIds], space: Namespace = SPACE, seconds: float = 0.5
) -> Publication:
    return Publication(namespace=space, tokens=tokens, blocks=blocks, seconds=seconds, tenant="t")


def publish(pool: WorkerPool, tokens: list[int], first: int = 0, space: Namespace = SPACE) -> int:
    """Publish all blocks from ``first`` on, each page filled with its block's number."""
    blocks = len(tokens) // BLOCK - first
    pages = np.split(pool.allocate(blocks * SIZE), blocks)
    for number, ids in enumerate(pages, first):
        pool.arena.data[ids] = number
    added = pool.publish_prefix(publication(tokens, pages, space))
    for ids in pages[: blocks - added]:
        pool.free(ids)
    return added


def test_a_prefix_passes_from_one_worker_to_another(join_prefixes: Join) -> None:
    compress, prefill = join_prefixes("compress"), join_prefixes("prefill")
    assert publish(compress, list(range(12))) == 3
    assert compress.allocated_pages == 0
    assert prefill.known_prefix(SPACE, list(range(20))) == 3
    found = prefill.find_prefix(SPACE, [*range(9), 77, 78, 79])
    assert found is not None
    assert found.tokens == 8
    for number, ids in enumerate(found.blocks):
        assert np.all(prefill.arena.data[ids] == number)
    prefill.release_prefix(found.pin)
    with pytest.raises(PoolError):
        prefill.release_prefix(found.pin)
    line = prefill.stat().prefix
    assert (line.blocks, line.hits, line.misses, line.hit_tokens) == (3, 1, 0, 8)


def test_what_is_known_already_stays_the_publishers(join_prefixes: Join) -> None:
    pool = join_prefixes("w")
    assert publish(pool, list(range(8))) == 2
    assert publish(pool, list(range(8))) == 0
    assert publish(pool, list(range(12)), first=1) == 1
    assert pool.allocated_pages == 0
    assert pool.stat().prefix.blocks == 3


def test_published_pages_are_not_the_workers_any_more(join_prefixes: Join) -> None:
    pool = join_prefixes("w")
    ids = pool.allocate(SIZE)
    assert pool.publish_prefix(publication([1, 2, 3, 4], [ids], seconds=0.0)) == 1
    with pytest.raises(NotHeld):
        pool.free(ids)
    with pytest.raises(NotHeld):
        pool.handoff([("r", ids)])
    with pytest.raises(NotHeld):
        pool.publish_prefix(publication([5, 6, 7, 8], [ids]))


def test_a_full_cache_evicts_and_frees(join_prefixes: Join) -> None:
    pool = join_prefixes("w")
    for start in range(0, 4000, 40):
        assert publish(pool, list(range(start, start + 20))) == 5
    ledger = pool.stat()
    assert ledger.prefix.evictions > 0
    assert ledger.request_pages <= 64
    assert ledger.free_pages + ledger.held_pages == ledger.pages
    other = Namespace(salt=b"x", model="m", revision="", profile="p")
    assert pool.find_prefix(other, list(range(3960, 3980))) is None


def test_a_prefix_too_large_is_refused_whole(join_prefixes: Join) -> None:
    pool = join_prefixes("w")
    assert publish(pool, list(range(4 * 30))) == 0
    assert pool.allocated_pages == 0
    assert pool.stat().prefix.refused == 1


def test_a_hold_ends_with_its_worker(join_prefixes: Join) -> None:
    first, second = join_prefixes("first"), join_prefixes("second")
    publish(first, list(range(80)))
    assert second.find_prefix(SPACE, list(range(81))) is not None
    assert publish(first, list(range(100, 180))) == 0
    second.close()
    assert publish(first, list(range(100, 180))) == 20


def test_the_name_of_the_cache_is_not_for_workers(join_prefixes: Join) -> None:
    pool = join_prefixes("w")
    publish(pool, list(range(8)))
    with pytest.raises(PoolError, match="the pool's own"):
        join_prefixes("prefix")
    with pytest.raises(StaleHandle):
        pool.inherit("prefix")
    assert not pool.expel("prefix")
    assert pool.known_prefix(SPACE, list(range(8))) == 2


def test_a_pool_without_a_cache_knows_nothing(join: Join) -> None:
    pool = join("w")
    assert publish(pool, list(range(8))) == 0
    assert pool.known_prefix(SPACE, list(range(8))) == 0
    assert pool.find_prefix(SPACE, list(range(8))) is None
    assert pool.stat().prefix.asked_tokens == 0


def test_many_threads_share_and_nothing_is_lost() -> None:
    limits = PrefixSettings(block_tokens=BLOCK, total_bytes=64 * 256, tenant_bytes=64 * 256)
    with LocalPool(512, 256, "bystander", limits) as pool:

        def work(seed: int) -> None:
            generator = np.random.default_rng(seed)
            with pool.join(f"w{seed}") as mine:
                for _ in range(60):
                    tokens = generator.integers(0, 2, 17).tolist()
                    found = mine.find_prefix(SPACE, tokens)
                    publish(mine, tokens[:16])
                    if found is not None:
                        mine.release_prefix(found.pin)

        threads = [threading.Thread(target=work, args=(seed,)) for seed in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert pool.check() == []
        ledger = pool.stat()
        assert ledger.prefix.hits > 0
        assert ledger.held_pages == ledger.prefix.blocks * SIZE


@pytest.mark.parametrize("tokens", [b"123", b"\xff" * 4, bytes(4 * ((1 << 20) + 1))])
def test_tokens_that_are_none_are_refused(tokens: bytes) -> None:
    with pytest.raises(ValueError):  # noqa: PT011 - the words differ
        FindPrefix(worker=WorkerId("w"), namespace=SPACE, tokens=tokens)


def test_frames_with_wrong_fields_are_refused() -> None:
    good = PublishPrefix(
        worker=WorkerId("w"),
        namespace=SPACE,
        tokens=encode([1, 2]),
        blocks=(PageRanges(b""),),
        seconds=1.0,
        tenant="t",
    )
    assert unpack(pack([good])) == [good]
    for old, new in ((b"salt", b"sale"), (b"\x01\x00\x00\x00", b"\x01\x00\x00\xff")):
        with pytest.raises(MessageError):
            unpack(pack([good]).replace(old, new))
    with pytest.raises(ValueError, match="3 blocks of 2 tokens"):
        PublishPrefix(
            worker=WorkerId("w"),
            namespace=SPACE,
            tokens=encode([1, 2]),
            blocks=(PageRanges(b""),) * 3,
            seconds=1.0,
            tenant="t",
        )


def test_memory_for_prefixes_is_lent(make_server: Callable[..., PoolServer]) -> None:
    room = 64 * 256
    limits = PrefixSettings(block_tokens=BLOCK, total_bytes=room, tenant_bytes=room)
    server = make_server(prefixes=limits)
    watcher = PoolWatcher(server.address)
    arena = server.stat().arena
    for asked, lent in ((1000, 1000), (1 << 30, room), (0, 0), (-5, 0)):
        assert watcher.borrow_cache_memory(asked) == CacheMemoryBorrowed(arena=arena, bytes=lent)
        assert server.stat().prefix.borrowed_bytes == lent
    watcher.close()
    assert make_server().check() == []


def test_a_hold_that_never_was_is_refused(join_prefixes: Join) -> None:
    with pytest.raises(PoolError):
        join_prefixes("w").release_prefix(PinId(5))
