"""Simulated prefill, compress and decode engines: their messages and step times.

They batch as those in ``triptych.workers`` do: prefill reads chunks of those prompts that are due,
the compressor encodes all that waits, decode writes a token for each running request.
"""

from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, field
from math import inf
from typing import Protocol

from triptych.core.handles import KVHandle, LeaseId, LeaseRef
from triptych.core.messages import (
    ROUTER,
    Compress,
    Compressed,
    CompressionReport,
    Encode,
    Fetched,
    Finished,
    Join,
    Message,
    Planned,
    Preempt,
    Preempted,
    Prefill,
    Prefilled,
    Request,
    Send,
    Stage,
    pack_tokens,
)
from triptych.router.models.prompt_blocks import block_keys
from triptych.router.policies.prefix_map import BlockCache
from triptych.simulator.costs import Costs
from triptych.simulator.setup import Cluster
from triptych.workers.decode.deadlines import DecodeDeadlines
from triptych.workers.prefill.chunk_scheduler import ChunkScheduler

FIRST_TOKEN = 1


@dataclass(frozen=True, slots=True)
class StepOutput:
    """Output tokens of one step, for the clients."""

    requests: int
    first: tuple[str, ...] = ()
    """Requests that receive their first token."""
    last: tuple[str, ...] = ()
    """Requests whose output is complete."""
    joined: tuple[str, ...] = ()
    """Requests for which it is the first token after the prefill's."""
    goes_on: bool = False
    """Whether the worker decodes in its next step as well."""


@dataclass(frozen=True, slots=True)
class Work:
    """Duration and results of one unit of work."""

    seconds: float
    sends: list[Send] = field(default_factory=list[Send])
    output: StepOutput | None = None
    began: tuple[str, ...] = ()
    """Requests whose prefill begins with it."""


class SimulatedEngine(Protocol):
    """One stage of one worker."""

    stage: Stage

    def accept(self, message: Message, now: float, /) -> Work | None:
        """Take a message; None if it is not for this stage."""
        ...

    def has_work(self) -> bool: ...

    @property
    def due(self) -> float:
        """When it is late, so that it may step again in the same turn."""
        ...

    def step(self) -> Work:
        """Run one unit of work."""
        ...


def lease_ref(request: str, tokens: int) -> KVHandle:
    """A placeholder handle."""
    return KVHandle(LeaseRef("simulated", LeaseId(0), 0), (), tokens)


@dataclass(eq=False)
class Prompt:
    """A prompt in prefill or in the prefill queue."""

    request: Request
    tokens: int
    due: float
    read: int = 0
    cached: int = 0
    has_begun: bool = False

    @property
    def left(self) -> int:
        return self.tokens - self.read


@dataclass
class NodeCache:
    """Prefix cache of one machine: whole blocks with LRU eviction.

    The real one evicts by cost, has quotas and guards conversations; here all blocks cost the same.
    """

    block_tokens: int
    blocks: BlockCache

    def cached(self, request: Request) -> int:
        """Cached tokens of a prompt; touches their blocks."""
        keys = self._keys(request)
        known = self.blocks.known(keys)
        self.blocks.keep(keys[:known])
        return known * self.block_tokens

    def publish(self, tokens: bytes, salt: str) -> None:
        """Cache a compressed prompt."""
        self.blocks.keep(block_keys(tokens, salt, self.block_tokens))

    def _keys(self, request: Request) -> tuple[bytes, ...]:
        return block_keys(pack_tokens(request.known), request.cache_salt, self.block_tokens)


class PrefillSimulation:
    """Prefills up to ``chunk_tokens`` a step, earliest due prompts first."""

    stage: Stage = "prefill"

    def __init__(self, cluster: Cluster, costs: Costs, cache: NodeCache | None) -> None:
        self._chunk, self._costs, self._cache = cluster.chunk_tokens, costs, cache
        self._chunks, self._prompts = ChunkScheduler(), list[Prompt]()

    def accept(self, message: Message, _now: float) -> Work | None:
        if not isinstance(message, Prefill):
            return None
        for one in message.requests:
            due = self._chunks.due(one.known_tokens, one.slo.ttft_s)
            self._prompts.append(Prompt(one, one.known_tokens, due))
        return Work(0.0)

    def has_work(self) -> bool:
        return bool(self._prompts)

    @property
    def due(self) -> float:
        return inf

    def step(self) -> Work:
        costs = self._costs
        left, pairs, done, began, copied = self._chunk, 0.0, list[Prompt](), list[str](), 0
        for prompt in self._chunks.in_order(self._prompts):
            if left == 0:
                break
            if not prompt.has_begun:
                began.append(prompt.request.id)
                copied += self._begin(prompt)
            count = min(left, prompt.left)
            pairs += count * (prompt.read + count / 2)
            prompt.read += count
            left -= count
            if not prompt.left:
                done.append(prompt)
        for prompt in done:
            self._prompts.remove(prompt)
        tokens = self._chunk - left
        seconds = costs.prefill_step_s + tokens * costs.prefill_token_s
        # Copying a token back takes about what compressing one takes (70 and 64 ms for 1,024).
        seconds += pairs * costs.prefill_pair_s + copied * costs.compress_token_s
        self._chunks.note(tokens, seconds)
        names = tuple(prompt.request.id for prompt in done)
        last = tuple(one.request.id for one in done if one.request.sampling.max_tokens <= 1)
        token_s = seconds / max(1, tokens)
        sends = [Send(ROUTER, self._prefilled(prompt, token_s)) for prompt in done]
        output = StepOutput(len(done), names, last) if done else None
        return Work(seconds, sends, output, tuple(began))

    def _begin(self, prompt: Prompt) -> int:
        """Start after the cached prefix; returns its tokens."""
        prompt.has_begun = True
        if self._cache is not None:
            prompt.read = prompt.cached = self._cache.cached(prompt.request)
        return prompt.cached

    @staticmethod
    def _prefilled(prompt: Prompt, token_s: float) -> Prefilled:
        request = prompt.request
        goes_on = request.sampling.max_tokens > 1
        handle = lease_ref(request.id, prompt.tokens) if goes_on else None
        return Prefilled(
            request=request.id,
            first_token=FIRST_TOKEN,
            handle=handle,
            cached_tokens=prompt.cached,
            token_s=token_s,
        )


class CompressSimulation:
    """Plans requests at once, and encodes all waiting ones in one step."""

    stage: Stage = "compress"

    def __init__(self, cluster: Cluster, costs: Costs, cache: NodeCache | None) -> None:
        self._cluster, self._costs, self._cache = cluster, costs, cache
        self._planned = dict[str, int]()
        self._ready = list[str]()

    def accept(self, message: Message, _now: float) -> Work | None:
        if isinstance(message, Compress):
            planned = list[Send]()
            for item in message.items:
                tokens = item.handle.tokens
                self._planned[item.request] = tokens
                pages = self._cluster.stored_pages(tokens)
                planned.append(Send(ROUTER, Planned(request=item.request, pages=pages)))
                if self._cache is not None and item.prefix is not None:
                    self._cache.publish(item.prefix.tokens, item.prefix.cache_salt)
            return Work(0.0, planned)
        if isinstance(message, Encode):
            self._ready.extend(message.requests)
            return Work(0.0)
        return None

    def has_work(self) -> bool:
        return bool(self._ready)

    @property
    def due(self) -> float:
        return inf

    def step(self) -> Work:
        names, self._ready = self._ready, []
        sends, total = list[Send](), 0
        for name in names:
            tokens = self._planned.pop(name)
            total += tokens
            report = CompressionReport(policy="simulated", raw_bytes=0, stored_bytes=0)
            done = Compressed(request=name, handle=lease_ref(name, tokens), report=report)
            sends.append(Send(ROUTER, done))
        costs = self._costs
        return Work(costs.compress_step_s + total * costs.compress_token_s, sends)


class DecodeSimulation:
    """Decodes a token for each running request at each step.

    Which step is the last of a request is known when it joins, so a step costs no time of ours
    for each request in it.
    """

    stage: Stage = "decode"

    def __init__(self, cluster: Cluster, costs: Costs, _cache: NodeCache | None) -> None:
        self._costs = costs
        self._has_arenas = len({arena for _, arena, _ in cluster.workers}) > 1
        self._running = 0
        self._stored = 0
        """Tokens that a step attends to."""
        self._steps = 0
        self._joined = list[str]()
        self._ends = defaultdict[int, list[tuple[Request, int]]](list)
        """Requests, and tokens stored by then, that end with a step."""
        self._tempo = DecodeDeadlines()

    def accept(self, message: Message, now: float) -> Work | None:
        if isinstance(message, Preempt):
            return Work(0.0, self._suspend(message.requests))
        if not isinstance(message, Join):
            return None
        request, tokens = message.request, message.handle.tokens
        left = request.sampling.max_tokens - len(message.output_tokens)
        self._ends[self._steps + left].append((request, tokens + left))
        self._running += 1
        self._stored += tokens
        tpot_s = request.slo.tpot_s
        self._tempo.join(request.id, tpot_s, len(message.output_tokens), message.age_s, now)
        if len(message.output_tokens) == 1:
            self._joined.append(request.id)
        if self._has_arenas:  # the pages may be another machine's; that they travel costs nothing
            return Work(0.0, [Send(ROUTER, Fetched(request=request.id))])
        return Work(0.0)

    def has_work(self) -> bool:
        return self._running > 0

    @property
    def due(self) -> float:
        return self._tempo.due

    def step(self) -> Work:
        costs, count = self._costs, self._running
        seconds = costs.decode_step_s + count * costs.decode_request_s
        seconds += self._stored * costs.decode_token_s
        self._steps += 1
        self._tempo.step()
        self._stored += count
        ended = self._ends.pop(self._steps, ())
        sends = list[Send]()
        for request, stored in ended:
            self._running -= 1
            self._stored -= stored
            self._tempo.leave(request.id)
            sends.append(
                Send(ROUTER, Finished(request=request.id, tokens=request.sampling.max_tokens))
            )
        last = tuple(request.id for request, _ in ended)
        joined, self._joined = tuple(self._joined), []
        return Work(seconds, sends, StepOutput(count, (), last, joined, self._running > 0))

    def _suspend(self, names: tuple[str, ...]) -> list[Send]:
        """Preempt those of the requests that still run."""
        self._joined = [name for name in self._joined if name not in names]
        found = [
            (step, request, stored)
            for step, ending in self._ends.items()
            for request, stored in ending
            if request.id in names
        ]
        sends = list[Send]()
        for step, request, stored_then in found:
            self._ends[step].remove((request, stored_then))
            left = step - self._steps
            stored = stored_then - left
            self._tempo.leave(request.id)
            self._running -= 1
            self._stored -= stored
            output_tokens = (FIRST_TOKEN,) * (request.sampling.max_tokens - left)
            handle = lease_ref(request.id, stored)
            sends.append(
                Send(
                    ROUTER,
                    Preempted(request=request.id, output_tokens=output_tokens, handle=handle),
                )
            )
        return sends


ENGINES = {
    "prefill": PrefillSimulation,
    "compress": CompressSimulation,
    "decode": DecodeSimulation,
}


def engines_of(
    stages: Iterable[Stage], cluster: Cluster, costs: Costs, cache: NodeCache | None
) -> list[SimulatedEngine]:
    """The engines of one worker, in the order in which its loop steps them."""
    return [ENGINES[stage](cluster, costs, cache) for stage in stages]
