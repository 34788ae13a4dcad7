"""Which worker of a stage takes a request: pure choices over snapshots, ties by name.

A placement policy says who reads a prompt: there the cache of prefixes decides what need not be
computed. Compressor and decode worker are chosen by fixed rules, from exact books (``LoadIndex``).
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from hashlib import blake2b
from heapq import nsmallest
from typing import Protocol

from triptych.router.models.prompt_blocks import PromptToPlace


@dataclass(frozen=True, slots=True)
class Choice:
    """Who reads a prompt, and in a word or two why."""

    worker: str
    """Its address."""
    reason: str


class PrefillWorkers(Protocol):
    """Prefill workers with room for one prompt, at one moment, fewest tokens to read first.

    A worker that is silent, dead or full is not among them: it is asked again once it has room.
    Read lazily: a policy that stops early pays for what it read.
    """

    def __len__(self) -> int: ...

    def __iter__(self) -> Iterator[str]:
        """Addresses."""
        ...

    def __getitem__(self, place: int, /) -> str:
        """The address of the one with so many before it."""
        ...

    def takes(self, worker: str) -> bool:
        """Whether the prompt can be booked there, with all that it will ever need."""
        ...

    def arena(self, worker: str) -> str:
        """Where a worker stores pages: workers of an arena share its cache of prefixes."""
        ...

    def tokens_before(self, worker: str) -> int:
        """Tokens that it reads before it would begin with this prompt, at the most."""
        ...

    def prefill_s(self, tokens: int) -> float:
        """What reading so many tokens takes at present; 0 if nothing was measured for long."""
        ...

    def best_in(self, arena: str) -> str | None:
        """The first of an arena that takes the prompt, or None."""
        ...

    def cached_tokens(self, arena: str) -> int:
        """How many tokens of the prompt an arena probably has."""
        ...

    def holders(self) -> Mapping[str, int]:
        """Arenas that probably have its beginning, with so many tokens of it."""
        ...

    def homes(self, key: bytes) -> tuple[str, ...]:
        """Two arenas, by two hashes of a key: the same ones for as long as both are there."""
        ...


class PlacementPolicy(Protocol):
    """Chooses who reads a prompt. The same snapshot gives the same choice."""

    def __call__(self, prompt: PromptToPlace, readers: PrefillWorkers, /) -> Choice | None:
        """One of ``readers`` that takes the prompt; None: it waits for another moment.

        While it waits, so do those behind it in the line.
        """
        ...


def least_bytes(_ask: PromptToPlace, readers: PrefillWorkers) -> Choice | None:
    """The worker with the fewest tokens to read whose arena has the bytes."""
    found = _first(readers)
    return Choice(found, "fewest_tokens") if found else None


def power_of_two(prompt: PromptToPlace, readers: PrefillWorkers) -> Choice | None:
    """The less loaded of two workers that a hash of the request's id picks.

    Source: Mitzenmacher, 2001 (the power of two choices)
    """
    if len(readers):
        digest = blake2b(prompt.request.id.encode(), digest_size=16).digest()
        picks = [int.from_bytes(half, "little") for half in (digest[:8], digest[8:])]
        for place in sorted(pick % len(readers) for pick in picks):  # the less loaded one first
            if readers.takes(readers[place]):
                return Choice(readers[place], "of_two")
    return least_bytes(prompt, readers)


def prefix_affinity(prompt: PromptToPlace, readers: PrefillWorkers) -> Choice | None:
    """Where fewest tokens are left to read before the first token: own ones, less cached ones.

    So a cached beginning attracts a prompt for as long as the queue there costs less than it saves.

    Source: Preble, Mooncake (cost of queue and of what is not cached, in one sum)
    """
    least = _first(readers)
    if least is None:
        return None
    holders = readers.holders()
    able = _holding(readers, holders)
    chosen = min([*able, least], key=lambda worker: (_work(prompt, readers, worker), worker))
    cached = holders.get(readers.arena(chosen), 0)
    return Choice(chosen, "cached" if cached else "fewest_tokens")


def single_hash(prompt: PromptToPlace, readers: PrefillWorkers) -> Choice | None:
    """Always where one hash of the prompt's beginning says, however long the queue: a baseline.

    If nobody there has room, the prompt waits, and the line behind it.
    """
    for home in readers.homes(affinity_key(prompt))[:1]:
        found = readers.best_in(home)
        return Choice(found, "home") if found else None
    return least_bytes(prompt, readers)


def dualmap(prompt: PromptToPlace, readers: PrefillWorkers) -> Choice | None:
    """Of two homes of the prompt's beginning the one that has more of it, unless that is too late.

    If the first token would come after ``prompt.ttft_s`` there, the prompt goes where it comes
    soonest: to the other home, to another arena that has its beginning, or, if the beginning is so
    popular that all of these are late, to the worker with the fewest tokens, which has it from then
    on. A queue that is hot is thus never filled further, and nothing has to be moved out of it.

    Source: DualMap (two hashes, SLO-aware switch, hotspots, dual hash ring). It moves requests from
        the head of a hot queue; here they wait in the router, and are placed when a worker has room
    """
    homes = readers.homes(affinity_key(prompt))
    able = [found for home in homes if (found := readers.best_in(home))]
    if able:
        affine = max(able, key=lambda worker: readers.cached_tokens(readers.arena(worker)))
        if readers.prefill_s(_work(prompt, readers, affine)) <= prompt.ttft_s:
            return Choice(affine, "affine")
    others = _holding(readers, readers.holders())
    least = _first(readers)
    if least is None:
        return None
    chosen = min([*able, *others, least], key=lambda worker: _work(prompt, readers, worker))
    return Choice(chosen, "switched" if readers.arena(chosen) in homes else "moved")


KEY_BLOCKS = 4
"""Blocks that a prompt's homes are found by. Fewer: all that begin with one system prompt share
their homes; more: the turns of a conversation without a ``session_id`` have different ones."""

HOLDERS = 8
"""Arenas with a prompt's beginning that are looked at: a popular one may be everywhere."""


def affinity_key(prompt: PromptToPlace) -> bytes:
    """What prompts have in common that had better be read in the same arena.

    The conversation if it is known; else the first blocks; a prompt without a whole block has
    nothing to share and is spread by its id.
    """
    if prompt.session:
        return prompt.session
    keys = prompt.keys[:KEY_BLOCKS]
    return keys[-1] if keys else prompt.request.id.encode()


def _first(readers: PrefillWorkers) -> str | None:
    for worker in readers:  # a generator costs as much again
        if readers.takes(worker):
            return worker
    return None


def _holding(readers: PrefillWorkers, holders: Mapping[str, int]) -> list[str]:
    """The best workers of the arenas that have most of a prompt."""
    nearest = nsmallest(HOLDERS, holders, key=lambda arena: (-holders[arena], arena))
    return [found for arena in nearest if (found := readers.best_in(arena))]


def _work(prompt: PromptToPlace, readers: PrefillWorkers, worker: str) -> int:
    """Tokens that are read at a worker until the prompt has its first token."""
    cached = readers.cached_tokens(readers.arena(worker))
    return readers.tokens_before(worker) + max(1, prompt.tokens - cached)
