"""Conversations: what is kept of them goes last, for a while, and in nobody's way."""

from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from triptych.core.messages import pack
from triptych.kvpool import Namespace, PrefixSettings
from triptych.kvpool.pool.leases import WorkerId
from triptych.kvpool.pool.page_pool import Pool
from triptych.kvpool.pool.processes import this_process
from triptych.kvpool.prefix.blocks import SoftPin, SoftPinId, encode
from triptych.kvpool.prefix.sessions import SessionKey, SessionTable
from triptych.kvpool.rpc.calls import AllocatePages, UnregisterWorker
from triptych.kvpool.rpc.dispatch import answer
from triptych.kvpool.rpc.local_pool import LockedPool
from triptych.kvpool.rpc.messages import PrefixBlocks
from triptych.kvpool.rpc.page_ranges import PageRanges
from triptych.kvpool.rpc.prefix_calls import (
    KeepSession,
    KnowPrefix,
    PublishPrefix,
    SetBorrowedMemory,
)

STEP, PAGE_BYTES, PAGES = 4, 256, 24
"""A block has one page; the cache has place for ten of them."""


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def space(salt: str = "a") -> Namespace:
    return Namespace(salt=salt.encode(), model="m", revision="", profile="p")


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def pool(clock: Clock) -> LockedPool:
    return a_pool(clock)


def a_pool(clock: Clock, tenant_pages: int = 10, session_pages: int = 5) -> LockedPool:
    prefixes = PrefixSettings(
        block_tokens=STEP,
        total_bytes=10 * PAGE_BYTES,
        tenant_bytes=tenant_pages * PAGE_BYTES,
        session_ttl_s=60.0,
        session_tenant_bytes=session_pages * PAGE_BYTES,
    )
    books = Pool(PAGES, PAGE_BYTES, "arena", 1e9)
    return LockedPool(books, 1, clock=clock, prefixes=prefixes)


def tokens(first: int, blocks: int) -> list[int]:
    return [first * 100 + i for i in range(blocks * STEP)]


def publish(pool: LockedPool, said: Sequence[int], tenant: str = "t", salt: str = "a") -> int:
    """Keep what is not known of whole blocks, as a worker of its own would."""
    worker = pool.register("w", this_process(), 0).worker
    known = known_of(pool, worker, said, salt)
    count = len(said) // STEP - known
    if count == 0:
        return 0
    asked = AllocatePages(worker=worker, pages=count, at_least=count)
    ids = np.split(pool.call(asked).pages.ids(PAGES), count)
    new = PublishPrefix(
        worker=worker,
        namespace=space(salt),
        tokens=encode(said),
        blocks=tuple(map(PageRanges, ids)),
        seconds=1.0,
        tenant=tenant,
    )
    added = pool.call(new).blocks
    pool.call(UnregisterWorker(worker=worker))
    return added


def keep(
    pool: LockedPool, said: Sequence[int], name: str = "s", tenant: str = "t", salt: str = "a"
) -> int:
    worker = pool.register("w", this_process(), 0).worker
    asked = KeepSession(
        worker=worker, namespace=space(salt), tokens=encode(said), tenant=tenant, session=name
    )
    kept = pool.call(asked).blocks
    pool.call(UnregisterWorker(worker=worker))
    return kept


def known(pool: LockedPool, said: Sequence[int], salt: str = "a") -> int:
    worker = pool.register("w", this_process(), 0).worker
    blocks = known_of(pool, worker, said, salt)
    pool.call(UnregisterWorker(worker=worker))
    return blocks


def known_of(pool: LockedPool, worker: WorkerId, said: Sequence[int], salt: str) -> int:
    asked = KnowPrefix(worker=worker, namespace=space(salt), tokens=encode(said))
    return pool.call(asked).blocks


def flood(pool: LockedPool, count: int = 30) -> None:
    """Other prompts, twice each, so that they are worth more than what nobody asks again."""
    for number in range(count):
        publish(pool, tokens(1000 + number, 2))
        publish(pool, tokens(1000 + number, 2))
    assert pool.check() == []


def test_a_conversation_outlives_whatever_else_there_is(pool: LockedPool) -> None:
    said, else_ = tokens(1, 4), tokens(2, 4)
    for one in (said, else_):
        publish(pool, one)
    assert keep(pool, said) == 4
    flood(pool)
    assert (known(pool, said), known(pool, else_)) == (4, 0)


def test_when_its_time_is_over_it_is_as_any_other(pool: LockedPool, clock: Clock) -> None:
    said = tokens(1, 4)
    publish(pool, said)
    keep(pool, said)
    clock.now = 59.0
    keep(pool, said)  # the next turn
    clock.now = 60.0 + 58.0
    assert (pool.stat().prefix.sessions, pool.stat().prefix.session_bytes) == (1, 4 * PAGE_BYTES)
    clock.now = 60.0 + 59.0
    assert (pool.stat().prefix.sessions, pool.stat().prefix.session_bytes) == (0, 0)
    assert known(pool, said) == 4
    flood(pool)
    assert known(pool, said) == 0


def test_requests_and_other_prompts_get_its_memory_if_there_is_no_other(pool: LockedPool) -> None:
    said = tokens(1, 5)
    publish(pool, said)
    assert keep(pool, said) == 5
    assert publish(pool, tokens(2, 10), "other") == 10
    assert known(pool, said) == 0
    assert pool.check() == []
    publish(pool, said)
    keep(pool, said)
    asked = SetBorrowedMemory(nbytes=10 * PAGE_BYTES)
    assert pool.call(asked).bytes == 10 * PAGE_BYTES
    assert pool.stat().prefix.bytes == 0
    assert pool.check() == []


def test_the_next_turn_replaces_the_one_before(pool: LockedPool) -> None:
    publish(pool, tokens(1, 2))
    keep(pool, tokens(1, 2))
    publish(pool, tokens(1, 4))
    assert keep(pool, tokens(1, 4)) == 4
    assert pool.stat().prefix.sessions == 1
    publish(pool, tokens(3, 2))
    assert keep(pool, tokens(3, 2)) == 2, "the client began again under the same name"
    flood(pool)
    assert (known(pool, tokens(1, 4)), known(pool, tokens(3, 2))) == (0, 2)


def test_a_name_means_nothing_to_other_clients(pool: LockedPool) -> None:
    for salt in "ab":
        publish(pool, tokens(1, 2), f"tenant {salt}", salt)
        assert keep(pool, tokens(1, 1), "s", f"tenant {salt}", salt) == 1
    assert pool.stat().prefix.sessions == 2
    assert keep(pool, tokens(1, 2), "s", "tenant c", "c") == 0
    assert keep(pool, tokens(1, 2), "s", "tenant b", "a") == 2, "a salt may be shared"
    assert pool.stat().prefix.sessions == 3


def test_too_long_a_conversation_is_kept_from_its_beginning(clock: Clock) -> None:
    pool = a_pool(clock, session_pages=3)
    publish(pool, tokens(1, 6))
    assert keep(pool, tokens(1, 6)) == 3
    flood(pool)
    assert known(pool, tokens(1, 6)) == 3


def test_no_worker_need_live_for_it(pool: LockedPool) -> None:
    publish(pool, tokens(1, 2))
    worker = pool.register("dying", this_process(), 0).worker
    said = encode(tokens(1, 2))
    asked = KeepSession(worker=worker, namespace=space(), tokens=said, tenant="t", session="s")
    pool.call(asked)
    pool.call(UnregisterWorker(worker=worker))
    assert pool.stat().prefix.sessions == 1
    assert pool.check() == []


def test_a_pool_without_prefixes_keeps_none() -> None:
    pool = LockedPool(Pool(PAGES, PAGE_BYTES, "arena", 1e9), 1)
    assert keep(pool, tokens(1, 2)) == 0


@pytest.mark.parametrize("field", ["tenant", "session"])
def test_a_name_that_is_too_long_is_no_question(field: str) -> None:
    asked = {"worker": "w", "namespace": space(), "tokens": b"", "tenant": "", "session": ""}
    with pytest.raises(ValueError, match="257 characters"):
        KeepSession(**{**asked, field: "x" * 257})  # pyright: ignore[reportArgumentType]


def test_it_is_asked_for_over_the_wire(pool: LockedPool) -> None:
    publish(pool, tokens(1, 2))
    worker = pool.register("w", this_process(), 0).worker
    said = np.array(tokens(1, 2), "<i4").tobytes()
    asked = KeepSession(worker=worker, namespace=space(), tokens=said, tenant="t", session="s")
    assert answer(pool, pack([asked])) == pack([PrefixBlocks(blocks=2)])


# ------------------------------------------------------------------ the book alone


opened = st.tuples(st.integers(0, 4), st.sampled_from("tu"), st.integers(1, 6), st.integers(0, 9))


@given(st.lists(opened, max_size=30))
def test_who_opens_one_more_has_the_first_to_end_go(
    turns: list[tuple[int, str, int, int]],
) -> None:
    book, now, alive = SessionTable(ttl_s=20.0, tenant_bytes=8, total_bytes=12), 0.0, set[int]()
    until = dict[int, float]()
    for number, (name, tenant, nbytes, pause) in enumerate(turns):
        now += pause
        expired = book.expire(now)
        assert all(until[soft_pin] <= now for soft_pin in expired)
        soft_pin = SoftPin(SoftPinId(number), 1, min(nbytes, book.most_bytes))
        key = SessionKey(f"{tenant}{name}".encode())
        ended = book.open(key, tenant, soft_pin, now)
        assert number not in ended
        alive = (alive | {number}) - {*expired, *ended}
        until[number] = now + 20.0
        assert book.soft_pins() == alive
        assert book.nbytes <= 12
        assert len(book) == len(alive)
    book.expire(now + 20.0)
    assert (len(book), book.nbytes, book.soft_pins()) == (0, 0, set())


@pytest.mark.parametrize(
    "book",
    [SessionTable(0.0, 8, 8), SessionTable(1.0, 0, 8), SessionTable(1.0, 8, 0)],
)
def test_none_is_kept_without_time_or_bytes(book: SessionTable) -> None:
    assert book.most_bytes == 0
