"""All requests of the router, by id and by state."""

from collections import Counter, OrderedDict, defaultdict
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from enum import StrEnum
from math import inf

from triptych.core.handles import KVHandle
from triptych.core.messages import CompressionReport, Request, Stage
from triptych.router.models.latency_forecast import NO_FORECAST, Forecast
from triptych.router.models.memory_estimate import RequestBytes
from triptych.router.policies.placement import Ask
from triptych.router.queue.waiting_queue import WaitingQueue
from triptych.router.state.history import History


class State(StrEnum):
    """Where a request stands; docs/architecture.md has the diagram."""

    WAITING = "waiting"
    """In the line; nothing booked, nobody told. Or set aside: the pages that it has are booked, and
    the decode worker that it was taken from has them on offer."""
    PREFILLING = "prefilling"
    """Sent to a prefill worker."""
    PREFILLED = "prefilled"
    """The prefill worker holds its raw pages; no compressor was told."""
    COMPRESSING = "compressing"
    """Sent to a compressor, which may or may not have attached the raw pages yet."""
    PLANNED = "planned"
    """The compressor holds the raw pages and waits to hear where to encode."""
    ENCODING = "encoding"
    """The compressor was told."""
    COMPRESSED = "compressed"
    """The compressor holds the finished pages, or the decode worker that it was taken from does;
    no decode worker was told."""
    DECODING = "decoding"
    """Sent to a decode worker, which may or may not have attached the pages yet."""
    ORPHANED = "orphaned"
    """Its decode worker died, and its pages wait in the pool for another one."""
    LEAVING = "leaving"
    """Over for the client, but some worker may still hold pages of it."""


AFTER_ENCODING = (State.COMPRESSED, State.DECODING, State.ORPHANED)


@dataclass(eq=False, slots=True)
class Entry:
    """One request and what the router knows of it. Addresses are empty where there is none."""

    request: Request
    sizes: RequestBytes
    arrived: float
    since: float
    """When it entered its state."""
    due: float = inf
    """When it loses patience."""
    latest: float = inf
    """When it must have started to keep its SLO."""
    whole: RequestBytes | None = None
    """What it takes where no compressor gets its layers as they are read; None: nowhere do they."""
    ask: Ask | None = None
    """How placement sees it, once it was to be placed."""
    cached_tokens: int = 0
    """Tokens of its prompt that are probably cached where it was sent; 0 if nobody looked."""
    ahead_tokens: int = 0
    """Prompt tokens before its prefill worker when it was sent there, its own included."""
    read_at: float = 0.0
    """When its first token was drawn."""
    concurrency_s: float = 0.0
    """What ``LatencyForecast.crowd_s`` was then."""
    forecast: Forecast = NO_FORECAST
    """What it was told when it came."""
    state: State = State.WAITING
    worker: str = ""
    """The last worker that was told of it."""
    stage: Stage = "prefill"
    """The stage of that worker."""
    source_worker: str = ""
    """The worker before, while it may still hold the lease that ``worker`` is to attach."""
    encoder: str = ""
    """The compressor that gets its layers while others are read, until it is told of it."""
    decode: str = ""
    """The decode worker with a slot for it."""
    previous_worker: str = ""
    """Name of the decode worker that left its pages or put them on offer, dead or not, until
    another one has taken them over."""
    raw_arena: str = ""
    """Where the prefill left its raw pages."""
    work_arena: str = ""
    """The compressor's; the decode worker's, once it has fetched the pages from there."""
    final_arena: str = ""
    """The decode worker's."""
    output_tokens: tuple[int, ...] = ()
    """Tokens of the answer that the next decode worker must know."""
    memory: tuple[float, ...] = ()
    """What plug-ins of the decode step remember of it."""
    is_preempt_sent: bool = False
    """Whether its decode worker was told to put it on offer."""
    is_preempted: bool = False
    """Whether it was set aside, or is about to be, for one that is more urgent."""
    kept_bytes: int = 0
    """Pages that it keeps while it is set aside."""
    token_s: float = 0.0
    """Seconds that a token of the prompt took to compute."""
    hit_tokens: int = 0
    """Tokens of the prompt that were not computed, as its prefill worker said."""
    handle: KVHandle | None = None
    """The pages that the next stage will attach."""
    report: CompressionReport | None = None
    spent_byte_s: float = 0.0
    """Bytes times the seconds that it has held them so far."""
    charged_byte_s: float = 0.0
    """What of that its tenant was charged, in advance and since."""
    owed: dict[str, float] = field(default_factory=dict[str, float])
    """While it is leaving: workers that have not said that they hold nothing of it, and until
    when that is waited for."""

    @property
    def id(self) -> str:
        return self.request.id

    @property
    def held_bytes(self) -> int:
        """What it has booked in its state, if all stages share an arena."""
        if self.state is State.WAITING:
            return self.kept_bytes
        return self.sizes.grown if self.state in AFTER_ENCODING else self.sizes.peak

    @property
    def waits_with_pages(self) -> bool:
        """Whether it waits with pages that it keeps."""
        return self.is_preempted and self.state is State.WAITING

    @property
    def prompt_tokens(self) -> int:
        """Tokens that the prefill reads."""
        return self.request.known_tokens

    @property
    def uncached_tokens(self) -> int:
        """Those of the prompt that are probably not cached."""
        return max(1, self.prompt_tokens - self.cached_tokens)

    @property
    def holders(self) -> list[str]:
        """Workers that may hold pages of it."""
        may_hold = (self.worker, self.source_worker, self.encoder)
        return list(dict.fromkeys(address for address in may_hold if address))


def is_prefilling(entry: Entry) -> bool:
    """Whether its prompt is in the queue of a prefill worker."""
    return entry.state is State.PREFILLING or (
        entry.state is State.LEAVING and entry.stage == "prefill"
    )


def is_compressing(entry: Entry) -> bool:
    """Whether it is in the queue of a compressor."""
    if entry.state is State.LEAVING:
        return entry.stage == "compress"
    return entry.state in (State.COMPRESSING, State.PLANNED, State.ENCODING)


def compressor_of(entry: Entry) -> str:
    """The compressor in whose queue it is, all of it or some layers; empty if there is none."""
    return entry.worker if is_compressing(entry) else entry.encoder


def _nothing(_entry: Entry) -> None:
    return


@dataclass
class Requests:
    """The table: each entry is in one state, and each state keeps the order of entering."""

    on_change: Callable[[Entry], None] = _nothing
    """Told of each entry that moved."""
    on_removal: Callable[[Entry], None] = _nothing
    queue: WaitingQueue = field(default_factory=WaitingQueue)
    """Those that wait, in the orders in which policies read them."""
    history: History = field(default_factory=History)
    _by_id: dict[str, Entry] = field(default_factory=dict[str, Entry])
    _by_state: dict[State, OrderedDict[str, Entry]] = field(
        default_factory=lambda: {state: OrderedDict[str, Entry]() for state in State}
    )
    _running: defaultdict[str, Counter[int]] = field(
        default_factory=lambda: defaultdict[str, Counter[int]](Counter[int])
    )
    """Priorities of what is being decoded, by tenant."""

    def __iter__(self) -> Iterator[Entry]:
        return iter(self._by_id.values())

    def __contains__(self, request: str) -> bool:
        return request in self._by_id

    def __getitem__(self, request: str) -> Entry:
        return self._by_id[request]

    def get(self, request: str) -> Entry | None:
        return self._by_id.get(request)

    def add(self, entry: Entry) -> None:
        """Take in a new entry, which waits; one that was in work before goes to the front."""
        in_front = entry.request.attempt > 0
        self._by_id[entry.id] = entry
        self._by_state[entry.state][entry.id] = entry
        if in_front:
            self._by_state[entry.state].move_to_end(entry.id, last=False)
        self._enqueue(entry, entry.sizes.peak, in_front=in_front)
        self.history.begin(entry.request, entry.state.value, entry.since)
        self.on_change(entry)

    def preempt(self, entry: Entry, kept_bytes: int, now: float) -> None:
        """Put an entry back into the line with pages that it keeps."""
        entry.kept_bytes = kept_bytes
        self.move(entry, State.WAITING, now)
        self._enqueue(entry, max(0, entry.sizes.grown - kept_bytes), in_front=False)

    def _enqueue(self, entry: Entry, size: int, *, in_front: bool) -> None:
        self.queue.add(
            entry.id,
            size,
            entry.arrived,
            in_front=in_front,
            due=entry.due,
            priority=entry.request.priority,
            tenant=entry.request.tenant,
            weight=entry.request.weight,
        )

    def move(self, entry: Entry, state: State, now: float) -> None:
        """Put an entry at the end of another state."""
        self.queue.discard(entry.id)
        self.accrue(entry, now)
        if entry.state is State.WAITING and state is State.PREFILLING:
            entry.charged_byte_s = entry.sizes.peak * self.queue.accounts.hold_s
            self.queue.accounts.serve(entry.request.tenant, entry.charged_byte_s)
        self._leave_state(entry)
        entry.state, entry.since = state, now
        self._by_state[state][entry.id] = entry
        if state is State.DECODING:
            self._running[entry.request.tenant][entry.request.priority] += 1
        if state is not State.LEAVING:  # over for the client; `RequestCompletion` says how
            self.history.note(entry.id, state.value, entry.report, now)
        self.on_change(entry)

    def touch(self, entry: Entry) -> None:
        """Say that an entry changed where it is."""
        self.on_change(entry)

    def accrue(self, entry: Entry, now: float) -> None:
        """Charge its tenant for what the request has held since it entered its state."""
        entry.spent_byte_s += entry.held_bytes * (now - entry.since)
        more = entry.spent_byte_s - entry.charged_byte_s
        if more > 0:
            self.queue.accounts.charge(entry.request.tenant, more)
            entry.charged_byte_s = entry.spent_byte_s

    def remove(self, entry: Entry) -> None:
        """Forget an entry; its tenant gets back what was charged and not used."""
        self.queue.discard(entry.id)
        accounts, tenant = self.queue.accounts, entry.request.tenant
        if entry.charged_byte_s:
            accounts.charge(tenant, entry.spent_byte_s - entry.charged_byte_s)
            accounts.learn(entry.spent_byte_s / entry.sizes.peak)
        accounts.close(tenant)
        del self._by_id[entry.id]
        self._leave_state(entry)
        self.on_removal(entry)

    def _leave_state(self, entry: Entry) -> None:
        del self._by_state[entry.state][entry.id]
        if entry.state is State.DECODING:
            tenant, priority = entry.request.tenant, entry.request.priority
            self._running[tenant][priority] -= 1
            if not self._running[tenant][priority]:
                del self._running[tenant][priority]
            if not self._running[tenant]:
                del self._running[tenant]

    def runs_less_urgent(self, tenant: str, priority: int) -> bool:
        """Whether anything of a tenant is being decoded that is less urgent."""
        return max(self._running.get(tenant, ()), default=priority) > priority

    def in_state(self, state: State) -> list[Entry]:
        """Entries of a state, first to enter first."""
        return list(self._by_state[state].values())

    def first(self, state: State) -> Entry | None:
        """The first of a state."""
        return next(iter(self._by_state[state].values()), None)

    def has_any(self, states: Iterable[State]) -> bool:
        """Whether any request is in one of these states."""
        by_state = self._by_state
        for state in states:  # noqa: SIM110  # asked at each message: a generator costs twice
            if by_state[state]:
                return True
        return False

    def count(self, state: State) -> int:
        return len(self._by_state[state])

    @property
    def in_work(self) -> int:
        """Requests that were begun and are not over."""
        return len(self._by_id) - self.count(State.WAITING) - self.count(State.LEAVING)
