"""Prompts that several requests share: which request computes one, and which wait for it.

Two waiting requests that begin alike would compute the same keys and values. The one that starts
first computes them. A request with an equal prompt goes to the same prefill worker, which computes
the prompt once. A request that has only whole blocks in common waits until the compressor has
published these in the prefix cache, if that is sooner than to compute them again.
"""

from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from heapq import heappop, heappush
from typing import Literal

from triptych.core.messages import PromptKey
from triptych.router.policies.prefix_map import PrefixMap
from triptych.router.state.request_table import Entry, PromptWait, State

MOST_FOLLOWERS = 1024
"""Requests that wait for blocks at a time; further ones compute them."""
MOST_WAITS = 3
"""Requests for whose blocks one request waits, one after another: all but the last were lost."""
LEAST_WAIT_S = 0.5
"""Shortest time limit of a wait: compressing and two messages are no part of the forecast."""
UNMEASURED_S = 5.0
"""Time limit of a wait while the speed of prefill is not known."""
RELEASE_EARLY_S = 0.5
"""Time before the latest start of a request's SLO at which its wait ends: a tick or two."""

IN_WORK = (State.PREFILLING, State.PREFILLED, State.COMPRESSING)
"""States of a request whose blocks are not in the prefix cache yet, but will be."""

Outcome = Literal["published", "lost", "timeout"]
"""How a wait ended: the blocks are cached; the request that computed them ended; it took long."""


def waits(*, left_tokens: float, queue_tokens: int, shared_tokens: int) -> bool:
    """Whether blocks are published sooner than a request could compute them.

    ``left_tokens``: prompt tokens that are prefilled until the other request has its first token;
    ``queue_tokens``: those before this request at the worker where it would start;
    ``shared_tokens``: those of the blocks. Prefill of the rest is needed in both cases.

    >>> waits(left_tokens=1000, queue_tokens=1000, shared_tokens=960)  # behind it, at its worker
    True
    >>> waits(left_tokens=1000, queue_tokens=0, shared_tokens=960)  # an idle worker is sooner
    False
    >>> waits(left_tokens=100_000, queue_tokens=1024, shared_tokens=64)
    False

    Source: SGLang (in-batch prefix caching: a request whose prefix is about to be cached is
        deprioritized), which knows one queue and thus has no limit
    """
    return shared_tokens > 0 and left_tokens <= queue_tokens + shared_tokens


@dataclass(frozen=True, slots=True)
class Claim:
    """Blocks of a prompt that a running request computes, and that others may wait for."""

    prompt: PromptKey
    arena: str
    """Arena in which the blocks will be published."""
    blocks: tuple[bytes, ...]
    """Keys of the blocks that no other request computes."""


@dataclass
class SharedPrompts:
    """Requests that compute a prompt, those with an equal one, and those that wait for blocks.

    Requests share only what the prefix cache would let them share: prompts with equal salts, and
    none with prompt log probabilities. A request that waits holds neither bytes nor a slot, so no
    request ever waits for it.
    """

    is_on: bool
    """Whether there is a prefix cache; without one nothing is shared."""
    published: PrefixMap
    """Blocks that were published in each arena, as far as the router knows."""
    _claims: dict[str, Claim] = field(default_factory=dict[str, Claim])
    """By the id of a request that computes its prompt."""
    _computing: dict[PromptKey, Entry] = field(default_factory=dict[PromptKey, Entry])
    """Those of them that are in prefill."""
    _equal: dict[str, dict[str, Entry]] = field(default_factory=dict[str, dict[str, Entry]])
    """By the id of such a request: those with an equal prompt at the same worker."""
    _blocks: dict[tuple[str, bytes], Entry] = field(default_factory=dict[tuple[str, bytes], Entry])
    """By arena and key: the request that computes a block, until it is published."""
    _waiting: dict[str, Entry] = field(default_factory=dict[str, Entry])
    """Requests that wait for blocks."""
    _followers: dict[str, dict[str, Entry]] = field(default_factory=dict[str, dict[str, Entry]])
    """The same by the id of the request that computes the blocks, first come first."""
    _limits: list[tuple[float, str]] = field(default_factory=list[tuple[float, str]])
    """Heap of the times until which requests wait."""
    _released: list[tuple[Entry, Outcome]] = field(default_factory=list[tuple[Entry, Outcome]])

    @property
    def is_any_computed(self) -> bool:
        """Whether an equal prompt could be in prefill."""
        return bool(self._computing)

    # ---------------------------------------------------------------- decisions

    def computing(self, entry: Entry) -> Entry | None:
        """The request in prefill that computes the prompt of ``entry``; None if there is none."""
        if not self._computing or not self._may_share(entry):
            return None
        return self._computing.get(entry.request.prompt_key)

    def wait_for(
        self, entry: Entry, arena: str, queue_tokens: int, token_s: float, now: float
    ) -> PromptWait | None:
        """The wait of a request that would start in ``arena`` now; None: it starts.

        ``queue_tokens``: prompt tokens before it; ``token_s``: seconds per token, 0 if not known.
        """
        prompt, is_full = entry.placement.prompt, len(self._waiting) >= MOST_FOLLOWERS
        if not self._blocks or is_full or prompt is None or not self._may_share(entry):
            return None
        if entry.placement.waits >= MOST_WAITS:
            return None
        keys = prompt.block_keys()
        found = self._last_block(arena, keys)
        if found is None:
            return None
        blocks, leader = found
        shared = (blocks - self.published.known(arena, keys)) * prompt.block_tokens
        left = _left_tokens(leader, token_s, now)
        if not waits(left_tokens=left, queue_tokens=queue_tokens, shared_tokens=shared):
            return None
        limit_s = (queue_tokens + shared) * token_s or UNMEASURED_S
        until = min(now + max(LEAST_WAIT_S, limit_s), entry.slo.latest - RELEASE_EARLY_S)
        return PromptWait(leader.id, shared, until) if until > now else None

    # ---------------------------------------------------------------- events

    def wait(self, entry: Entry, wait: PromptWait) -> None:
        """A request waits from now on."""
        entry.placement.waits_for, entry.placement.shared_tokens = wait, wait.shared_tokens
        entry.placement.waits += 1
        self._waiting[entry.id] = entry
        self._followers.setdefault(wait.leader, {})[entry.id] = entry
        heappush(self._limits, (wait.until, entry.id))

    def started(self, entry: Entry, arena: str, equal: Entry | None) -> None:
        """A request was sent to a prefill worker, and its blocks will be published in ``arena``.

        ``equal``: the request that computes its prompt; None: it does so itself.
        """
        if not self._may_share(entry):
            return
        if equal is None:
            self._claim(entry, arena)
        else:
            entry.placement.equal_to = equal.id
            self._equal.setdefault(equal.id, {})[entry.id] = entry

    def prefilled(self, entry: Entry) -> None:
        """The prompt of a request was computed, so an equal one cannot join it any more."""
        claim = self._claims.get(entry.id)
        if claim is not None and self._computing.get(claim.prompt) is entry:
            del self._computing[claim.prompt]

    def is_published(self, entry: Entry) -> None:
        """The blocks of a request's prompt are in the prefix cache."""
        if not self._may_share(entry):
            return
        if (prompt := entry.placement.prompt) is not None:
            self.published.keep(entry.placement.work_arena, prompt.block_keys())
        self._leave(entry)
        self._equal.pop(entry.id, None)
        self._release(entry.id, "published")

    def ended(self, entry: Entry) -> Entry | None:
        """A request ended. Returns the one that computes its prompt instead of it, if any does."""
        if entry.placement.waits_for is not None:
            self._stop_waiting(entry)
        claim = self._leave(entry)
        if claim is None:
            return None
        successor = self._successor(entry, claim)
        if successor is None:
            self._release(entry.id, "lost")
        return successor

    def released(self, now: float) -> list[tuple[Entry, Outcome]]:
        """Requests that wait no longer, and why."""
        while self._limits and self._limits[0][0] <= now:
            until, name = heappop(self._limits)
            entry = self._waiting.get(name)
            wait = entry.placement.waits_for if entry else None
            if entry is not None and wait is not None and wait.until == until:
                self._stop_waiting(entry)
                self._let_go(entry, "timeout")
        released, self._released = self._released, []
        return released

    def forget_arenas_except(self, arenas: Iterable[str]) -> None:
        """Forget what was published in other arenas: they are gone."""
        if gone := self.published.arenas.difference(arenas):
            self.published.forget(gone)

    # ---------------------------------------------------------------- parts

    def _may_share(self, entry: Entry) -> bool:
        return self.is_on and not entry.request.is_scored

    def _last_block(self, arena: str, keys: tuple[bytes, ...]) -> tuple[int, Entry] | None:
        """The last block of a prompt that is being computed: its number, and the request."""
        for count in range(len(keys), 0, -1):
            leader = self._blocks.get((arena, keys[count - 1]))
            if leader is not None:
                return count, leader
        return None

    def _claim(self, entry: Entry, arena: str) -> None:
        """Record that a request computes its prompt, and those blocks that no other one computes.

        A request that ends with its first token is not compressed, so its blocks are not published.
        """
        request, prompt = entry.request, entry.placement.prompt
        is_compressed = request.sampling.max_tokens - len(request.output_tokens) > 1
        keys = prompt.block_keys() if prompt is not None and is_compressed else ()
        new = tuple(
            key
            for key in keys[self.published.known(arena, keys) :]
            if self._blocks.setdefault((arena, key), entry) is entry
        )
        claim = self._claims[entry.id] = Claim(request.prompt_key, arena, new)
        if entry.state is State.PREFILLING:
            self._computing.setdefault(claim.prompt, entry)

    def _leave(self, entry: Entry) -> Claim | None:
        """Nobody uses what a request computes any more; what it was."""
        self.prefilled(entry)
        self._equal.get(entry.placement.equal_to, {}).pop(entry.id, None)
        claim = self._claims.pop(entry.id, None)
        if claim is not None:
            for key in claim.blocks:
                del self._blocks[claim.arena, key]
        return claim

    def _successor(self, entry: Entry, claim: Claim) -> Entry | None:
        """The first request with an equal prompt computes it from now on, at the same worker."""
        equal = self._equal.pop(entry.id, {})
        successor = next((one for one in equal.values() if one.state in IN_WORK), None)
        if successor is None:
            return None
        successor.placement.equal_to, successor.placement.cached_tokens = "", 0
        rest = {name: one for name, one in equal.items() if one is not successor}
        for one in rest.values():
            one.placement.equal_to = successor.id
        self._equal[successor.id] = rest
        self._claim(successor, claim.arena)
        followers = self._followers.pop(entry.id, {})
        for one in followers.values():
            assert one.placement.waits_for is not None
            one.placement.waits_for = replace(one.placement.waits_for, leader=successor.id)
        if followers:
            self._followers[successor.id] = followers
        return successor

    def _release(self, leader: str, outcome: Outcome) -> None:
        for entry in list(self._followers.get(leader, {}).values()):
            self._stop_waiting(entry)
            self._let_go(entry, outcome)

    def _let_go(self, entry: Entry, outcome: Outcome) -> None:
        if outcome != "lost":
            entry.placement.waits = MOST_WAITS  # it does not wait again
        self._released.append((entry, outcome))

    def _stop_waiting(self, entry: Entry) -> None:
        wait = entry.placement.waits_for
        assert wait is not None
        entry.placement.waits_for = None
        del self._waiting[entry.id]
        followers = self._followers[wait.leader]
        del followers[entry.id]
        if not followers:
            del self._followers[wait.leader]


def _left_tokens(leader: Entry, token_s: float, now: float) -> float:
    """Prompt tokens that are prefilled until a request has its first token."""
    if leader.state is not State.PREFILLING:
        return 0
    done = (now - leader.since) / token_s if token_s else 0
    return max(0.0, leader.placement.ahead_tokens - done)
