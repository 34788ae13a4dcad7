# numpy's comparisons lack types.
# pyright: reportUnknownVariableType=false
"""The compress stage: classifies tokens, counts pages exactly, then encodes.

Planning precedes allocation, so the router can choose the decode worker by the exact pages of a
request; the papers reserve high-precision pages for all tokens and free the rest. Sink and
window move to small pages, so that a short prompt does not take whole pages.
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
from triptych.core.layout import PageLayout
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
    Prefix,
    Send,
    Stage,
)
from triptych.core.methods.learned_files import LearnedFile
from triptych.core.pages import PagePlan
from triptych.kernels import Section, move_tokens, plan_tokens
from triptych.kernels.compact.reference import HIGH, LOW
from triptych.kernels.pages import segments
from triptych.kernels.prefill.significance import ALWAYS_HIGH
from triptych.kvpool import About, WorkerPool
from triptych.workers.compress.attention_predictor import AttentionPredictor
from triptych.workers.compress.class_report import class_shares
from triptych.workers.compress.job import (
    ClassPlan,
    EarlyEncode,
    Job,
    LayerGroup,
    MergedChunks,
    MergedSets,
    split_by_class,
)
from triptych.workers.compress.key_merger import KeyMerger
from triptych.workers.compress.layer_windows import kept_tokens, windows_of
from triptych.workers.compress.merged_class import merged_class
from triptych.workers.compress.modality_report import modality_reports
from triptych.workers.compress.prompt_merger import MergedPrompt, PromptMerger
from triptych.workers.compress.raw_tokens import RawTokens
from triptych.workers.compress.stored_rows import classes_of_stored, rectangular
from triptych.workers.compress.token_judge import TokenJudge
from triptych.workers.core_scheduler import CoreUse
from triptych.workers.device import CPU, Device
from triptych.workers.kv.device_pages import NO_PAGES, DevicePages
from triptych.workers.kv.handle_codec import Run, make_handle, pages_of, pool_pages, unpack_run
from triptych.workers.kv.prefix_cache import PrefixStore, RawPages, copy_pages
from triptych.workers.stage import refuse

Ids = NDArray[np.int32]
Mask = NDArray[np.bool_]
NONE = range(0)
NOT_IN_CLASS = -1
"""Index of a token in a class that it does not belong to."""
UNANNOUNCED = 1024
"""Most messages of layers that are kept until the router announces their request."""


@dataclass
class CompressEngine:
    """Encodes all requests that are ready in a step together.

    The first layers of a layerwise prefilled prompt arrive from its prefill worker and are encoded
    at once; its last layers arrive in the router's ``Compress`` message, like any other prompt.
    """

    pool: WorkerPool
    plan: PagePlan
    prefixes: PrefixStore | None = None
    """None: no prefix cache."""
    device: Device = CPU
    stage: Stage = "compress"
    _open: dict[str, Job] = field(default_factory=dict[str, Job])
    """Requests with layers still to come."""
    _unannounced: deque[Layers] = field(default_factory=lambda: deque(maxlen=UNANNOUNCED))
    """Layers that arrived before the router's ``Expect``, or after a cancel. Their pages still
    belong to the prefill worker."""
    _early: list[EarlyEncode] = field(default_factory=list[EarlyEncode])
    _deferred: dict[str, CompressItem] = field(default_factory=dict[str, CompressItem])
    """Items that arrived before earlier layers of their request."""
    _planned: dict[str, Job] = field(default_factory=dict[str, Job])
    _ready: list[Job] = field(default_factory=list[Job])

    def __post_init__(self) -> None:
        self._memory = DevicePages.in_place(self.pool.arena, self.device)
        self._judge = TokenJudge(self._memory, self.plan.raw)
        plans = self.plan.by_method.values()
        self._mergers = {
            (file, plan.high): PromptMerger(file, plan, self.device)
            for plan in plans
            for file in plan.policy.mergers.values()
        }
        self._key_mergers = {
            (plan.policy.key_merging, plan.high): KeyMerger(plan, self.device)
            for plan in plans
            if plan.policy.key_merging is not None
        }
        self._predictors = {
            plan.policy.scorer: AttentionPredictor(plan, self.device)
            for plan in plans
            if plan.policy.scorer is not None
        }

    # ---------------------------------------------------------------- the Engine protocol

    def accept(self, message: Message) -> Iterable[Send] | None:
        if isinstance(message, Expect):
            return [send for name in message.requests for send in self._expect(name)]
        if isinstance(message, Layers):
            return self._take_layers(message)
        if isinstance(message, Compress):
            return [send for item in message.items for send in self._plan_item(item)]
        if isinstance(message, Encode):
            arena = message.arena if self.pool.has(message.arena) else self.pool.home
            for name in message.requests:
                job = self._planned.pop(name, None)
                if job is not None:
                    job.arena = arena
                    self._ready.append(job)
            return ()
        return None

    def has_work(self) -> bool:
        return bool(self._early or self._ready)

    def wait_s(self) -> float | None:
        return None

    def is_late(self) -> bool:
        return False

    def core_use(self) -> CoreUse:
        return CoreUse.TEAM

    def requests(self) -> list[str]:
        return [*self._open, *self._planned, *(job.request for job in self._ready)]

    def cancel(self, requests: Sequence[str]) -> None:
        gone = set(requests)
        for job in [*self._open.values(), *self._planned.values(), *self._ready]:
            if job.request in gone:
                self._release(job)
        for name in gone:
            for jobs in (self._open, self._planned, self._deferred):
                jobs.pop(name, None)
        self._ready = [job for job in self._ready if job.request not in gone]
        self._early = [one for one in self._early if one.job.request not in gone]
        self.pool.withdraw(requests)

    def _release(self, job: Job) -> None:
        """Release the prefix of a job that was not handed over, and free its encoded groups."""
        if job.shared is not None:
            self.pool.release_prefix(job.shared.pin)
            job.shared = None
        for group in job.groups:
            if group.encoded:
                self.pool.free(group.pages)
                group.encoded = []

    def abandon(self) -> None:
        self.cancel(self.requests())
        self.pool.withdraw_all()

    def step(self) -> Iterable[Send]:
        return self._step_early() if self._early else self._step_ready()

    def _step_early(self) -> list[Send]:
        """Encode early layers; their raw pages are freed into this worker's free pages."""
        early = list(self._early)  # cleared at the end, so that a fault fails these requests too
        groups = [one.group for one in early]
        names = [one.job.request for one in early]
        ids, refused = self._allocate(sum(group.new_pages for group in groups), names)
        if refused:
            return refused
        try:
            encoded = split_by_class(ids, groups)
            self._encode([one.job for one in early], groups, encoded)
            self.pool.release([group.lease_ref.lease for group in groups], keep=True)
        except Exception:
            self._free(ids)
            raise
        for group, own in zip(groups, encoded, strict=True):
            group.encoded = own
        self.pool.free(np.concatenate([group.raw.ravel() for group in groups]))
        self._early.clear()
        return [one.reply for one in early]

    def _step_ready(self) -> list[Send]:
        """Encode the requests for one arena, straight into it."""
        arena = self._ready[0].arena
        jobs = [job for job in self._ready if job.arena == arena]  # as above
        groups = [job.last for job in jobs]
        moving = [job.last for job in jobs if job.moves_raw]
        count = sum(group.new_pages for group in groups)
        total = count + sum(group.raw.size for group in moving)
        ids, refused = self._allocate(total, [job.request for job in jobs], arena)
        if refused:
            return refused
        try:
            encoded = split_by_class(ids[:count], groups)
            self._move_raw(moving, ids[count:])
            self._encode(jobs, groups, encoded)
            sends = self._hand_over(jobs, encoded)
        except Exception:
            self._free(ids)
            raise
        self._memory.touch(ids)
        self._ready = [job for job in self._ready if job.arena != arena]
        return sends

    def _allocate(self, pages: int, requests: list[str], arena: str = "") -> tuple[Ids, list[Send]]:
        """Allocate pages; if there are too few, fail these requests."""
        try:
            return self.pool.allocate(pages, arena), []
        except TriptychError as error:
            names = list(dict.fromkeys(requests))
            self.cancel(names)
            return NO_PAGES, [refuse(name, error) for name in names]

    def _move_raw(self, groups: list[LayerGroup], ids: Ids) -> None:
        """Copy the raw pages of 16-bit requests to the arena of their decode workers."""
        for group in groups:
            new, ids = ids[: group.raw.size].reshape(group.raw.shape), ids[group.raw.size :]
            copy_pages(self._memory, group.raw, new)
            group.raw = new

    def _free(self, ids: Ids) -> None:
        if not self.pool.is_lost:
            self.pool.free(ids)

    def _publish(self, prefixes: PrefixStore, prefix: Prefix, raw: Ids, tokens: int) -> None:
        """Publish whole blocks of a prompt; with a prefix cache, all layers arrive at once."""
        plan = prefixes.plan
        judged = plan.policy.needs_significance and not plan.rounds_prompts
        significance = self._judge.significance(raw, tokens) if judged else None
        prefixes.publish(prefix, RawPages(self._memory, plan, raw, significance))

    # ---------------------------------------------------------------- plan

    def _expect(self, request: str) -> list[Send]:
        self._open[request] = Job(request, self.plan)
        early = [layers for layers in self._unannounced if layers.request == request]
        for layers in early:
            self._unannounced.remove(layers)
        return [send for layers in early for send in self._take_layers(layers)]

    def _take_layers(self, message: Layers) -> list[Send]:
        """Plan early layers; if a deferred item waited for them, plan its request."""
        name = message.request
        job = self._open.get(name)
        if job is None:
            self._unannounced.append(message)
            return []
        job.tokens, job.floor = message.handle.tokens, message.floor
        job.segments = message.segments
        try:
            job.plan = self.plan.of_method(message.method)
            if job.rows != message.first * self.plan.geometry.kv_heads:
                raise MessageError(f"layers from {message.first} on behind {job.rows} head rows")
            group = self._attach(job.plan, message.handle, rows_of(message.handle))
            self._predict(job, group, message.first)
            group.classes = self._classes(group, job)
        except TriptychError as error:
            return [self._fail(name, error)]
        job.groups.append(group)
        self._early.append(EarlyEncode(job, group, message))
        item = self._deferred.pop(name, None)
        return [] if item is None else self._plan_item(item)

    def _plan_item(self, item: CompressItem) -> list[Send]:
        """Plan the rest of a request once all of its layers have arrived."""
        announced, every = self._open.get(item.request), self.plan.geometry.head_rows
        if announced is not None and announced.rows + rows_of(item.handle) < every:
            self._deferred[item.request] = item
            return []
        job = self._open.setdefault(item.request, Job(item.request, self.plan))
        job.tokens, job.floor = item.handle.tokens, item.floor
        job.segments = item.segments
        try:
            job.plan = self.plan.of_method(item.method)
            self._plan(job, item, every - job.rows)
        except TriptychError as error:
            return [self._fail(item.request, error)]
        self._planned[item.request] = self._open.pop(item.request)
        planned = Planned(request=job.request, pages=job.total_pages, shared=job.shared_pages)
        return [Send(ROUTER, planned)]

    def _fail(self, request: str, error: TriptychError) -> Send:
        self.cancel([request])
        return refuse(request, StageLost("prefill") if isinstance(error, StaleHandle) else error)

    def _plan(self, job: Job, item: CompressItem, rows: int) -> None:
        """Attach the raw pages, and count the pages that the request needs.

        Blocks of the prompt are published first, so that the request shares them with the cache.
        """
        plan = job.plan
        group = self._attach(plan, item.handle, rows)
        job.groups.append(group)
        fixed = NONE
        rounded = plan.rounded_tokens(item.prefix.prompt_tokens).stop if item.prefix else 0
        self._predict(job, group, plan.geometry.layers - rows // plan.geometry.kv_heads, rounded)
        if self.prefixes is not None and item.prefix is not None and plan.caches_prompts:
            prefixes = self.prefixes.of_method(item.method)
            self._publish(prefixes, item.prefix, group.raw, job.tokens)
            fixed = plan.fixed_span(rounded or item.prefix.cached_tokens, job.tokens)
            job.shared = prefixes.share(item.prefix, fixed)
        if job.shared is None and not rounded:
            fixed = NONE
        if plan.compresses:
            group.classes = self._classes(group, job, fixed, rounded)
            if fixed and job.shared is None:
                in_window = windows_of(job, group) > 0
                group.classes.append(self._fixed_class(plan.high, in_window, fixed))

    def _fixed_class(self, high: PageLayout, in_window: Mask, fixed: range) -> ClassPlan:
        """Fixed pages of the request's own, as the blocks that the cache did not take.

        ``in_window``: head rows that have none.
        """
        rows, count, there = len(in_window), len(fixed), self.device.name
        beside_sink = -fixed.start % high.tokens
        positions = torch.arange(fixed.start, fixed.stop, dtype=torch.int32, device=there)
        places = torch.arange(count, dtype=torch.int32, device=there)
        places = ((places - beside_sink) % count).expand(rows, count)
        if in_window.any():
            places = places.masked_fill(self.device.put(in_window)[:, None], NOT_IN_CLASS)
        counts: Ids = np.where(in_window, 0, count).astype(np.int32)
        return ClassPlan(high, positions, places, counts, is_fixed=True)

    def _attach(self, plan: PagePlan, handle: KVHandle, rows: int) -> LayerGroup:
        counts, ids = unpack_run(handle.runs[0], plan.raw, rows, self.pool.capacity_pages)
        (lease_ref,) = self.pool.attach([(handle.lease_ref, ids)])
        self._memory.touch(ids)
        sink = min(plan.sink_tokens, handle.tokens)
        leaving = range(sink, sink + plan.leaving_tokens(handle.tokens))
        if plan.reads_in_blocks:
            return LayerGroup(lease_ref, rectangular(ids, counts, plan.raw), leaving, counts)
        return LayerGroup(lease_ref, ids.reshape(rows, -1), leaving)

    def _predict(self, job: Job, group: LayerGroup, first: int, rounded: int = 0) -> None:
        """If the method has a scorer, let it write the sums that prefill did not.

        ``first``: the first layer of the group. ``rounded``: first tokens, which stay high.
        """
        scorer = job.plan.policy.scorer
        if scorer is None:
            return
        raw = self._raw(group.raw)
        self._predictors[scorer].write(raw, job.tokens, first)
        if rounded:
            first_tokens = torch.arange(rounded, device=self.device.name)
            raw.set_scores(first_tokens, torch.tensor(ALWAYS_HIGH, device=self.device.name))

    def _raw(self, raw: Ids) -> RawTokens:
        pages = self.device.put(raw).long()
        return RawTokens(self._memory.near, self.plan.raw, self.plan.geometry.kv_heads, pages)

    def _recent_class(self, group: LayerGroup, job: Job) -> ClassPlan:
        """The sink and the newest tokens."""
        rows, leaving, there = len(group.raw), group.leaving, self.device
        count = job.tokens - len(leaving)
        kept = np.r_[0 : leaving.start, leaving.stop : job.tokens].astype(np.int32)
        places = there.put(np.arange(count, dtype=np.int32)).expand(rows, count)
        counts: Ids = np.full(rows, count, np.int32)
        return ClassPlan(job.plan.recent, there.put(kept), places, counts)

    def _classes(
        self, group: LayerGroup, job: Job, fixed: range = NONE, rounded: int = 0
    ) -> list[ClassPlan]:
        """Recent pages, and the classes of the leaving tokens, without those in fixed pages.

        All of them are high if the request's floor is. Layers with a sliding window have no fixed
        pages and no low tokens, and drop what lies before the window.

        ``rounded``: first tokens, which are high whatever attention they receive, and on which no
        threshold depends: another prompt may have computed them.

        Counts are exact. The significance of shared tokens is computed too, if thresholds depend
        on it.
        """
        policy, raw, tokens = job.plan.policy, group.raw, job.tokens
        if group.stored is not None:
            return classes_of_stored(job, group, group.stored, self.device)
        if job.plan.merges and job.floor == "low":
            return [self._recent_class(group, job), merged_class(group, job, self.device)]
        rows, there = len(raw), self.device.name
        first, end = group.leaving.start, group.leaving.stop
        every = np.arange(first, end, dtype=np.int32)
        windows = windows_of(job, group)
        in_window = windows > 0
        own = every if in_window.any() else every[(every < fixed.start) | (every >= fixed.stop)]
        is_judged = first < end and job.floor == "low"
        if is_judged:
            scores, high, low = self._judge.judge(job, group, own, rounded)
        else:
            scores = torch.zeros(rows, own.size, device=there)
            high, low = torch.zeros(2, rows, device=there)
        lengths = torch.full((rows,), own.size, dtype=torch.int32, device=there)
        always = {
            "first": int(np.count_nonzero(own < rounded)),
            "window": int(np.count_nonzero(own >= tokens - policy.high_window_tokens)),
        }
        if policy.images is not None:
            always["window"] = 0  # each modality has its own
        if in_window.any():
            kept = self.device.put(kept_tokens(job, windows, own, fixed))
            scores, always = _forced(scores, kept, **always), {}
        classes, ranks, counts = plan_tokens(scores, lengths, high, low, **always)
        low_pays = _low_pays(job.plan, counts.T.contiguous().cpu().numpy())
        low_pays &= ~in_window
        if not low_pays.all():
            high = torch.where(self.device.put(low_pays), high, low)
            classes, ranks, counts = plan_tokens(scores, lengths, high, low, **always)
        positions, recent = self.device.put(own), self._recent_class(group, job)
        places = [ranks.masked_fill(classes != name, NOT_IN_CLASS) for name in (HIGH, LOW)]
        # Last, so that no work of the device is pending when the plan is announced.
        counted = counts.T.contiguous().cpu().numpy()
        return [
            recent,
            *(
                ClassPlan(layout, positions, here, each)
                for layout, here, each in zip(job.plan.classes, places, counted, strict=False)
            ),
        ]

    # ---------------------------------------------------------------- encode

    def _encode(self, jobs: list[Job], groups: list[LayerGroup], encoded: list[list[Ids]]) -> None:
        self._merge(jobs, groups, encoded)
        for job, group, ids in zip(jobs, groups, encoded, strict=True):
            if job.plan.merges:
                self._clear_scores(group)
            for plan, own in zip(group.classes, ids, strict=True):
                if own.size and plan.tokens.numel():
                    self._encode_class(group, plan, own)
        self.device.wait()

    def _merge(self, jobs: list[Job], groups: list[LayerGroup], encoded: list[list[Ids]]) -> None:
        """Merge tokens: those of all prompts that one network merges together."""
        by_network = dict[tuple[LearnedFile, PageLayout], list[MergedPrompt[MergedChunks]]]()
        for job, group, ids in zip(jobs, groups, encoded, strict=True):
            for plan, own in zip(group.classes, ids, strict=True):
                for merged in (one for one in plan.merged if one.made):
                    pages = self.device.put(own).view(len(group.raw), -1)
                    raw = self._raw(group.raw)
                    if isinstance(merged, MergedSets):
                        prompt = MergedPrompt(raw, job.tokens, merged, pages)
                        self._key_mergers[merged.rule, plan.layout].merge(prompt)
                    else:
                        found = by_network.setdefault((merged.network, plan.layout), [])
                        found.append(MergedPrompt(raw, job.tokens, merged, pages))
        for merger, prompts in by_network.items():
            self._mergers[merger].merge(prompts)

    def _clear_scores(self, group: LayerGroup) -> None:
        """Set the scores of raw tokens to 0: where tokens are merged, a score is a logit bias.

        Tokens of the window will move to pages with biases as they are.
        """
        segments(self._memory.near, self.plan.raw).scores[self.device.put(group.raw).long()] = 0.0

    def _encode_class(self, group: LayerGroup, plan: ClassPlan, ids: Ids) -> None:
        """Encode the tokens of a class, or of fixed blocks, into its pages, given in row order."""
        raw, put, rows = self.plan.raw, self.device.put, len(group.raw)
        full: Ids = np.full((rows, 1), group.raw.shape[1] * raw.tokens, np.int32)
        table = plan.table(ids)
        move_tokens(
            self._memory.near,
            Section(raw, put(group.raw[:, None]), put(full)),
            Section(plan.layout, put(table.pages[:, 0]), put(table.tokens[:, 0])),
            put(np.arange(rows, dtype=np.int32)),
            plan.tokens.view(-1, 1, plan.tokens.shape[-1]).expand(rows, -1, -1),
            plan.places[:, None],
        )

    def _hand_over(self, jobs: list[Job], encoded: list[list[Ids]]) -> list[Send]:
        """Hand the pages over, and free the raw ones, in one call."""
        all_runs = [self._runs(job, last) for job, last in zip(jobs, encoded, strict=True)]
        fixed_runs = [job.fixed_run(last) for job, last in zip(jobs, encoded, strict=True)]
        parts = [
            runs if fixed is None else [*runs, fixed]
            for runs, fixed in zip(all_runs, fixed_runs, strict=True)
        ]
        lease_refs = self.pool.handoff(
            [
                (job.request, np.concatenate([pool_pages(ids, of.parts) for of, _, ids in part]))
                for job, part in zip(jobs, parts, strict=True)
            ],
            releases=[job.last.lease_ref.lease for job in jobs],
            about=[
                _about(runs if job.shared else part)
                for job, runs, part in zip(jobs, all_runs, parts, strict=True)
            ],
            pins=[job.shared.pin if job.shared else None for job in jobs],
        )
        return [
            self._compressed(job, runs, fixed, lease_ref)
            for job, runs, fixed, lease_ref in zip(
                jobs, all_runs, fixed_runs, lease_refs, strict=True
            )
        ]

    def _runs(self, job: Job, last: list[Ids]) -> list[Run]:
        """Pages of a request by format, for its handle: each class, or the raw pages."""
        if job.plan.compresses:
            return job.runs(last)
        tokens = np.full(self.plan.geometry.head_rows, job.tokens, np.int32)
        return [(self.plan.raw, tokens, np.concatenate([of.raw.ravel() for of in job.groups]))]

    def _compressed(
        self, job: Job, runs: list[Run], fixed: Run | None, lease_ref: LeaseRef
    ) -> Send:
        job.shared = None  # its pin belongs to the request now
        handle = make_handle(lease_ref, runs, job.tokens, fixed)
        report = CompressionReport(
            policy=job.plan.policy.name,
            raw_bytes=self.plan.raw_bytes(job.tokens),
            stored_bytes=job.total_pages * self.plan.page_bytes,
            shared_bytes=lease_ref.shared * self.plan.page_bytes,
            modalities=modality_reports(job, self.plan) if job.segments else (),
            classes=class_shares(handle, job.plan, job.groups),
        )
        return Send(ROUTER, Compressed(request=job.request, handle=handle, report=report))


def _low_pays(plan: PagePlan, counts: Ids) -> NDArray[np.bool_]:
    """Whether a head row takes fewer pages with a low class than with all its tokens high.

    ``counts``: high and low tokens, [2, head rows].
    """
    if plan.low is None:
        return np.ones(counts.shape[1], np.bool_)
    high, low = pages_of(counts[0], plan.high), pages_of(counts[1], plan.low)
    all_high = pages_of(counts[0] + counts[1], plan.high)
    return np.less(high + low, all_high) | np.equal(low, 0)


def _forced(scores: Tensor, kept: Tensor, first: int, window: int) -> Tensor:
    """Scores with which the ``first`` and the last ``window`` tokens are high, and those that a
    head row does not keep are dropped."""
    forced = scores.clone()
    forced[:, :first] = forced[:, scores.shape[1] - window :] = torch.inf
    return forced.masked_fill(~kept, -torch.inf)


def rows_of(handle: KVHandle) -> int:
    """Head rows of the raw pages of a handle."""
    return len(handle.runs[0].tokens) // 4


def _about(runs: list[Run]) -> About:
    """Pages by format, for the pool's statistics; it knows the tenant from the raw pages."""
    return About(
        formats=tuple(
            (layout.format.name, pool_pages(ids, layout.parts).size) for layout, _, ids in runs
        )
    )
