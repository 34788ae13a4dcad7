"""Prefixes are shared where they may be, found where they are, and never taken for another."""

from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from triptych.kvpool.prefix.blocks import (
    Limits,
    Namespace,
    Payload,
    Published,
    chain_keys,
    cut,
    encode,
)
from triptych.kvpool.prefix.index import PrefixIndex

STEP = 4
HERE = Namespace(salt=b"a", model="m", revision="1", profile="auto")
ROOMY = Limits(total_bytes=1000, tenant_bytes=1000)


def payloads(count: int, nbytes: int = 10, seconds: float = 1.0, page: int = 0) -> list[Payload]:
    pages = [np.array([page + i], np.int32) for i in range(count)]
    return [Payload(ids, nbytes, seconds) for ids in pages]


def publish(
    index: PrefixIndex,
    tokens: Sequence[int],
    new: list[Payload],
    tenant: str = "a",
    where: Namespace = HERE,
    *,
    hold: bool = False,
) -> Published:
    done = index.publish(where, tokens, new, tenant=tenant)
    if done.pin and not hold:
        index.release(done.pin.id)
    return done


def test_a_prompt_finds_the_blocks_that_it_starts_with() -> None:
    index = PrefixIndex(STEP, ROOMY)
    publish(index, range(12), payloads(3, page=7))
    found = index.lookup(HERE, [*range(8), 99, 98, 97, 96, 95])
    assert [block.pages.tolist() for block in found] == [[7], [8]]
    assert index.lookup(HERE, [1, 2, 3, 4, 5]) == ()


@pytest.mark.parametrize(("length", "blocks"), [(0, 0), (4, 0), (5, 1), (8, 1), (9, 2), (12, 2)])
def test_at_least_one_token_is_left_to_compute(length: int, blocks: int) -> None:
    index = PrefixIndex(STEP, ROOMY)
    publish(index, range(12), payloads(3))
    assert len(index.lookup(HERE, range(length))) == blocks


@given(step=st.integers(1, 9), blocks=st.integers(1, 5), more=st.integers(0, 12))
def test_blocks_have_the_size_that_their_namespace_says(step: int, blocks: int, more: int) -> None:
    """Pages of another format hold other numbers of tokens."""
    index = PrefixIndex(STEP, ROOMY)
    other = Namespace(salt=b"a", model="m", revision="1", profile="k4v2", block_tokens=step)
    publish(index, range(12), payloads(3))
    publish(index, range(step * blocks), payloads(blocks, page=50), where=other)
    asked = range(step * blocks + more)
    found = index.lookup(other, asked)
    assert len(found) == min(blocks, max(0, len(asked) - 1) // step)
    assert [block.pages.tolist() for block in found] == [[50 + n] for n in range(len(found))]
    assert index.resident(other, asked) == blocks
    assert len(index.lookup(HERE, range(13))) == 3
    assert index.check() == []
    if step > 1:
        with pytest.raises(ValueError, match="blocks to publish"):
            publish(index, range(step * blocks + 1), payloads(1), where=other)


@pytest.mark.parametrize(
    "other",
    [
        Namespace(salt=b"b", model="m", revision="1", profile="auto"),
        Namespace(salt=b"", model="m", revision="1", profile="auto"),
        Namespace(salt=b"a", model="n", revision="1", profile="auto"),
        Namespace(salt=b"a", model="m", revision="2", profile="auto"),
        Namespace(salt=b"a", model="m", revision="1", profile="k8v4"),
        Namespace(salt=b"am", model="", revision="1", profile="auto"),
    ],
)
def test_nothing_is_shared_across_salts_models_revisions_and_profiles(other: Namespace) -> None:
    index = PrefixIndex(STEP, ROOMY)
    publish(index, range(12), payloads(3))
    assert index.lookup(other, range(13)) == ()
    done = publish(index, range(12), payloads(3, page=50), "b", other)
    assert done.added == 3
    assert index.check() == []


def test_tenants_with_one_salt_share_and_the_first_one_pays() -> None:
    index = PrefixIndex(STEP, ROOMY)
    publish(index, range(8), payloads(2), "a")
    done = publish(index, range(12), payloads(3, page=20), "b")
    assert done.added == 1
    assert index.stat().bytes_by_tenant == {"a": 20, "b": 10}
    assert [b.pages.tolist() for b in index.lookup(HERE, range(13))] == [[0], [1], [22]]


texts = st.text(max_size=4)
namespaces = st.builds(
    Namespace, salt=st.binary(max_size=4), model=texts, revision=texts, profile=texts
)


@given(namespaces, namespaces)
def test_no_two_namespaces_look_alike(first: Namespace, second: Namespace) -> None:
    assert (first.encoded() == second.encoded()) == (first == second)
    assert (first.digest() == second.digest()) == (first == second)


def test_keys_are_a_chain() -> None:
    index = PrefixIndex(STEP, ROOMY)
    keys = index.keys(HERE, [*range(12), 5])
    assert keys == list(chain_keys(HERE, cut(encode(range(12)), STEP)))[1:]
    assert index.keys(HERE, range(8)) == keys[:2]
    changed = index.keys(HERE, [9, *range(1, 12)])
    assert not set(changed) & set(keys)
    publish(index, range(12), payloads(3))
    blocks = index.lookup(HERE, range(13))
    assert [block.key for block in blocks] == keys
    assert [block.parent for block in blocks] == [HERE.digest(), *keys[:2]]


@pytest.mark.parametrize("tokens", [[-1] * 4, [2**31] * 4, [0.5] * 4, [[1]] * 4, ["a"] * 4])
def test_what_is_no_token_is_refused(tokens: list[int]) -> None:
    index = PrefixIndex(STEP, ROOMY)
    with pytest.raises(ValueError, match="expected a list of integers"):
        index.publish(HERE, tokens, payloads(1), tenant="a")


@pytest.mark.parametrize(("tokens", "count"), [(7, 1), (8, 3), (8, 0), (0, 1)])
def test_a_publish_is_of_whole_blocks(tokens: int, count: int) -> None:
    with pytest.raises(ValueError, match="blocks to publish"):
        publish(PrefixIndex(STEP, ROOMY), range(tokens), payloads(count))


@pytest.mark.parametrize(("nbytes", "seconds"), [(-1, 1.0), (1, -1.0), (1, float("nan"))])
def test_a_payload_says_what_it_costs(nbytes: int, seconds: float) -> None:
    with pytest.raises(ValueError, match="a block of"):
        payloads(1, nbytes, seconds)


def test_published_pages_cannot_be_changed_from_outside() -> None:
    index, pages = PrefixIndex(STEP, ROOMY), np.array([3, 4], np.int32)
    publish(index, range(4), [Payload(pages, 10, 1.0)])
    pages[:] = 9
    (block,) = index.lookup(HERE, range(5))
    assert block.pages.tolist() == [3, 4]
    with pytest.raises(ValueError, match="read-only"):
        block.pages[0] = 1


def test_a_tenant_over_its_quota_pays_with_its_own_blocks() -> None:
    index = PrefixIndex(STEP, Limits(total_bytes=100, tenant_bytes=30))
    publish(index, [1] * 4, payloads(1, seconds=1e-6), "b")
    publish(index, range(12), payloads(3), "a")
    done = publish(index, [7] * 4, payloads(1), "a")
    assert [block.tenant for block in done.evicted] == ["a"]
    assert len(index.lookup(HERE, range(13))) == 2
    assert index.lookup(HERE, [1] * 5)


def test_what_cannot_fit_is_refused_and_counted() -> None:
    index = PrefixIndex(STEP, Limits(total_bytes=50, tenant_bytes=30))
    done = publish(index, range(12), payloads(3), hold=True)
    assert publish(index, [7] * 4, payloads(1)).refused == "quota"
    assert publish(index, [7] * 4, payloads(1, nbytes=31), "b").refused == "quota"
    assert publish(index, [7] * 4, payloads(1, nbytes=21), "b").refused == "memory"
    assert publish(index, [7] * 8, payloads(1), "b").refused == "parent"
    assert index.stat().refused == {"quota": 2, "memory": 1, "parent": 1}
    assert done.pin is not None
    index.release(done.pin.id)
    assert publish(index, [7] * 4, payloads(1, nbytes=21), "b").refused is None


def test_a_tenant_that_floods_a_full_cache_takes_nothing_from_one_with_less() -> None:
    index = PrefixIndex(STEP, Limits(total_bytes=100, tenant_bytes=100))
    other = Namespace(salt=b"b", model="m", revision="1", profile="auto")
    mine = list(range(8))
    publish(index, mine, payloads(2, seconds=0.001), "small", other)
    for start in range(0, 4000, 100):
        done = publish(index, range(start, start + 4), payloads(1), "large")
        assert done.refused is None
    assert len(index.lookup(other, [*mine, 0])) == 2
    assert index.stat().bytes_by_tenant == {"small": 20, "large": 80}
    for start in range(5000, 9000, 100):
        publish(index, range(start, start + 4), payloads(1), "small", other)
    assert index.stat().bytes_by_tenant == {"small": 50, "large": 50}
    assert index.check() == []


def test_the_child_of_another_tenant_keeps_a_block_from_being_evicted() -> None:
    index = PrefixIndex(STEP, Limits(total_bytes=100, tenant_bytes=30))
    publish(index, range(8), payloads(2), "a")
    publish(index, range(12), payloads(3, page=20), "b")
    publish(index, [7] * 4, payloads(1), "a")
    before = index.stat()
    assert publish(index, [8] * 4, payloads(1, nbytes=25), "a").refused == "quota"
    assert index.stat().bytes_by_tenant == before.bytes_by_tenant
    assert index.lookup(HERE, [7] * 5), "what was evicted in vain is back"
    assert index.check() == []
    assert publish(index, [8] * 4, payloads(1, nbytes=10), "a").refused is None


def test_leaves_go_before_their_parents() -> None:
    index = PrefixIndex(STEP, ROOMY)
    publish(index, range(20), payloads(5))
    keys = index.keys(HERE, range(20))
    assert [block.key for block in index.evict(30)] == keys[:1:-1]
    assert len(index.lookup(HERE, range(21))) == 2


def test_the_same_calls_give_the_same_evictions() -> None:
    def run() -> list[bytes]:
        chance = np.random.default_rng(3)
        index, gone = PrefixIndex(STEP, Limits(total_bytes=200, tenant_bytes=200)), list[bytes]()
        for _ in range(500):
            tokens = np.repeat(chance.integers(0, 4, 3), STEP)
            hold = index.acquire(HERE, tokens.tolist())
            done = publish(index, tokens.tolist(), payloads(3, int(chance.integers(1, 40))))
            gone += [block.key for block in done.evicted]
            if hold:
                index.release(hold.id)
        return gone

    assert len(run()) > 100
    assert run() == run()


def test_numbers_are_counted() -> None:
    index = PrefixIndex(STEP, ROOMY)
    assert index.acquire(HERE, range(9)) is None
    publish(index, range(8), payloads(2))
    hold = index.acquire(HERE, range(9))
    assert hold is not None
    stat = index.stat()
    assert (stat.hits, stat.misses, stat.asked_tokens, stat.hit_tokens) == (1, 1, 18, 8)
    assert (stat.blocks, stat.nbytes, stat.pinned_bytes, stat.added) == (2, 20, 20, 2)
    assert index.evict(100) == ()
    index.release(hold.id)
    assert len(index.evict(100)) == 2
    assert index.stat().evictions == 2
    assert index.stat().nbytes == 0
