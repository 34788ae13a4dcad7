"""Simulated prefill, compress and decode engines: their messages and step times.

They batch as those in ``triptych.workers`` do: prefill reads chunks of those prompts that are due,
the compressor encodes all that waits, decode writes a token for each running request.
"""

from collections.abc import Iterable
from dataclasses import dataclass, field
from math import inf
from typing import Protocol

from triptych.core.messages import (
    ROUTER,
    Compress,
    Compressed,
    CompressionReport,
    Encode,
    ImagesEncoded,
    Message,
    Planned,
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
from triptych.simulator.decode_simulation import DecodeSimulation
from triptych.simulator.image_stage import EncodeSimulation
from triptych.simulator.setup import Cluster
from triptych.simulator.work import (
    FIRST_TOKEN,
    TAKEN,
    Lengths,
    NeverQuiet,
    StepOutput,
    Work,
    lease_ref,
)
from triptych.workers.prefill.chunk_scheduler import ChunkScheduler


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

    def quiet_steps(self) -> list[float]:
        """Seconds of each of the next steps that only write tokens; empty if the next one does
        more. Valid until a message is accepted."""
        ...

    def skip(self, count: int) -> int:
        """Do that many of them at once; returns the number of requests in each."""
        ...


@dataclass(eq=False)
class Prompt:
    """A prompt in prefill or in the prefill queue."""

    request: Request
    tokens: int
    due: float
    equal: list[Request] = field(default_factory=list[Request])
    """Requests with an equal prompt, for which it is computed too."""
    read: int = 0
    cached: int = 0
    has_begun: bool = False

    @property
    def left(self) -> int:
        return self.tokens - self.read

    @property
    def requests(self) -> list[Request]:
        return [self.request, *self.equal]


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
        return block_keys(pack_tokens(request.known_keys), request.cache_salt, self.block_tokens)


class PrefillSimulation(NeverQuiet):
    """Prefills up to ``chunk_tokens`` a step, earliest due prompts first."""

    stage: Stage = "prefill"

    def __init__(
        self, cluster: Cluster, costs: Costs, cache: NodeCache | None, lengths: Lengths
    ) -> None:
        self._chunk, self._costs, self._cache = cluster.chunk_tokens, costs, cache
        self._lengths = lengths
        self._chunks, self._prompts = ChunkScheduler(), list[Prompt]()
        self._encoded = set[str]()
        """Requests whose images are encoded."""

    def accept(self, message: Message, _now: float) -> Work | None:
        if isinstance(message, ImagesEncoded):
            self._encoded.add(message.request)
            return TAKEN
        if not isinstance(message, Prefill):
            return None
        for one in message.requests:
            due = self._chunks.due(one.known_tokens, one.slo.ttft_s)
            equal = self._equal(one)
            if equal is None:
                self._prompts.append(Prompt(one, one.known_tokens, due))
            else:
                equal.equal.append(one)
                equal.due = min(equal.due, due)
        return TAKEN

    def _equal(self, request: Request) -> Prompt | None:
        """The prompt that is computed for a request too; without a cache prompts have no tokens."""
        if self._cache is None:
            return None
        key = request.prompt_key
        return next((one for one in self._prompts if one.request.prompt_key == key), None)

    def has_work(self) -> bool:
        return any(map(self._can_run, self._prompts))

    def _can_run(self, prompt: Prompt) -> bool:
        """Whether the features of its images are there."""
        return not prompt.request.images or any(one.id in self._encoded for one in prompt.requests)

    @property
    def due(self) -> float:
        return inf

    def step(self) -> Work:
        costs = self._costs
        left, pairs, done, began, copied = self._chunk, 0.0, list[Prompt](), list[str](), 0
        for prompt in self._chunks.in_order(filter(self._can_run, self._prompts)):
            if left == 0:
                break
            if not prompt.has_begun:
                began += [one.id for one in prompt.requests]
                copied += self._begin(prompt)
            count = min(left, prompt.left)
            pairs += count * (prompt.read + count / 2)
            prompt.read += count
            left -= count
            if not prompt.left:
                done.append(prompt)
        for prompt in done:
            self._prompts.remove(prompt)
            self._encoded.difference_update(one.id for one in prompt.requests)
        tokens = self._chunk - left
        seconds = costs.prefill_step_s + tokens * costs.prefill_token_s
        # Copying a token back takes about what compressing one takes (70 and 64 ms for 1,024).
        seconds += pairs * costs.prefill_pair_s + copied * costs.compress_token_s
        self._chunks.note(tokens, seconds)
        ended = [(prompt, request) for prompt in done for request in prompt.requests]
        last = tuple(one.id for _, one in ended if not self._left(one))
        token_s = seconds / max(1, tokens)
        sends = [Send(ROUTER, self._prefilled(*one, token_s)) for one in ended]
        first = tuple(one.id for _, one in ended if not one.output_tokens)
        output = StepOutput(len(ended), first, last) if ended else None
        return Work(seconds, sends, output, tuple(began))

    def _begin(self, prompt: Prompt) -> int:
        """Start after the cached prefix; returns its tokens."""
        prompt.has_begun = True
        if self._cache is not None:
            prompt.read = prompt.cached = self._cache.cached(prompt.request)
        return prompt.cached

    def _left(self, request: Request) -> int:
        """Output tokens of a request after the one that its prefill draws."""
        return self._lengths[request.id] - len(request.output_tokens) - 1

    def _prefilled(self, prompt: Prompt, request: Request, token_s: float) -> Prefilled:
        goes_on = self._left(request) > 0
        handle = lease_ref(request.id, prompt.tokens) if goes_on else None
        return Prefilled(
            request=request.id,
            first_token=FIRST_TOKEN,
            handle=handle,
            cached_tokens=prompt.cached,
            token_s=token_s,
        )


class CompressSimulation(NeverQuiet):
    """Plans requests at once, and encodes all waiting ones in one step."""

    stage: Stage = "compress"

    def __init__(
        self, cluster: Cluster, costs: Costs, cache: NodeCache | None, _lengths: Lengths
    ) -> None:
        self._cluster, self._costs, self._cache = cluster, costs, cache
        self._planned, self._methods = dict[str, int](), dict[str, str]()
        self._ready = list[str]()

    def accept(self, message: Message, _now: float) -> Work | None:
        if isinstance(message, Compress):
            planned = list[Send]()
            for item in message.items:
                tokens = item.handle.tokens
                self._planned[item.request] = tokens
                cluster = self._cluster.of_method(item.method)
                self._methods[item.request] = item.method
                pages = cluster.stored_pages(tokens) + cluster.kept_pages(tokens)
                planned.append(Send(ROUTER, Planned(request=item.request, pages=pages)))
                if self._cache is not None and item.prefix is not None:
                    self._cache.publish(item.prefix.tokens, item.prefix.cache_salt)
            return Work(0.0, planned)
        if isinstance(message, Encode):
            self._ready.extend(message.requests)
            return TAKEN
        return None

    def has_work(self) -> bool:
        return bool(self._ready)

    @property
    def due(self) -> float:
        return inf

    def step(self) -> Work:
        names, self._ready = self._ready, []
        sends, seconds, costs = list[Send](), self._costs.compress_step_s, self._costs
        for name in names:
            tokens, cluster = (
                self._planned.pop(name),
                self._cluster.of_method(self._methods.pop(name)),
            )
            seconds += tokens * cluster.compress_token_s(costs.compress_token_s)
            report = CompressionReport(policy="simulated", raw_bytes=0, stored_bytes=0)
            done = Compressed(request=name, handle=lease_ref(name, tokens), report=report)
            sends.append(Send(ROUTER, done))
        return Work(seconds, sends)


ENGINES = {
    "encode": EncodeSimulation,
    "prefill": PrefillSimulation,
    "compress": CompressSimulation,
    "decode": DecodeSimulation,
}


def engines_of(
    stages: Iterable[Stage],
    cluster: Cluster,
    costs: Costs,
    cache: NodeCache | None,
    lengths: Lengths,
) -> list[SimulatedEngine]:
    """The engines of one worker, in the order in which its loop steps them."""
    return [ENGINES[stage](cluster, costs, cache, lengths) for stage in stages]
