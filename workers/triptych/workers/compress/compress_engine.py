"""The compressor stage: classes tokens, counts pages exactly, then encodes.

Planning comes before allocation, so the router can choose the decode worker from what a
request really takes; the papers reserve high pages for all and give back the rest. Raw pages
of sink and window are not touched: they pass on to the decode stage as they are.
"""

from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from triptych.core.errors import MessageError, StageLost, StaleHandle, TriptychError
from triptych.core.handles import KVHandle, LeaseRef
from triptych.core.messages import (
    ROUTER,
    Compress,
    Compressed,
    CompressionReport,
    CompressItem,
    Encode,
    Expect,
    Layers,
    Message,
    Planned,
    Send,
    Stage,
)
from triptych.core.pages import PagePlan
from triptych.kernels import Section, mass_limits, move_tokens, plan_tokens, significance_of
from triptych.kernels.compact.reference import HIGH, LOW
from triptych.kernels.pages import segments
from triptych.kvpool import About, WorkerPool
from triptych.workers.compress.job import ClassPlan, Early, Job, Part, split_by_class
from triptych.workers.device import CPU, Device
from triptych.workers.kv.device_pages import NO_PAGES, DevicePages
from triptych.workers.kv.handle_codec import Run, make_handle, unpack_run
from triptych.workers.kv.prefix_cache import PrefixStore, RawPages
from triptych.workers.stage import refuse

Ids = NDArray[np.int32]
NONE = range(0)
NOT_HERE = -1
"""The place of a token in pages that it does not go into."""
UNANNOUNCED = 1024
"""Layers of which the router has said nothing that are remembered, in case it is about to."""


@dataclass
class CompressEngine:
    """Encodes all requests that wait at one step with one kernel call.

    Of a prompt that is read some layers at a time the first layers come from its prefill worker
    and are encoded at once; with the last ones comes the router's order, as for any other.
    """

    pool: WorkerPool
    plan: PagePlan
    prefixes: PrefixStore | None = None
    """None: nothing is kept for later requests."""
    device: Device = CPU
    stage: Stage = "compress"
    _open: dict[str, Job] = field(default_factory=dict[str, Job])
    """Requests of which layers are to come."""
    _unannounced: deque[Layers] = field(default_factory=lambda: deque(maxlen=UNANNOUNCED))
    """Layers that came before the router's word that they will, or after it was taken back: their
    pages are whose they were."""
    _early: list[Early] = field(default_factory=list[Early])
    _ordered: dict[str, CompressItem] = field(default_factory=dict[str, CompressItem])
    """Orders that came before layers that they follow upon."""
    _planned: dict[str, Job] = field(default_factory=dict[str, Job])
    _ready: list[Job] = field(default_factory=list[Job])

    def __post_init__(self) -> None:
        self._memory = DevicePages.in_place(self.pool.arena, self.device)

    # ---------------------------------------------------------------- the Engine protocol

    def accept(self, message: Message) -> Iterable[Send] | None:
        if isinstance(message, Expect):
            return [send for name in message.requests for send in self._expect(name)]
        if isinstance(message, Layers):
            return self._take_layers(message)
        if isinstance(message, Compress):
            return [send for item in message.items for send in self._order(item)]
        if isinstance(message, Encode):
            jobs = [self._planned.pop(name, None) for name in message.requests]
            self._ready.extend(job for job in jobs if job is not None)
            return ()
        return None

    def has_work(self) -> bool:
        return bool(self._early or self._ready)

    def wait_s(self) -> float | None:
        return None

    def is_late(self) -> bool:
        return False

    def requests(self) -> list[str]:
        return [*self._open, *self._planned, *(job.request for job in self._ready)]

    def cancel(self, requests: Sequence[str]) -> None:
        gone = set(requests)
        for job in [*self._open.values(), *self._planned.values(), *self._ready]:
            if job.request in gone:
                self._let_go(job)
        for name in gone:
            for jobs in (self._open, self._planned, self._ordered):
                jobs.pop(name, None)
        self._ready = [job for job in self._ready if job.request not in gone]
        self._early = [one for one in self._early if one.job.request not in gone]
        self.pool.withdraw(requests)

    def _let_go(self, job: Job) -> None:
        """End the hold of a job that was not handed over, and give its encoded parts back."""
        if job.shared is not None:
            self.pool.release_prefix(job.shared.pin)
            job.shared = None
        for part in job.parts:
            if part.encoded:
                self.pool.free(part.pages)
                part.encoded = []

    def abandon(self) -> None:
        self.cancel(self.requests())
        self.pool.withdraw_all()

    def step(self) -> Iterable[Send]:
        return self._step_early() if self._early else self._step_ready()

    def _step_early(self) -> list[Send]:
        """Encode layers that came alone; what is left of them goes into stock here."""
        early = list(self._early)  # they stay there to the end, so that a fault ends them too
        parts = [one.part for one in early]
        ids, refused = self._take_for(parts, [one.job.request for one in early])
        if refused:
            return refused
        try:
            encoded = split_by_class(ids, parts)
            self._encode(parts, encoded)
            self.pool.release([part.lease_ref.lease for part in parts], keep=True)
        except Exception:
            self._give_back(ids)
            raise
        for part, own in zip(parts, encoded, strict=True):
            part.encoded = own
        self.pool.free(np.concatenate([part.raw[:, part.leaving].ravel() for part in parts]))
        self._early.clear()
        return [one.answer for one in early]

    def _step_ready(self) -> list[Send]:
        jobs = list(self._ready)  # as above
        parts = [job.last for job in jobs]
        ids, refused = self._take_for(parts, [job.request for job in jobs])
        if refused:
            return refused
        try:
            encoded = split_by_class(ids, parts)
            self._publish(jobs)
            self._encode(parts, encoded)
            sends = self._hand_over(jobs, encoded)
        except Exception:
            self._give_back(ids)
            raise
        self._ready.clear()
        return sends

    def _take_for(self, parts: list[Part], requests: list[str]) -> tuple[Ids, list[Send]]:
        """New pages for parts; if there are too few their requests end, and why."""
        try:
            return self.pool.allocate(sum(part.new_pages for part in parts)), []
        except TriptychError as error:
            names = list(dict.fromkeys(requests))
            self.cancel(names)
            return NO_PAGES, [refuse(name, error) for name in names]

    def _give_back(self, ids: Ids) -> None:
        if not self.pool.is_lost:
            self.pool.free(ids)

    def _publish(self, jobs: list[Job]) -> None:
        """Keep the beginnings of prompts while their raw pages are there, unless it cannot be.

        Where prefixes are kept, all layers come at once.
        """
        for job in jobs:
            if self.prefixes is not None and job.prefix is not None:
                judged = self.plan.policy.needs_significance
                significance = self._significance(job.last.raw, job.tokens) if judged else None
                pages = RawPages(self._memory, self.plan, job.last.raw, significance)
                self.prefixes.publish(job.prefix, pages)

    # ---------------------------------------------------------------- plan

    def _expect(self, request: str) -> list[Send]:
        self._open[request] = Job(request)
        early = [layers for layers in self._unannounced if layers.request == request]
        for layers in early:
            self._unannounced.remove(layers)
        return [send for layers in early for send in self._take_layers(layers)]

    def _take_layers(self, message: Layers) -> list[Send]:
        """Plan layers that came alone; if they were the last that an order waits for, all."""
        name = message.request
        job = self._open.get(name)
        if job is None:
            self._unannounced.append(message)
            return []
        job.tokens = message.handle.tokens
        try:
            if job.rows != message.first * self.plan.geometry.kv_heads:
                raise MessageError(f"layers from {message.first} on behind {job.rows} head rows")
            part = self._attach(message.handle, rows_of(message.handle))
            part.classes = self._classes(part, job.tokens)
        except TriptychError as error:
            return [self._give_up(name, error)]
        job.parts.append(part)
        self._early.append(Early(job, part, message))
        item = self._ordered.pop(name, None)
        return [] if item is None else self._order(item)

    def _order(self, item: CompressItem) -> list[Send]:
        """Plan a request to its end, once all of its layers are here."""
        announced, every = self._open.get(item.request), self.plan.geometry.head_rows
        if announced is not None and announced.rows + rows_of(item.handle) < every:
            self._ordered[item.request] = item
            return []
        job = self._open.setdefault(item.request, Job(item.request))
        job.tokens = item.handle.tokens
        try:
            self._plan(job, item, every - job.rows)
        except TriptychError as error:
            return [self._give_up(item.request, error)]
        self._planned[item.request] = self._open.pop(item.request)
        planned = Planned(request=job.request, pages=job.total_pages, shared=job.shared_pages)
        return [Send(ROUTER, planned)]

    def _give_up(self, request: str, error: TriptychError) -> Send:
        self.cancel([request])
        return refuse(request, StageLost("prefill") if isinstance(error, StaleHandle) else error)

    def _plan(self, job: Job, item: CompressItem, rows: int) -> None:
        """Attach the raw pages and count what the request will take."""
        part = self._attach(item.handle, rows)
        job.parts.append(part)
        job.prefix = item.prefix
        if self.prefixes is not None and item.prefix is not None:
            job.shared = self.prefixes.share(item.prefix, job.tokens)
        if self.plan.compresses:
            part.classes = self._classes(part, job.tokens, job.shared.span if job.shared else NONE)

    def _attach(self, handle: KVHandle, rows: int) -> Part:
        _, ids = unpack_run(handle.runs[0], self.plan.raw, rows, self.pool.capacity_pages)
        (lease_ref,) = self.pool.attach([(handle.lease_ref, ids)])
        sink = self.plan.sink_pages
        leaving = slice(sink, sink + self.plan.leaving_pages(handle.tokens))
        return Part(lease_ref, ids.reshape(rows, -1), leaving)

    def _classes(self, part: Part, tokens: int, shared: range = NONE) -> list[ClassPlan]:
        """Class the tokens of the leaving pages but those that are shared; they are counted
        exactly, page by page.

        What is shared is judged as well, as it has a part in what the others are judged by; it is
        high, whatever comes of it.
        """
        policy, raw, leaving = self.plan.policy, part.raw, part.leaving
        rows, there = len(raw), self.device.name
        first, end = (edge * self.plan.raw.tokens for edge in (leaving.start, leaving.stop))
        every = np.arange(first, end, dtype=np.int32)
        own = every[(every < shared.start) | (every >= shared.stop)]
        if policy.needs_significance and first < end:
            significance = self._significance(raw, tokens)
            high, low = self._limits(significance, slice(first, end), tokens)
            scores = significance[:, self.device.put(own).long()]
        else:
            scores = torch.zeros(rows, own.size, device=there)
            high, low = torch.zeros(2, rows, device=there)
        classes, ranks, counts = plan_tokens(
            scores,
            torch.full((rows,), own.size, dtype=torch.int32, device=there),
            high,
            low,
            window=int(np.count_nonzero(own >= tokens - policy.high_window_tokens)),
        )
        positions = self.device.put(own)
        places = [ranks.masked_fill(classes != name, NOT_HERE) for name in (HIGH, LOW)]
        counted = counts.T.contiguous().cpu().numpy()
        return [
            ClassPlan(layout, positions, here, each)
            for layout, here, each in zip(self.plan.classes, places, counted, strict=False)
        ]

    def _limits(self, scores: Tensor, leaving: slice, tokens: int) -> tuple[Tensor, Tensor]:
        """Significance from which on a token is high, and low: [head rows] each."""
        policy = self.plan.policy
        if policy.mass_high > 0:
            total, leave = scores.sum(1), scores[:, leaving]
            high = mass_limits(leave, total, policy.mass_high)
            return high, mass_limits(leave, total, policy.mass_low)
        alphas = policy.alpha_high, policy.alpha_low
        high, low = (scores.new_full((len(scores),), min(1.0, a / tokens)) for a in alphas)
        return high, low

    def _significance(self, raw: Ids, tokens: int) -> Tensor:
        """Mean attention of each token from itself and all later ones, [head rows, tokens].

        Prefill left each KV head's sums in the score segment of the raw pages.
        """
        scores = segments(self._memory.near, self.plan.raw).scores
        kept = scores[self.device.put(raw).long()]
        return significance_of(kept.flatten(1), tokens, len(raw))

    # ---------------------------------------------------------------- encode

    def _encode(self, parts: list[Part], encoded: list[list[Ids]]) -> None:
        for part, ids in zip(parts, encoded, strict=True):
            for plan, own in zip(part.classes, ids, strict=True):
                if own.size:
                    self._encode_class(part, plan, own)
        self.device.wait()

    def _encode_class(self, part: Part, plan: ClassPlan, ids: Ids) -> None:
        """Write the tokens of a class into its pages, given in row order."""
        raw, put, rows = self.plan.raw, self.device.put, len(part.raw)
        full: Ids = np.full((rows, 1), part.raw.shape[1] * raw.tokens, np.int32)
        table = plan.table(ids)
        move_tokens(
            self._memory.near,
            Section(raw, put(part.raw[:, None]), put(full)),
            Section(plan.layout, put(table.pages[:, 0]), put(table.tokens[:, 0])),
            put(np.arange(rows, dtype=np.int32)),
            plan.tokens.expand(rows, 1, -1),
            plan.places[:, None],
        )

    def _hand_over(self, jobs: list[Job], encoded: list[list[Ids]]) -> list[Send]:
        """Commit new and kept pages, and free the raw ones, in one call."""
        all_runs = [self._runs(job, last) for job, last in zip(jobs, encoded, strict=True)]
        lease_refs = self.pool.handoff(
            [
                (job.request, np.concatenate([*(ids for *_, ids in runs), *_fixed_pages(job)]))
                for job, runs in zip(jobs, all_runs, strict=True)
            ],
            releases=[job.last.lease_ref.lease for job in jobs],
            about=[_about(runs) for runs in all_runs],
            pins=[job.shared.pin if job.shared else None for job in jobs],
        )
        return [
            self._compressed(job, runs, lease_ref)
            for job, runs, lease_ref in zip(jobs, all_runs, lease_refs, strict=True)
        ]

    def _runs(self, job: Job, last: list[Ids]) -> list[Run]:
        """What a request has by format, for its handle: raw pages that stay, and each class."""
        leaving = job.last.leaving
        left = (leaving.stop - leaving.start) * self.plan.raw.tokens
        tokens = np.full(self.plan.geometry.head_rows, job.tokens - left, np.int32)
        return [(self.plan.raw.format.name, tokens, job.kept), *job.runs(last)]

    def _compressed(self, job: Job, runs: list[Run], lease_ref: LeaseRef) -> Send:
        shared, job.shared = job.shared, None  # its hold is the request's now
        report = CompressionReport(
            policy=self.plan.policy.name,
            raw_bytes=self.plan.raw_bytes(job.tokens),
            stored_bytes=job.total_pages * self.plan.page_bytes,
            shared_bytes=lease_ref.shared * self.plan.page_bytes,
        )
        name = self.plan.high.format.name
        fixed = (name, shared.counts, shared.pages.ravel()) if shared else None
        handle = make_handle(lease_ref, runs, job.tokens, fixed)
        return Send(ROUTER, Compressed(request=job.request, handle=handle, report=report))


def rows_of(handle: KVHandle) -> int:
    """Head rows of the raw pages of a handle."""
    return len(handle.runs[0].tokens) // 4


def _about(runs: list[Run]) -> About:
    """Pages by format, for the pool's books; whose they are it knows from the raw ones."""
    return About(formats=tuple((name, ids.size) for name, _, ids in runs))


def _fixed_pages(job: Job) -> list[Ids]:
    """Behind a request's own pages come those that it shares."""
    return [job.shared.pages.ravel()] if job.shared else []
