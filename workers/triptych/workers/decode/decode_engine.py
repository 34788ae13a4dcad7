"""The decode engine: continuous batching over compressed pages, one token per request and step."""

import logging
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from triptych.core.config import SelectionConfig, StepPluginConfig
from triptych.core.errors import (
    PageLimitReached,
    PoolExhausted,
    StageLost,
    StaleHandle,
    TriptychError,
)
from triptych.core.messages import (
    EARLY_TOKENS,
    ROUTER,
    Evict,
    Evicted,
    Join,
    Lower,
    Message,
    PageLimit,
    Preempt,
    Resume,
    Resumed,
    Send,
    Stage,
)
from triptych.core.pages import PagePlan
from triptych.kvpool import WorkerPool
from triptych.workers.core_scheduler import CoreUse
from triptych.workers.decode.checkpoint import Checkpoint
from triptych.workers.decode.deadlines import DecodeDeadlines
from triptych.workers.decode.decode_attention import PageAttention, TokenScores
from triptych.workers.decode.handover import Admission, RequestHandover
from triptych.workers.decode.lowering import Lowering, RequestLowerings
from triptych.workers.decode.output_cache import KeepAnswers, OutputCache
from triptych.workers.decode.page_expiry import PageExpiry
from triptych.workers.decode.page_growth import PageGrowth
from triptych.workers.decode.page_selection import Selector
from triptych.workers.decode.plugins.pipeline import Pipeline, Seen, Verdict
from triptych.workers.decode.running_batch import RunningRequest, exits_of
from triptych.workers.decode.steps.step_graphs import StepGraphs
from triptych.workers.decode.window import Window
from triptych.workers.device import CPU, Device, read_together
from triptych.workers.kv.block_table import Sections, SectionTable
from triptych.workers.kv.device_pages import DevicePages
from triptych.workers.kv.new_tokens import NewTokens
from triptych.workers.kv.prefetch import Prefetcher
from triptych.workers.kv.prefix_cache import PrefixStore
from triptych.workers.models.runner import Runner
from triptych.workers.sampling.output import OutputFactory
from triptych.workers.sampling.sampler import Draw, Drawn, sample
from triptych.workers.stage import finished, refuse

if TYPE_CHECKING:
    from triptych.workers.decode.steps.step_programs import StepPrograms

logger = logging.getLogger(__name__)

Ids = NDArray[np.int32]

MOST_LIMITS = 1024
"""Most page limits that are kept for requests that have not joined. A router that dies may have
sent some for requests that never come."""

FEW_BYTES, FEW_REQUESTS = 128 << 20, 4
"""Weights and requests of a step that leaves a core to the processes that deliver its tokens, which
would make its threads wait for each other. On two cores one request gets a token each 14.4 ms
instead of 18.8, and four get theirs as fast for a quarter less CPU time (docs/log.md)."""


@dataclass
class DecodeEngine:
    """Samples one token for every running request at each step; requests join and leave between
    steps."""

    runner: Runner
    pool: WorkerPool
    plan: PagePlan
    outputs: OutputFactory
    max_requests: int
    draw: Draw = sample
    """Samples tokens from logits; evaluations replace it to force tokens."""
    selection: SelectionConfig = field(default_factory=SelectionConfig)
    """Page selection of a step."""
    plugins: Sequence[StepPluginConfig] = ()
    """Step plug-ins, which run after sampling."""
    prefixes: PrefixStore | None = None
    """None: no output is published to the prefix cache."""
    keep_answers: KeepAnswers = "never"
    """Which outputs are published."""
    device: Device = CPU
    stage: Stage = "decode"
    _deadlines: DecodeDeadlines = field(default_factory=DecodeDeadlines)
    _running: dict[str, RunningRequest] = field(default_factory=dict[str, RunningRequest])
    _publishing: dict[str, RunningRequest] = field(default_factory=dict[str, RunningRequest])
    """Requests with a complete output whose blocks are being published; they keep their pages."""
    _limits: dict[str, PageLimit] = field(default_factory=dict[str, PageLimit])
    """Limits of requests that have not joined yet, at most ``MOST_LIMITS``."""

    def __post_init__(self) -> None:
        arena, device = self.pool.arena, self.device
        self._memory = DevicePages.nearest(arena, device)
        longest = self.outputs.context_tokens
        self._own_runner = self.runner  # a profile replaces it for some steps
        self._row_indices = np.arange(self.max_requests)
        self._checkpoint = Checkpoint.create(
            self.plan, self.pool.checkpoint, self.max_requests, longest
        )
        self._sections = Sections(self._checkpoint.sections, device)
        tables = self._checkpoint.tables
        windows = {
            one: Window(self._memory, self._checkpoint, one, self._sections)
            for one in tables.methods
            if one.plan.compresses
        }
        self._selector = Selector.of(self.selection, self.plan, arena, self._memory, self._sections)
        expiries = {
            one: PageExpiry(self._memory, self._checkpoint, self._sections, one)
            for one in tables.methods
            if one.plan.has_windows
        }
        self._growth = PageGrowth(self.pool, self._sections, windows, self._selector, expiries)
        lowerings = {
            one: Lowering(self._memory, self._checkpoint, self._sections, one)
            for one in tables.methods
            if one.plan.low is not None
        }
        self._prefetcher = Prefetcher.of(arena, self._sections.tables)
        self._scores = TokenScores(
            self._memory,
            self._sections,
            tables.num_fixed,
            max(one.plan.policy.score_every for one in tables.methods),
            device.share_part(self._checkpoint.memory, self._checkpoint.scored),
        )
        self._graphs = StepGraphs.of(
            self.runner,
            self._memory,
            self._sections,
            self._scores,
            self._prefetcher,
            self.max_requests,
            tables.num_recent,
        )
        self._pipeline = Pipeline.of(self.plugins, self.plan.policy, can_exit=self.runner.can_exit)
        self._output_cache = OutputCache.of(self.prefixes, self._memory.behind, self.keep_answers)
        self._handover = RequestHandover(
            self.pool,
            self.outputs,
            self.max_requests,
            self.selection,
            self._pipeline,
            self._checkpoint,
            self._sections,
            self._memory,
            self._selector,
            self._output_cache,
        )
        self._lowerings = RequestLowerings(
            lowerings,
            self._growth,
            self._handover,
            self._selector,
            self._checkpoint,
            self._memory,
        )

    @cached_property
    def _programs(self) -> "StepPrograms | None":
        """None on a GPU, and if each layer requests its pages from a disk.

        Made by the first step: on a new machine kernels are compiled, and a worker that is
        registered lets requests wait for that.
        """
        if self._prefetcher is not None or not self.device.is_host:
            return None
        from triptych.workers.decode.steps.step_programs import (  # noqa: PLC0415 - compiles for a CPU
            StepPrograms,
        )

        return StepPrograms.of(
            self._own_runner, self._memory, self._sections, self._scores, self.max_requests
        )

    def capture_usual_steps(self) -> None:
        """Capture the usual steps as graphs, before requests come; nothing to do on a CPU."""
        if self._graphs is not None:
            self._graphs.capture_usual(self.runner)

    # ---------------------------------------------------------------- the Engine protocol

    def accept(self, message: Message) -> Iterable[Send] | None:
        match message:
            case Join():
                return self._accept_join(message)
            case Resume():
                return self._accept_resume(message)
            case Preempt():
                running = [self._running.get(name) for name in message.requests]
                return [send for one in running if one for send in self._preempt(one)]
            case PageLimit():
                self._set_limit(message)
                return []
            case Lower():
                return self._lowerings.accept(message, self._running.get(message.request))
            case Evict():
                return [self._evict(message)]
            case _:
                return None

    def _accept_join(self, message: Join) -> list[Send]:
        try:
            return self._start(self._handover.join(message), message)
        except StaleHandle:
            self._limits.pop(message.request.id, None)
            return [refuse(message.request.id, StageLost("compress"), tokens=1)]
        except TriptychError as error:
            self._limits.pop(message.request.id, None)
            self.pool.withdraw([message.request.id])
            return [refuse(message.request.id, error, tokens=1)]

    def _accept_resume(self, message: Resume) -> list[Send]:
        name = message.join.request.id
        if name in self._running or name in self._publishing:
            return [Send(ROUTER, Resumed(request=name))]
        try:
            return self._start(self._handover.resume(message), message.join)
        except TriptychError as error:
            logger.warning("takeover of request %s failed: %s", name, error)
            self._limits.pop(name, None)
            self.pool.withdraw([name])
            return [refuse(name, StageLost("decode"))]

    def has_work(self) -> bool:
        has_steps = any(not one.is_paused for one in self._running.values())
        return has_steps or bool(self._publishing) or self._lowerings.has_work

    def wait_s(self) -> float | None:
        return None

    def is_late(self) -> bool:
        return self._deadlines.due < time.monotonic()

    def core_use(self) -> CoreUse:
        count = len(self._running)
        if self.runner.step_bytes <= FEW_BYTES and count <= FEW_REQUESTS:
            return CoreUse.SMALL
        made = self.__dict__.get("_programs")  # by the first step
        return CoreUse.DIVIDED if made is not None and made.divides(count) else CoreUse.TEAM

    def requests(self) -> list[str]:
        return [*self._running, *self._publishing]

    def cancel(self, requests: Sequence[str]) -> None:
        for name in requests:
            self._limits.pop(name, None)
            if one := self._running.get(name) or self._publishing.get(name):
                self._forget(one)
        self.pool.withdraw(requests)

    def abandon(self) -> None:
        self._limits.clear()
        self._lowerings.abandon()
        self.cancel(self.requests())
        self.pool.withdraw_all()

    def step(self) -> Iterable[Send]:
        sends = [*self._publish_block(), *self._allocate_slots()]
        batch = self._batch()
        if not batch:
            return [*sends, *self._settle()]
        logits = self._forward(batch)
        drawn = self.draw(logits, [one.output.sampler_row for one in batch])
        sends += self._settle()  # the device has drawn tokens, so it has moved others before
        self._deadlines.step()
        verdict = self._run_plugins(batch, logits, drawn)
        for row, (one, draw) in enumerate(zip(batch, drawn, strict=True)):
            one.position += 1
            for likely in one.output.logprobs(draw):
                self._checkpoint.record_logprob(one.slot, likely)
            try:
                sends.append(one.output.push(draw, self._ending_plugin(verdict, row)))
            except TriptychError as error:
                sends.append(self._fail(one, error))
                continue
            if verdict:
                is_end = bool(one.output.ended_by)
                self._checkpoint.record_plugins(
                    one.slot, verdict.memory[row], verdict.ended_by[row] * is_end
                )
            self._checkpoint.append_token(one.slot, draw.token)
            if one.output.finish is not None:
                sends.extend(self._finish(one))
            elif one.preempt_after_step:
                sends.append(self._hand_back(one))
            elif self._is_near_limit(one):
                sends.append(one.wants_pages())
        return sends

    # ---------------------------------------------------------------- page limits

    def _allocate_slots(self) -> list[Send]:
        """Allocate pages for the next token of each request; pause those that get none.

        What the device has to tell about requests is read together.
        """
        wanted, sends = self._lowerings.take(self._running)
        for one in self._running.values():
            if not one.is_paused and one.spare_tokens <= 0:
                sends.append(self._pause(one, PageLimitReached(0)))
        ranks = self._lowerings.rank(wanted)
        plans = self._growth.queue_plans(self._batch())
        read = read_together([*ranks, *(each for plan in plans for each in plan.tensors)])
        self._lowerings.apply(wanted, read[: len(ranks)])
        for one, error in self._growth.allocate_slots(self._batch(), plans, read[len(ranks) :]):
            sends.append(self._pause(one, error))
        return sends

    def _batch(self) -> list[RunningRequest]:
        """Requests that take part in this step."""
        moving = self._lowerings.moving()
        return [one for one in self._running.values() if not one.is_paused and one not in moving]

    def _settle(self) -> list[Send]:
        """End the retirements and lowerings of a step."""
        self._growth.settle()
        return self._lowerings.settle()

    def _pause(self, one: RunningRequest, error: TriptychError) -> Send:
        """Let a request wait for pages that the router is asked for."""
        if not isinstance(error, PageLimitReached | PoolExhausted):
            return self._fail(one, error)
        one.is_paused = True
        self._deadlines.leave(one.id)
        return one.wants_pages(error.wanted, is_exhausted=isinstance(error, PoolExhausted))

    def _is_near_limit(self, one: RunningRequest) -> bool:
        """Whether a request may reach its limit before the router answers the next time."""
        if one.limit is None or one.limit.lowers or one.has_asked:
            return False
        return one.spare_pages < one.step_pages or one.spare_tokens <= EARLY_TOKENS

    def _set_limit(self, message: PageLimit) -> None:
        one = self._running.get(message.request)
        if one is None:
            self._limits[message.request] = message
            if len(self._limits) > MOST_LIMITS:  # those of requests that never came
                del self._limits[next(iter(self._limits))]
            return
        one.limit, one.has_asked = message if message.pages else None, False
        if one.is_paused:
            one.is_paused = False
            tpot_s = one.output.request.slo.tpot_s
            self._deadlines.join(one.id, tpot_s, written=1, age_s=0.0, now=time.monotonic())

    def _evict(self, message: Evict) -> Send:
        """Free all pages of a request, and tell the router its output tokens."""
        name = message.request
        self._limits.pop(name, None)
        done = self._publishing.get(name)
        if done is not None:
            self._release(done)
            return finished(name, len(done.output.tokens))
        one, tokens = self._running.get(name), ()
        if one is not None:
            tokens = tuple(self._checkpoint.output_tokens(one.slot))
            self._forget(one)
        self.pool.withdraw([name])
        evicted = Evicted(request=name, number=message.number, output_tokens=tokens)
        return Send(ROUTER, evicted)

    def _run_plugins(
        self, batch: Sequence[RunningRequest], logits: Tensor, drawn: Sequence[Drawn]
    ) -> Verdict | None:
        """Run the step plug-ins; None: none is configured."""
        if not self._pipeline.places:
            return None
        seen = Seen(
            logits,
            tokens=[draw.token for draw in drawn],
            lengths=[len(one.output.tokens) + 1 for one in batch],
            positions=[one.position for one in batch],
        )
        memory = np.stack([self._checkpoint.plugin_memory_of(one.slot) for one in batch])
        return self._pipeline.look([one.options.plugins for one in batch], seen, memory)

    def _ending_plugin(self, verdict: Verdict | None, row: int) -> str:
        """The plug-in that ends the output of a row; empty: none."""
        return self._pipeline.label(verdict.ended_by[row]) if verdict else ""

    def _finish(self, one: RunningRequest) -> list[Send]:
        """Finish a request, now or after its output is published to the prefix cache."""
        self._checkpoint.mark_finished(one.slot)
        # Tokens that exited early, or were lowered, have other keys and values than those of other
        # requests: do not publish them.
        is_exact = not one.options.exit_entropy and not self._checkpoint.lowered[one.slot]
        if (
            is_exact
            and self._output_cache
            and self._output_cache.should_publish(one.output.request)
        ):
            self._publishing[one.id] = self._running.pop(one.id)
            return []
        self._release(one)
        return [finished(one.id, len(one.output.tokens))]

    def _publish_block(self) -> list[Send]:
        """Publish one block of a finished output to the prefix cache."""
        one = next(iter(self._publishing.values()), None)
        if (
            one is None
            or self._output_cache is None
            or not self._output_cache.publish_next(one.finished_output)
        ):
            return []
        self._release(one)
        return [finished(one.id, len(one.output.tokens))]

    # ---------------------------------------------------------------- for profilers and tests

    @property
    def tables(self) -> Sequence[SectionTable]:
        """Page tables of all slots; the one of recent pages first."""
        return self._sections.tables

    @property
    def selector(self) -> Selector | None:
        """None: attention reads every page."""
        return self._selector

    def slots(self) -> tuple[list[str], Ids]:
        """The requests of the batch and their slots."""
        return list(self._running), np.array([one.slot for one in self._running.values()], np.int32)

    # ---------------------------------------------------------------- join and leave

    def _start(self, admitted: Admission, join: Join) -> list[Send]:
        """Add an admitted request to the batch."""
        one, sends = admitted.request, admitted.sends
        limit = self._limits.pop(join.request.id, None)
        if one is None:
            return sends
        one.limit = limit if limit and limit.pages else None
        self._running[one.id] = one
        written, asked = int(self._checkpoint.num_output_tokens[one.slot]), join.request.slo.tpot_s
        self._deadlines.join(one.id, asked, written, join.age_s, time.monotonic())
        return sends if one.output.finish is None else [*sends, *self._finish(one)]

    def _preempt(self, one: RunningRequest) -> list[Send]:
        """Hand a request back now, or after its next step if its last one was cut short."""
        if self._handover.is_mid_step(one):
            one.preempt_after_step = True
            return []
        return [self._hand_back(one)]

    def _hand_back(self, one: RunningRequest) -> Send:
        preempted = self._handover.preempt(one)
        self._free(one)
        return preempted

    def _release(self, one: RunningRequest) -> None:
        """Release the lease of a request, free its pages and its slot."""
        self.pool.release([one.lease_ref.lease])
        self._forget(one)

    def _forget(self, one: RunningRequest) -> None:
        """Free the slot and the pages that this worker allocated, but not the lease.

        A cancel withdraws the lease by request id; another stage of the same process can have
        done that already.
        """
        self._checkpoint.leave(one.slot)
        self._free(one)

    def _free(self, one: RunningRequest) -> None:
        self._running.pop(one.id, None)
        self._deadlines.leave(one.id)
        if self._publishing.pop(one.id, None) and self._output_cache:
            self._output_cache.forget(one.id)
        self.pool.free(np.concatenate(one.allocated_pages))
        if self._selector is not None:
            self._selector.leave(one.slot)
        self._handover.release_slot(one.slot)

    def _fail(self, one: RunningRequest, error: TriptychError) -> Send:
        self._growth.settle()
        self._release(one)
        return refuse(one.id, error, tokens=len(one.output.tokens))

    # ---------------------------------------------------------------- forward

    def _forward(self, batch: list[RunningRequest]) -> Tensor:
        """Run the model on the newest token of each request; logits [requests, vocab]."""
        tokens = np.array([one.output.tokens[-1] for one in batch], np.int64)
        positions = np.array([one.position for one in batch], np.int32)
        rotary = positions + np.array([one.rotary_offset for one in batch], np.int32)
        slots = np.array([one.slot for one in batch], np.int32)
        new = NewTokens.count(
            [one.tables for one in batch], slots, positions, self._checkpoint.scored
        )
        self._sections.renew(slots)
        choice = self._selector.step(slots, positions, new.scored) if self._selector else None
        exits = exits_of(batch, self.device)
        captured = self._graphs or self._programs
        if captured is not None and new.begun is None and choice is None and exits is None:
            logits = captured.forward(self.runner, tokens, rotary, new)
            if logits is not None:
                return logits
        attend = PageAttention(
            self._memory,
            self._sections,
            new,
            self._scores,
            choice,
            self._prefetcher,
        )
        every, put = self._row_indices[: len(batch)], self.device.put
        return self.runner.forward(put(tokens), put(rotary), attend, put(every), exits)
