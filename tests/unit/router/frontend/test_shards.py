"""Which shard takes a request: its home while that has room, the next one on the ring if not."""

from collections import Counter
from dataclasses import replace
from math import ceil

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from tests.effort import examples
from triptych.core.config import AppConfig
from triptych.core.errors import ConfigError, DeadlineExceeded, QueueFull, StageLost
from triptych.core.messages import Request, Sampling, failed
from triptych.core.pages import PagePlan
from triptych.core.shards import shard_of
from triptych.router import RequestAttempts, Shards
from triptych.router.frontend.shards import key_of, may_pass_on, names_of
from triptych.simulator import Cluster

NAMES = list(names_of(4))
UNBOUNDED = 1e9


def opened(count: int, overload: float = UNBOUNDED, free_requests: int = 0) -> Shards:
    shards = Shards(list(names_of(count)), overload, free_requests)
    for name in names_of(count):
        shards.found(name)
    return shards


def homes(count: int, keys: int = 1000) -> list[str | None]:
    shards = opened(count)
    return [shards.place(str(key), str(key).encode(), 1) for key in range(keys)]


@settings(max_examples=examples(20))
@given(count=st.integers(1, 12))
def test_a_new_shard_takes_its_share_of_keys_and_no_other_key_moves(count: int) -> None:
    before, after = homes(count), homes(count + 1)
    moved = [new for old, new in zip(before, after, strict=True) if old != new]
    assert set(moved) <= {str(count)}
    assert 0.4 < len(moved) * (count + 1) / len(before) < 2.0


@settings(max_examples=examples(20))
@given(count=st.integers(2, 8), gone=st.integers(0, 7))
def test_only_the_keys_of_a_shard_that_is_down_move_and_not_all_to_one(
    count: int, gone: int
) -> None:
    shards, dead = opened(count), str(gone % count)
    shards.lost(dead)
    before = homes(count)
    after = [shards.place(str(key), str(key).encode(), 1) for key in range(len(before))]
    assert all(new == old for old, new in zip(before, after, strict=True) if old != dead)
    heirs = Counter(new for old, new in zip(before, after, strict=True) if old == dead)
    assert dead not in heirs
    assert len(heirs) == count - 1
    shards.found(dead)
    back = [shards.place(str(key), str(key).encode(), 1) for key in range(len(before))]
    assert back == before


class Bounded(RuleBasedStateMachine):
    """Requests of any size come, end, are refused, and shards die and come back."""

    OVERLOAD, FREE = 1.25, 2

    def __init__(self) -> None:
        super().__init__()
        self.shards = Shards(NAMES, self.OVERLOAD, self.FREE)
        self.sizes = dict[str, int]()
        self.refused = dict[str, set[str]]()
        self.count = 0

    @property
    def where(self) -> dict[str, str]:
        return {name: shard for name in self.sizes if (shard := self.shards.where(name))}

    @rule(key=st.binary(max_size=2), nbytes=st.integers(1, 1000))
    def come(self, key: bytes, nbytes: int) -> None:
        name = f"r{self.count}"
        self.count += 1
        held = self.shards.held_bytes
        chosen = self.shards.place(name, key, nbytes)
        self.sizes[name], self.refused[name] = nbytes, set()
        up = self.shards.up
        assert (chosen is None) == (not up)
        if chosen is not None:
            mean = (sum(held[shard] for shard in up) + nbytes) / len(up)
            assert chosen in up
            assert held[chosen] < self.OVERLOAD * mean + self.FREE * nbytes

    @precondition(lambda self: self.sizes)
    @rule(data=st.data())
    def end(self, data: st.DataObject) -> None:
        name = data.draw(st.sampled_from(sorted(self.sizes)))
        self.shards.remove(name)
        del self.sizes[name], self.refused[name]

    @precondition(lambda self: self.where)
    @rule(data=st.data())
    def refuse(self, data: st.DataObject) -> None:
        """Passed on until all that are up have refused, and to none of them twice."""
        name, shard = data.draw(st.sampled_from(sorted(self.where.items())))
        self.refused[name].add(shard)
        found = self.shards.pass_on(name)
        left = set(self.shards.up) - self.refused[name]
        assert (found in left) if left else found is None

    @rule(shard=st.sampled_from(NAMES))
    def die(self, shard: str) -> None:
        """The ingress sends what was there again."""
        there = [name for name, at in self.where.items() if at == shard]
        self.shards.lost(shard)
        for name in there:
            self.shards.remove(name)
            del self.sizes[name], self.refused[name]

    @rule(shard=st.sampled_from(NAMES))
    def rise(self, shard: str) -> None:
        self.shards.found(shard)

    @invariant()
    def what_a_shard_holds_is_what_its_requests_count_for(self) -> None:
        held = dict.fromkeys(NAMES, 0)
        for name, shard in self.where.items():
            held[shard] += self.sizes[name]
        assert self.shards.held_bytes == held


TestBounded = Bounded.TestCase
TestBounded.settings = settings(max_examples=examples(40), stateful_step_count=30)


def test_of_one_size_and_without_free_ones_it_is_the_rule_of_the_paper() -> None:
    """No shard ever has more than ceil(1.25 m / n) of m requests, wherever their keys lie."""
    shards = opened(4, overload=1.25)
    for count in range(1, 200):
        shards.place(f"r{count}", b"popular" if count % 3 else str(count).encode(), 1)
        assert max(shards.held_bytes.values()) <= ceil(1.25 * count / 4)


def test_where_little_is_under_way_nobody_leaves_its_home() -> None:
    shards = opened(4, overload=1.25, free_requests=2)
    placed = [shards.place(f"r{n}", b"popular", 10) for n in range(100)]
    assert placed[:4] == placed[:1] * 4
    assert placed[4] != placed[0]
    assert len(set(placed)) >= 3
    assert max(shards.held_bytes.values()) <= 1.25 * 250 + 3 * 10
    assert shards.counters["bound"] > shards.counters["home"] > 20


def request(name: str, prompt: tuple[int, ...], session: str = "") -> Request:
    return Request(id=name, prompt=prompt, sampling=Sampling(), reply_to="", session=session)


def test_what_shares_a_beginning_or_a_conversation_shares_a_key() -> None:
    plan = replace(Cluster().plan, prefix_bytes=1 << 20)
    shared = tuple(range(4 * plan.block_tokens))
    one, two = request("one", (*shared, 1, 2)), request("two", (*shared, 3))
    assert key_of(one, plan) == key_of(two, plan)
    assert key_of(replace(one, cache_salt="x"), plan) != key_of(one, plan)
    assert key_of(replace(two, prompt=(9, *shared)), plan) != key_of(one, plan)
    first, later = request("3", (1,), session="s"), request("4", (2, 3), session="s")
    assert key_of(first, plan) == key_of(later, plan) != key_of(one, plan)
    assert key_of(replace(later, tenant="other"), plan) != key_of(first, plan)


def test_without_prefixes_nothing_keeps_equal_prompts_together() -> None:
    plan: PagePlan = replace(Cluster().plan, prefix_bytes=0)
    assert key_of(request("one", (1,) * 999), plan) != key_of(request("two", (1,) * 999), plan)


def test_what_another_shard_may_have_room_for_is_passed_on() -> None:
    assert may_pass_on(failed("r", QueueFull(9, 9, 1.0)))
    assert not may_pass_on(failed("r", StageLost("decode")))  # it goes on from where it was
    assert not may_pass_on(failed("r", DeadlineExceeded("late")))


def test_a_client_hears_the_soonest_of_all_refusals() -> None:
    journey = RequestAttempts(request("r", (1,)), lambda _: None)
    soon, late = (failed("r", QueueFull(9, 9, seconds)) for seconds in (2.0, 7.0))
    assert journey.refused(late) == late
    assert journey.refused(soon) == soon
    assert journey.refused(late) == soon


# ------------------------------------------------------------------ settings


def stage(replicas: int, **more: object) -> dict[str, object]:
    return {"actor": {"num_replicas": replicas}, **more}


def config(shards: int, **more: object) -> AppConfig:
    return AppConfig.from_mapping({"router": {"shards": shards}, **more})


def test_shards_have_equal_parts_of_everything() -> None:
    whole = config(
        2,
        prefill=stage(4, autoscaling={"min_replicas": 2, "max_replicas": 8}),
        compressor=stage(2),
        decode=stage(6),
        pool={"kv_cache_memory_bytes": 1 << 30, "disk_path": "/disk", "disk_bytes": 1 << 20},
    )
    one, two = (shard_of(whole, index) for index in range(2))
    assert one.prefill.actor.num_replicas == 2
    assert (one.prefill.autoscaling.min_replicas, one.prefill.autoscaling.max_replicas) == (1, 4)
    assert (one.compressor.actor.num_replicas, one.decode.actor.num_replicas) == (1, 3)
    assert (one.pool.kv_cache_memory_bytes, one.pool.prefix_bytes) == (1 << 29, "auto")
    assert one.pool.disk_bytes == 1 << 19
    assert one.router.max_queued_requests == 128
    assert (one.pool.disk_path, two.pool.disk_path) == ("/disk/shard-0", "/disk/shard-1")
    assert one == replace(two, pool=replace(two.pool, disk_path="/disk/shard-0"))


def test_one_shard_is_the_whole_application() -> None:
    assert shard_of(whole := config(1, pool={"kv_cache_memory_bytes": 12345}), 0) is whole


@pytest.mark.parametrize(
    ("shards", "stages", "named"),
    [
        (2, {}, "prefill.actor.num_replicas=1"),
        (2, {"prefill": stage(2), "decode": stage(2)}, "compressor.actor.num_replicas=1"),
        (2, {"prefill": stage(2), "compressor": stage(2), "decode": stage(3)}, "decode.actor"),
        (
            2,
            {
                "prefill": stage(2, autoscaling={"max_replicas": 4}),
                "compressor": stage(2),
                "decode": stage(2),
            },
            "prefill.autoscaling.min_replicas=1",
        ),
    ],
)
def test_shards_that_would_lack_a_stage_are_refused(
    shards: int, stages: dict[str, object], named: str
) -> None:
    expected = rf"{named}.*: expected a multiple of router.shards \(2\)"
    with pytest.raises(ConfigError, match=expected):
        config(shards, **stages)


def test_of_colocated_workers_only_their_own_number_counts() -> None:
    whole = config(2, topology="colocated", decode=stage(4))
    assert shard_of(whole, 1).decode.actor.num_replicas == 2
