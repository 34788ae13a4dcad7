"""The request table: all requests of the router, by id and by state."""

from collections import Counter, OrderedDict, defaultdict
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from enum import StrEnum
from math import inf

from triptych.core.handles import KVHandle
from triptych.core.messages import CompressionReport, Request, Stage, TokenLogprob
from triptych.router.models.booking import Booking
from triptych.router.models.latency_forecast import NO_FORECAST, Forecast
from triptych.router.models.memory_estimate import RequestBytes
from triptych.router.models.prompt_blocks import PromptToPlace
from triptych.router.queue.waiting_queue import WaitingQueue
from triptych.router.state.history import History
from triptych.router.state.stage_times import PARTS, StageTimes


class State(StrEnum):
    """State of a request; docs/architecture.md has the diagram."""

    WAITING = "waiting"
    """In the waiting queue, with nothing booked and sent to no worker. Or preempted: its pages are
    booked, and the decode worker that had it offers them."""
    PREFILLING = "prefilling"
    """Sent to a prefill worker."""
    PREFILLED = "prefilled"
    """The prefill worker holds its raw pages; it was sent to no compressor yet."""
    COMPRESSING = "compressing"
    """Sent to a compressor, which may or may not have attached the raw pages yet."""
    PLANNED = "planned"
    """The compressor holds the raw pages and waits for ``Encode``."""
    ENCODING = "encoding"
    """The compressor was sent ``Encode``."""
    COMPRESSED = "compressed"
    """The compressor, or the decode worker that was preempted, holds the compressed pages; it was
    sent to no decode worker yet."""
    DECODING = "decoding"
    """Sent to a decode worker, which may or may not have attached the pages yet."""
    ORPHANED = "orphaned"
    """Its decode worker died, and the pool keeps its pages for a takeover."""
    EVICTING = "evicting"
    """Its decode worker was told to free its pages; then it waits again and is computed again."""
    LEAVING = "leaving"
    """Ended for the client, but a worker may still hold pages of it."""


BEFORE_DECODING = (
    State.PREFILLING,
    State.PREFILLED,
    State.COMPRESSING,
    State.PLANNED,
    State.ENCODING,
)
AFTER_ENCODING = (State.COMPRESSED, State.DECODING, State.ORPHANED, State.EVICTING)


@dataclass(frozen=True, slots=True)
class PromptWait:
    """A waiting request whose first blocks another request computes."""

    leader: str
    """Id of that request."""
    shared_tokens: int
    """Tokens of the blocks."""
    until: float
    """When it waits no longer."""


@dataclass(eq=False, slots=True)
class Placement:
    """Where a request is placed, and what placement assumed. Empty: not decided yet."""

    prompt: PromptToPlace | None = None
    """The prompt as placement policies see it."""
    cached_tokens: int = 0
    """Prompt tokens that its prefill worker probably has cached; 0 if no policy looked it up."""
    waits_for: PromptWait | None = None
    """Set while it waits for blocks of its prompt."""
    waits: int = 0
    """Requests for whose blocks it waited."""
    shared_tokens: int = 0
    """Prompt tokens that another request computes, or was to compute, for it."""
    equal_to: str = ""
    """Id of the request at its prefill worker that computes its prompt; empty: it does so."""
    ahead_tokens: int = 0
    """Prompt tokens in the queue of its prefill worker when it was sent there, its own included."""
    encoder: str = ""
    """The compressor that receives its layers during prefill, until it compresses the request."""
    image_encoder: str = ""
    """The encode worker that has its images, until its prompt is computed."""
    is_encoding: bool = False
    """Whether the features of its images are still to come, so that its prompt cannot begin."""
    decode_worker: str = ""
    """Address of the decode worker with a slot for it."""
    raw_arena: str = ""
    """Arena where prefill stored its raw pages."""
    work_arena: str = ""
    """Arena of the compressor; of the decode worker, once the pages are there."""
    final_arena: str = ""
    """Arena of the decode worker."""


@dataclass(eq=False, slots=True)
class Transfer:
    """Results of a stage that the next stage needs."""

    source_worker: str = ""
    """The worker before, while it may still hold the lease that ``Entry.worker`` is to attach."""
    previous_worker: str = ""
    """Name of the decode worker that died or was told to preempt it, until another one has taken
    its pages over."""
    handle: KVHandle | None = None
    """The pages that the next stage attaches."""
    report: CompressionReport | None = None
    """What compression did to it; None before compression."""
    output_tokens: tuple[int, ...] = ()
    """Output tokens that the next decode worker must know."""
    plugin_memory: tuple[float, ...] = ()
    """State of decode-step plug-ins for this request."""
    logprobs: tuple[TokenLogprob, ...] = ()
    """Log probabilities of the newest ``output_tokens``, if the request asks for them."""
    token_s: float = 0.0
    """Seconds that prefill took for each computed token of the prompt."""
    plan_s: float = 0.0
    """Seconds until the compressor had counted its pages."""
    hit_tokens: int = 0
    """Prompt tokens that prefill took from the prefix cache."""
    first_token_at: float = 0.0
    """When its first output token was sampled."""
    concurrency_s: float = 0.0
    """``LatencyForecast.concurrency_s`` at that time."""


@dataclass(eq=False, slots=True)
class SloStatus:
    """The times by which a request is to start, and what was forecast when it arrived."""

    due: float = inf
    """From this time on no request of its tenant may overtake it."""
    latest: float = inf
    """Latest start that meets its SLO."""
    forecast: Forecast = NO_FORECAST


@dataclass(eq=False, slots=True)
class Usage:
    """Resources that a request has used, for fair queueing between tenants."""

    spent_byte_s: float = 0.0
    """Bytes times the seconds that it has held them."""
    charged_byte_s: float = 0.0
    """The part of it that its tenant was charged, in advance and since."""


@dataclass(eq=False, slots=True)
class Entry:
    """One request and what the router knows of it. Addresses are empty where there is none."""

    request: Request
    sizes: RequestBytes
    arrived: float
    since: float
    """When it entered its state."""
    whole: RequestBytes | None = None
    """Its sizes without layer-wise prefill, if it may use that; None: ``sizes`` are."""
    booking: Booking | None = None
    """What is known of its memory; None: nothing, and ``sizes`` are bounds."""
    state: State = State.WAITING
    part_since: float = 0.0
    """When it entered the part of its time (``PARTS``) that its state belongs to."""
    worker: str = ""
    """The last worker that it was sent to."""
    stage: Stage = "prefill"
    """The stage of that worker."""
    is_preempt_sent: bool = False
    """Whether its decode worker was sent ``Preempt`` and has not answered."""
    is_preempted: bool = False
    """Whether it was preempted, or is about to be, for a more urgent request."""
    was_lowered: bool = False
    """Whether high tokens of it became low because memory was short, now or in an attempt before
    it was evicted."""
    kept_bytes: int = 0
    """Bytes of pages that it keeps while it is preempted."""
    owed: dict[str, float] = field(default_factory=dict[str, float])
    """While it is leaving: workers that may still hold pages of it, and until when the router waits
    for their answer."""
    placement: Placement = field(default_factory=Placement)
    transfer: Transfer = field(default_factory=Transfer)
    slo: SloStatus = field(default_factory=SloStatus)
    usage: Usage = field(default_factory=Usage)
    id: str = field(init=False)
    """Of its request, which other attempts at it keep."""

    def __post_init__(self) -> None:
        self.id = self.request.id

    @property
    def held_bytes(self) -> int:
        """Bytes that it has booked in its state, if all stages share an arena."""
        if self.state is State.WAITING:
            return self.kept_bytes
        return self.sizes.grown if self.state in AFTER_ENCODING else self.sizes.peak

    @property
    def waits_with_pages(self) -> bool:
        """Whether it is preempted and waits with its pages."""
        return self.is_preempted and self.state is State.WAITING

    @property
    def was_evicted(self) -> bool:
        """Whether it ran, and is computed again because its pages were freed."""
        return self.booking is not None and self.booking.evictions > 0

    @property
    def prompt_tokens(self) -> int:
        """Tokens that prefill processes."""
        return self.request.known_tokens

    @property
    def uncached_tokens(self) -> int:
        """Prompt tokens that are probably not cached; at least 1."""
        return max(1, self.prompt_tokens - self.placement.cached_tokens)

    @property
    def holders(self) -> list[str]:
        """Workers that may hold pages of it."""
        placement = self.placement
        may_hold = (
            self.worker,
            self.transfer.source_worker,
            placement.encoder,
            placement.image_encoder,
        )
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
    return entry.worker if is_compressing(entry) else entry.placement.encoder


def _nothing(_entry: Entry) -> None:
    return


@dataclass
class Requests:
    """The table: each entry is in one state, and each state keeps the order of entering."""

    on_change: Callable[[Entry], None] = _nothing
    """Called with each entry whose state changed."""
    on_removal: Callable[[Entry], None] = _nothing
    on_end: list[Callable[[Entry], None]] = field(default_factory=list[Callable[[Entry], None]])
    """Called with each entry that ends for its client, at least once."""
    queue: WaitingQueue = field(default_factory=WaitingQueue)
    """Waiting requests, in the orders that policies use."""
    history: History = field(default_factory=History)
    stage_times: StageTimes = field(default_factory=StageTimes)
    """Of requests that went on to the next stage."""
    _by_id: dict[str, Entry] = field(default_factory=dict[str, Entry])
    _by_state: dict[State, OrderedDict[str, Entry]] = field(
        default_factory=lambda: {state: OrderedDict[str, Entry]() for state in State}
    )
    _running: defaultdict[str, Counter[int]] = field(
        default_factory=lambda: defaultdict[str, Counter[int]](Counter[int])
    )
    """Priorities of running requests, by tenant."""

    def __iter__(self) -> Iterator[Entry]:
        return iter(self._by_id.values())

    def __contains__(self, request: str) -> bool:
        return request in self._by_id

    def __getitem__(self, request: str) -> Entry:
        return self._by_id[request]

    def get(self, request: str) -> Entry | None:
        return self._by_id.get(request)

    def add(self, entry: Entry) -> None:
        """Add a waiting entry; a retried attempt goes to the front."""
        in_front = entry.request.attempt > 0
        self._by_id[entry.id] = entry
        self._by_state[entry.state][entry.id] = entry
        if in_front:
            self._by_state[entry.state].move_to_end(entry.id, last=False)
        self._enqueue(entry, entry.sizes.peak, in_front=in_front)
        self.history.begin(entry.request, entry.state.value, entry.since)
        entry.part_since = entry.since
        self.on_change(entry)

    def preempt(self, entry: Entry, kept_bytes: int, now: float) -> None:
        """Put an entry back into the waiting queue with its pages."""
        entry.kept_bytes = kept_bytes
        self.move(entry, State.WAITING, now)
        self._enqueue(entry, max(0, entry.sizes.grown - kept_bytes), in_front=False)
        self.queue.accounts.close(entry.request.tenant)  # it was open for this request already

    def requeue(self, entry: Entry, now: float) -> None:
        """Put an entry without pages back into the waiting queue, to be computed again."""
        entry.kept_bytes = 0
        self.move(entry, State.WAITING, now)
        self._enqueue(entry, entry.sizes.peak, in_front=False)
        self.queue.accounts.close(entry.request.tenant)

    def _enqueue(self, entry: Entry, size: int, *, in_front: bool) -> None:
        self.queue.add(
            entry.id,
            size,
            entry.arrived,
            in_front=in_front,
            due=entry.slo.due,
            priority=entry.request.priority,
            tenant=entry.request.tenant,
            weight=entry.request.weight,
        )

    def move(self, entry: Entry, state: State, now: float) -> None:
        """Put an entry at the end of another state."""
        if entry.state is State.WAITING:
            self.queue.discard(entry.id)
        self.accrue(entry, now)
        if entry.state is State.WAITING and state is State.PREFILLING:
            usage = entry.usage
            ahead = entry.sizes.peak * self.queue.accounts.hold_s
            ahead += usage.spent_byte_s - usage.charged_byte_s  # not 0 if it is computed again
            usage.charged_byte_s += ahead
            self.queue.accounts.serve(entry.request.tenant, ahead)
        self._leave_state(entry)
        self._time(entry, state, now)
        entry.state, entry.since = state, now
        self._by_state[state][entry.id] = entry
        if state is State.DECODING:
            self._running[entry.request.tenant][entry.request.priority] += 1
        if state is State.LEAVING:  # `RequestCompletion` records the end
            self._ended(entry)
        else:
            self.history.note(entry.id, state.value, entry.transfer.report, now)
        self.on_change(entry)

    def _time(self, entry: Entry, state: State, now: float) -> None:
        part, following = PARTS.get(entry.state), PARTS.get(state)
        if part == following:
            return
        if part is not None and state is not State.LEAVING:
            self.stage_times.add(part, now - entry.part_since)
        entry.part_since = now

    def touch(self, entry: Entry) -> None:
        """Report that an entry changed within its state."""
        self.on_change(entry)

    def accrue(self, entry: Entry, now: float) -> None:
        """Charge its tenant for what the request has held since it entered its state."""
        entry.usage.spent_byte_s += entry.held_bytes * (now - entry.since)
        more = entry.usage.spent_byte_s - entry.usage.charged_byte_s
        if more > 0:
            self.queue.accounts.charge(entry.request.tenant, more)
            entry.usage.charged_byte_s = entry.usage.spent_byte_s

    def remove(self, entry: Entry) -> None:
        """Remove an entry; its tenant is refunded what was charged and not used."""
        self.queue.discard(entry.id)
        accounts, tenant = self.queue.accounts, entry.request.tenant
        if entry.usage.charged_byte_s:
            accounts.charge(tenant, entry.usage.spent_byte_s - entry.usage.charged_byte_s)
            accounts.learn(entry.usage.spent_byte_s / entry.sizes.peak)
        accounts.close(tenant)
        del self._by_id[entry.id]
        self._leave_state(entry)
        self._ended(entry)
        self.on_removal(entry)

    def _ended(self, entry: Entry) -> None:
        for on_end in self.on_end:
            on_end(entry)

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
        """Whether a tenant has a running request that is less urgent."""
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
        for state in states:  # noqa: SIM110  # called at each message: a generator costs twice
            if by_state[state]:
                return True
        return False

    def count(self, state: State) -> int:
        return len(self._by_state[state])

    @property
    def in_work(self) -> int:
        """Requests that have started and have not ended."""
        return len(self._by_id) - self.count(State.WAITING) - self.count(State.LEAVING)
