"""Router shards: which shard gets a request, by consistent hashing with bounded loads.

A shard is a router with its own pools and workers. Each ingress has one of these tables, and so
has the simulator.
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
"""Statuses of refusals for which another shard may be tried."""

Reason = Literal["home", "down", "refused", "bound"]
"""Why a request is in its shard: its hash, or that shard is down, refused it, or was full."""


@dataclass(slots=True)
class Assignment:
    """The shard of a request, and the bytes that it counts for."""

    key: bytes
    nbytes: int
    shard: str = ""
    """Empty while no shard is up."""
    refused: set[str] = field(default_factory=set[str])
    """Shards that refused it."""


class Shards:
    """Shards of an application by name, and the bytes of this ingress's requests in each.

    A request goes to the first shard on the ring, from its key on, that is up, has not refused it,
    and is below the bound: ``overload`` times the mean of all shards that are up, the request
    included, and ``free_requests`` of its own size beside that. So some shard is always below it,
    none is ever above it by more than one request, and a new shard takes no more than its share of
    keys from the others. If each ingress keeps to its bound, their sum keeps to the sum of them.

    Source: Mirrokni, Thorup, Zadimoghaddam, 2018 (consistent hashing with bounded loads): without
        free requests, and if all have one size, it is the paper's rule. Counting bytes of pages is
        ours, and so are free requests: where little is under way nobody has to leave its home
    """

    def __init__(self, names: Sequence[str], overload: float, free_requests: int) -> None:
        """``free_requests``: requests of a shard above the bound, e.g. one per prefill worker."""
        self.counters = Counter[Reason]()
        """Requests by the reason of their shard."""
        self._overload, self._free = overload, free_requests
        self._held = dict.fromkeys(names, 0)
        self._up = set[str]()
        self._assignments = dict[str, Assignment]()
        self._ring = HashRing(SALT)
        for name in names:
            self._ring.add(name)

    @property
    def up(self) -> list[str]:
        """Shards whose router is up, in the given order."""
        return [name for name in self._held if name in self._up]

    @property
    def held_bytes(self) -> dict[str, int]:
        """Upper bound of the bytes of the requests in each shard."""
        return dict(self._held)

    def found(self, shard: str) -> None:
        """The router of a shard is up."""
        self._up.add(shard)

    def lost(self, shard: str) -> None:
        """The router of a shard is down; its requests must be placed again."""
        self._up.discard(shard)

    def place(self, request: str, key: bytes, nbytes: int) -> str | None:
        """Assign an attempt to a shard; None while none is up."""
        self.remove(request)
        assignment = self._assignments[request] = Assignment(key, nbytes)
        return self._assign(assignment)

    def pass_on(self, request: str) -> str | None:
        """Assign a refused request to another shard; None if all refused it."""
        assignment = self._assignments[request]
        self._release(assignment)
        return self._assign(assignment)

    def where(self, request: str) -> str:
        """The shard of a request; empty if it has none."""
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
    """The first shard in ``order`` below the bound, and why it is not an earlier one.

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
    """Hash key of a request: requests with a common prefix belong in the same shard.

    The conversation if it is known; else the first blocks of the prompt. Where no prefixes are
    kept there is nothing to share, and requests are spread by their ids.
    """
    plan = plan.of_method(request.method)
    if not plan.caches_prompts:
        return request.id.encode()
    block_tokens = plan.block_tokens
    beginning = request.prompt[: KEY_BLOCKS * block_tokens + 1]
    asked = replace(request, prompt=beginning, output_tokens=(), cached_at_most=None)
    return affinity_key(PromptToPlace(asked, 0.0, block_tokens))


def bytes_of(request: Request, plan: PagePlan) -> int:
    """Bytes that a request counts for in its shard: the most that its router will book."""
    left = max(0, request.sampling.max_tokens - len(request.output_tokens))
    model = ByteModel(plan.of_method(request.method))
    return model.estimate(request.known_tokens, left).peak + request.feature_bytes


def may_pass_on(failure: Failed) -> bool:
    """Whether another shard may take a refused request that has no output yet."""
    return failure.status in REFUSALS and not failure.resumable


def names_of(shards: int) -> Iterator[str]:
    """Names of the shards.

    >>> list(names_of(2))
    ['0', '1']
    """
    return (str(index) for index in range(shards))
