"""Setup of a simulation: workers, machines, memory and jobs."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, lru_cache

from triptych.core.config import EncodeConfig, RouterConfig, require
from triptych.core.layout import Geometry, default_page_bytes
from triptych.core.messages import NO_SLO, Slo, Stage
from triptych.core.pages import PagePlan
from triptych.core.policy import Policy
from triptych.simulator.link import LinkSteps

SMOLLM2 = Geometry(layers=30, kv_heads=3, head_dim=64)
DIFFKV = Policy(
    name="diffkv", high_format="k8v4", low_format="k4v2", alpha_high=1.0, window_tokens=64
)

Group = tuple[str, str, tuple[Stage, ...]]
"""Address, arena and stages of one worker."""


KNOWN_PAGES = 1 << 16
"""Lengths whose pages are remembered."""

Segments = tuple[tuple[str, int], ...]
"""Named runs of tokens: prompts that begin with the same runs begin with the same tokens."""


@dataclass(frozen=True, slots=True)
class Job:
    """One request of a client."""

    id: str
    prompt_tokens: int
    max_tokens: int
    at_s: float = 0.0
    """When it is sent; within a session, the time after the end of the job before."""
    segments: Segments = ()
    """Runs that the prompt consists of; empty: tokens that no other prompt has."""
    images: tuple[tuple[str, int], ...] = ()
    """Names and tokens of the images that its prompt begins with; equal names are equal images."""
    output_tokens: int = 0
    """Tokens after which its answer ends; 0: it ends at ``max_tokens``."""
    max_kl: float = 0.0
    """Its limit of KL; 0: none."""
    slo: Slo = NO_SLO
    """Its SLO. Simulated workers cannot cancel, so it has no deadline."""

    def __post_init__(self) -> None:
        require(not self.slo.deadline_s, "deadline_s", self.slo.deadline_s, "0 in a simulation")
        ends = 0 <= self.output_tokens <= self.max_tokens
        require(ends, "output_tokens", self.output_tokens, f"0 to max_tokens ({self.max_tokens})")
        named = sum(tokens for _, tokens in (*self.segments, *self.images))
        fits = not self.segments or named == self.prompt_tokens
        require(fits, "segments", named, f"prompt_tokens ({self.prompt_tokens}) in all")

    @property
    def answer_tokens(self) -> int:
        """Tokens of its answer."""
        return self.output_tokens or self.max_tokens


Chain = Sequence[Job]
"""The jobs of one session, each sent after the end of the job before."""


@dataclass(frozen=True, kw_only=True)
class Cluster:
    """Workers, the machines they are on, and the settings of their router."""

    prefill: int = 1
    compress: int = 1
    decode: int = 1
    colocated: int = 0
    """Workers with all stages; then there are no other workers."""
    encode: int = 0
    """Workers of the encode stage; 0 without images, or if others have the stage."""
    has_images: bool = False
    """Whether there is an encode stage: of its own workers, or of prefill or colocated ones."""
    image_tokens: int = 196
    """Tokens of an image."""
    encoding: EncodeConfig = field(default_factory=EncodeConfig)
    """Batches and cache of the encode stage."""
    workers_per_node: int = 0
    """Workers that share a machine and its arena; 0: all of them."""
    decodes_apart: bool = False
    """Whether all decode workers are on a machine of their own, and the others on another one."""
    shared_cores: bool = True
    """Whether the workers of a machine take turns on its cores, step by step."""
    name: str = ""
    """Prefix of the names of workers and machines, for one of several shards."""
    cores: int = 2
    """Of each machine."""
    free_cores: float | None = None
    """Cores that other processes leave free; None: all, or one for each worker without sharing."""
    capacity_bytes: int = 600 << 20
    """Page memory of each machine that requests may book."""
    max_batch_requests: int = 32
    chunk_tokens: int = 512
    high_share: float = 0.35
    """Share of the compressed tokens that stay in the high format."""
    links: LinkSteps = ()
    """Speed of the link of each decode worker to other machines; empty: pages travel at once."""
    router: RouterConfig = field(default_factory=RouterConfig)
    plan: PagePlan = field(
        default_factory=lambda: PagePlan(SMOLLM2, default_page_bytes(SMOLLM2.head_dim), DIFFKV)
    )

    def __post_init__(self) -> None:
        for name in ("prefill", "compress", "decode"):
            count = getattr(self, name)
            least = 0 if self.colocated else 1
            require(count >= least, name, count, f"at least {least} worker")
        for name in ("encode", "prefill", "compress", "decode", "colocated"):
            count, shards = getattr(self, name), self.router.shards
            require(count % shards == 0, name, count, f"a multiple of the shards ({shards})")
        fits = self.has_images or not self.encode
        require(fits, "encode", self.encode, "0 for requests without images")
        require(self.capacity_bytes > 0, "capacity_bytes", self.capacity_bytes, "> 0")
        require(self.max_batch_requests >= 1, "slots", self.max_batch_requests, ">= 1")
        require(self.chunk_tokens >= 1, "chunk_tokens", self.chunk_tokens, ">= 1")
        free = self.free_cores
        require(free is None or 0 < free <= self.cores, "free_cores", free, f"0 to {self.cores}")
        require(0 <= self.high_share <= 1, "high_share", self.high_share, "0 to 1")

    def of_method(self, name: str) -> "Cluster":
        """The same cluster as requests of a method see it; an empty name is the default one."""
        return self._by_method[name or self.plan.policy.name]

    @cached_property
    def _by_method(self) -> Mapping[str, "Cluster"]:
        return {
            name: replace(self, plan=plan, high_share=self._high_share(plan))
            for name, plan in self.plan.by_method.items()
        }

    def _high_share(self, plan: PagePlan) -> float:
        """Share of high tokens with which a method has the bytes that calibration measured."""
        policy, known = plan.policy, self.plan.fidelity
        names = (policy.name, f"uniform:{policy.low_format}", f"uniform:{policy.high_format}")
        if not all(name in known for name in names):
            return self.high_share
        own, low, high = (known[name][0].bytes_ratio for name in names)
        return min(1.0, max(0.0, (own - low) / (high - low)))

    def compress_token_s(self, token_s: float) -> float:
        """Seconds to compress a token with this method, if ``token_s`` is the mean of all."""
        times = {one.name: one.compress_us for one in self.plan.measured if one.compress_us}
        own = times.get(self.plan.policy.name)
        return token_s if own is None else token_s * own * len(times) / sum(times.values())

    def shard(self, index: int) -> "Cluster":
        """One of ``router.shards`` shards: an equal part of the workers, on its own machines.

        If all workers are on one machine, shards share its cores, and each has part of its memory.
        """
        shards = self.router.shards
        if shards == 1:
            return self
        parts = shards if not self.workers_per_node else 1
        return replace(
            self,
            encode=self.encode // shards,
            prefill=self.prefill // shards,
            compress=self.compress // shards,
            decode=self.decode // shards,
            colocated=self.colocated // shards,
            name=f"{index}.",
            capacity_bytes=self.capacity_bytes // parts,
            router=replace(
                self.router,
                shards=1,
                max_queued_requests=-(-self.router.max_queued_requests // shards),
            ),
            plan=replace(self.plan, prefix_bytes=self.plan.prefix_bytes // parts),
        )

    def machine(self, arena: str) -> str:
        """The machine of an arena; it has one arena for each shard that shares it."""
        return arena if self.workers_per_node else ""

    @cached_property
    def workers(self) -> list[Group]:
        """All workers; the stages are spread evenly over the machines."""
        encode: tuple[Stage, ...] = ("encode",) if self.has_images else ()
        kinds: list[tuple[str, tuple[Stage, ...], int]] = [
            ("e", encode, self.encode),
            ("p", ("prefill",) if self.encode else (*encode, "prefill"), self.prefill),
            ("c", ("compress",), self.compress),
            ("d", ("decode",), self.decode),
        ]
        if self.colocated:
            kinds = [("w", (*encode, "prefill", "compress", "decode"), self.colocated)]
        total = sum(count for _, _, count in kinds)
        nodes = -(-total // self.workers_per_node) if self.workers_per_node else 1
        groups = list[Group]()
        for letter, stages, count in kinds:
            for index in range(count):
                number = int(letter == "d") if self.decodes_apart else index * nodes // count
                node = f"{self.name}node{number}"
                groups.append((f"{self.name}{letter}{index}", node, stages))
        return groups

    @cached_property
    def stored_pages(self) -> Callable[..., int]:
        """Counts pages of all head rows: of ``tokens`` compressed tokens, of which ``lowered`` high
        ones of each head row are stored as low ones (0 if not given).

        Counts are remembered: where a request reaches its limits is searched for each time that it
        gets another.
        """
        return lru_cache(KNOWN_PAGES)(self._count_pages)

    def _count_pages(self, tokens: int, lowered: int = 0) -> int:
        plan = self.plan
        encoded, rows = plan.leaving_tokens(tokens), plan.geometry.head_rows
        recent = plan.recent.pool_pages(plan.recent.pages(tokens - encoded) * rows)
        if not plan.compresses:
            return recent
        if plan.low is None:
            coded = plan.high.pages(plan.encoded_tokens(encoded))
        else:
            high = round(encoded * self.high_share) - lowered
            coded = plan.high.pages(high) + plan.low.pages(encoded - high)
        return recent + sum(
            rows * (plan.high.pages(plan.visible_tokens(encoded, window)) if window else coded)
            for window, rows in plan.rows_by_window.items()
        )

    def kept_pages(self, prompt_tokens: int) -> int:
        """Raw pages of all head rows that stay beside the compressed ones until a request ends."""
        plan = self.plan
        if not (plan.keeps_raw and plan.compresses):
            return 0
        return plan.raw.pages(prompt_tokens) * plan.geometry.head_rows

    def most_lowered(self, tokens: int) -> int:
        """High tokens of each head row, of ``tokens`` in all, that fill whole pages."""
        plan = self.plan
        if plan.low is None:
            return 0
        high = round(plan.leaving_tokens(tokens) * self.high_share)
        return high // plan.high.tokens * plan.high.tokens


def split_of(replicas: int) -> tuple[int, int, int]:
    """Prefill, compress and decode workers of ``replicas`` in all: about 3 to 1 to 6.

    Raises: ConfigError if there are too few for one of each
    """
    require(replicas >= 3, "--replicas", replicas, "at least 3, one of each stage")
    prefill, compress = max(1, round(replicas * 0.3)), max(1, round(replicas * 0.1))
    return prefill, compress, replicas - prefill - compress
