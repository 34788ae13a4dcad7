"""A run in virtual time: clients, the real scheduler, and simulated workers."""

import gc
from array import array
from collections import Counter
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cache
from hashlib import blake2b
from math import inf
from time import thread_time

from triptych.core.config import RouterConfig
from triptych.core.errors import TriptychError
from triptych.core.messages import (
    ROUTER,
    Compressed,
    Failed,
    Join,
    Lowered,
    Message,
    Prefill,
    Prefilled,
    Register,
    Request,
    Sampling,
    Send,
    Submit,
)
from triptych.core.pages import PagePlan
from triptych.router.events.peers import Timeouts
from triptych.router.frontend.shards import Shards, bytes_of, key_of, may_pass_on, names_of
from triptych.router.policies.prefix_map import BlockCache
from triptych.router.scheduler import Scheduler
from triptych.simulator.clock import Clock
from triptych.simulator.costs import Costs
from triptych.simulator.engines import NodeCache, engines_of
from triptych.simulator.image_stage import spans_of
from triptych.simulator.link import SimulatedLink
from triptych.simulator.setup import Chain, Cluster, Job
from triptych.simulator.work import StepOutput
from triptych.simulator.worker import OwnCores, SimulatedWorker, Turns

INGRESS = "ingress"
REPORT_S, TICK_S = 2.0, 0.25
"""Real workers report twice a second. Simulated ones do not die, so it is enough that the router
counts none as silent (``Timeouts.report_bound_s``)."""
STUCK_S = 3600.0
"""Time without a start or end of a request after which the run counts as stuck."""


class SimulationStuck(TriptychError):
    """Requests are left that will never end."""


@dataclass(slots=True)
class Outcome:
    """Result of one request; times in seconds of the run."""

    job: Job
    due_s: float
    first_s: float = -1.0
    last_s: float = -1.0
    error: str = ""
    began_s: float = -1.0
    """When its prefill began."""
    cached_tokens: int = 0
    """Prompt tokens from the prefix cache."""
    method: str = ""
    """Its compression method."""
    is_lowered: bool = False
    """Whether high tokens of it became low because memory was short."""

    @property
    def is_done(self) -> bool:
        return self.last_s >= 0 and not self.error


@dataclass
class Trial:
    """Results of one run."""

    outcomes: list[Outcome] = field(default_factory=list[Outcome])
    duration_s: float = 0.0
    gaps: Counter[float] = field(default_factory=Counter[float])
    """Histogram of the seconds between two output tokens, in steps of 0.1 ms."""
    decision_s: "array[float]" = field(default_factory=lambda: array("d"))
    """Real CPU time of each call of the scheduler, without reports and ticks."""
    state_seconds: dict[str, float] = field(default_factory=dict[str, float])
    """Requests in each state, integrated over time by a sample at each tick."""
    mean_booked_bytes: float = 0.0
    peak_booked_bytes: int = 0
    mean_held_bytes: float = 0.0
    mean_bound_bytes: float = 0.0
    busy_s: dict[str, float] = field(default_factory=dict[str, float])
    """Seconds of work of each stage's workers."""
    counters: dict[str, int] = field(default_factory=dict[str, int])
    """Counters of the schedulers."""
    shards: dict[str, "ShardTrial"] = field(default_factory=dict[str, "ShardTrial"])
    """Results of each shard."""
    shard_choices: dict[str, int] = field(default_factory=dict[str, int])
    """Requests by the reason of their shard."""


@dataclass(slots=True)
class ShardTrial:
    """Results of one shard."""

    requests: int = 0
    """Requests that ended there."""
    busy_s: float = 0.0
    """Seconds of work of its workers."""
    router_s: float = 0.0
    """Real CPU time of its scheduler."""


class Simulation:
    """One run, with the real scheduler."""

    def __init__(
        self,
        cluster: Cluster,
        costs: Costs,
        *,
        keep_gaps: bool = True,
        on_tick: Callable[[Trial], None] = lambda _: None,
        make: Callable[[RouterConfig, PagePlan, int, Timeouts], Scheduler] = Scheduler,
    ) -> None:
        self.clock, self.trial = Clock(), Trial()
        self._cluster, self._costs, self._keep_gaps = cluster, costs, keep_gaps
        names = list(names_of(cluster.router.shards))
        self._parts = {name: cluster.shard(index) for index, name in enumerate(names)}
        self._schedulers = {
            name: make(part.router, part.plan, part.capacity_bytes, Timeouts())
            for name, part in self._parts.items()
        }
        prefill_workers = (cluster.colocated or cluster.prefill) // len(names)
        self._shards = Shards(names, cluster.router.shard_overload, prefill_workers)
        self._shard_of = dict[str, str]()
        """Shard of each worker, by address."""
        self._outcomes = dict[str, Outcome]()
        self._rest = dict[str, Iterator[Job]]()
        """The jobs that follow a running or scheduled request in its session."""
        self._sessions: Iterator[Chain] = iter(())
        self._is_closed_loop = False
        self._progress_s = 0.0
        self._looks, self._on_tick = 0, on_tick
        self._wrote_at = dict[str, float]()
        self._arenas = dict[str, str]()
        """Arena of each worker."""
        self._pages_in = dict[str, str]()
        """Arena in which the compressed pages of a request are, until it joins."""
        self._caches = dict[str, NodeCache]()
        self._lengths = dict[str, int]()
        """Output tokens of each request under way."""
        self._workers = self._build_workers()

    def run(
        self, sessions: Iterable[Chain], concurrency: int | None = None, stop_s: float = inf
    ) -> Trial:
        """Serve all sessions to their end, or until ``stop_s``.

        ``sessions`` are in the order in which they are due. With ``concurrency`` so many are
        always under way, whenever they were due.

        Raises: SimulationStuck if some of them would wait for ever
        """
        for name in self._parts:
            self._shards.found(name)
            self.trial.shards[name] = ShardTrial()
        everybody = [one for part in self._parts.values() for one in part.workers]
        for number, (address, arena, stages) in enumerate(everybody):
            slots = self._cluster.max_batch_requests if "decode" in stages else 0
            registration = Register(
                name=address, address=address, stages=stages, max_requests=slots, arena=arena
            )
            self._schedulers[self._shard_of[address]].on(registration, address, 0.0)
            self._report(self._workers[address])
            # Real workers do not report at the same moment.
            offset = REPORT_S * number / len(self._workers)
            self.clock.after(offset, self._keep_reporting, self._workers[address])
        self.clock.after(TICK_S, self._tick)
        self._sessions, self._is_closed_loop = iter(sessions), concurrency is not None
        for _ in range(concurrency or 1):
            self._begin_session()
        with _rare_collections():
            while self._rest and self.clock.now < stop_s and self.clock.step():
                pass
        return self._finished()

    def _build_workers(self) -> dict[str, SimulatedWorker]:
        cores = dict[str, Turns | OwnCores]()
        workers = dict[str, SimulatedWorker]()
        for shard, part in self._parts.items():
            for address, arena, stages in part.workers:
                shared = cores.get(part.machine(arena))
                if shared is None:
                    shared = cores[part.machine(arena)] = self._cores()
                engines = engines_of(
                    stages, part, self._costs, self._cache_of(part, arena), self._lengths
                )
                link = SimulatedLink(self.clock, part.links) if part.links else None
                workers[address] = SimulatedWorker(
                    address,
                    self.clock,
                    engines,
                    shared,
                    self._from_worker,
                    self._began,
                    self._wrote,
                    link,
                )
                self._arenas[address] = arena
                self._shard_of[address] = shard
        return workers

    def _cache_of(self, part: Cluster, arena: str) -> NodeCache | None:
        """Prefix cache of one machine; None without one."""
        if arena not in self._caches and part.plan.prefix_bytes:
            blocks = BlockCache(part.plan.prefix_blocks)
            self._caches[arena] = NodeCache(part.plan.block_tokens, blocks)
        return self._caches.get(arena)

    def _cores(self) -> Turns | OwnCores:
        """Cores of one machine."""
        cluster = self._cluster
        if not cluster.shared_cores:
            return OwnCores(cluster.free_cores)
        return Turns(
            self.clock, 1.0 if cluster.free_cores is None else cluster.cores / cluster.free_cores
        )

    # ---------------------------------------------------------------- clients

    def _begin_session(self) -> None:
        """Wait for the next session that is due; in a closed loop, begin it now."""
        session = next(self._sessions, None)
        if session is not None:
            jobs = iter(session)
            first = next(jobs)
            wait_s = 0.0 if self._is_closed_loop else max(0.0, first.at_s - self.clock.now)
            self._rest[first.id] = jobs
            self.clock.after(wait_s, self._send, first, not self._is_closed_loop)

    def _send(self, job: Job, is_arrival: bool = False) -> None:
        self._progress_s = self.clock.now
        self._outcomes[job.id] = Outcome(job, self.clock.now)
        self._lengths[job.id] = job.answer_tokens
        self.clock.after(self._costs.arrive_s, self._arrive, job)
        if is_arrival:
            self._begin_session()

    def _arrive(self, job: Job) -> None:
        request, plan = self._request(job), self._cluster.plan
        if len(self._parts) == 1:  # hashing would cost time and change nothing
            self._shards.place(job.id, b"", 1)
        else:
            self._shards.place(job.id, key_of(request, plan), bytes_of(request, plan))
        self._submit(request)

    def _request(self, job: Job) -> Request:
        return Request(
            id=job.id,
            prompt=self._prompt(job),
            sampling=_sampling(job.max_tokens),
            reply_to=INGRESS,
            slo=job.slo,
            images=spans_of(job.images),
            max_kl=job.max_kl,
            adapts=bool(self._cluster.plan.adaptive),
        )

    def _submit(self, request: Request) -> None:
        self._decide([Submit(request=request)], INGRESS, self._shards.where(request.id))

    def _failed(self, failure: Failed) -> None:
        """A shard refused or failed a request."""
        name = failure.request
        is_begun = self._outcomes[name].first_s >= 0
        if may_pass_on(failure) and not is_begun and self._shards.pass_on(name) is not None:
            self._submit(self._request(self._outcomes[name].job))
        else:
            self._end(name, failure.code or "failed")

    def _prompt(self, job: Job) -> tuple[int, ...]:
        """Tokens that are equal exactly where segments are; zeros without a prefix cache."""
        if not self._cluster.plan.prefix_bytes:
            return _zeros(job.prompt_tokens)
        text = job.prompt_tokens - sum(tokens for _, tokens in job.images)
        segments = (*job.images, *(job.segments or ((f"only {job.id}", text),)))
        return tuple(token for name, count in segments for token in (_token(name),) * count)

    def _began(self, names: Sequence[str]) -> None:
        for name in names:
            self._outcomes[name].began_s = self.clock.now

    def _receive_output(self, output: StepOutput) -> None:
        """Tokens reach their clients."""
        now = self.clock.now
        for name in output.first:
            self._outcomes[name].first_s = now
        for name in output.joined:
            if self._keep_gaps:
                self.trial.gaps[round(now - self._outcomes[name].first_s, 4)] += 1
        for name in output.last:
            self._end(name)

    def _end(self, name: str, error: str = "") -> None:
        outcome = self._outcomes.pop(name)
        del self._lengths[name]
        self._pages_in.pop(name, None)
        outcome.last_s, outcome.error = self.clock.now, error
        if not error:
            self.trial.shards[self._shards.where(name)].requests += 1
        self._shards.remove(name)
        self._progress_s = self.clock.now
        self.trial.outcomes.append(outcome)
        jobs = self._rest.pop(name)
        job = None if error else next(jobs, None)
        if job is not None:
            self._rest[job.id] = jobs
            self.clock.after(job.at_s, self._send, job)
        elif self._is_closed_loop:
            self._begin_session()

    # ---------------------------------------------------------------- the router

    def _decide(self, messages: Sequence[Message], sender: str, shard: str) -> None:
        started = thread_time()
        sends = self._schedulers[shard].receive(messages, sender, self.clock.now)
        spent = thread_time() - started
        self.trial.decision_s.append(spent)
        self.trial.shards[shard].router_s += spent
        self._post(sends)

    def _post(self, sends: Sequence[Send]) -> None:
        frames = dict[str, list[Message]]()
        for send in sends:
            if isinstance(send.message, Prefill):
                self._note_methods(send.message.requests)
            if isinstance(send.message, Failed):
                self.clock.after(self._costs.reply_s, self._failed, send.message)
            elif isinstance(send.message, Join) and self._fetches(send.message, send.to):
                self._fetch(send.message, self._workers[send.to])
            elif send.to in self._workers:
                frames.setdefault(send.to, []).append(send.message)
        for address, messages in frames.items():
            self.clock.after(self._costs.hop_s, self._workers[address].post, messages)

    def _note_methods(self, requests: Sequence[Request]) -> None:
        for one in requests:
            self._outcomes[one.id].method = one.method or self._cluster.plan.policy.name

    def _fetches(self, message: Join, address: str) -> bool:
        """Whether the pages of a request cross the link of the worker that it joins."""
        arena = self._pages_in.get(message.request.id, self._arenas[address])
        return self._workers[address].link is not None and arena != self._arenas[address]

    def _fetch(self, message: Join, worker: SimulatedWorker) -> None:
        """Let a worker have a request once its pages have arrived."""
        assert worker.link is not None
        request, plan = message.request, self._cluster.plan
        self._pages_in[request.id] = self._arenas[worker.address]
        pages = self._cluster.of_method(request.method).stored_pages(message.handle.tokens)
        worker.link.fetch(pages * plan.page_bytes, lambda: worker.post([message]))

    def _tick(self) -> None:
        now = self.clock.now
        if self._outcomes and now - self._progress_s > STUCK_S:
            raise SimulationStuck(f"{len(self._outcomes)} requests wait for ever at {now:.1f} s")
        for shard, scheduler in self._schedulers.items():
            started = thread_time()
            sends = scheduler.tick(now)
            self.trial.shards[shard].router_s += thread_time() - started
            self._post(sends)
        self._look()
        self._on_tick(self.trial)
        self.clock.after(TICK_S, self._tick)

    def _look(self) -> None:
        trial, self._looks, booked, held, bound = self.trial, self._looks + 1, 0, 0, 0
        for scheduler in self._schedulers.values():
            counts, memory = scheduler.census()
            booked += memory.booked
            held += memory.held
            bound += memory.bound
            for state, count in counts.items():
                trial.state_seconds[state] = trial.state_seconds.get(state, 0.0) + count * TICK_S
        trial.mean_booked_bytes += (booked - trial.mean_booked_bytes) / self._looks
        trial.mean_held_bytes += (held - trial.mean_held_bytes) / self._looks
        trial.mean_bound_bytes += (bound - trial.mean_bound_bytes) / self._looks
        trial.peak_booked_bytes = max(trial.peak_booked_bytes, booked)

    # ---------------------------------------------------------------- workers

    def _report(self, worker: SimulatedWorker) -> None:
        scheduler = self._schedulers[self._shard_of[worker.address]]
        self._post(scheduler.on(worker.report(), worker.address, self.clock.now))

    def _keep_reporting(self, worker: SimulatedWorker) -> None:
        self._report(worker)
        self.clock.after(REPORT_S, self._keep_reporting, worker)

    def _from_worker(
        self, worker: SimulatedWorker, sends: Sequence[Send], output: StepOutput | None
    ) -> None:
        messages = list[Message]()
        for send in sends:
            message = send.message
            if isinstance(message, Prefilled):
                self._outcomes[message.request].cached_tokens = message.cached_tokens
            if isinstance(message, Lowered) and message.freed:
                self._outcomes[message.request].is_lowered = True
            if isinstance(message, Compressed):
                self._pages_in[message.request] = self._arenas[worker.address]
            if send.to == ROUTER:
                messages.append(message)
            else:
                self.clock.after(self._costs.hop_s, self._workers[send.to].post, [message])
        if messages:
            shard = self._shard_of[worker.address]
            self.clock.after(self._costs.hop_s, self._decide, messages, worker.address, shard)
        if output is None:
            return
        if not output.first:
            self._note_gap(worker, output)
        if output.first or output.last or output.joined:
            self.clock.after(self._costs.reply_s, self._receive_output, output)

    def _wrote(self, worker: SimulatedWorker, times: Sequence[float], requests: int) -> None:
        """Record the times between steps that wrote a token for each of the same requests."""
        before, self._wrote_at[worker.address] = self._wrote_at.get(worker.address), times[-1]
        if self._keep_gaps:
            gaps = self.trial.gaps
            for now in times:
                if before is not None:
                    gaps[round(now - before, 4)] += requests
                before = now

    def _note_gap(self, worker: SimulatedWorker, output: StepOutput) -> None:
        """Record the time between two decode steps of a worker, as a client observes it."""
        now, before = self.clock.now, self._wrote_at.pop(worker.address, None)
        others = output.requests - len(output.joined)
        if self._keep_gaps and before is not None and others:
            self.trial.gaps[round(now - before, 4)] += others
        if output.goes_on:
            self._wrote_at[worker.address] = now

    # ---------------------------------------------------------------- the end

    def _finished(self) -> Trial:
        trial = self.trial
        trial.duration_s = self.clock.now
        for worker in self._workers.values():
            worker.catch_up()
        counters = Counter[str]()
        for shard, part in self._parts.items():
            for address, _, stages in part.workers:
                stage = "all" if self._cluster.colocated else "+".join(stages)
                busy_s = self._workers[address].busy_s
                trial.busy_s[stage] = trial.busy_s.get(stage, 0.0) + busy_s
                trial.shards[shard].busy_s += busy_s
            counters.update(self._schedulers[shard].snapshot(self.clock.now).counters)
        trial.counters, trial.shard_choices = dict(counters), {**self._shards.counters}
        return trial


@contextmanager
def _rare_collections() -> Generator[None]:
    """Look for cycles of garbage a hundredth as often.

    Simulated requests leave none, and looking takes a sixth of a run with 1,000 workers.
    """
    before = gc.get_threshold()
    gc.set_threshold(100 * before[0], *before[1:])
    try:
        yield
    finally:
        gc.set_threshold(*before)


@cache
def _zeros(tokens: int) -> tuple[int, ...]:
    return (0,) * tokens


def _token(segment: str) -> int:
    return int.from_bytes(blake2b(segment.encode(), digest_size=4).digest(), "little") >> 1


@cache
def _sampling(max_tokens: int) -> Sampling:
    return Sampling(max_tokens=max_tokens, temperature=0.0)
