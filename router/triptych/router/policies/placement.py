"""Placement policies: which prefill worker gets a prompt, by load and by cached prefixes.

Compressors and decode workers are chosen by fixed rules in ``LoadIndex``.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from hashlib import blake2b
from heapq import nsmallest
from typing import Protocol

from triptych.router.models.prompt_blocks import PromptToPlace


@dataclass(frozen=True, slots=True)
class Choice:
    """The prefill worker of a prompt, and a short reason."""

    worker: str
    """Its address."""
    reason: str


class PrefillWorkers(Protocol):
    """Prefill workers with room for one prompt, at one moment, fewest queued tokens first.

    It is lazy, and does not contain workers that are full, dead or without a recent report.
    """

    def __len__(self) -> int: ...

    def __iter__(self) -> Iterator[str]:
        """Addresses."""
        ...

    def __getitem__(self, place: int, /) -> str:
        """The address at a position."""
        ...

    def takes(self, worker: str) -> bool:
        """Whether all bytes that the request can need can be booked with this worker."""
        ...

    def arena(self, worker: str) -> str:
        """The arena of a worker; workers of an arena share its prefix cache."""
        ...

    def tokens_before(self, worker: str) -> int:
        """Upper bound of the tokens that it prefills before this prompt."""
        ...

    def prefill_s(self, tokens: int) -> float:
        """Seconds to prefill ``tokens`` at present; 0 without a recent measurement."""
        ...

    def best_in(self, arena: str) -> str | None:
        """The first worker of an arena that takes the prompt, or None."""
        ...

    def cached_tokens(self, arena: str) -> int:
        """Prompt tokens that an arena probably has cached."""
        ...

    def holders(self) -> Mapping[str, int]:
        """Arenas that probably have a prefix of the prompt, with its tokens."""
        ...

    def homes(self, key: bytes) -> tuple[str, ...]:
        """Two arenas, by two hashes of a key; stable while both exist."""
        ...


class PlacementPolicy(Protocol):
    """Chooses the prefill worker of a prompt, deterministically."""

    def __call__(self, prompt: PromptToPlace, prefill_workers: PrefillWorkers, /) -> Choice | None:
        """One of ``prefill_workers`` that takes the prompt; None: it waits.

        While it waits, so do the requests behind it in the queue.
        """
        ...


def least_bytes(_ask: PromptToPlace, prefill_workers: PrefillWorkers) -> Choice | None:
    """The worker with fewest queued tokens whose arena has the bytes."""
    found = _first(prefill_workers)
    return Choice(found, "fewest_tokens") if found else None


def power_of_two(prompt: PromptToPlace, prefill_workers: PrefillWorkers) -> Choice | None:
    """The less loaded of two workers that a hash of the request's id picks.

    Source: Mitzenmacher, 2001 (the power of two choices)
    """
    if len(prefill_workers):
        digest = blake2b(prompt.request.id.encode(), digest_size=16).digest()
        picks = [int.from_bytes(half, "little") for half in (digest[:8], digest[8:])]
        for place in sorted(
            pick % len(prefill_workers) for pick in picks
        ):  # the less loaded one first
            if prefill_workers.takes(prefill_workers[place]):
                return Choice(prefill_workers[place], "of_two")
    return least_bytes(prompt, prefill_workers)


def prefix_affinity(prompt: PromptToPlace, prefill_workers: PrefillWorkers) -> Choice | None:
    """The worker with fewest tokens to prefill: its queue, and uncached tokens of the prompt.

    A cached prefix attracts a prompt while the queue there costs less than the prefix saves.

    Source: Preble, Mooncake (cost of queue and of what is not cached, in one sum)
    """
    least = _first(prefill_workers)
    if least is None:
        return None
    holders = prefill_workers.holders()
    able = _holding(prefill_workers, holders)
    chosen = min(
        [*able, least], key=lambda worker: (_work(prompt, prefill_workers, worker), worker)
    )
    cached = holders.get(prefill_workers.arena(chosen), 0)
    return Choice(chosen, "cached" if cached else "fewest_tokens")


def single_hash(prompt: PromptToPlace, prefill_workers: PrefillWorkers) -> Choice | None:
    """The arena that a hash of the prompt's prefix gives, however long its queue: a baseline.

    If that has no room, the prompt waits, and so does the queue.
    """
    for home in prefill_workers.homes(affinity_key(prompt))[:1]:
        found = prefill_workers.best_in(home)
        return Choice(found, "home") if found else None
    return least_bytes(prompt, prefill_workers)


def dualmap(prompt: PromptToPlace, prefill_workers: PrefillWorkers) -> Choice | None:
    """Of two arenas hashed from the prefix, the one that caches more, unless it is too slow.

    If the first token would come after ``prompt.ttft_s`` there, the prompt goes where it comes
    soonest: to the other home, to another arena that has its beginning, or, if the beginning is so
    popular that all of these are late, to the worker with the fewest tokens, which has it from then
    on. A queue that is hot is thus never filled further, and nothing has to be moved out of it.

    Source: DualMap (two hashes, SLO-aware switch, hotspots, dual hash ring). It moves requests from
        the head of a hot queue; here they wait in the router, and are placed when a worker has room
    """
    homes = prefill_workers.homes(affinity_key(prompt))
    able = [found for home in homes if (found := prefill_workers.best_in(home))]
    if able:
        affine = max(
            able, key=lambda worker: prefill_workers.cached_tokens(prefill_workers.arena(worker))
        )
        if prefill_workers.prefill_s(_work(prompt, prefill_workers, affine)) <= prompt.ttft_s:
            return Choice(affine, "affine")
    others = _holding(prefill_workers, prefill_workers.holders())
    least = _first(prefill_workers)
    if least is None:
        return None
    chosen = min([*able, *others, least], key=lambda worker: _work(prompt, prefill_workers, worker))
    return Choice(chosen, "switched" if prefill_workers.arena(chosen) in homes else "moved")


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


def _first(prefill_workers: PrefillWorkers) -> str | None:
    for worker in prefill_workers:  # a generator costs as much again
        if prefill_workers.takes(worker):
            return worker
    return None


def _holding(prefill_workers: PrefillWorkers, holders: Mapping[str, int]) -> list[str]:
    """The best workers of the arenas that have most of a prompt."""
    nearest = nsmallest(HOLDERS, holders, key=lambda arena: (-holders[arena], arena))
    return [found for arena in nearest if (found := prefill_workers.best_in(arena))]


def _work(prompt: PromptToPlace, prefill_workers: PrefillWorkers, worker: str) -> int:
    """Tokens that are read at a worker until the prompt has its first token."""
    cached = prefill_workers.cached_tokens(prefill_workers.arena(worker))
    return prefill_workers.tokens_before(worker) + max(1, prompt.tokens - cached)
