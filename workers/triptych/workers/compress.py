# pyright: reportUnknownMemberType=false
# torch.from_numpy has no type hints.
"""The compressor stage: plans exact page counts, then moves tokens into the policy's format.

Planning comes before allocation (kv_spec D.7), so the router can choose the decode worker
from what a request really takes. Raw pages of the recent window are not touched: they pass
on to the decode stage as they are.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from numpy.typing import NDArray

from triptych.core.errors import StageLost, StaleHandle, TriptychError
from triptych.core.handles import Claim
from triptych.core.messages import (
    ROUTER,
    Compress,
    Compressed,
    CompressionReport,
    CompressItem,
    Encode,
    Message,
    Planned,
    Send,
    Stage,
)
from triptych.core.pages import PagePlan
from triptych.kernels import transcode
from triptych.kvpool import WorkerPool
from triptych.workers.handles import Run, make_handle, unpack_run
from triptych.workers.stage import refuse

Ids = NDArray[np.int32]


@dataclass(eq=False)
class Job:
    """One request between plan and encoding."""

    request: str
    claim: Claim
    tokens: int
    """Tokens of the sequence."""
    raw: Ids
    """Raw pages, [head rows, pages of a row]."""
    leaving: int
    """Raw pages per head row whose tokens are encoded."""
    leaving_tokens: int
    """Tokens per head row that are encoded."""
    stored_pages: int
    """Pages of the stored format per head row."""

    @property
    def kept(self) -> Ids:
        """Raw pages that stay as they are."""
        return self.raw[:, self.leaving :]

    @property
    def total_pages(self) -> int:
        """Pages of all head rows after encoding."""
        return self.raw.shape[0] * self.stored_pages + self.kept.size


@dataclass
class CompressEngine:
    """Encodes all requests that wait at one step with one kernel call."""

    pool: WorkerPool
    plan: PagePlan
    policy: str
    stage: Stage = "compress"
    _planned: dict[str, Job] = field(default_factory=dict[str, Job])
    _ready: list[Job] = field(default_factory=list[Job])

    def __post_init__(self) -> None:
        self._arena = torch.from_numpy(self.pool.arena.data)

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

    def requests(self) -> list[str]:
        return [*self._planned, *(job.request for job in self._ready)]

    def cancel(self, requests: Sequence[str]) -> None:
        gone = set(requests)
        for name in gone:
            self._planned.pop(name, None)
        self._ready = [job for job in self._ready if job.request not in gone]
        self.pool.withdraw(requests)

    def step(self) -> Iterable[Send]:
        jobs, self._ready = self._ready, []
        try:
            encoded = self._take_pages(jobs)
        except TriptychError as error:
            self.pool.withdraw([job.request for job in jobs])
            return [refuse(job.request, error) for job in jobs]
        self._encode(jobs, encoded)
        return self._hand_over(jobs, encoded)

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
        return Send(ROUTER, Planned(request=item.request, pages=job.total_pages))

    def _plan(self, item: CompressItem) -> Job:
        """Attach the raw pages and count what the request will take."""
        rows = self.plan.geometry.head_rows
        handle = item.handle
        tokens, ids = unpack_run(handle.runs[0], self.plan.raw, rows, self.pool.capacity_pages)
        (claim,) = self.pool.attach([(handle.claim, ids)])
        leaving = self.plan.leaving_pages(handle.tokens)
        leaving_tokens = leaving * self.plan.raw.tokens
        return Job(
            request=item.request,
            claim=claim,
            tokens=int(tokens[0]),
            raw=ids.reshape(rows, -1),
            leaving=leaving,
            leaving_tokens=leaving_tokens,
            stored_pages=self.plan.stored.pages(leaving_tokens),
        )

    # ---------------------------------------------------------------- encode

    def _take_pages(self, jobs: list[Job]) -> list[Ids]:
        """Pages of the stored format for every job, [head rows, pages]; all or nothing."""
        rows = self.plan.geometry.head_rows
        counts = [rows * job.stored_pages for job in jobs]
        ids = self.pool.take(sum(counts))
        return [part.reshape(rows, -1) for part in np.split(ids, np.cumsum(counts)[:-1])]

    def _encode(self, jobs: list[Job], encoded: list[Ids]) -> None:
        moves = [self._moves(job, target) for job, target in zip(jobs, encoded, strict=True)]
        columns = [np.concatenate(parts) for parts in zip(*moves, strict=True)]
        if columns[0].size:
            transcode(
                self._arena,
                self.plan.raw,
                self.plan.stored,
                *(torch.from_numpy(column) for column in columns),
            )

    def _moves(self, job: Job, target: Ids) -> tuple[Ids, Ids, Ids, Ids]:
        """Source page and row, target page and row of every token that is encoded."""
        token = np.arange(job.leaving_tokens, dtype=np.int32)
        source_page, source_row = np.divmod(token, np.int32(self.plan.raw.tokens))
        target_page, target_row = np.divmod(token, np.int32(self.plan.stored.tokens))
        rows = len(job.raw)
        return (
            job.raw[:, source_page].ravel(),
            np.tile(source_row, rows),
            target[:, target_page].ravel(),
            np.tile(target_row, rows),
        )

    def _hand_over(self, jobs: list[Job], encoded: list[Ids]) -> list[Send]:
        """Commit new and kept pages, and free the raw ones, in one call."""
        claims = self.pool.handoff(
            [
                (job.request, np.concatenate([target.ravel(), job.kept.ravel()]))
                for job, target in zip(jobs, encoded, strict=True)
            ],
            releases=[job.claim.lease for job in jobs],
        )
        return [
            self._compressed(job, target, claim)
            for job, target, claim in zip(jobs, encoded, claims, strict=True)
        ]

    def _compressed(self, job: Job, target: Ids, claim: Claim) -> Send:
        rows = self.plan.geometry.head_rows
        kept_tokens = np.full(rows, job.tokens - job.leaving_tokens, np.int32)
        runs: list[Run] = [(self.plan.raw.format.name, kept_tokens, job.kept.ravel())]
        if self.plan.compresses:
            stored_tokens = np.full(rows, job.leaving_tokens, np.int32)
            runs.insert(0, (self.plan.stored.format.name, stored_tokens, target.ravel()))
        report = CompressionReport(
            policy=self.policy,
            raw_bytes=self.plan.raw_bytes(job.tokens),
            stored_bytes=job.total_pages * self.plan.page_bytes,
        )
        handle = make_handle(claim, runs, job.tokens)
        return Send(ROUTER, Compressed(request=job.request, handle=handle, report=report))
