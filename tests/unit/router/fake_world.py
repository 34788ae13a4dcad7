"""A world of fake workers around a scheduler: they die, lag, repeat themselves, forget to answer.

``FakeWorld`` keeps every page that any process holds, by the rules of the real stages.
"""

from collections import deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace

from triptych.core.errors import StageLost, StaleHandle, TriptychError
from triptych.core.handles import KVHandle, LeaseId, LeaseRef
from triptych.core.layout import FORMATS, Geometry, PageLayout
from triptych.core.messages import (
    Cancel,
    Compress,
    Compressed,
    CompressionReport,
    Encode,
    Evict,
    Evicted,
    Expect,
    Expel,
    Failed,
    Finished,
    Join,
    Layers,
    LayersEncoded,
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
    Register,
    Report,
    Request,
    Resume,
    Resumed,
    Send,
    Stage,
    failed,
)
from triptych.core.pages import PagePlan
from triptych.core.policy import Policy
from triptych.router import ByteModel, Scheduler

PAGE, SLOTS = 768, 3  # a page as small as this is not divided
POLICY = Policy(name="uniform:k8v4", high_format="k8v4")
PLAN = PagePlan(Geometry(layers=6, kv_heads=1, head_dim=64), PAGE, POLICY)
IN_PARTS = replace(PLAN, chunk_tokens=60, layers_at_once=2)
LOWERABLE = replace(PLAN, policy=replace(POLICY, low_format="k4v2"))
"""Its bounds are those of two classes. The workers hold less: what one class takes."""
WITH_CACHE = replace(PLAN, prefix_bytes=1 << 20)
RAW, STORED = PageLayout(FORMATS["fp16"], 64, PAGE), PageLayout(FORMATS["k8v4"], 64, PAGE)
CAPACITY = 330 * PLAN.geometry.head_rows * PAGE
LEASE_S = 4.0
WORKERS: dict[str, tuple[Stage, ...]] = {
    "p0": ("prefill",),
    "p1": ("prefill",),
    "c0": ("compress",),
    "c1": ("compress",),
    "d0": ("decode",),
    "d1": ("decode",),
    "all0": ("prefill", "compress", "decode"),
    "all1": ("prefill", "compress", "decode"),
    "all2": ("prefill", "compress", "decode"),
}
INGRESSES = ("in0", "in1")
REPEATABLE = (
    Prefilled
    | Planned
    | Compressed
    | Resumed
    | Preempted
    | Finished
    | PagesWanted
    | Evicted
    | Lowered
)


@dataclass(eq=False)
class Held:
    """Pages of one request, or of some of its layers, in one process: as many in each head row."""

    pages: int
    rows: int = PLAN.geometry.head_rows
    lease_ref: LeaseRef | None = None
    """Set once the pages are on offer to the next stage."""
    decoding: Request | None = None
    written: int = 0
    limit: PageLimit | None = None
    is_paused: bool = False
    lowered: int = 0
    """Pages of each head row that storing high tokens as low ones has freed."""


@dataclass(eq=False)
class Reading:
    """A prompt that is read some layers at a time."""

    request: Request
    encoder: str
    first: int = 0
    unencoded: set[int] = field(default_factory=set[int])

    @property
    def id(self) -> str:
        return self.request.id


Task = Request | Reading | Layers | tuple[str, str]


@dataclass(eq=False)
class FakeWorker:
    """All three engines, as dull as they can be: one message or one unit of work per step."""

    address: str
    name: str
    stages: tuple[Stage, ...]
    inbox: deque[Message] = field(default_factory=deque[Message])
    outbox: deque[Message] = field(default_factory=deque[Message])
    """For the router; a ``Send`` is for another worker."""
    queue: deque[Task] = field(default_factory=deque[Task])
    """Prompts to read, and layers or (request, arena) to encode."""
    held: dict[str, Held] = field(default_factory=dict[str, Held])
    prompts: dict[str, int] = field(default_factory=dict[str, int])
    """Prompt tokens of what is being compressed."""
    expected: set[str] = field(default_factory=set[str])
    """Prompts of which layers may come."""
    limits: dict[str, PageLimit] = field(default_factory=dict[str, PageLimit])
    """Page limits of requests that have not joined yet."""

    @property
    def ready(self) -> list[str]:
        """Running requests that need not wait for pages."""
        return [name for name in self.running if not self.held[name].is_paused]

    @property
    def running(self) -> list[str]:
        return [name for name, held in self.held.items() if held.decoding is not None]

    def next_task(self) -> Task | None:
        """The first that need not wait for another worker."""
        for task in self.queue:
            if not isinstance(task, Reading) or len(task.unencoded) <= 1:
                self.queue.remove(task)
                return task
        return None


class FakeWorld:
    """Workers, the pool between them, and clients who remember what they were told."""

    def __init__(self, coordinator: Scheduler, plan: PagePlan, *, answers_cancel: bool) -> None:
        self.router, self.answers_cancel = coordinator, answers_cancel
        self.shape = plan
        self.now, self.starts, self.leases = 0.0, 0, 0
        self.workers = dict[str, FakeWorker]()
        self.dead = list[tuple[FakeWorker, float]]()
        self.ingresses = set[str]()
        self.requests = dict[str, Request]()
        self.arrived = dict[str, float]()
        self.waiting = list[str]()
        self.outcomes = dict[str, list[str]]()
        self.unnoticed = list[str]()
        self.record_report = list[tuple[str, Message]]()
        self.check_admissions = True
        self.resumed = self.suspended = self.evicted = self.lowered = 0

    # ---------------------------------------------------------------- the router's side

    def tell(self, message: Message, sender: str) -> None:
        if isinstance(message, Send):
            self.deliver([message])
            return
        self.record_report.append((sender, message))
        self.deliver(self.router.on(message, sender, self.now))

    def deliver(self, sends: Iterable[Send]) -> None:
        admitted = list[str]()
        for send in sends:
            if isinstance(send.message, Failed):
                self.end(send.message.request, f"failed {send.message.code}")
            elif isinstance(send.message, Expel):
                self.expel(send.message.worker)
            elif send.to in self.workers:
                self.workers[send.to].inbox.append(send.message)
            if isinstance(send.message, Prefill):
                admitted += [request.id for request in send.message.requests]
        self.note_admitted(admitted)

    def note_admitted(self, admitted: list[str]) -> None:
        raise NotImplementedError

    def end(self, request: str, how: str) -> None:
        self.outcomes.setdefault(request, []).append(how)
        if request in self.waiting:
            self.waiting.remove(request)

    # ---------------------------------------------------------------- the pool

    def processes(self) -> Iterator[FakeWorker]:
        yield from self.workers.values()
        yield from (worker for worker, _ in self.dead)

    @property
    def bytes_held(self) -> int:
        every = [held for worker in self.processes() for held in worker.held.values()]
        return sum(held.pages * held.rows for held in every) * PAGE

    def offer(self, held: Held) -> LeaseRef:
        self.leases += 1
        held.lease_ref = LeaseRef("cpu", LeaseId(self.leases), 0)
        return held.lease_ref

    def attach(self, lease_ref: LeaseRef, request: str, taker: FakeWorker) -> Held:
        for worker in self.processes():
            held = worker.held.get(request)
            if held is not None and held.lease_ref == lease_ref:
                del worker.held[request]
                held.lease_ref = None
                taker.held[request] = held
                return held
        raise StaleHandle(int(lease_ref.lease), "nobody offers it")

    def reclaim(self) -> None:
        """What a decode worker held is kept for others until the router says otherwise."""
        self.dead = [
            (worker, when)
            for worker, when in self.dead
            if self.now < when + LEASE_S or "decode" in worker.stages
        ]

    def expel(self, name: str) -> None:
        self.dead = [(worker, when) for worker, when in self.dead if worker.name != name]

    # ---------------------------------------------------------------- workers

    def start(self, address: str) -> None:
        self.starts += 1
        worker = FakeWorker(address, f"{address}#{self.starts}", WORKERS[address])
        self.workers[address] = worker
        slots = SLOTS if "decode" in worker.stages else 0
        registration = Register(
            name=worker.name,
            address=address,
            stages=worker.stages,
            max_requests=slots,
            arena="cpu",
        )
        self.unnoticed = [gone for gone in self.unnoticed if gone != address]
        self.tell(registration, address)
        self.report(worker)

    def report(self, worker: FakeWorker) -> None:
        held = sum(held.pages * held.rows for held in worker.held.values())
        report = Report(name=worker.name, running=0, waiting=0, pages_held=held, busy_s=0.0)
        self.tell(report, worker.address)

    def kill(self, address: str) -> FakeWorker:
        worker = self.workers.pop(address)
        self.dead.append((worker, self.now))
        self.unnoticed.append(address)
        return worker

    def notice(self) -> None:
        for address in self.unnoticed:
            self.deliver(self.router.lost(address, self.now))
        self.unnoticed = []

    def step(self, worker: FakeWorker) -> bool:
        """One message or one unit of work; False if there is nothing to do."""
        if worker.inbox:
            self.accept(worker, worker.inbox.popleft())
        elif (task := worker.next_task()) is not None:
            self.work(worker, task)
        elif worker.ready:
            self.decode(worker, worker.ready[0])
        else:
            return False
        return True

    def accept(self, worker: FakeWorker, message: Message) -> None:
        match message:
            case Prefill():
                encoders = message.encoders or [""] * len(message.requests)
                worker.queue.extend(
                    Reading(request, encoder) if encoder else request
                    for request, encoder in zip(message.requests, encoders, strict=True)
                )
            case Expect():
                worker.expected.update(message.requests)
            case Layers():
                if message.request in worker.expected:
                    self.take_layers(worker, message)
            case LayersEncoded():
                for task in worker.queue:
                    if isinstance(task, Reading) and task.id == message.request:
                        task.unencoded.discard(message.first)
            case Compress():
                for item in message.items:
                    self.plan(worker, item.request, item.handle)
            case Encode():
                named = [name for name in message.requests if name in worker.prompts]
                worker.queue.extend((name, message.arena) for name in named)
            case Join():
                self.join(worker, message)
            case Resume():
                self.resume(worker, message)
            case Preempt():
                for name in message.requests:
                    self.suspend(worker, name)
            case PageLimit():
                self.limit(worker, message)
            case Lower():
                self.lower(worker, message)
            case Evict():
                self.evict(worker, message)
            case Cancel():
                for name in message.requests:
                    self.cancel(worker, name)
            case _:
                raise AssertionError(f"{worker.name} was sent {message}")

    def cancel(self, worker: FakeWorker, name: str) -> None:
        for key in [key for key in worker.held if key.partition("/")[0] == name]:
            del worker.held[key]
        worker.prompts.pop(name, None)
        worker.expected.discard(name)
        worker.queue = deque(one for one in worker.queue if name_of(one) != name)
        if self.answers_cancel:
            worker.outbox.append(Finished(request=name, tokens=0))

    def refuse(self, worker: FakeWorker, name: str, error: TriptychError, tokens: int) -> None:
        worker.outbox.append(Finished(request=name, tokens=tokens, error=failed(name, error)))

    def work(self, worker: FakeWorker, task: Task) -> None:
        match task:
            case Reading():
                self.read_layers(worker, task)
            case Layers():
                self.encode_layers(worker, task)
            case Request():
                self.prefill(worker, task)
            case _:
                self.encode(worker, *task)

    def read_layers(self, worker: FakeWorker, task: Reading) -> None:
        """Some layers of a prompt; the last ones go the way of a whole prompt."""
        plan, tokens = self.shape, task.request.known_tokens
        at_once = plan.layers_of(tokens)
        end = min(task.first + at_once, plan.geometry.layers)
        held = Held(RAW.pages(tokens), end - task.first)
        if end == plan.geometry.layers:
            self.prefill(worker, task.request, held)
            return
        worker.held[f"{task.id}/{task.first}"] = held
        handle = KVHandle(self.offer(held), (), tokens)
        message = Layers(request=task.id, first=task.first, handle=handle, reader=worker.address)
        worker.outbox.append(Send(task.encoder, message))
        task.unencoded.add(task.first)
        task.first = end
        worker.queue.append(task)

    def take_layers(self, worker: FakeWorker, message: Layers) -> None:
        key = f"{message.request}/{message.first}"
        before = sum(held.rows for held in self.parts(worker, message.request))
        try:
            if before != message.first:
                raise StaleHandle(0, "layers before it are not here")
            self.attach(message.handle.lease_ref, key, worker)
        except StaleHandle as error:
            self.cancel_silently(worker, message.request)
            self.refuse(worker, message.request, error, 0)
            return
        worker.queue.append(message)

    def cancel_silently(self, worker: FakeWorker, name: str) -> None:
        answers, self.answers_cancel = self.answers_cancel, False
        self.cancel(worker, name)
        self.answers_cancel = answers

    def encode_layers(self, worker: FakeWorker, message: Layers) -> None:
        held = worker.held[f"{message.request}/{message.first}"]
        stored, kept = self.split(message.handle.tokens)
        new = (stored + kept) * held.rows * PAGE
        assert self.bytes_held + new <= CAPACITY or not self.answers_cancel
        held.pages = stored + kept
        encoded = LayersEncoded(request=message.request, first=message.first)
        worker.outbox.append(Send(message.reader, encoded))

    @staticmethod
    def parts(worker: FakeWorker, name: str) -> list[Held]:
        return [held for key, held in worker.held.items() if key.startswith(f"{name}/")]

    def prefill(self, worker: FakeWorker, request: Request, last: Held | None = None) -> None:
        prompt = request.known_tokens
        handle = None
        if request.sampling.max_tokens - len(request.output_tokens) > 1:
            held = worker.held[request.id] = last or Held(RAW.pages(prompt))
            handle = KVHandle(self.offer(held), (), prompt)
        else:
            self.end(request.id, "finished")
        worker.outbox.append(
            Prefilled(request=request.id, first_token=7, handle=handle, token_s=0.01)
        )

    def plan(self, worker: FakeWorker, name: str, handle: KVHandle) -> None:
        try:
            self.attach(handle.lease_ref, name, worker)
        except StaleHandle as error:
            self.refuse(worker, name, error, 1)
            return
        worker.prompts[name] = handle.tokens
        stored, kept = self.split(handle.tokens)
        rows = self.shape.geometry.head_rows
        here = sum(part.rows for part in self.parts(worker, name)) + worker.held[name].rows
        assert here == rows
        worker.outbox.append(Planned(request=name, pages=rows * (stored + kept)))

    @staticmethod
    def split(tokens: int) -> tuple[int, int]:
        """Pages per row of encoded tokens, and recent pages."""
        leaving = PLAN.leaving_tokens(tokens)
        return STORED.pages(leaving), PLAN.recent.pages(tokens - leaving)

    def encode(self, worker: FakeWorker, name: str, arena: str) -> None:
        assert arena == "cpu"
        stored, kept = self.split(worker.prompts[name])
        held = worker.held[name]
        new = (stored + kept) * held.rows * PAGE
        assert self.bytes_held + new <= CAPACITY or not self.answers_cancel
        tokens = worker.prompts.pop(name)
        held.pages = stored + kept
        for key in [key for key in worker.held if key.startswith(f"{name}/")]:
            part = worker.held.pop(key)
            assert part.pages == held.pages  # encoded before
            held.rows += part.rows
        handle = KVHandle(self.offer(held), (), tokens)
        report = CompressionReport(policy="uniform:k8v4", raw_bytes=1, stored_bytes=1)
        worker.outbox.append(Compressed(request=name, handle=handle, report=report))

    def join(self, worker: FakeWorker, message: Join) -> None:
        name = message.request.id
        try:
            held = self.attach(message.handle.lease_ref, name, worker)
        except StaleHandle as error:
            self.refuse(worker, name, error, 1)
            return
        held.decoding, held.written = message.request, len(message.output_tokens) - 1
        self.set_limit(held, worker.limits.pop(name, None))
        assert len(worker.running) <= SLOTS
        if message.previous_worker:
            worker.outbox.append(Resumed(request=name))

    def suspend(self, worker: FakeWorker, name: str) -> None:
        held = worker.held.get(name)
        if held is None or held.decoding is None:
            return
        request, held.decoding = held.decoding, None
        output_tokens = (7,) * (held.written + 1)
        handle = KVHandle(self.offer(held), (), request.known_tokens + held.written)
        self.suspended += 1
        worker.outbox.append(Preempted(request=name, output_tokens=output_tokens, handle=handle))

    def resume(self, worker: FakeWorker, message: Resume) -> None:
        name = message.join.request.id
        left = [
            dead
            for dead, _ in self.dead
            if dead.name == message.previous_worker and name in dead.held
        ]
        try:
            held = (
                worker.held.setdefault(name, left[0].held.pop(name))
                if left
                else self.attach(message.join.handle.lease_ref, name, worker)
            )
        except StaleHandle:
            self.refuse(worker, name, StageLost("decode"), 0)
            return
        held.lease_ref, held.decoding = None, message.join.request
        self.set_limit(held, worker.limits.pop(name, None))
        self.resumed += 1
        assert len(worker.running) <= SLOTS
        worker.outbox.append(Resumed(request=name))

    @staticmethod
    def set_limit(held: Held, limit: PageLimit | None) -> None:
        held.limit, held.is_paused = limit if limit and limit.pages else None, False

    def limit(self, worker: FakeWorker, message: PageLimit) -> None:
        if message.request in worker.running:
            self.set_limit(worker.held[message.request], message)
        else:
            worker.limits[message.request] = message

    def lower(self, worker: FakeWorker, message: Lower) -> None:
        """Free a page or two of each head row, or none, whatever is wanted."""
        held = worker.held.get(message.request)
        answer = Lowered(request=message.request, number=message.number)
        if held is not None and held.decoding is not None:
            assert held.decoding.floor == "low"
            count = min(self.leases % 3, held.pages - 1)
            if count:
                self.lowered += 1
                held.pages, held.lowered = held.pages - count, held.lowered + count
                if held.limit is not None:
                    limit = held.limit.pages - held.rows * count
                    held.limit = replace(held.limit, pages=limit)
                answer = replace(
                    answer,
                    freed=held.rows * count,
                    pages=held.rows * held.pages,
                    tokens=held.decoding.known_tokens + held.written,
                    lowered_tokens=held.lowered,
                )
        worker.outbox.append(answer)

    def lower_within(self, worker: FakeWorker, name: str, limit: PageLimit) -> int:
        """Free as many pages as keep a request within its limit; returns those of a head row."""
        held = worker.held[name]
        assert held.decoding is not None
        assert held.decoding.floor == "low"
        pages = limit.pages // held.rows
        tokens = held.decoding.known_tokens + held.written + 1
        need = ByteModel(PLAN).estimate(tokens, 0).grown // (held.rows * PAGE)
        need = min(need, self.most_pages(held.decoding)) - held.lowered
        held.lowered += need - pages
        self.lowered += 1
        lowered = Lowered(
            request=name,
            freed=held.rows,
            pages=held.rows * pages,
            tokens=tokens - 1,
            lowered_tokens=held.lowered,
        )
        worker.outbox.append(lowered)
        return pages

    def evict(self, worker: FakeWorker, message: Evict) -> None:
        """Free the pages of a request that runs here, or is on offer."""
        name = message.request
        held = worker.held.pop(name, None)
        tokens = (7,) * (held.written + 1) if held and held.decoding else ()
        self.evicted += 1
        evicted = Evicted(request=name, number=message.number, output_tokens=tokens)
        worker.outbox.append(evicted)

    def decode(self, worker: FakeWorker, name: str) -> None:
        """Write up to ten tokens of one request."""
        held = worker.held[name]
        request, rows = held.decoding, PLAN.geometry.head_rows
        assert request is not None
        for _ in range(10):
            tokens = request.known_tokens + held.written + 1
            is_last = len(request.output_tokens) + held.written + 2 > request.sampling.max_tokens
            need = ByteModel(PLAN).estimate(tokens, 0).grown // (rows * PAGE)
            need = max(held.pages, min(need, self.most_pages(request)) - held.lowered)
            limit = held.limit
            if limit and limit.lowers and rows * need > limit.pages and self.leases % 5:
                need = self.lower_within(worker, name, limit)
            if (
                limit
                and not is_last
                and (rows * need > limit.pages or (limit.tokens and tokens > limit.tokens))
            ):
                held.is_paused = True
                wanted = PagesWanted(
                    request=name,
                    tokens=tokens - 1,
                    pages=rows * held.pages,
                    wanted=rows * (need - held.pages),
                )
                worker.outbox.append(wanted)
                return
            held.written += 1
            total = len(request.output_tokens) + held.written
            if total >= request.sampling.max_tokens:
                del worker.held[name]
                self.end(name, "finished")
                worker.outbox.append(Finished(request=name, tokens=total))
                return
            held.pages = need
        worker.held[name] = worker.held.pop(name)  # the next step takes another request

    @staticmethod
    def most_pages(request: Request) -> int:
        sizes = ByteModel(PLAN).estimate(len(request.prompt), request.sampling.max_tokens)
        return sizes.grown // (PLAN.geometry.head_rows * PAGE)


def name_of(task: Task) -> str:
    match task:
        case Layers():
            return task.request
        case Request() | Reading():
            return task.id
        case _:
            return task[0]


class GreedyWorld(FakeWorld):
    """Checks that nobody overtakes a request that lost patience."""

    max_overtake_s = 2.0

    def note_admitted(self, admitted: list[str]) -> None:
        self.waiting = [name for name in self.waiting if name not in admitted]
        late = [n for n in self.waiting if self.arrived[n] + self.max_overtake_s < self.now]
        if late and self.check_admissions:
            oldest = min(self.arrived[name] for name in late)
            assert all(self.arrived[name] <= oldest for name in admitted)


class SharingWorld(GreedyWorld):
    """The same; but a request that waits for its prompt lets others go on."""

    def note_admitted(self, admitted: list[str]) -> None:
        requests = self.router._cluster.requests
        present = [entry for name in self.waiting if (entry := requests.get(name))]
        deferred = [entry.id for entry in present if entry.placement.waits_for]
        self.waiting = [name for name in self.waiting if name not in deferred]
        super().note_admitted(admitted)
        self.waiting += deferred


class UrgentWorld(FakeWorld):
    """Who is more urgent overtakes others."""

    def note_admitted(self, admitted: list[str]) -> None:
        self.waiting = [name for name in self.waiting if name not in admitted]


class FifoWorld(FakeWorld):
    """Checks that nobody overtakes anybody."""

    def note_admitted(self, admitted: list[str]) -> None:
        order = [name for name in self.waiting if name in admitted]
        again = [name for name in admitted if name not in self.waiting]  # evicted before
        assert sorted(admitted) == sorted([*order, *again])
        assert order == self.waiting[: len(order)]
        self.waiting = self.waiting[len(order) :]
