"""Which cell of an application takes a request: consistent hashing with bounded loads.

A cell is a router with pools and workers of its own. An ingress has one of these tables; the
simulator's has the same.
"""

from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal

from triptych.core.messages import Failed, Request
from triptych.core.pages import PagePlan
from triptych.router.models.memory_estimate import ByteModel
from triptych.router.models.prompt_blocks import PromptToPlace
from triptych.router.policies.hash_ring import HashRing
from triptych.router.policies.placement import KEY_BLOCKS, affinity_key

SALT = b"cells"
REFUSALS = (429, 503)
"""Statuses of what another cell may have room for, or workers."""

Reason = Literal["home", "down", "refused", "bound"]
"""Why a request is where it is: its hash says so, or that cell is down, refused it, or was full."""


@dataclass(slots=True)
class Assignment:
    """Where a request is, and what it counts for there."""

    key: bytes
    nbytes: int
    shard: str = ""
    """Empty while no cell is up."""
    refused: set[str] = field(default_factory=set[str])
    """Cells that would not take it."""


class Shards:
    """Cells of an application by name: who is up, and what each holds of this ingress's requests.

    A request goes to the first cell on the ring, from its key on, that is up, has not refused it,
    and is below the bound: ``overload`` times the mean of all cells that are up, the request
    included, and ``free_requests`` of its own size beside that. So some cell is always below it,
    none is ever above it by more than one request, and a new cell takes no more than its share of
    keys from the others. If each ingress keeps to its bound, their sum keeps to the sum of them.

    Source: Mirrokni, Thorup, Zadimoghaddam, 2018 (consistent hashing with bounded loads): without
        free requests, and if all have one size, it is the paper's rule. Counting bytes of pages is
        ours, and so are free requests: where little is under way nobody has to leave its home
    """

    def __init__(self, names: Sequence[str], overload: float, free_requests: int) -> None:
        """``free_requests``: what a cell may have without a queue, as of its prefill workers."""
        self.counters = Counter[Reason]()
        """Requests by why they went where they went."""
        self._overload, self._free = overload, free_requests
        self._held = dict.fromkeys(names, 0)
        self._up = set[str]()
        self._assignments = dict[str, Assignment]()
        self._ring = HashRing(SALT)
        for name in names:
            self._ring.add(name)

    @property
    def up(self) -> list[str]:
        """Cells whose router is there, in the order of their names as given."""
        return [name for name in self._held if name in self._up]

    @property
    def held_bytes(self) -> dict[str, int]:
        """What the requests that are in each cell will take there at most."""
        return dict(self._held)

    def found(self, shard: str) -> None:
        """A cell's router is there."""
        self._up.add(shard)

    def lost(self, shard: str) -> None:
        """A cell's router is gone; what was there is to be placed again."""
        self._up.discard(shard)

    def place(self, request: str, key: bytes, nbytes: int) -> str | None:
        """The cell that takes an attempt at a request; None as long as none is up."""
        self.remove(request)
        assignment = self._assignments[request] = Assignment(key, nbytes)
        return self._assign(assignment)

    def pass_on(self, request: str) -> str | None:
        """The cell that takes a request that its cell refused; None if all of them did."""
        assignment = self._assignments[request]
        self._release(assignment)
        return self._assign(assignment)

    def where(self, request: str) -> str:
        """The cell that has a request; empty if none has."""
        assignment = self._assignments.get(request)
        return assignment.shard if assignment else ""

    def remove(self, request: str) -> None:
        """A request has ended, or its attempt has."""
        assignment = self._assignments.pop(request, None)
        if assignment is not None:
            self._release(assignment)

    def _release(self, assignment: Assignment) -> None:
        if assignment.shard:
            self._held[assignment.shard] -= assignment.nbytes
            assignment.refused.add(assignment.shard)
            assignment.shard = ""

    def _assign(self, assignment: Assignment) -> str | None:
        present = [self._held[shard] for shard in self._up]
        mean = (sum(present) + assignment.nbytes) / max(1, len(present))
        found = choose(
            dict.fromkeys(self._ring.walk(assignment.key)),
            self._held,
            self._overload * mean + self._free * assignment.nbytes,
            up=self._up,
            refused=assignment.refused,
        )
        if found is None:
            return None
        assignment.shard, reason = found
        self._held[assignment.shard] += assignment.nbytes
        self.counters[reason] += 1
        return assignment.shard


def choose(
    order: Iterable[str],
    held: Mapping[str, int],
    bound: float,
    *,
    up: Collection[str],
    refused: Collection[str],
) -> tuple[str, Reason] | None:
    """The first cell in ``order`` below the bound, and why it is not the one before it.

    None if all that are up have refused. If all below the bound have, it is the one that has least.
    """
    reason: Reason = "home"
    full = list[str]()
    for shard in order:
        if shard not in up:
            reason = "down"
        elif shard in refused:
            reason = "refused"
        elif held[shard] < bound:
            return shard, reason
        else:
            reason = "bound"
            full.append(shard)
    return (min(full, key=lambda shard: held[shard]), "refused") if full else None


def key_of(request: Request, plan: PagePlan) -> bytes:
    """What requests have in common that had better be in the same cell, where it is cached.

    The conversation if it is known; else the first blocks of the prompt. Where no prefixes are
    kept there is nothing to share, and requests are spread by their ids.
    """
    if not plan.prefix_bytes:
        return request.id.encode()
    beginning = request.prompt[: KEY_BLOCKS * plan.block_tokens + 1]
    asked = replace(request, prompt=beginning, said=(), cached_at_most=None)
    return affinity_key(PromptToPlace(asked, 0.0, plan.block_tokens))


def bytes_of(request: Request, plan: PagePlan) -> int:
    """What a request counts for in its cell: the most that its router will book."""
    left = max(0, request.sampling.max_tokens - len(request.said))
    return ByteModel(plan).estimate(request.known_tokens, left).peak


def may_pass_on(failure: Failed) -> bool:
    """Whether another cell may take what this one refused; if it has not begun to answer it."""
    return failure.status in REFUSALS and not failure.resumable


def names_of(shards: int) -> Iterator[str]:
    """What cells are called.

    >>> list(names_of(2))
    ['0', '1']
    """
    return (str(index) for index in range(shards))
