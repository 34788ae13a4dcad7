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

from triptych.core.errors import PoolError
from triptych.kvpool.prefix.blocks import (
    Block,
    Limits,
    Namespace,
    Payload,
    Pin,
    PinId,
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


def namespace(salt: bytes, profile: str = "auto") -> Namespace:
    return Namespace(salt=salt, model="m", revision="1", profile=profile)


NAMESPACES = [namespace(b"a"), namespace(b"b"), namespace(b"both"), namespace(b"a", "k8v4")]
TENANTS = [(0, "a"), (1, "b"), (2, "a"), (2, "b"), (3, "a")]
"""Who asks in which namespace: two tenants share one."""


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
        self.pins = dict[PinId, Path]()
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

    def below(self, path: Path) -> list[Path]:
        """Itself and all blocks that follow it."""
        space, tokens = path
        return [p for p in self.kept if p[0] == space and p[1][: len(tokens)] == tokens]

    def pinned(self, path: Path, soft_pin: Path | None = None) -> bool:
        held = [*self.pins.values(), *([soft_pin] if soft_pin else [])]
        return any(space == path[0] and t[: len(path[1])] == path[1] for space, t in held)

    def can_free(self, tenant: str | None, soft_pin: Path | None) -> int:
        """Bytes that can be had by evicting this tenant's blocks, or all."""
        return sum(
            entry.nbytes
            for path, entry in self.kept.items()
            if all(
                not self.pinned(p, soft_pin) and tenant in (None, self.kept[p].tenant)
                for p in self.below(path)
            )
        )

    def held_bytes(self, tenant: str | None = None) -> int:
        return sum(e.nbytes for e in self.kept.values() if tenant in (None, e.tenant))

    def worth(self, entry: Kept) -> float:
        if isinstance(self.policy, LruPolicy):
            return entry.uses[-1]
        uses = sum(2.0 ** ((at - self.tick) / HALF_LIFE) for at in entry.uses)
        return max(entry.seconds, 1e-9) / entry.nbytes * uses

    def note_evicted(
        self,
        blocks: Iterable[Block],
        soft_pin: Path | None,
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
                and not self.pinned(p, soft_pin)
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
            assert self.worth(self.kept[path]) <= lowest * (1 + 1e-9)
            freed += self.kept.pop(path).nbytes
            self.gone += 1

    def require_same(self, blocks: tuple[Block, ...], paths: list[Path]) -> None:
        """The blocks are really the first ones of the chain, whether or not all are there."""
        if self.exact:
            assert len(blocks) == len(paths)
        for block, path in zip(blocks, paths, strict=False):
            assert block.pages.tolist() == self.kept[path].pages
            assert np.frombuffer(block.tokens, "<i4").tolist() == list(path[1][-STEP:])
            assert block.namespace == NAMESPACES[path[0]]

    # ---------------------------------------------------------- operations

    def lookup(self, who: tuple[int, str], tokens: tuple[int, ...]) -> None:
        blocks = self.index.lookup(NAMESPACES[who[0]], tokens)
        assert len(blocks) * STEP < max(1, len(tokens))
        self.require_same(blocks, self.longest((who[0], tokens[:-1])))

    def acquire(self, who: tuple[int, str], tokens: tuple[int, ...]) -> None:
        self.tick += 1
        expected = self.longest((who[0], tokens[:-1]))
        hold = self.index.acquire(NAMESPACES[who[0]], tokens)
        self.seen["hit" if hold else "miss"] += 1
        if hold is None:
            assert not expected or not self.exact
            return
        self.require_same(hold.blocks, expected)
        for path in expected[: len(hold.blocks)]:
            self.kept[path].uses.append(self.tick)
        self.note_hold(hold, expected[len(hold.blocks) - 1])

    def note_hold(self, hold: Pin, path: Path) -> None:
        assert hold.id not in {*self.pins, *self.ended}
        self.pins[hold.id] = path

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
        chain = [self.kept[path] for path in self.longest((who[0], tokens))]
        soft_pin = self.index.soft_pin(NAMESPACES[who[0]], tokens, most_bytes)
        fitting = [
            entry
            for at, entry in enumerate(chain)
            if sum(each.nbytes for each in chain[: at + 1]) <= most_bytes
        ]
        if soft_pin is None:
            assert not fitting or not self.exact
            return
        assert soft_pin.blocks == len(fitting) or not self.exact
        self.soft_pins[soft_pin.id] = fitting[: soft_pin.blocks]
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
        chain = self.longest((space, tokens))
        new = payloads[max(0, len(chain) - before) :]
        soft_pin = chain[-1] if chain else None
        wanted = sum(payload.nbytes for payload in new)
        over = self.held_bytes(tenant) + wanted - LIMITS.of(tenant)
        too_much = self.held_bytes() + wanted - LIMITS.total_bytes
        known = self.index.stat()
        done = self.index.publish(NAMESPACES[space], tokens, payloads, tenant=tenant)
        self.seen[done.refused or "published"] += 1
        if done.refused is not None:
            assert (done.added, done.pin, done.evicted) == (0, None, ())
            assert self.index.stat().bytes_by_tenant == known.bytes_by_tenant
        if not self.exact and done.refused in ("collision", "parent"):
            return
        if len(chain) < before:
            assert done.refused == "parent"
        elif over > self.can_free(tenant, soft_pin):
            both = done.refused == "memory" and too_much > self.can_free(None, soft_pin)
            assert done.refused == "quota" or both
        elif too_much > self.can_free(None, soft_pin):
            assert done.refused == "memory"
        else:
            assert done.refused is None
            assert done.added == len(new)
            self.note_evicted(done.evicted, soft_pin, tenant, over, wanted)
            spared = sum(block.nbytes for block in done.evicted[:-1])
            assert not done.evicted or spared < max(over, too_much), "no more than must go"
            for path in chain[before:]:
                self.kept[path].uses.append(self.tick)
            self.note_new(space, tokens, new, tenant)
            assert done.pin is not None
            self.require_same(done.pin.blocks, self.longest((space, tokens)))
            self.note_hold(done.pin, (space, tokens))

    def payload(self, nbytes: int, seconds: float) -> Payload:
        self.page += 2
        return Payload(np.array([self.page, self.page + 1], np.int32), nbytes, seconds)

    def note_new(self, space: int, tokens: tuple[int, ...], new: list[Payload], who: str) -> None:
        first = len(tokens) - STEP * len(new)
        for at, payload in enumerate(new, 1):
            pages = payload.pages.tolist()
            entry = Kept(payload.nbytes, payload.seconds, who, pages, [self.tick])
            self.kept[space, tokens[: first + at * STEP]] = entry

    def evict(self, nbytes: int) -> None:
        free = self.can_free(None, None)
        evicted = self.index.evict(nbytes)
        self.note_evicted(evicted, None, None, 0)
        freed = sum(block.nbytes for block in evicted)
        assert min(nbytes, free) <= freed <= free
        assert freed - sum(block.nbytes for block in evicted[-1:]) < max(1, nbytes)

    # ---------------------------------------------------------- always

    def agree(self) -> None:
        """The books agree with each other and with the model."""
        assert self.index.check() == []
        stat = self.index.stat()
        assert stat.blocks == len(self.kept)
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
costs = st.lists(st.tuples(st.integers(1, 9), st.sampled_from([0.0, 0.25, 7.5])), max_size=4)


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
    machine.TestCase.settings = settings(max_examples=40, stateful_step_count=40)
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
            both.publish(who, tokens, sizes[: chance.randint(1, 4)])
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
