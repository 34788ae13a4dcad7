"""The prefix index against a model that a child could keep: a dictionary of token tuples."""

import random
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import ClassVar

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from tests.effort import examples
from triptych.core.errors import PoolError
from triptych.kvpool.prefix.blocks import (
    Block,
    IndexStats,
    Limits,
    Namespace,
    Payload,
    Pin,
    PinId,
    Published,
    SoftPinId,
    sha256,
)
from triptych.kvpool.prefix.eviction import CostPolicy, EvictionPolicy, LruPolicy
from triptych.kvpool.prefix.index import PrefixIndex

STEP = 2
LIMITS = Limits(total_bytes=36, tenant_bytes=20, by_tenant={"b": 28})
HALF_LIFE = 4.0

Path = tuple[int, tuple[int, ...]]
"""Which namespace, and all tokens from the start of the prompt to the end of the block."""


def namespace(salt: bytes, profile: str = "auto", window_blocks: int = 0) -> Namespace:
    return Namespace(
        salt=salt, model="m", revision="1", profile=profile, window_blocks=window_blocks
    )


NAMESPACES = [
    namespace(b"a"),
    namespace(b"b"),
    namespace(b"both", "sliding", 2),
    namespace(b"a", "k8v4", 1),
]
TENANTS = [(0, "a"), (1, "b"), (2, "a"), (2, "b"), (3, "a")]
"""Who asks in which namespace: two tenants share one. In two of them blocks have window entries."""
WINDOW = (-1,)
"""Behind the tokens of a block: its window entry."""


@dataclass
class Kept:
    nbytes: int
    seconds: float
    tenant: str
    pages: list[int]
    uses: list[int] = field(default_factory=list[int])


PROMPTS = [(0,) * 9, (0, 0, 0, 0, 1, 0, 1, 0, 1), (0, 0, 1, 1, 0, 0, 1, 1, 0), (1, 0) * 4 + (1,)]
"""What is asked: these, cut off anywhere, so that most prompts begin like others."""


class Checked:
    """An index and its model: every operation is done on both, and the answers compared."""

    def __init__(self, policy: EvictionPolicy, key_bits: int = 256, seed: int = 0) -> None:
        def digest(data: bytes) -> bytes:
            whole = int.from_bytes(sha256(bytes([seed]) + data), "little")
            return (whole % 2**key_bits).to_bytes(32, "little")

        self.policy = policy
        self.exact = key_bits == 256
        """False where keys collide: then the index may know less than the model, never else."""
        self.index = PrefixIndex(STEP, LIMITS, policy, digest=digest)
        self.kept = dict[Path, Kept]()
        self.pins = dict[PinId, list[Path]]()
        """The last block, and window entries."""
        self.ended = [PinId(0)]
        self.soft_pins = dict[SoftPinId, list[Kept]]()
        self.tick = self.page = self.gone = 0
        self.seen = Counter[str]()

    # ---------------------------------------------------------- the model

    def longest(self, path: Path) -> list[Path]:
        """Resident blocks that the tokens start with, in order."""
        space, tokens = path
        found = list[Path]()
        for end in range(STEP, len(tokens) + 1, STEP):
            if (space, tokens[:end]) not in self.kept:
                break
            found.append((space, tokens[:end]))
        return found

    def windows(self, chain: Sequence[Path]) -> list[Path]:
        """The resident window entries of blocks."""
        entries = [(space, tokens + WINDOW) for space, tokens in chain]
        return [entry for entry in entries if entry in self.kept]

    def needed(self, chain: Sequence[Path]) -> list[Path]:
        """The resident window entries that a request with this prefix needs."""
        count = NAMESPACES[chain[0][0]].window_blocks if chain else 0
        return self.windows(chain[max(0, len(chain) - count) :])

    def to_use(self, chain: Sequence[Path]) -> list[Path]:
        return [*chain, *self.needed(chain)]

    def usable(self, path: Path) -> list[Path]:
        """The longest beginning of the chain whose last window entries are all there."""
        chain, count = self.longest(path), NAMESPACES[path[0]].window_blocks
        while chain and len(self.needed(chain)) < min(count, len(chain)):
            chain.pop()
        return chain

    def below(self, path: Path) -> list[Path]:
        """Itself and all blocks that follow it."""
        space, tokens = path
        return [p for p in self.kept if p[0] == space and p[1][: len(tokens)] == tokens]

    def pinned(self, path: Path, keep: Sequence[Path] = ()) -> bool:
        held = [*(each for pin in self.pins.values() for each in pin), *keep]
        return any(space == path[0] and t[: len(path[1])] == path[1] for space, t in held)

    def can_free(self, tenant: str | None, keep: Sequence[Path]) -> int:
        """Bytes that can be had by evicting this tenant's blocks, or all."""
        return sum(
            entry.nbytes
            for path, entry in self.kept.items()
            if all(
                not self.pinned(p, keep) and tenant in (None, self.kept[p].tenant)
                for p in self.below(path)
            )
        )

    def held_bytes(self, tenant: str | None = None) -> int:
        return sum(e.nbytes for e in self.kept.values() if tenant in (None, e.tenant))

    def worth(self, entry: Kept) -> float:
        if not entry.nbytes or not entry.uses:
            return -1.0
        if isinstance(self.policy, LruPolicy):
            return entry.uses[-1]
        uses = sum(2.0 ** ((at - self.tick) / HALF_LIFE) for at in entry.uses)
        return max(entry.seconds, 1e-9) / entry.nbytes * uses

    def note_evicted(
        self,
        blocks: Iterable[Block],
        keep: Sequence[Path],
        own: str | None,
        over: int,
        coming: int = 0,
    ) -> None:
        """Each was evictable, and of those that were the one of lowest worth.

        The first ``over`` bytes come from the blocks of the tenant ``own``, the others from those
        of the tenant with the most bytes, if ``own`` is one, which gets ``coming`` bytes.
        """
        freed = 0
        for block in blocks:
            (path,) = [p for p, e in self.kept.items() if e.pages == block.pages.tolist()]
            scope = own if freed < over else None
            leaves = [
                p
                for p, entry in self.kept.items()
                if self.below(p) == [p]
                and not self.pinned(p, keep)
                and scope in (None, entry.tenant)
            ]
            assert path in leaves
            others = [p for p in leaves if not self.soft_pinned(self.kept[p])]
            if own is not None and scope is None and others:
                size = {
                    who: self.held_bytes(who) + coming * (who == own)
                    for who in {self.kept[p].tenant for p in others}
                }
                assert size[self.kept[path].tenant] == max(size.values())
                others = [p for p in others if self.kept[p].tenant == self.kept[path].tenant]
            assert path in others or not others, "what is guarded goes last"
            lowest = min(self.worth(self.kept[p]) for p in others or leaves)
            assert self.worth(self.kept[path]) <= lowest + abs(lowest) * 1e-9
            freed += self.kept.pop(path).nbytes
            self.gone += 1

    def require_same(self, blocks: tuple[Block, ...], paths: list[Path]) -> None:
        """The blocks are really the first ones of the chain, whether or not all are there."""
        if self.exact:
            assert len(blocks) == len(paths)
        for block, path in zip(blocks, paths, strict=False):
            assert block.pages.tolist() == self.kept[path].pages
            own = () if path[1][-1:] == WINDOW else path[1][-STEP:]
            assert np.frombuffer(block.tokens, "<i4").tolist() == list(own)
            assert block.namespace == NAMESPACES[path[0]]

    # ---------------------------------------------------------- operations

    def lookup(self, who: tuple[int, str], tokens: tuple[int, ...]) -> None:
        blocks = self.index.lookup(NAMESPACES[who[0]], tokens)
        assert len(blocks) * STEP < max(1, len(tokens))
        self.require_same(blocks, self.usable((who[0], tokens[:-1])))

    def acquire(self, who: tuple[int, str], tokens: tuple[int, ...]) -> None:
        self.tick += 1
        expected = self.usable((who[0], tokens[:-1]))
        hold = self.index.acquire(NAMESPACES[who[0]], tokens)
        self.seen["hit" if hold else "miss"] += 1
        if hold is None:
            assert not expected or not self.exact
            return
        chain = expected[: len(hold.blocks)]
        self.require_same(hold.blocks, chain)
        self.require_same(hold.windows, self.needed(chain))
        for path in self.to_use(chain):
            self.kept[path].uses.append(self.tick)
        self.note_hold(hold, [chain[-1], *self.needed(chain)])

    def note_hold(self, hold: Pin, paths: list[Path]) -> None:
        assert hold.id not in {*self.pins, *self.ended}
        self.pins[hold.id] = paths

    def release(self, at: int) -> None:
        """End a hold that there is; and one that ended before cannot end again."""
        with pytest.raises(PoolError, match="released before"):
            self.index.release(self.ended[at % len(self.ended)])
        if self.pins:
            hold = sorted(self.pins)[at % len(self.pins)]
            self.index.release(hold)
            del self.pins[hold]
            self.ended.append(hold)

    def soft_pinned(self, entry: Kept) -> bool:
        return any(entry is each for chain in self.soft_pins.values() for each in chain)

    def soft_pin(self, who: tuple[int, str], tokens: tuple[int, ...], most_bytes: int) -> None:
        chain = self.longest((who[0], tokens))
        soft_pin = self.index.soft_pin(NAMESPACES[who[0]], tokens, most_bytes)
        fitting = [
            length
            for length in range(1, len(chain) + 1)
            if len(self.usable(chain[length - 1])) == length
            and sum(self.kept[path].nbytes for path in self.to_use(chain[:length])) <= most_bytes
        ]
        if soft_pin is None:
            assert not fitting or not self.exact
            return
        assert not self.exact or soft_pin.blocks == fitting[-1]
        covered = self.to_use(chain[: soft_pin.blocks])
        self.soft_pins[soft_pin.id] = [self.kept[path] for path in covered]
        assert soft_pin.nbytes == sum(each.nbytes for each in self.soft_pins[soft_pin.id])

    def soft_unpin(self, at: int) -> None:
        """End a guard that there is, whether its blocks are there or not."""
        if self.soft_pins:
            soft_pin = sorted(self.soft_pins)[at % len(self.soft_pins)]
            self.index.soft_unpin(soft_pin)
            del self.soft_pins[soft_pin]
            with pytest.raises(KeyError):
                self.index.soft_unpin(soft_pin)

    def publish(
        self,
        who: tuple[int, str],
        tokens: tuple[int, ...],
        costs: Sequence[tuple[int, float]],
    ) -> None:
        """Publish the last blocks of the tokens, one for each (bytes, seconds)."""
        space, tenant = who
        tokens = tokens[: len(tokens) // STEP * STEP]
        payloads = [self.payload(*cost) for cost in costs[: len(tokens) // STEP]]
        if not payloads:
            return
        before = len(tokens) // STEP - len(payloads)
        chain, paths = self.longest((space, tokens)), self.blocks_of(space, tokens)
        new = list(zip(paths[before:], payloads, strict=True))[max(0, len(chain) - before) :]
        known = self.index.stat()
        wanted, over, too_much = self.room_for(new, tenant)
        done = self.index.publish(NAMESPACES[space], tokens, payloads, tenant=tenant)
        keep = chain[-1:]
        outcome = self.expected(len(chain) < before, tenant, over, too_much, keep)
        if self.agrees(done, outcome, known) and done.pin is not None:
            self.note_evicted(done.evicted, keep, tenant, over, wanted)
            self.require_sparing(done.evicted, max(over, too_much))
            for path in chain[before:]:
                self.kept[path].uses.append(self.tick)
            self.note_new(done, new, tenant, [True] * len(new))
            self.require_same(done.pin.blocks, self.longest((space, tokens)))
            self.note_hold(done.pin, paths[-1:])

    def publish_windows(
        self, who: tuple[int, str], tokens: tuple[int, ...], costs: Sequence[tuple[int, float]]
    ) -> None:
        """Publish window entries of the last blocks of the tokens."""
        space, tenant = who
        tokens = tokens[: len(tokens) // STEP * STEP]
        payloads = [self.payload(*cost) for cost in costs[: len(tokens) // STEP]]
        count = NAMESPACES[space].window_blocks
        if not payloads or not count:
            return
        paths, chain = self.blocks_of(space, tokens), self.longest((space, tokens))
        behind = paths[len(paths) - len(payloads) :]
        entries = [(where, path + WINDOW) for where, path in behind]
        there = [at for at, entry in enumerate(entries, 1) if entry in self.kept]
        new = list(zip(entries, payloads, strict=True))[max(there, default=0) :]
        is_end = not any(len(p[1]) > len(tokens) + 1 for p in self.below((space, tokens)))
        used = self.needed(paths) if is_end else []
        keep = [paths[-1], *used, *self.windows(behind)]
        known = self.index.stat()
        wanted, over, too_much = self.room_for(new, tenant)
        done = self.index.publish_windows(NAMESPACES[space], tokens, payloads, tenant=tenant)
        gone = len(chain) < len(paths)
        outcome = self.expected(gone, tenant, over, too_much, [] if gone else keep)
        if self.agrees(done, outcome, known) and done.pin is not None:
            self.note_evicted(done.evicted, keep, tenant, over, wanted)
            self.require_sparing(done.evicted, max(over, too_much))
            for path in used:
                self.kept[path].uses.append(self.tick)
            ends = {(where, path + WINDOW) for where, path in paths[-count:]} if is_end else set()
            self.note_new(done, new, tenant, [path in ends for path, _ in new])
            self.require_same(done.pin.blocks, paths)
            self.require_same(done.pin.windows, self.windows(behind))
            self.note_hold(done.pin, [paths[-1], *self.windows(behind)])

    def blocks_of(self, space: int, tokens: tuple[int, ...]) -> list[Path]:
        """All blocks of tokens, resident or not."""
        return [(space, tokens[:end]) for end in range(STEP, len(tokens) + 1, STEP)]

    def room_for(self, new: Sequence[tuple[Path, Payload]], tenant: str) -> tuple[int, int, int]:
        """Bytes of new blocks, and by how many they would exceed the quota and the total."""
        wanted = sum(payload.nbytes for _, payload in new)
        over = self.held_bytes(tenant) + wanted - LIMITS.of(tenant)
        return wanted, over, self.held_bytes() + wanted - LIMITS.total_bytes

    def expected(
        self, gone: bool, tenant: str, over: int, too_much: int, keep: Sequence[Path]
    ) -> str:
        if gone:
            return "parent"
        if over > self.can_free(tenant, keep):
            is_both = too_much > self.can_free(None, keep)
            return "quota or memory" if is_both else "quota"
        return "memory" if too_much > self.can_free(None, keep) else "published"

    def agrees(self, done: Published, outcome: str, known: IndexStats) -> bool:
        """Whether the index did as the model; False: a collision kept it from that."""
        self.seen[done.refused or "published"] += 1
        if done.refused is not None:
            assert (done.added, done.pin, done.evicted) == (0, None, ())
            assert self.index.stat().bytes_by_tenant == known.bytes_by_tenant
        if not self.exact and done.refused in ("collision", "parent"):
            return False
        assert (done.refused or "published") in outcome.split(" or ")
        return True

    def require_sparing(self, evicted: Sequence[Block], most: int) -> None:
        spared = sum(block.nbytes for block in evicted[:-1])
        assert not evicted or spared < max(1, most), "no more than must go"

    def payload(self, nbytes: int, seconds: float) -> Payload:
        self.page += 2
        return Payload(np.array([self.page, self.page + 1], np.int32), nbytes, seconds)

    def note_new(
        self,
        done: Published,
        new: Sequence[tuple[Path, Payload]],
        who: str,
        used: Sequence[bool],
    ) -> None:
        assert done.added == len(new)
        for (path, payload), is_used in zip(new, used, strict=True):
            uses = [self.tick] if is_used else []
            pages = payload.pages.tolist()
            self.kept[path] = Kept(payload.nbytes, payload.seconds, who, pages, uses)

    def evict(self, nbytes: int) -> None:
        free = self.can_free(None, ())
        evicted = self.index.evict(nbytes)
        self.note_evicted(evicted, (), None, 0)
        freed = sum(block.nbytes for block in evicted)
        assert min(nbytes, free) <= freed <= free
        assert freed - sum(block.nbytes for block in evicted[-1:]) < max(1, nbytes)

    # ---------------------------------------------------------- always

    def agree(self) -> None:
        """The books agree with each other and with the model."""
        assert self.index.check() == []
        stat = self.index.stat()
        windows = sum(path[1][-1:] == WINDOW for path in self.kept)
        assert (stat.blocks, stat.windows) == (len(self.kept) - windows, windows)
        assert stat.nbytes == self.held_bytes() == sum(stat.bytes_by_tenant.values())
        assert stat.nbytes <= LIMITS.total_bytes
        assert (stat.pins, stat.evictions) == (len(self.pins), self.gone)
        assert stat.hits + stat.misses == self.tick
        pinned = [entry.nbytes for path, entry in self.kept.items() if self.pinned(path)]
        assert stat.pinned_bytes == sum(pinned)
        assert self.index.soft_pins == set(self.soft_pins)
        for tenant in ("a", "b"):
            assert stat.bytes_by_tenant.get(tenant, 0) == self.held_bytes(tenant)
            assert self.held_bytes(tenant) <= LIMITS.of(tenant)


# -------------------------------------------------------------- few operations, that shrink

asking = st.sampled_from(TENANTS)
prompts = st.sampled_from([prompt[:end] for prompt in PROMPTS for end in range(10)])
costs = st.lists(st.tuples(st.integers(0, 9), st.sampled_from([0.0, 0.25, 7.5])), max_size=4)


class PrefixMachine(RuleBasedStateMachine):
    policy: ClassVar[EvictionPolicy]
    key_bits: ClassVar[int] = 256

    def __init__(self) -> None:
        super().__init__()
        self.both = Checked(self.policy, self.key_bits)

    @rule(who=asking, tokens=prompts)
    def acquire(self, who: tuple[int, str], tokens: tuple[int, ...]) -> None:
        self.both.lookup(who, tokens)
        self.both.acquire(who, tokens)

    @rule(at=st.integers(0, 9))
    def release(self, at: int) -> None:
        self.both.release(at)

    @rule(who=asking, tokens=prompts, costs=costs)
    def publish(
        self, who: tuple[int, str], tokens: tuple[int, ...], costs: list[tuple[int, float]]
    ) -> None:
        self.both.publish(who, tokens, costs)
        self.both.publish_windows(who, tokens, costs[::2])

    @rule(who=asking, tokens=prompts, costs=costs)
    def publish_windows(
        self, who: tuple[int, str], tokens: tuple[int, ...], costs: list[tuple[int, float]]
    ) -> None:
        self.both.publish_windows(who, tokens, costs)

    @rule(who=asking, tokens=prompts, most_bytes=st.sampled_from([0, 9, 36]))
    def soft_pin(self, who: tuple[int, str], tokens: tuple[int, ...], most_bytes: int) -> None:
        self.both.soft_pin(who, tokens, most_bytes)

    @rule(at=st.integers(0, 9))
    def soft_unpin(self, at: int) -> None:
        self.both.soft_unpin(at)

    @rule(nbytes=st.integers(0, 20))
    def evict(self, nbytes: int) -> None:
        self.both.evict(nbytes)

    @invariant()
    def agree(self) -> None:
        self.both.agree()


class CostMachine(PrefixMachine):
    policy = CostPolicy(half_life=HALF_LIFE)


class LruMachine(PrefixMachine):
    policy = LruPolicy()


class CollidingMachine(PrefixMachine):
    policy = CostPolicy(half_life=HALF_LIFE)
    key_bits = 4


for machine in (CostMachine, LruMachine, CollidingMachine):
    machine.TestCase.settings = settings(max_examples=examples(40), stateful_step_count=40)
TestCost = CostMachine.TestCase
TestLru = LruMachine.TestCase
TestColliding = CollidingMachine.TestCase


# -------------------------------------------------------------- many operations


def walk(both: Checked, operations: int, chance: random.Random) -> None:
    """Draw at random rather than by hypothesis, which takes longer to draw than all this takes."""
    for _ in range(operations):
        who, prompt = chance.choice(TENANTS), chance.choice(PROMPTS)
        tokens, action = prompt[: chance.randrange(10)], chance.random()
        if action < 0.3:
            both.lookup(who, tokens)
            both.acquire(who, tokens)
        elif action < 0.65:
            both.release(chance.randrange(100))
        elif action < 0.97:
            sizes = [(chance.randint(1, 9), chance.choice([0.0, 0.25, 7.5])) for _ in range(4)]
            count = chance.randint(1, 4)
            both.publish(who, tokens, sizes[:count])
            if chance.random() < 0.7:
                both.publish_windows(who, tokens, sizes[-count:])
        else:
            both.evict(chance.randrange(20))
        if chance.random() < 0.2:
            both.soft_unpin(chance.randrange(100))
            both.soft_pin(who, tokens, chance.choice([9, 18]))
        both.agree()


@pytest.mark.parametrize("policy", [CostPolicy(half_life=HALF_LIFE), LruPolicy()])
def test_ten_thousand_operations(policy: EvictionPolicy) -> None:
    both = Checked(policy)
    walk(both, 10_000, random.Random(0))
    wanted = {"hit", "miss", "published", "quota", "memory", "parent"}
    assert all(both.seen[outcome] > 20 for outcome in wanted), both.seen
    assert both.gone > 1000
    assert both.index.stat().collisions == 0


@pytest.mark.parametrize("seed", range(20))
def test_a_collision_is_a_miss_and_never_a_wrong_answer(seed: int) -> None:
    both = Checked(LruPolicy(), key_bits=4, seed=seed)
    walk(both, 500, random.Random(seed))
    assert both.index.stat().collisions > 0
    assert both.seen["hit"] > 0
