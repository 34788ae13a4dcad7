"""The view of a placement policy for one prompt: loads, free bytes and the prefix map."""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from itertools import islice

from triptych.core.messages import Request
from triptych.router.models.latency_forecast import LatencyForecast
from triptych.router.models.prompt_blocks import PromptToPlace
from triptych.router.policies.hash_ring import DualHashRing
from triptych.router.policies.placement import Choice, PlacementPolicy
from triptych.router.policies.prefix_map import PrefixMap
from triptych.router.state.load_index import Fits, LoadIndex


@dataclass(eq=False, slots=True)
class Snapshot:
    """The prefill workers with room for one prompt; valid until any load changes."""

    load_index: LoadIndex
    prompt: PromptToPlace
    limit_tokens: int
    """Tokens that a worker takes at a time."""
    fits: Fits
    token_s: float
    prefixes: PrefixMap
    rings: Callable[[], DualHashRing]
    _fitting: dict[str, bool] = field(default_factory=dict[str, bool])
    _count: int = 0
    """Workers with room."""

    def __post_init__(self) -> None:
        self._count = self.load_index.with_room(self.needed, self.limit_tokens)

    @property
    def needed(self) -> int:
        """Room that the prompt takes. A long one with images is sent while another is read, since
        its images come first."""
        if self.prompt.has_images:
            return min(self.prompt.tokens, self.load_index.long_tokens)
        return self.prompt.tokens

    def __len__(self) -> int:
        return self._count

    def __iter__(self) -> Iterator[str]:
        return islice(self.load_index.prefill_workers(), self._count)

    def __getitem__(self, place: int, /) -> str:
        if not 0 <= place < self._count:
            raise IndexError(f"place {place} of {self._count} workers")
        return self.load_index.prefill_workers().at(place)

    def takes(self, worker: str) -> bool:
        return self._has_bytes(self.load_index.arena_of(worker))

    def arena(self, worker: str) -> str:
        return self.load_index.arena_of(worker)

    def tokens_before(self, worker: str) -> int:
        return self.load_index.queue_tokens(worker)

    def prefill_s(self, tokens: int) -> float:
        return tokens * self.token_s

    def best_in(self, arena: str) -> str | None:
        if not self.load_index.with_room(self.needed, self.limit_tokens, arena):
            return None
        return self.load_index.prefill_workers(arena).first() if self._has_bytes(arena) else None

    def cached_tokens(self, arena: str) -> int:
        return self.prefixes.known(arena, self.prompt.keys) * self.prompt.block_tokens

    def holders(self) -> Mapping[str, int]:
        found, block_tokens = self.prefixes.holders(self.prompt.keys), self.prompt.block_tokens
        return {arena: count * block_tokens for arena, count in found.items()}

    def homes(self, key: bytes) -> tuple[str, ...]:
        return self.rings().homes(key)

    def _has_bytes(self, arena: str) -> bool:
        known = self._fitting.get(arena)
        if known is None:
            known = self._fitting[arena] = self.fits(arena)
        return known


@dataclass(eq=False)
class Placer:
    """Calls the placement policy, and records where prompts were sent if the policy uses that."""

    policy: PlacementPolicy
    load_index: LoadIndex
    latency: LatencyForecast
    block_tokens: Callable[[str], int]
    """Tokens of a block of the prefix cache, by method."""
    prefixes: PrefixMap
    ttft_s: float
    """TTFT limit of prompts without one."""
    _rings: DualHashRing = field(default_factory=DualHashRing)
    _seen: int = -1
    """Generation of the load index when arenas were last removed from the prefix map."""
    _hashed: int = -1
    """Generation of the load index when the rings were last built; -1: never."""

    def prompt(self, request: Request) -> PromptToPlace:
        """The prompt of a request as placement policies see it."""
        block_tokens = self.block_tokens(request.method)
        return PromptToPlace(request, request.slo.ttft_s or self.ttft_s, block_tokens)

    def snapshot(
        self, prompt: PromptToPlace, limit_tokens: int, fits: Fits, now: float
    ) -> Snapshot:
        """The view of all prefill workers at present."""
        if self._seen != self.load_index.generation:
            self._seen = self.load_index.generation
            self.prefixes.forget(self.prefixes.arenas - set(self.load_index.prefill_arenas))
        token_s = self.latency.prefill_token_s.at(now)
        return Snapshot(
            self.load_index, prompt, limit_tokens, fits, token_s, self.prefixes, self._present
        )

    def choose(self, snapshot: Snapshot) -> Choice | None:
        """The prefill worker that the policy chooses."""
        return self.policy(snapshot.prompt, snapshot)

    def sent(self, prompt: PromptToPlace, arena: str) -> int:
        """A prompt was sent to an arena, which will cache its blocks.

        Returns: tokens that are probably cached already; 0 if the policy did not use the keys
        """
        if not prompt.keys_were_read:
            return 0
        known = self.prefixes.known(arena, prompt.keys)
        self.prefixes.keep(arena, prompt.keys)
        return known * prompt.block_tokens

    def _present(self) -> DualHashRing:
        """The rings of the arenas that have prefill workers."""
        if self._hashed != self.load_index.generation:
            self._hashed = self.load_index.generation
            self._rings.hold(self.load_index.prefill_arenas)
        return self._rings
