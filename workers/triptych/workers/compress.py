"""The compressor stage: classes tokens, counts pages exactly, then encodes.

Planning comes before allocation, so the router can choose the decode worker from what a
request really takes; the papers reserve high pages for all and give back the rest. Raw pages
of sink and window are not touched: they pass on to the decode stage as they are.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import chain, pairwise

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from triptych.core.errors import StageLost, StaleHandle, TriptychError
from triptych.core.handles import Claim
from triptych.core.layout import PageLayout
from triptych.core.messages import (
    ROUTER,
    Compress,
    Compressed,
    CompressionReport,
    CompressItem,
    Encode,
    Message,
    Planned,
    Prefix,
    Send,
    Stage,
)
from triptych.core.pages import PagePlan
from triptych.kernels import mass_limits, plan_tokens, significance_of, transcode
from triptych.kernels.compact.reference import HIGH, LOW
from triptych.kernels.pages import segments
from triptych.kvpool import About, WorkerPool
from triptych.workers.device import CPU, Device
from triptych.workers.handles import Run, make_handle, pages_of, unpack_run
from triptych.workers.memory import PageMemory
from triptych.workers.prefixes import PrefixStore, RawPages, SharedPrefix
from triptych.workers.stage import refuse

Ids = NDArray[np.int32]


@dataclass(frozen=True)
class ClassPlan:
    """Which tokens of a request go into pages of one format."""

    layout: PageLayout
    rows: Ids
    """Head row of each token, ascending."""
    tokens: Ids
    """Position of each token in the sequence, ascending within a row."""
    ranks: Ids
    """Place of each token among those of its row and class."""
    counts: Ids
    """Tokens of each head row."""

    @property
    def pages(self) -> Ids:
        """Pages of each head row."""
        return pages_of(self.counts, self.layout)


@dataclass(eq=False)
class Job:
    """One request between plan and encoding."""

    request: str
    claim: Claim
    tokens: int
    """Tokens of the sequence."""
    raw: Ids
    """Raw pages, [head rows, pages of a row]."""
    leaving: slice
    """Raw pages of a head row whose tokens are encoded."""
    classes: list[ClassPlan]
    """High, and low if the policy has it; none if the policy keeps 16 bits."""
    prefix: Prefix | None = None
    """What is to be kept for later requests."""
    shared: SharedPrefix | None = None
    """What is there already, and read where it is."""

    @property
    def kept(self) -> Ids:
        """Raw pages of sink and window, which stay as they are."""
        return np.delete(self.raw, self.leaving, axis=1)

    @property
    def new_pages(self) -> int:
        return sum(int(part.pages.sum()) for part in self.classes)

    @property
    def total_pages(self) -> int:
        """Pages of all head rows after encoding that are its own."""
        return self.new_pages + self.kept.size

    @property
    def shared_pages(self) -> int:
        return self.shared.pages.size if self.shared else 0


@dataclass
class CompressEngine:
    """Encodes all requests that wait at one step with one kernel call."""

    pool: WorkerPool
    plan: PagePlan
    prefixes: PrefixStore | None = None
    """None: nothing is kept for later requests."""
    device: Device = CPU
    stage: Stage = "compress"
    _planned: dict[str, Job] = field(default_factory=dict[str, Job])
    _ready: list[Job] = field(default_factory=list[Job])

    def __post_init__(self) -> None:
        self._memory = PageMemory.in_place(self.pool.arena, self.device)

    # ---------------------------------------------------------------- the Engine protocol

    def accept(self, message: Message) -> Iterable[Send] | None:
        if isinstance(message, Compress):
            return [self._attach(item) for item in message.items]
        if isinstance(message, Encode):
            jobs = [self._planned.pop(name, None) for name in message.requests]
            self._ready.extend(job for job in jobs if job is not None)
            return ()
        return None

    def has_work(self) -> bool:
        return bool(self._ready)

    def wait_s(self) -> float | None:
        return None

    def is_late(self) -> bool:
        return False

    def requests(self) -> list[str]:
        return [*self._planned, *(job.request for job in self._ready)]

    def cancel(self, requests: Sequence[str]) -> None:
        gone = set(requests)
        for job in [*self._planned.values(), *self._ready]:
            if job.request in gone:
                self._let_go(job)
        for name in gone:
            self._planned.pop(name, None)
        self._ready = [job for job in self._ready if job.request not in gone]
        self.pool.withdraw(requests)

    def _let_go(self, job: Job) -> None:
        """End the hold of a job that was not handed over."""
        if job.shared is not None:
            self.pool.release_prefix(job.shared.hold)
            job.shared = None

    def abandon(self) -> None:
        self.cancel(self.requests())
        self.pool.withdraw_all()

    def step(self) -> Iterable[Send]:
        jobs = list(self._ready)  # they stay there to the end, so that a fault ends them too
        try:
            ids = self.pool.take(sum(job.new_pages for job in jobs))
        except TriptychError as error:
            self.cancel([job.request for job in jobs])
            return [refuse(job.request, error) for job in jobs]
        try:
            encoded = split_by_class(ids, jobs)
            self._publish(jobs)
            self._encode(jobs, encoded)
            sends = self._hand_over(jobs, encoded)
        except Exception:
            if not self.pool.is_lost:
                self.pool.give(ids)
            raise
        self._ready.clear()
        return sends

    def _publish(self, jobs: list[Job]) -> None:
        """Keep the beginnings of prompts while their raw pages are there, unless it cannot be."""
        for job in jobs:
            if self.prefixes is not None and job.prefix is not None:
                judged = self.plan.policy.needs_significance
                significance = self._significance(job.raw, job.tokens) if judged else None
                pages = RawPages(self._memory, self.plan, job.raw, significance)
                self.prefixes.publish(job.prefix, pages)

    # ---------------------------------------------------------------- plan

    def _attach(self, item: CompressItem) -> Send:
        try:
            job = self._plan(item)
        except StaleHandle:
            return refuse(item.request, StageLost("prefill"))
        except TriptychError as error:
            self.pool.withdraw([item.request])
            return refuse(item.request, error)
        self._planned[item.request] = job
        planned = Planned(request=job.request, pages=job.total_pages, shared=job.shared_pages)
        return Send(ROUTER, planned)

    def _plan(self, item: CompressItem) -> Job:
        """Attach the raw pages and count what the request will take."""
        rows = self.plan.geometry.head_rows
        handle = item.handle
        tokens, ids = unpack_run(handle.runs[0], self.plan.raw, rows, self.pool.capacity_pages)
        (claim,) = self.pool.attach([(handle.claim, ids)])
        raw = ids.reshape(rows, -1)
        sink = self.plan.sink_pages
        leaving = slice(sink, sink + self.plan.leaving_pages(handle.tokens))
        shared = None
        if self.prefixes is not None and item.prefix is not None:
            shared = self.prefixes.share(item.prefix, handle.tokens)
        job = Job(
            request=item.request,
            claim=claim,
            tokens=int(tokens[0]),
            raw=raw,
            leaving=leaving,
            classes=[],
            prefix=item.prefix,
            shared=shared,
        )
        span = shared.span if shared else range(0)
        try:
            if self.plan.compresses:
                job.classes = self._classes(raw, leaving, handle.tokens, span)
        except TriptychError:
            self._let_go(job)
            raise
        return job

    def _classes(self, raw: Ids, leaving: slice, tokens: int, shared: range) -> list[ClassPlan]:
        """Class the tokens of the leaving pages but those that are shared; they are counted
        exactly, page by page.

        What is shared is judged as well, as it has a part in what the others are judged by; it is
        high, whatever comes of it.
        """
        policy, rows = self.plan.policy, len(raw)
        there = self.device.name
        high, low = torch.zeros(2, rows, device=there)
        first, end = (edge * self.plan.raw.tokens for edge in (leaving.start, leaving.stop))
        every = np.arange(first, end, dtype=np.int32)
        own = every[(every < shared.start) | (every >= shared.stop)]
        if policy.needs_significance and first < end:
            significance = self._significance(raw, tokens)
            high, low = self._limits(significance[:, first:end], significance.sum(1), tokens)
            scores = significance[:, self.device.put(own).long()]
        else:
            scores = torch.zeros(rows, own.size, device=there)
        classes, ranks, counts = plan_tokens(
            scores,
            torch.full((rows,), own.size, dtype=torch.int32, device=there),
            high,
            low,
            window=int(np.count_nonzero(own >= tokens - policy.high_window_tokens)),
        )
        wanted = [(HIGH, self.plan.high), (LOW, self.plan.low)]
        classes, ranks, counts = (part.cpu() for part in (classes, ranks, counts))
        plans = list[ClassPlan]()
        for column, (name, layout) in enumerate(wanted):
            if layout is not None:
                row, token = (classes == name).nonzero(as_tuple=True)
                plans.append(
                    ClassPlan(
                        layout=layout,
                        rows=row.int().numpy(),
                        tokens=own[token.numpy()],
                        ranks=ranks[row, token].numpy(),
                        counts=counts[:, column].contiguous().numpy(),
                    )
                )
        return plans

    def _limits(self, scores: Tensor, total: Tensor, tokens: int) -> tuple[Tensor, Tensor]:
        """Significance from which on a token is high, and low: [head rows] each."""
        policy = self.plan.policy
        if policy.mass_high > 0:
            high = mass_limits(scores, total, policy.mass_high)
            return high, mass_limits(scores, total, policy.mass_low)
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

    def _encode(self, jobs: list[Job], encoded: list[list[Ids]]) -> None:
        """One kernel call per format for all requests."""
        for index, layout in enumerate((self.plan.high, self.plan.low)):
            moves = [
                self._moves(job, job.classes[index], ids[index])
                for job, ids in zip(jobs, encoded, strict=True)
                if index < len(job.classes)
            ]
            columns = [np.concatenate(parts) for parts in zip(*moves, strict=True)]
            if layout is not None and columns and columns[0].size:
                cells = map(self.device.put, columns)
                transcode(self._memory.near, self.plan.raw, layout, *cells)
        self.device.wait()

    def _moves(self, job: Job, part: ClassPlan, ids: Ids) -> tuple[Ids, Ids, Ids, Ids]:
        """Source page and row, target page and row of every token of a class."""
        source_page, source_row = np.divmod(part.tokens, np.int32(self.plan.raw.tokens))
        target_page, target_row = np.divmod(part.ranks, np.int32(part.layout.tokens))
        pages = part.pages
        first = np.cumsum(pages) - pages
        return (
            job.raw[part.rows, source_page],
            source_row,
            ids[first[part.rows] + target_page],
            target_row,
        )

    def _hand_over(self, jobs: list[Job], encoded: list[list[Ids]]) -> list[Send]:
        """Commit new and kept pages, and free the raw ones, in one call."""
        claims = self.pool.handoff(
            [
                (job.request, np.concatenate([*ids, job.kept.ravel(), *_fixed_pages(job)]))
                for job, ids in zip(jobs, encoded, strict=True)
            ],
            releases=[job.claim.lease for job in jobs],
            about=[About(formats=self._formats(job)) for job in jobs],
            holds=[job.shared.hold if job.shared else None for job in jobs],
        )
        return [
            self._compressed(job, ids, claim)
            for job, ids, claim in zip(jobs, encoded, claims, strict=True)
        ]

    def _formats(self, job: Job) -> tuple[tuple[str, int], ...]:
        """Pages by format, for the pool's books; whose they are it knows from the raw ones."""
        new = [(part.layout.format.name, int(part.pages.sum())) for part in job.classes]
        return ((self.plan.raw.format.name, job.kept.size), *new)

    def _compressed(self, job: Job, encoded: list[Ids], claim: Claim) -> Send:
        shared, job.shared = job.shared, None  # its hold is the request's now
        left = (job.leaving.stop - job.leaving.start) * self.plan.raw.tokens
        raw_tokens = np.full(self.plan.geometry.head_rows, job.tokens - left, np.int32)
        runs: list[Run] = [(self.plan.raw.format.name, raw_tokens, job.kept.ravel())]
        for part, ids in zip(job.classes, encoded, strict=True):
            runs.append((part.layout.format.name, part.counts, ids))
        report = CompressionReport(
            policy=self.plan.policy.name,
            raw_bytes=self.plan.raw_bytes(job.tokens),
            stored_bytes=job.total_pages * self.plan.page_bytes,
            shared_bytes=claim.shared * self.plan.page_bytes,
        )
        name = self.plan.high.format.name
        fixed = (name, shared.counts, shared.pages.ravel()) if shared else None
        handle = make_handle(claim, runs, job.tokens, fixed)
        return Send(ROUTER, Compressed(request=job.request, handle=handle, report=report))


def _fixed_pages(job: Job) -> list[Ids]:
    """Behind a request's own pages come those that it shares."""
    return [job.shared.pages.ravel()] if job.shared else []


def split_by_class(ids: Ids, jobs: Sequence[Job]) -> list[list[Ids]]:
    """The pages of every class of every job, each in row order, cut from one array."""
    counts = [[int(part.pages.sum()) for part in job.classes] for job in jobs]
    ends = np.cumsum([0, *chain.from_iterable(counts)])
    parts = iter([ids[first:end] for first, end in pairwise(ends)])
    return [[next(parts) for _ in count] for count in counts]
