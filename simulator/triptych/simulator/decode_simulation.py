"""Simulated decode engine: its steps, page limits and lowerings."""

from bisect import bisect_right
from collections import defaultdict
from dataclasses import dataclass, replace
from heapq import heappop, heappush

from triptych.core.messages import (
    EARLY_TOKENS,
    ROUTER,
    Evict,
    Evicted,
    Fetched,
    Finished,
    Join,
    Lower,
    Lowered,
    Message,
    PageLimit,
    PagesWanted,
    Preempt,
    Preempted,
    Request,
    Resumed,
    Send,
    Stage,
)
from triptych.simulator.costs import Costs
from triptych.simulator.setup import Cluster
from triptych.simulator.work import FIRST_TOKEN, TAKEN, Lengths, StepOutput, Work, lease_ref
from triptych.workers.decode.deadlines import DecodeDeadlines

MOST_QUIET_STEPS = 64
"""Steps that are foreseen at a time; a message that arrives makes the rest of them void."""


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

    def __init__(self, cluster: Cluster, costs: Costs, _cache: object, lengths: Lengths) -> None:
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
        self._eventful = list[int]()
        """Heap of the steps with events."""
        self._tempo = DecodeDeadlines()

    def accept(self, message: Message, now: float) -> Work | None:
        match message:
            case Preempt():
                return Work(0.0, [s for name in message.requests for s in self._suspend(name)])
            case PageLimit():
                self._set_limit(message, now)
                return TAKEN
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

    def quiet_steps(self) -> list[float]:
        eventful = self._eventful
        while eventful and not self._is_eventful(eventful[0]):
            self._events.pop(heappop(eventful), None)
        if self._joined or not eventful:
            return []
        costs, count, stored = self._costs, self._running, self._stored
        before = costs.decode_step_s + count * costs.decode_request_s
        end = stored + count * min(MOST_QUIET_STEPS, eventful[0] - self._steps - 1)
        token_s = costs.decode_token_s
        return [before + tokens * token_s for tokens in range(stored, end, count)]

    def _is_eventful(self, step: int) -> bool:
        """Whether something will happen with a step that was entered."""
        batch = self._batch
        return any(batch.get(one.request.id) is one for _, one in self._events.get(step, ()))

    def skip(self, count: int) -> int:
        self._steps += count
        self._tempo.step(count)
        self._stored += count * self._running
        return self._running

    def _expect(self, step: int, event: str, one: Decoding) -> None:
        """Something happens to a request with a step."""
        if step not in self._events:
            heappush(self._eventful, step)
        self._events[step].append((event, one))

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
        self._expect(self._steps + one.left, "ends", one)
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
            self._expect(self._steps + ask, "asks", one)
        self._expect(self._steps + pause, "pauses", one)

    def _enter_lowering(self, one: Decoding, limit: PageLimit) -> bool:
        """Schedule the next lowering of a request with such a limit; False if nothing is left."""
        cluster = self._cluster_of(one)
        if one.lowered + cluster.plan.high.tokens > cluster.most_lowered(one.tokens):
            return False
        reached = max(1, self._tokens_in(one, self._lowest_spare(limit)) - one.tokens)
        if reached < one.left:
            self._expect(self._steps + reached, "lowers", one)
        return True

    def _lowest_spare(self, limit: PageLimit) -> int:
        """Pages at which a request with such a limit is lowered."""
        return limit.pages - self._step_pages - self._cluster.plan.geometry.head_rows

    def _tokens_in(self, one: Decoding, pages: int) -> int:
        """Tokens, from those that a request has on, that fit this number of pages."""
        lengths = range(one.tokens + 1, one.tokens + one.left + 2)
        stored, lowered = self._cluster_of(one).stored_pages, one.lowered
        most = pages - self._kept_pages(one)
        return one.tokens + bisect_right(lengths, most, key=lambda n: stored(n, lowered))

    def _pages(self, one: Decoding, tokens: int) -> int:
        """Pages that a request holds at a length."""
        stored = self._cluster_of(one).stored_pages(tokens, one.lowered)
        return stored + self._kept_pages(one)

    def _kept_pages(self, one: Decoding) -> int:
        return self._cluster_of(one).kept_pages(one.request.known_tokens)

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
