"""Simulated prefill, compress and decode engines: their messages and step times.

They batch as those in ``triptych.workers`` do: prefill reads chunks of those prompts that are due,
the compressor encodes all that waits, decode writes a token for each running request.
"""

from bisect import bisect_right
from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from math import inf
from typing import Protocol

from triptych.core.handles import KVHandle, LeaseId, LeaseRef
from triptych.core.messages import (
    EARLY_TOKENS,
    ROUTER,
    Compress,
    Compressed,
    CompressionReport,
    Encode,
    Evict,
    Evicted,
    Fetched,
    Finished,
    ImagesEncoded,
    Join,
    Lower,
    Lowered,
    Message,
    PageLimit,
    PagesWanted,
    Planned,
    Preempt,
    Preempted,
    Prefill,
    Prefilled,
    Request,
    Resumed,
    Send,
    Stage,
    pack_tokens,
)
from triptych.router.models.prompt_blocks import block_keys
from triptych.router.policies.prefix_map import BlockCache
from triptych.simulator.costs import Costs
from triptych.simulator.image_stage import EncodeSimulation
from triptych.simulator.setup import Cluster
from triptych.simulator.work import StepOutput, Work
from triptych.workers.decode.deadlines import DecodeDeadlines
from triptych.workers.prefill.chunk_scheduler import ChunkScheduler

FIRST_TOKEN = 1


Lengths = Mapping[str, int]
"""Output tokens after which each request ends."""


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
    """A handle with page counts and without pages, as simulated requests have none."""
    return KVHandle(LeaseRef("simulated", LeaseId(0), 0), (), tokens)


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


class PrefillSimulation:
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
            return Work(0.0)
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
        return Work(0.0)

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


class CompressSimulation:
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
            return Work(0.0)
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


@dataclass(eq=False, slots=True)
class Decoding:
    """A request in the decode batch, as it was at step ``since``."""

    request: Request
    since: int
    tokens: int
    """Tokens of the sequence that its pages hold."""
    written: int
    """Output tokens after those of ``request``."""
    left: int
    """Output tokens until its end."""
    lowered: int = 0
    """High tokens of each head row that are stored as low ones."""
    limit: PageLimit | None = None
    is_paused: bool = False

    def at(self, step: int) -> int:
        """Tokens that its pages hold after a step."""
        return self.tokens if self.is_paused else self.tokens + step - self.since


class DecodeSimulation:
    """Decodes a token for each running request at each step.

    Which steps are the last of a request, or reach its page limit, is known when it joins or gets
    another limit. So a step costs no time of ours for each request in it.
    """

    stage: Stage = "decode"

    def __init__(
        self, cluster: Cluster, costs: Costs, _cache: NodeCache | None, lengths: Lengths
    ) -> None:
        self._costs, self._cluster, self._lengths = costs, cluster, lengths
        self._has_arenas = len({arena for _, arena, _ in cluster.workers}) > 1
        classes = max(len(plan.classes) for plan in cluster.plan.by_method.values())
        self._step_pages = cluster.plan.geometry.head_rows * max(1, classes)
        self._batch = dict[str, Decoding]()
        self._limits = dict[str, PageLimit]()
        self._running = 0
        """Requests of the batch that are not paused."""
        self._stored = 0
        """Tokens that a step attends to."""
        self._steps = 0
        self._joined = list[str]()
        self._events = defaultdict[int, list[tuple[str, Decoding]]](list)
        """What happens with a step: a request "ends", "asks" for pages or "pauses". Valid while
        the request still has that entry."""
        self._tempo = DecodeDeadlines()

    def accept(self, message: Message, now: float) -> Work | None:
        match message:
            case Preempt():
                return Work(0.0, [s for name in message.requests for s in self._suspend(name)])
            case PageLimit():
                self._set_limit(message, now)
                return Work(0.0)
            case Lower():
                return Work(0.0, [self._lower(message)])
            case Evict():
                return Work(0.0, [self._evict(message)])
            case Join():
                return Work(0.0, self._join(message, now))
            case _:
                return None

    def _join(self, message: Join, now: float) -> list[Send]:
        request, tokens, written = message.request, message.handle.tokens, message.output_tokens
        left = self._lengths[request.id] - len(request.output_tokens) - len(written)
        limit = self._limits.pop(request.id, None)
        lowered = message.report.lowered_tokens
        one = Decoding(request, self._steps, tokens, len(written), left, lowered)
        one.limit = limit if limit and limit.pages else None
        self._enter(one)
        tpot_s = request.slo.tpot_s
        self._tempo.join(request.id, tpot_s, len(written), message.age_s, now)
        if len(written) == 1 and not request.output_tokens:
            self._joined.append(request.id)
        sends = list[Send]()
        if self._has_arenas:  # the pages may be another machine's
            sends.append(Send(ROUTER, Fetched(request=request.id)))
        if message.previous_worker:
            sends.append(Send(ROUTER, Resumed(request=request.id)))
        return sends

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
        sends, last = list[Send](), list[str]()
        for event, one in self._events.pop(self._steps, ()):
            name = one.request.id
            if self._batch.get(name) is not one:
                continue
            if event == "ends":
                self._leave(one)
                last.append(name)
                sends.append(Send(ROUTER, Finished(request=name, tokens=self._lengths[name])))
            elif event == "lowers":
                sends.append(Send(ROUTER, self._free_by_lowering(one, 0)))
            else:
                sends.append(self._ask(one, is_paused=event == "pauses"))
        joined, self._joined = tuple(self._joined), []
        output = StepOutput(count, (), tuple(last), joined, self._running > 0)
        return Work(seconds, sends, output)

    def _enter(self, one: Decoding) -> None:
        """Add a request to the running ones, with its next events."""
        self._batch[one.request.id] = one
        self._running += 1
        self._stored += one.tokens
        self._events[self._steps + one.left].append(("ends", one))
        limit = one.limit
        if limit is None:
            return
        if limit.lowers and self._enter_lowering(one, limit):
            return
        most = self._tokens_in(one, limit.pages)
        if limit.tokens:
            most = min(most, limit.tokens)
        # A step that would pass the limit is not begun: the request pauses after the one before.
        pause = max(1, most - one.tokens)
        if pause >= one.left:
            return
        early = min(most - EARLY_TOKENS, self._tokens_in(one, limit.pages - self._step_pages) + 1)
        ask = max(1, early - one.tokens)
        if ask < pause:
            self._events[self._steps + ask].append(("asks", one))
        self._events[self._steps + pause].append(("pauses", one))

    def _enter_lowering(self, one: Decoding, limit: PageLimit) -> bool:
        """Schedule the next lowering of a request with such a limit; False if nothing is left."""
        cluster = self._cluster_of(one)
        if one.lowered + cluster.plan.high.tokens > cluster.most_lowered(one.tokens):
            return False
        reached = max(1, self._tokens_in(one, self._lowest_spare(limit)) - one.tokens)
        if reached < one.left:
            self._events[self._steps + reached].append(("lowers", one))
        return True

    def _lowest_spare(self, limit: PageLimit) -> int:
        """Pages at which a request with such a limit is lowered."""
        return limit.pages - self._step_pages - self._cluster.plan.geometry.head_rows

    def _tokens_in(self, one: Decoding, pages: int) -> int:
        """Tokens, from those that a request has on, that fit this number of pages."""
        lengths = range(one.tokens + 1, one.tokens + one.left + 2)
        return one.tokens + bisect_right(lengths, pages, key=lambda n: self._pages(one, n))

    def _pages(self, one: Decoding, tokens: int) -> int:
        """Pages that a request holds at a length."""
        cluster = self._cluster_of(one)
        kept = cluster.kept_pages(one.request.known_tokens)
        return cluster.stored_pages(tokens, one.lowered) + kept

    def _cluster_of(self, one: Decoding) -> Cluster:
        return self._cluster.of_method(one.request.method)

    def _ask(self, one: Decoding, *, is_paused: bool) -> Send:
        tokens = one.at(self._steps)
        pages = self._pages(one, tokens)
        wanted = max(0, self._pages(one, tokens + 1) - pages)
        if is_paused:
            self._leave(one)
            self._batch[one.request.id] = paused = self._now(one)
            paused.is_paused = True
        message = PagesWanted(
            request=one.request.id, tokens=tokens, pages=pages, wanted=wanted * is_paused
        )
        return Send(ROUTER, message)

    def _set_limit(self, message: PageLimit, now: float) -> None:
        one = self._batch.get(message.request)
        if one is None:
            self._limits[message.request] = message
            return
        if one.is_paused:
            self._tempo.join(one.request.id, one.request.slo.tpot_s, 1, 0.0, now)
        self._leave(one, keeps_deadline=True)
        after = self._now(one)
        after.limit, after.is_paused = message if message.pages else None, False
        self._enter(after)

    def _now(self, one: Decoding) -> Decoding:
        """A request as it is after the present step."""
        more = one.at(self._steps) - one.tokens
        return Decoding(
            one.request,
            self._steps,
            one.tokens + more,
            one.written + more,
            one.left - more,
            one.lowered,
            one.limit,
            one.is_paused,
        )

    def _leave(self, one: Decoding, *, keeps_deadline: bool = False) -> None:
        """Remove a request from the batch."""
        self._batch.pop(one.request.id, None)
        if not keeps_deadline:
            self._tempo.leave(one.request.id)
        if not one.is_paused:
            self._running -= 1
            self._stored -= one.at(self._steps)

    def _lower(self, message: Lower) -> Send:
        """Lower a request, and its limit by the freed pages."""
        one, lowered = self._batch.get(message.request), Lowered(request=message.request)
        if one is not None:
            lowered = self._free_by_lowering(one, message.pages, takes_away=True)
        return Send(ROUTER, replace(lowered, number=message.number))

    def _free_by_lowering(
        self, found: Decoding, pages: int, *, takes_away: bool = False
    ) -> Lowered:
        """Lower whole pages of high tokens, as few as free ``pages``, or reach the limit again.

        ``takes_away``: whether the limit is lowered by the freed pages.
        """
        one, cluster = self._now(found), self._cluster_of(found)
        room, before = cluster.plan.high.tokens, self._pages(one, one.tokens)
        most = cluster.most_lowered(one.tokens)
        if one.limit is not None and one.limit.lowers:
            pages = max(pages, before - self._lowest_spare(one.limit) + self._step_pages)
        freed = 0
        while freed < pages and one.lowered + room <= most:
            one.lowered += room
            freed = before - self._pages(one, one.tokens)
        if takes_away and one.limit is not None:
            one.limit = replace(one.limit, pages=one.limit.pages - freed)
        self._leave(found, keeps_deadline=True)
        if one.is_paused:
            self._batch[one.request.id] = one
        else:
            self._enter(one)
        return Lowered(
            request=one.request.id,
            freed=freed,
            pages=before - freed,
            tokens=one.tokens,
            lowered_tokens=one.lowered,
        )

    def _suspend(self, name: str) -> list[Send]:
        """Preempt a request, if it still runs."""
        one = self._take(name)
        if one is None:
            return []
        handle = lease_ref(name, one.tokens)
        output_tokens = (FIRST_TOKEN,) * one.written
        return [Send(ROUTER, Preempted(request=name, output_tokens=output_tokens, handle=handle))]

    def _evict(self, message: Evict) -> Send:
        one = self._take(message.request)
        tokens = (FIRST_TOKEN,) * one.written if one else ()
        evicted = Evicted(request=message.request, number=message.number, output_tokens=tokens)
        return Send(ROUTER, evicted)

    def _take(self, name: str) -> Decoding | None:
        """Remove a request from the batch, as it is now; None if it is not there."""
        self._limits.pop(name, None)
        one = self._batch.get(name)
        if one is None:
            return None
        self._joined = [other for other in self._joined if other != name]
        self._leave(one)
        return self._now(one)


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
