"""Requests that enter and leave a decode batch: joins, preemption and takeover of a dead worker."""

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from triptych.core.config import SelectionConfig
from triptych.core.errors import MessageError, StaleHandle
from triptych.core.handles import LeaseRef, PageRun
from triptych.core.messages import ROUTER, Join, Preempted, Request, Resume, Resumed, Send
from triptych.core.policy import Policy, Thresholds
from triptych.kvpool import About, WorkerPool
from triptych.workers.decode.checkpoint import MAX_PLUGIN_MEMORY, Checkpoint
from triptych.workers.decode.output_cache import OutputCache
from triptych.workers.decode.page_selection import Selector
from triptych.workers.decode.plugins.pipeline import Pipeline, selection_for
from triptych.workers.decode.plugins.plugin import ALPHA_LOW, EXIT_DEPTH, EXIT_ENTROPY
from triptych.workers.decode.running_batch import RunningRequest, StepOptions
from triptych.workers.decode.window import Window
from triptych.workers.kv.block_table import Sections, SectionTable
from triptych.workers.kv.device_pages import NO_PAGES, DevicePages
from triptych.workers.kv.handle_codec import Run, make_handle, pool_pages, unpack_run
from triptych.workers.kv.method_tables import MethodTables
from triptych.workers.sampling.output import OutputFactory, OutputProcessor
from triptych.workers.stage import finished

Ids = NDArray[np.int32]


@dataclass(frozen=True)
class Admission:
    """The result of a join or a takeover."""

    sends: list[Send]
    """Messages to the router and the ingress."""
    request: RunningRequest | None = None
    """The request to add to the batch; None: its output was complete already."""


class RequestHandover:
    """Admits requests to the slots of a decode worker, and hands running requests back."""

    def __init__(
        self,
        pool: WorkerPool,
        outputs: OutputFactory,
        max_requests: int,
        selection: SelectionConfig,
        pipeline: Pipeline,
        checkpoint: Checkpoint,
        sections: Sections,
        memory: DevicePages,
        selector: Selector | None,
        output_cache: OutputCache | None,
    ) -> None:
        self._pool, self._outputs = pool, outputs
        self._selection, self._pipeline = selection, pipeline
        self._checkpoint, self._sections = checkpoint, sections
        self._memory, self._selector = memory, selector
        self._output_cache = output_cache
        self._max_requests = max_requests
        # First in, first out: the finished output of a slot stays in the checkpoint for longest.
        self._free_slots = deque(range(max_requests))

    def join(self, message: Join, previous_worker: str = "") -> Admission:
        """Admit a request from the pages of a handle.

        ``previous_worker``: the worker that may still own the pages, if there was one.
        """
        self._require_slot()
        tables = self._checkpoint.tables_for(message.request.method)
        rows = tables.plan.geometry.head_rows
        unpacked = list[tuple[SectionTable, Ids, Ids]]()
        runs, capacity = message.handle.runs, self._pool.capacity_pages
        for table, run in zip(_tables_of(tables, runs), runs, strict=True):
            unpacked.append((table, *unpack_run(run, table.layout, rows, capacity)))
        output = self._output(message)
        options = self._options(message.request)
        if len(message.memory) > MAX_PLUGIN_MEMORY:
            raise MessageError(
                f"memory of {len(message.memory)} numbers: at most {MAX_PLUGIN_MEMORY}"
            )
        ids = np.concatenate([pool_pages(ids, of.layout.parts) for of, _, ids in unpacked])
        self._checkpoint.forget(message.request.id)
        lease_ref = self._attach(message, ids, previous_worker)
        slot = self._free_slots.popleft()
        self._checkpoint.assign(slot, tables)
        for table, tokens, pages in unpacked:
            table.fill(slot, tokens, pages)
        name, stored = message.request.id, message.handle.tokens
        self._checkpoint.join(
            slot,
            name,
            lease_ref.lease,
            message.output_tokens,
            stored,
            message.memory,
            message.logprobs,
            message.report.lowered_tokens,
        )
        resumed = [Send(ROUTER, Resumed(request=name))] if message.previous_worker else []
        own = int(ids.size) - lease_ref.shared
        unused = self._checkpoint.unused_pages(slot)
        return self._admit(message, output, slot, lease_ref, options, resumed, own, unused)

    def resume(self, message: Resume) -> Admission:
        """Admit a request from the checkpoint of a dead worker and its pages in the pool.

        The worker may have died before it attached the pages, even if its checkpoint has the
        request: the entry can be of an earlier stay of the same request. It then joins by the
        handle.
        """
        join = message.join
        left = self._checkpoint.open_other(self._pool.inherit(message.previous_worker))
        at = left.find(join.request.id)
        resumed = Send(ROUTER, Resumed(request=join.request.id))
        if at is None:
            admitted = self.join(join, message.previous_worker)
        else:
            try:
                admitted = self._take_over(message, left, at)
            except StaleHandle:
                admitted = self.join(join)
        return Admission([resumed, *admitted.sends], admitted.request)

    def is_mid_step(self, one: RunningRequest) -> bool:
        """Whether a step of a request was cut short by the death of its previous worker.

        What that step has done is in the checkpoint alone, not in the pages of the request.
        """
        return self._checkpoint.is_mid_step(one.slot)

    def preempt(self, one: RunningRequest) -> Send:
        """Hand the pages and the output tokens of a request, as they are between two steps, back.

        This worker owns the pages until another one attaches them. If it dies before the router
        has the message, the takeover worker goes by the checkpoint. The caller frees the slot.
        """
        checkpoint = self._checkpoint
        runs, fixed = self._runs(one), checkpoint.fixed_run(one.slot)
        lease_ref, held = self._hand_off(one, NO_PAGES)
        handle = make_handle(lease_ref, runs, one.position, fixed)
        tokens = tuple(checkpoint.output_tokens(one.slot))
        memory = tuple(checkpoint.plugin_memory_of(one.slot).tolist())
        one.allocated_pages = [np.setdiff1d(np.concatenate(one.allocated_pages), held)]
        preempted = Preempted(
            request=one.id,
            output_tokens=tokens,
            handle=handle,
            memory=memory,
            logprobs=checkpoint.newest_logprobs(one.slot),
        )
        return Send(ROUTER, preempted)

    def renew_lease(self, one: RunningRequest) -> None:
        """Put the pages that a request has under a new lease, and free its others.

        If the worker dies meanwhile, the takeover worker goes by the checkpoint.
        """
        unused = pool_pages(one.unused_pages, one.tables.plan.recent.parts)
        unused = np.concatenate([unused, one.expired_pages])
        lease_ref, held = self._hand_off(one, unused)
        self._checkpoint.lease[one.slot] = lease_ref.lease
        one.lease_ref = lease_ref
        self._pool.free(np.setdiff1d(np.concatenate(one.allocated_pages), held))
        one.allocated_pages = [NO_PAGES]

    def _hand_off(self, one: RunningRequest, unused: Ids) -> tuple[LeaseRef, Ids]:
        """Put the pages of a request under a new lease; returns it with their ids.

        ``unused``: pages of the pool of which no row has any, and others.
        """
        runs, fixed = self._runs(one), self._checkpoint.fixed_run(one.slot)
        parts = [
            (layout.format.name, pool_pages(pages, layout.parts))
            for layout, _, pages in (runs if fixed is None else [*runs, fixed])
        ]
        name, recent = parts[0]
        parts[0] = name, np.union1d(recent, unused)
        held = np.concatenate([pages for _, pages in parts])
        self._checkpoint.mark_preempted(one.slot)
        owned = parts[: len(runs)] if one.lease_ref.shared else parts
        about = About(formats=tuple((name, pages.size) for name, pages in owned))
        (lease_ref,) = self._pool.handoff([(one.id, held)], [one.lease_ref.lease], about=[about])
        return lease_ref, held

    def _runs(self, one: RunningRequest) -> list[Run]:
        """Layout, tokens and pages of a request in each of its own tables."""
        return [table.run(one.slot) for table in one.tables.tables]

    def release_slot(self, slot: int) -> None:
        """Make a slot free for the next request."""
        self._free_slots.append(slot)

    # ---------------------------------------------------------------- joining

    def _attach(self, message: Join, ids: Ids, previous_worker: str) -> LeaseRef:
        """Take over the pages of a handle.

        Raises: StaleHandle if they are gone, or on another device. Then they were encoded for a
            worker that the router knew with the arena of a pool that is gone; grown at home, the
            request would have pages in two arenas.
        """
        try:
            (lease_ref,) = self._pool.attach([(message.handle.lease_ref, ids)])
        except StaleHandle:
            if not previous_worker:
                raise
            return self._pool.adopt(previous_worker, message.request.id, None, ids)
        if lease_ref.arena != self._pool.home:
            self._pool.release([lease_ref.lease])
            raise StaleHandle(
                lease_ref.lease, f"its pages are in {lease_ref.arena}, not in {self._pool.home}"
            )
        return lease_ref

    def _require_slot(self) -> None:
        if not self._free_slots:
            raise MessageError(f"no free slot: all {self._max_requests} are taken")

    def _take_over(self, message: Resume, left: Checkpoint, at: int) -> Admission:
        """Admit a request from a slot of a dead worker's checkpoint."""
        join, name, checkpoint = message.join, message.join.request.id, self._checkpoint
        output = self._output(join)
        if left.is_finished(at):
            sends = self._replay(output, left, at)
            if output.finish is None:
                raise MessageError(
                    f"the checkpoint entry of {name!r} is marked finished, its output is not"
                )
            return Admission([*sends, finished(name, len(output.tokens))])
        self._require_slot()
        options = self._options(join.request)
        held = left.pages(at)  # pages that it shares come last
        checkpoint.forget(name)
        lease_ref = self._pool.adopt(message.previous_worker, name, left.lease_of(at), held)
        # The pages of the dead worker are in the arena: they are copied to the device when whole.
        tables = left.tables_of(at)
        if tables.plan.compresses:
            Window(self._memory.behind, left, tables).resume(at)
        # A step that was cut short may have counted its token already.
        tables.tables[0].tokens[:, at] = left.recent_tokens(at)
        unused = left.unused_pages(at)
        slot = self._free_slots.popleft()
        checkpoint.copy_slot(left, at, slot)
        output.note_lowered(checkpoint.lowered_tokens(slot))
        checkpoint.enter(slot, name, lease_ref.lease)
        own = int(held.size) - lease_ref.shared
        return self._admit(join, output, slot, lease_ref, options, [], own, unused)

    def _options(self, request: Request) -> StepOptions:
        """The step options of a request.

        Raises: RequestError if it asks for a plug-in that is not configured
        """
        plugin_overrides = request.plugin_overrides
        plan = self._checkpoint.plan.of_method(request.method)
        plugins = self._pipeline.chosen(plugin_overrides)
        set_to = self._pipeline.settings(plugins)
        return StepOptions(
            plugins,
            selection_for(self._selection, plugin_overrides),
            thresholds=Thresholds()
            if self._stays_high(request)
            else _thresholds(plan.policy, set_to.get(ALPHA_LOW, 0.0)),
            most_tokens=_most_tokens(request, plan.policy),
            exit_entropy=set_to.get(EXIT_ENTROPY, 0.0),
            exit_layers=max(1, round(set_to.get(EXIT_DEPTH, 1.0) * plan.geometry.layers)),
        )

    def _stays_high(self, request: Request) -> bool:
        """Whether no token of a request is downgraded while it generates."""
        cache = self._output_cache
        return request.floor == "high" or (cache is not None and cache.keeps_high(request))

    def _output(self, message: Join) -> OutputProcessor:
        output = self._outputs.start(message.request)
        output.report = message.report
        return output

    def _admit(
        self,
        join: Join,
        output: OutputProcessor,
        slot: int,
        lease_ref: LeaseRef,
        options: StepOptions,
        sends: list[Send],
        num_pages: int,
        unused: Ids,
    ) -> Admission:
        """Make a running request of a slot of the checkpoint; ``num_pages``: pages of its own."""
        if self._memory.is_copied:
            # Unused pages too: a step that was cut short can have stored its token in one.
            begun = pool_pages(unused, self._checkpoint.tables_of(slot).plan.recent.parts)
            self._memory.fetch(np.concatenate([self._checkpoint.pages(slot), begun]))
        self._sections.moved(slot)
        if self._selector is not None:
            self._selector.join(slot, options.selection)
        sends = [*sends, *self._replay(output, self._checkpoint, slot)]
        position = self._checkpoint.position(slot)
        one = RunningRequest(
            slot,
            self._checkpoint.tables_of(slot),
            lease_ref,
            output,
            options,
            position,
            unused,
            num_pages=num_pages,
            token_s=join.token_s,
        )
        return Admission(sends, one)

    def _replay(self, output: OutputProcessor, checkpoint: Checkpoint, slot: int) -> list[Send]:
        """Send the output tokens of a checkpoint to the ingress again, in case they were lost.

        Of a request with log probabilities only the newest tokens are sent: the checkpoint has
        no older log probabilities, nor those of the prompt, which go with the first token. If
        the ingress lacks older ones, it starts the request again.
        """
        sends, tokens, asked = list[Send](), checkpoint.output_tokens(slot), output.request.sampling
        for index, token in enumerate(tokens):
            logprob = checkpoint.logprob_of(slot, index)
            is_last = index == len(tokens) - 1
            ended_by = self._pipeline.label(checkpoint.ending_plugin(slot)) if is_last else ""
            send = output.replay(token, ended_by, () if logprob is None else (logprob,))
            has_prompt_logprobs = index == 0 and asked.prompt_logprobs >= 0
            if logprob is not None or not (asked.logprobs >= 0 or has_prompt_logprobs):
                sends.append(send)
        return sends


def _tables_of(method: MethodTables, runs: Sequence[PageRun]) -> list[SectionTable]:
    """The table of each run: recent pages, the classes, then fixed pages if there are any."""
    tables = method.sections if len(runs) > len(method.tables) else method.tables
    wanted = [(table.layout.format.name, table is method.fixed) for table in tables]
    given = [(run.format, run.fixed) for run in runs]
    if given != wanted:
        raise MessageError(f"runs of (format, fixed) {given}: expected {wanted}")
    return tables


def _thresholds(policy: Policy, least_alpha_low: float) -> Thresholds:
    """Thresholds of the output tokens; ``least_alpha_low``: that of a step plug-in."""
    known = policy.answer_thresholds
    return known._replace(alpha_low=max(known.alpha_low, least_alpha_low))


def _most_tokens(request: Request, policy: Policy) -> int:
    """Tokens that each head row keeps while the answer is generated; 0: all of them."""
    if request.floor == "high" or policy.retention is None or not policy.evicts_output:
        return 0
    return policy.retention.most_tokens(len(request.prompt))
