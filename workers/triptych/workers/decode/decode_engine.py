"""The decode stage: continuous batching over compressed pages, one token a step for each."""

import logging
import time
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from triptych.core.config import SelectionConfig, StepPluginConfig
from triptych.core.errors import MessageError, StageLost, StaleHandle, TriptychError
from triptych.core.handles import Claim, PageRun
from triptych.core.messages import (
    ROUTER,
    Finished,
    Join,
    Message,
    Preempt,
    Preempted,
    Request,
    Resume,
    Resumed,
    Send,
    Stage,
)
from triptych.core.pages import PagePlan
from triptych.kvpool import About, WorkerPool
from triptych.workers.decode.checkpoint import MOST_MEMORY, Checkpoint
from triptych.workers.decode.deadlines import DecodeDeadlines
from triptych.workers.decode.decode_attention import PageAttention
from triptych.workers.decode.output_cache import KeepAnswers, OutputCache
from triptych.workers.decode.page_growth import PageGrowth
from triptych.workers.decode.page_selection import Selector
from triptych.workers.decode.plugins.pipeline import Pipeline, Seen, Verdict, selection_for
from triptych.workers.decode.plugins.plugin import ALPHA_LOW, EXIT_DEPTH, EXIT_ENTROPY
from triptych.workers.decode.running_batch import Running, Wanted, exits_of
from triptych.workers.decode.window import Window
from triptych.workers.device import CPU, Device
from triptych.workers.kv.block_table import Sections, SectionTable
from triptych.workers.kv.device_pages import NO_PAGES, DevicePages
from triptych.workers.kv.handle_codec import make_handle, unpack_run
from triptych.workers.kv.prefetch import Prefetcher
from triptych.workers.kv.prefix_cache import PrefixStore
from triptych.workers.models.runner import Runner
from triptych.workers.sampling.output import Answer, OutputFactory
from triptych.workers.sampling.sampler import Draw, Drawn, sample
from triptych.workers.stage import refuse

logger = logging.getLogger(__name__)

Ids = NDArray[np.int32]


@dataclass
class DecodeEngine:
    """Draws one token for every running request at each step; requests join and leave freely."""

    runner: Runner
    pool: WorkerPool
    plan: PagePlan
    answers: OutputFactory
    max_requests: int
    draw: Draw = sample
    """How tokens are drawn from logits; the quality harness forces them."""
    selection: SelectionConfig = field(default_factory=SelectionConfig)
    """Which pages a step reads."""
    plugins: Sequence[StepPluginConfig] = ()
    """What looks at each step when its tokens are drawn."""
    prefixes: PrefixStore | None = None
    """None: no answer is kept for the next turn."""
    keep_answers: KeepAnswers = "never"
    """Which answers are."""
    device: Device = CPU
    stage: Stage = "decode"
    _tempo: DecodeDeadlines = field(default_factory=DecodeDeadlines)
    _running: dict[str, Running] = field(default_factory=dict[str, Running])
    _kept: dict[str, Running] = field(default_factory=dict[str, Running])
    """Answers that are complete and told; their pages stay until the pool has what it lacks."""

    def __post_init__(self) -> None:
        arena, device = self.pool.arena, self.device
        self._memory = DevicePages.nearest(arena, device)
        self._shared = self._memory.behind
        # The one that was left first is used first: what was said there stays to be read longest.
        self._free_slots = deque(range(self.max_requests))
        longest = self.answers.context_tokens
        self._every = np.arange(self.max_requests)
        self._checkpoint = Checkpoint.begin(
            self.plan, self.pool.checkpoint, self.max_requests, longest
        )
        self._tables = self._checkpoint.tables
        self._raw = self._tables[0]
        self._sections = Sections(self._checkpoint.sections, device)
        self._window = self._window_of(self._checkpoint, self._memory, self._sections)
        self._selector = Selector.of(self.selection, self.plan, arena, self._memory, self._sections)
        self._growth = PageGrowth(
            self.pool, self._checkpoint, self._sections, self._window, self._selector
        )
        self._prefetcher = Prefetcher.of(arena, self._sections.tables)
        self._pipeline = Pipeline.of(self.plugins, self.plan.policy, can_exit=self.runner.can_exit)
        self._keeper = OutputCache.of(
            self.prefixes, self._shared, self._sections.tables, self.keep_answers
        )

    def _window_of(
        self, checkpoint: Checkpoint, memory: DevicePages, sections: Sections | None = None
    ) -> Window | None:
        """None if raw pages are the final ones."""
        return Window(memory, checkpoint, sections) if self.plan.compresses else None

    # ---------------------------------------------------------------- the Engine protocol

    def accept(self, message: Message) -> Iterable[Send] | None:
        match message:
            case Join():
                return self._accept_join(message)
            case Resume():
                return self._accept_resume(message)
            case Preempt():
                running = [self._running.get(name) for name in message.requests]
                return [send for one in running if one for send in self._ask_back(one)]
            case _:
                return None

    def _accept_join(self, message: Join) -> list[Send]:
        try:
            return self._join(message)
        except StaleHandle:
            return [refuse(message.request.id, StageLost("compress"), tokens=1)]
        except TriptychError as error:
            self.pool.withdraw([message.request.id])
            return [refuse(message.request.id, error, tokens=1)]

    def _accept_resume(self, message: Resume) -> list[Send]:
        name = message.join.request.id
        if name in self._running or name in self._kept:
            return [Send(ROUTER, Resumed(request=name))]
        try:
            return self._resume(message)
        except TriptychError as error:
            logger.warning("request %s cannot go on here: %s", name, error)
            self.pool.withdraw([name])
            return [refuse(name, StageLost("decode"))]

    def has_work(self) -> bool:
        return bool(self._running or self._kept)

    def wait_s(self) -> float | None:
        return None

    def is_late(self) -> bool:
        return self._tempo.due < time.monotonic()

    def requests(self) -> list[str]:
        return [*self._running, *self._kept]

    def cancel(self, requests: Sequence[str]) -> None:
        for name in requests:
            if one := self._running.get(name) or self._kept.get(name):
                self._forget(one)
        self.pool.withdraw(requests)

    def abandon(self) -> None:
        self.cancel(self.requests())
        self.pool.withdraw_all()

    def step(self) -> Iterable[Send]:
        refused = self._keep_a_block()
        for one, error in self._growth.make_room(self._running):
            refused.append(self._give_up(one, error))
        batch = list(self._running.values())
        if not batch:
            return refused
        logits = self._forward(batch)
        drawn = self.draw(logits, [one.answer.sampler_row for one in batch])
        self._tempo.step()
        verdict = self._look(batch, logits, drawn)
        sends = refused
        for row, (one, draw) in enumerate(zip(batch, drawn, strict=True)):
            one.position += 1
            for likely in one.answer.logprobs(draw):
                self._checkpoint.rate(one.slot, likely)
            try:
                sends.append(one.answer.push(draw, self._ender(verdict, row)))
            except TriptychError as error:
                sends.append(self._give_up(one, error))
                continue
            if verdict:
                is_end = bool(one.answer.ended_by)
                self._checkpoint.note(one.slot, verdict.memory[row], verdict.ended_by[row] * is_end)
            self._checkpoint.say(one.slot, draw.token)
            if one.answer.finish is not None:
                sends.extend(self._finish(one))
            elif one.is_asked_back:
                sends.append(self._suspend(one))
        return sends

    def _look(
        self, batch: Sequence[Running], logits: Tensor, drawn: Sequence[Drawn]
    ) -> Verdict | None:
        """What plug-ins make of a step; None: nobody has one."""
        if not self._pipeline.places:
            return None
        seen = Seen(
            logits,
            tokens=[draw.token for draw in drawn],
            lengths=[len(one.answer.tokens) + 1 for one in batch],
            positions=[one.position for one in batch],
        )
        memory = np.stack([self._checkpoint.remembered(one.slot) for one in batch])
        return self._pipeline.look([one.wanted.plugins for one in batch], seen, memory)

    def _ender(self, verdict: Verdict | None, row: int) -> str:
        """The plug-in that wants an answer to end; empty: none does."""
        return self._pipeline.label(verdict.ended_by[row]) if verdict else ""

    def _finish(self, one: Running) -> list[Send]:
        """End a request, now or when what was answered is kept."""
        self._checkpoint.end(one.slot)
        # What has skipped layers is nobody's prefix: its keys and values are not the model's.
        is_exact = not one.wanted.exit_entropy
        if is_exact and self._keeper and self._keeper.wants(one.answer.request):
            self._kept[one.id] = self._running.pop(one.id)
            return []
        self._leave(one)
        return [finished(one.answer)]

    def _keep_a_block(self) -> list[Send]:
        """Go on with keeping answers; what was said at the last step is on its way already."""
        one = next(iter(self._kept.values()), None)
        if one is None or self._keeper is None or not self._keeper.go_on(one.ended):
            return []
        self._leave(one)
        return [finished(one.answer)]

    # ---------------------------------------------------------------- for who looks on

    @property
    def tables(self) -> Sequence[SectionTable]:
        """Pages of all slots; those of raw pages first."""
        return self._sections.tables

    @property
    def selector(self) -> Selector | None:
        """None: every page is read."""
        return self._selector

    def slots(self) -> tuple[list[str], Ids]:
        """The requests of the batch and where they are."""
        return list(self._running), np.array([one.slot for one in self._running.values()], np.int32)

    # ---------------------------------------------------------------- join and leave

    def _join(self, message: Join, previous_worker: str = "") -> list[Send]:
        """Continue from the pages of a handle, which ``previous_worker`` may still hold."""
        self._require_slot()
        rows = self.plan.geometry.head_rows
        unpacked = list[tuple[SectionTable, Ids, Ids]]()
        for run in message.handle.runs:
            table = self._table_of(run)
            unpacked.append((table, *unpack_run(run, table.layout, rows, self.pool.capacity_pages)))
        answer = self._answer(message)
        wanted = self._wanted(message.request)
        if len(message.memory) > MOST_MEMORY:
            raise MessageError(f"memory of {len(message.memory)} numbers: at most {MOST_MEMORY}")
        ids = np.concatenate([ids for _, _, ids in unpacked])
        self._checkpoint.forget(message.request.id)
        claim = self._obtain(message, ids, previous_worker)
        slot = self._free_slots.popleft()
        for table in self._sections.tables:
            table.clear(slot)
        for table, tokens, pages in unpacked:
            table.fill(slot, tokens, pages)
        name, stored = message.request.id, message.handle.tokens
        self._checkpoint.join(slot, name, claim.lease, message.words, stored, message.memory)
        resumed = [Send(ROUTER, Resumed(request=name))] if message.previous_worker else []
        return [*resumed, *self._start(message, answer, slot, claim, wanted)]

    def _table_of(self, run: PageRun) -> SectionTable:
        """Where a run goes; two of one format are told apart by whether they are ever written."""
        fixed = self._checkpoint.fixed
        tables = [fixed] if fixed is not None and run.fixed else [] if run.fixed else self._tables
        found = {table.layout.format.name: table for table in tables}
        if run.format not in found:
            kind = "fixed run" if run.fixed else "run"
            raise MessageError(f"{kind} of format {run.format}: expected one of {sorted(found)}")
        return found[run.format]

    def _obtain(self, message: Join, ids: Ids, previous_worker: str) -> Claim:
        try:
            return self.pool.attach([(message.handle.claim, ids)])[0]
        except StaleHandle:
            if not previous_worker:
                raise
            return self.pool.adopt(previous_worker, message.request.id, None, ids)

    def _require_slot(self) -> None:
        if not self._free_slots:
            raise MessageError(f"no free slot: all {self.max_requests} are taken")

    def _ask_back(self, one: Running) -> list[Send]:
        """Put a request on offer; one whose step was cut short at a dead worker goes on first.

        Of what is done of that step nothing is in its pages: only the checkpoint here tells.
        """
        if self._checkpoint.is_begun(one.slot):
            one.is_asked_back = True
            return []
        return [self._suspend(one)]

    def _suspend(self, one: Running) -> Send:
        """Put a request on offer as it is between two steps: its pages, and what it said.

        Until it is joined somewhere the pages are this worker's. If it dies before the router
        has heard of it, its heir goes by the checkpoint, as ever.
        """
        checkpoint = self._checkpoint
        runs = [table.run(one.slot) for table in self._tables]
        fixed = checkpoint.fixed_run(one.slot)
        parts = runs if fixed is None else [*runs, fixed]
        held = np.concatenate([pages for _, _, pages in parts])
        checkpoint.offer(one.slot)
        owned = runs if one.claim.shared else parts
        about = About(formats=tuple((name, pages.size) for name, _, pages in owned))
        (claim,) = self.pool.handoff([(one.id, held)], [one.claim.lease], about=[about])
        handle = make_handle(claim, runs, one.position, fixed)
        words, memory = (
            tuple(checkpoint.words(one.slot)),
            tuple(checkpoint.remembered(one.slot).tolist()),
        )
        one.grown = [np.setdiff1d(np.concatenate(one.grown), held)]
        self._free(one)
        return Send(ROUTER, Preempted(request=one.id, words=words, handle=handle, memory=memory))

    def _resume(self, message: Resume) -> list[Send]:
        """Go on from what a dead worker left in its checkpoint and in the pool.

        It may have died before it took the request over, even if its checkpoint has it: it may have
        had the same request once before.
        """
        join = message.join
        left = self._checkpoint.beside(self.pool.inherit(message.previous_worker))
        at = left.find(join.request.id)
        resumed = Send(ROUTER, Resumed(request=join.request.id))
        if at is None:
            return [resumed, *self._join(join, message.previous_worker)]
        try:
            return [resumed, *self._take_over(message, left, at)]
        except StaleHandle:
            return [resumed, *self._join(join)]

    def _take_over(self, message: Resume, left: Checkpoint, at: int) -> list[Send]:
        """Go on from a slot of a dead worker's checkpoint."""
        name, checkpoint, answer = (
            message.join.request.id,
            self._checkpoint,
            self._answer(message.join),
        )
        if left.is_ended(at):
            words = self._repeat(answer, left, at)
            if answer.finish is None:
                raise MessageError(f"what is written of {name!r} has no end")
            return [*words, finished(answer)]
        self._require_slot()
        wanted = self._wanted(message.join.request)
        begun = left.begun_pages(at)
        held = np.concatenate([begun, left.pages(at)])  # pages that it shares come last
        checkpoint.forget(name)
        claim = self.pool.adopt(message.previous_worker, name, left.lease_of(at), held)
        # What it left is in the arena; it comes near once it is whole.
        window = self._window_of(left, self._shared)
        emptied = window.finish(at) if window else NO_PAGES
        # The first spare pages are the next ones that the rows get, in this order.
        spare = np.concatenate([begun, emptied])
        # A step that was cut short may have counted its token already.
        left.tables[0].tokens[:, at] = left.raw_tokens(at)
        slot = self._free_slots.popleft()
        checkpoint.copy(left, at, slot)
        checkpoint.enter(slot, name, claim.lease)
        return self._start(message.join, answer, slot, claim, wanted, spare)

    def _wanted(self, request: Request) -> Wanted:
        """Raises: RequestError if the request wants what is not here"""
        switches = request.plugin_overrides
        plugins = self._pipeline.chosen(switches)
        set_to = self._pipeline.settings(plugins)
        return Wanted(
            plugins,
            selection_for(self.selection, switches),
            alpha_low=set_to.get(ALPHA_LOW, 0.0),
            exit_entropy=set_to.get(EXIT_ENTROPY, 0.0),
            exit_layers=max(1, round(set_to.get(EXIT_DEPTH, 1.0) * self.plan.geometry.layers)),
        )

    def _answer(self, message: Join) -> Answer:
        answer = self.answers.start(message.request)
        answer.report = message.report
        return answer

    def _start(
        self,
        join: Join,
        answer: Answer,
        slot: int,
        claim: Claim,
        wanted: Wanted,
        spare: Ids = NO_PAGES,
    ) -> list[Send]:
        """Put a request that is in the checkpoint into the batch."""
        if self._memory.is_copied:
            self._memory.fetch(self._checkpoint.pages(slot))
        self._sections.moved(slot)
        if self._selector is not None:
            self._selector.join(slot, wanted.selection)
        sends = self._repeat(answer, self._checkpoint, slot)
        position = self._checkpoint.position(slot)
        one = Running(slot, claim, answer, wanted, position, spare, token_s=join.token_s)
        self._running[one.id] = one
        written, asked = int(self._checkpoint.said[slot]), join.request.slo.tpot_s
        self._tempo.join(one.id, asked, written, join.age_s, time.monotonic())
        if answer.finish is not None:
            sends.extend(self._finish(one))
        return sends

    def _repeat(self, answer: Answer, checkpoint: Checkpoint, slot: int) -> list[Send]:
        """Say again what is written of an answer, in case it did not get through.

        Of one that tells how likely its tokens are, the newest alone: of older ones that is not
        written any more, nor what was told of the prompt with the first. If such are lost, the
        ingress begins again.
        """
        sends, words, asked = list[Send](), checkpoint.words(slot), answer.request.sampling
        for index, token in enumerate(words):
            rating = checkpoint.rating(slot, index)
            is_last = index == len(words) - 1
            ender = self._pipeline.label(checkpoint.ended(slot)) if is_last else ""
            send = answer.replay(token, ender, () if rating is None else (rating,))
            tells_of_prompt = index == 0 and asked.prompt_logprobs >= 0
            if rating is not None or not (asked.logprobs >= 0 or tells_of_prompt):
                sends.append(send)
        return sends

    def _leave(self, one: Running) -> None:
        """Give every page back and free the slot."""
        self.pool.release([one.claim.lease])
        self._forget(one)

    def _forget(self, one: Running) -> None:
        """Free the slot and the pages of this worker's stock; the lease is not touched.

        On cancel the lease is withdrawn by the request's name, and where stages share a
        process another one may have done that already.
        """
        self._checkpoint.leave(one.slot)
        self._free(one)

    def _free(self, one: Running) -> None:
        self._running.pop(one.id, None)
        self._tempo.leave(one.id)
        if self._kept.pop(one.id, None) and self._keeper:
            self._keeper.forget(one.id)
        self.pool.give(np.concatenate(one.grown))
        if self._selector is not None:
            self._selector.leave(one.slot)
        self._free_slots.append(one.slot)

    def _give_up(self, one: Running, error: TriptychError) -> Send:
        self._leave(one)
        return refuse(one.id, error, tokens=len(one.answer.tokens))

    # ---------------------------------------------------------------- forward

    def _forward(self, batch: list[Running]) -> Tensor:
        """Logits [requests, vocab] of the newest token of each request."""
        tokens = np.array([one.answer.tokens[-1] for one in batch], np.int64)
        positions = np.array([one.position for one in batch], np.int32)
        slots = np.array([one.slot for one in batch], np.int32)
        attend = PageAttention(
            self._memory,
            self._sections,
            slots,
            positions,
            self.plan.policy.score_every,
            self._checkpoint.scored,
            self._selector,
            self._checkpoint.fixed,
            self._prefetcher,
        )
        every, put = self._every[: len(batch)], self.device.put
        exits = exits_of(batch, self.device)
        return self.runner.forward(put(tokens), put(positions), attend, put(every), exits)


def finished(answer: Answer) -> Send:
    """Tell the router that nothing is held of a request any more."""
    return Send(ROUTER, Finished(request=answer.request.id, tokens=len(answer.tokens)))
