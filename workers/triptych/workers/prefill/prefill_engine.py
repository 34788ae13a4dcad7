# pyright: reportUnknownMemberType=false
# Some methods of tensors have no types.
"""The prefill stage: computes prompts in chunks, stores raw pages, samples the first token."""

import logging
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import repeat

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor

from triptych.core.errors import TriptychError
from triptych.core.handles import KVHandle
from triptych.core.messages import (
    ROUTER,
    ImagesEncoded,
    Layers,
    LayersEncoded,
    Message,
    Prefill,
    Prefilled,
    Request,
    Send,
    Stage,
)
from triptych.core.pages import PagePlan
from triptych.kernels import ALWAYS_HIGH, largest_sums, load_tokens, mean_sums, sums_of_heads
from triptych.kernels.pages import segments
from triptych.kvpool import About, WorkerPool
from triptych.workers.core_scheduler import CoreUse
from triptych.workers.device import CPU, Device
from triptych.workers.kv.device_pages import DevicePages
from triptych.workers.kv.handle_codec import make_handle
from triptych.workers.kv.prefix_cache import PrefixStore, copy_pages
from triptych.workers.models.runner import Runner
from triptych.workers.prefill.block_rows import BlockRows, question_weights
from triptych.workers.prefill.chunk_pass import ChunkPass
from triptych.workers.prefill.chunk_scheduler import ChunkScheduler
from triptych.workers.prefill.image_features import ImageFeatures
from triptych.workers.prefill.prefix_restore import PrefixRestore
from triptych.workers.prefill.prompt_batch import (
    ChunkBudget,
    LayerwisePrefill,
    PendingRequest,
    PrefillChunk,
    Prompt,
)
from triptych.workers.prefill.prompt_logprobs import PromptLogprobRows
from triptych.workers.prefill.prompt_statistics import StatisticsFactory
from triptych.workers.sampling.output import OutputFactory, OutputProcessor
from triptych.workers.sampling.sampler import Draw, sample
from triptych.workers.stage import refuse

logger = logging.getLogger(__name__)

Ids = NDArray[np.int32]
NO_PAGES: Ids = np.empty((0, 0, 0), np.int32)


@dataclass(frozen=True)
class Started:
    """A request whose first token was sampled and that goes on."""

    prompt: Prompt
    request: Request
    answer: OutputProcessor


@dataclass
class PrefillEngine:
    """Chunked prefill: up to ``chunk_tokens`` tokens per step, from one prompt or several.

    Between two steps a shorter prompt may overtake a longer one. Requests with equal prompts, such
    as the choices of one request, are computed once: each gets a first token of its own, and a copy
    of the raw pages.

    A prompt that is longer than a step is prefilled layerwise if the router names a compressor for
    it: all tokens at once, some layers per step. The compressor encodes finished layers while the
    next ones are computed, so at most two parts of the prompt are in raw pages. The residual stream
    is kept from step to step.
    """

    runner: Runner
    pool: WorkerPool
    plan: PagePlan
    answers: OutputFactory
    chunk_tokens: int
    prefixes: PrefixStore | None = None
    """None: no prefix cache."""
    draw: Draw = sample
    """Samples tokens from logits; evals replace it with teacher forcing."""
    device: Device = CPU
    attention_dtype: torch.dtype = torch.float32
    """Type of the products of attention."""
    two_way_images: bool = False
    """Whether the tokens of an image attend to all of it, and not only to those before them."""
    frequencies: Sequence[float] = ()
    """Of RoPE, if a method needs them."""
    stage: Stage = "prefill"
    _scheduler: ChunkScheduler = field(default_factory=ChunkScheduler)
    _waiting: list[PendingRequest] = field(default_factory=list[PendingRequest])
    _prompts: list[Prompt] = field(default_factory=list[Prompt])

    def __post_init__(self) -> None:
        self._memory = DevicePages.in_place(self.pool.arena, self.device)
        self._restores = PrefixRestore(self.prefixes) if self.prefixes is not None else None
        self._images = ImageFeatures(self.pool)
        self._pass = ChunkPass(
            self.runner,
            self.pool.arena,
            self._memory,
            self.plan,
            self.device,
            self.attention_dtype,
            self.chunk_tokens,
        )
        self._statistics = StatisticsFactory(
            self.plan.geometry, self.runner.num_heads, self.frequencies, self.device.name
        )

    # ---------------------------------------------------------------- the Engine protocol

    def accept(self, message: Message) -> Iterable[Send] | None:
        if isinstance(message, LayersEncoded):
            self._on_layers_encoded(message)
            return ()
        if isinstance(message, ImagesEncoded):
            self._images.add(message)
            return ()
        if not isinstance(message, Prefill):
            return None
        places = zip(message.encoders or repeat(""), message.arenas or repeat(""), strict=False)
        for request, (encoder, arena) in zip(message.requests, places, strict=False):
            due = self._scheduler.due(request.known_tokens, request.slo.ttft_s)
            if not encoder and (equal := self._equal(request)) is not None:
                equal.equal.append(request)
                equal.due = min(equal.due, due)
                continue
            # An unknown method is refused when its prompt starts.
            plan = self.plan.by_method.get(request.method, self.plan)
            layers_per_part = plan.of_floor(request.floor).layers_of(request.known_tokens)
            layerwise = (
                LayerwisePrefill(encoder, message.reader, layers_per_part) if encoder else None
            )
            self._waiting.append(PendingRequest(request, due, layerwise=layerwise, arena=arena))
            if self._restores is not None and request.method in ("", *self.plan.by_method):
                self._restores.start(request)
        return ()

    def has_work(self) -> bool:
        if not all(prompt.waits_for_compressor for prompt in self._prompts):
            return True
        return any(map(self._is_ready, self._waiting))

    def _is_ready(self, pending: PendingRequest) -> bool:
        """Whether the features of its images are there, and its prefix need not be waited for."""
        if not self._images.are_there(pending.requests):
            return False
        return self._restores is None or self._restores.is_ready(pending.request.id)

    def wait_s(self) -> float | None:
        return None if self._restores is None else self._restores.wait_s

    def is_late(self) -> bool:
        return False

    def core_use(self) -> CoreUse:
        return CoreUse.TEAM

    def requests(self) -> list[str]:
        entries = [*self._waiting, *self._prompts]
        return [request.id for entry in entries for request in entry.requests]

    def cancel(self, requests: Sequence[str]) -> None:
        gone = set(requests)
        self._waiting = [pending for pending in self._waiting if self._stays(pending, gone)]
        if self._restores is not None:
            self._restores.forget(gone)
        self._images.forget(gone)
        for prompt in [p for p in self._prompts if not self._stays(p, gone)]:
            self._drop(prompt)
        self.pool.withdraw(requests)

    def _stays(self, entry: Prompt | PendingRequest, gone: set[str]) -> bool:
        """Take cancelled requests from a prompt; whether any request is left that needs it."""
        left = [request for request in entry.requests if request.id not in gone]
        if not left:
            return False
        if self._restores is not None and left[0] is not entry.request:
            self._restores.pass_on(entry.request.id, left[0])
        entry.request, entry.equal = left[0], left[1:]
        return True

    def _equal(self, request: Request) -> Prompt | PendingRequest | None:
        """The entry that computes the prompt of a request; None: the request needs its own."""
        if request.is_scored:
            return None
        key = request.prompt_key
        for entry in (*self._prompts, *self._waiting):
            if (
                entry.layerwise is None
                and not entry.request.is_scored
                and entry.request.known_tokens == request.known_tokens
                and entry.request.prompt_key == key
            ):
                return entry
        return None

    def abandon(self) -> None:
        self.cancel(self.requests())
        self.pool.withdraw_all()

    def step(self) -> Iterable[Send]:
        refused, chunks = self._schedule_chunks()
        if not chunks:
            return refused
        for chunk in chunks:
            if chunk.prompt.bounded is not None:
                chunk.prompt.bounded.reserve(chunk.end)
        began_s = time.perf_counter()
        logits = self._pass(self.runner, chunks)
        took_s, tokens = time.perf_counter() - began_s, sum(chunk.tokens for chunk in chunks)
        share = len(chunks[0].layers) / self.plan.geometry.layers
        self._scheduler.note(max(1, round(tokens * share)), took_s)
        for chunk in chunks:
            self._end_block(chunk)
            chunk.prompt.read += chunk.tokens * chunk.has_last_layer
            chunk.prompt.seconds += chunk.tokens * took_s / tokens
        done = [chunk.prompt for chunk in chunks if chunk.ends_prompt]
        parts = [self._hand_over_layers(chunk) for chunk in chunks if not chunk.has_last_layer]
        return [*refused, *parts, *self._finish(done, logits)]

    def _end_block(self, chunk: PrefillChunk) -> None:
        """Drop tokens down to the budget, if a chunk ends a block of a prompt read in blocks."""
        prompt, bounded = chunk.prompt, chunk.prompt.bounded
        if bounded is None or chunk.end != bounded.block_end(chunk.start):
            return
        assert prompt.attention is not None
        bounded.end_block(self._memory.near, self.device, prompt.attention, chunk.end)
        if chunk.ends_prompt:
            self.device.wait()
            prompt.pages = bounded.final_pages()
            self._free([bounded.spare])

    # ---------------------------------------------------------------- starting prompts

    def _start(self, pending: PendingRequest, refused: list[Send]) -> Prompt | None:
        """Allocate pages for a prompt; None if its prefix is not restored yet, the features of its
        images are not there, or it is refused.

        Other prompts are prefilled while it waits.
        """
        if not self._images.are_there(pending.requests):
            return None
        if self._restores is not None and not self._restores.poll(pending.request.id):
            return None
        self._waiting.remove(pending)
        try:
            prompt = self._prompt(pending)
        except Exception as error:  # noqa: BLE001  # others of the step go on
            refused.extend(_refusal(request, error) for request in pending.requests)
            return None
        self._prompts.append(prompt)
        return prompt

    def _prompt(self, pending: PendingRequest) -> Prompt:
        request = pending.request
        plan = self.plan.of_method(request.method).of_floor(request.floor)
        blocks_of = 0 if request.is_scored else request.known_prompt_tokens
        rounded = plan.rounded_tokens(blocks_of)
        prompt = Prompt(
            request,
            plan,
            pending.equal,
            pending.due,
            NO_PAGES,
            pending.arena,
            rounded=rounded,
            layerwise=pending.layerwise,
            features=self._images.read(pending.requests),
            two_way_images=self.two_way_images,
        )
        if prompt.layerwise is not None:
            return prompt
        try:
            self._allocate(prompt, range(self.plan.geometry.layers))
            if request.is_scored:
                prompt.scores = PromptLogprobRows(request.prompt, request.sampling.prompt_logprobs)
            if self.prefixes is not None and plan.caches_prompts:
                self._load_prefix(prompt, self.prefixes.of_method(request.method))
        except Exception:
            self._free([prompt.pages])
            raise
        return prompt

    def _load_prefix(self, prompt: Prompt, prefixes: PrefixStore) -> None:
        """Copy cached prefix pages; at least the last token is left to compute."""
        # Attention to cached tokens decides nothing where these are always high.
        attention = None if prompt.plan.rounds_prompts else prompt.attention
        prompt.read = prompt.cached = prefixes.load(prompt.request, prompt.pages, attention)

    def _allocate(self, prompt: Prompt, layers: range) -> None:
        """Allocate raw pages for some layers, and what is measured in them."""
        tokens, kv_heads = prompt.request.known_tokens, self.plan.geometry.kv_heads
        per_row, policy = prompt.plan.raw_row_pages(tokens), prompt.plan.policy
        ids = self.pool.allocate(len(layers) * kv_heads * per_row, prompt.arena)
        prompt.layers = layers
        if policy.reads_in_blocks:
            prompt.pages, ends = ids, self.answers.model.eos_token_ids
            weights = question_weights(prompt.request.known, ends, self.device)
            prompt.bounded = BlockRows(prompt.plan, tokens, ids, weights)
            shape = len(layers), self.runner.num_heads, prompt.bounded.most_slots
            prompt.attention = torch.zeros(shape, device=self.device.name)
            return
        prompt.pages = ids.reshape(len(layers), kv_heads, per_row)
        prompt.statistics = self._statistics.make(policy, layers, tokens, prompt.first_observed)
        if policy.observes_attention:
            shape = (len(layers), self.runner.num_heads, tokens - prompt.rounded.stop)
            prompt.attention = torch.zeros(shape, device=self.device.name)

    def _drop(self, prompt: Prompt) -> None:
        self._prompts.remove(prompt)
        self.pool.free(prompt.pages.ravel())

    # ---------------------------------------------------------------- one step

    def _schedule_chunks(self) -> tuple[list[Send], list[PrefillChunk]]:
        """Chunks of this step, earliest due first, and refusals of prompts that could not start.

        Prompts with prompt logprobs have a smaller budget: their logits take memory.
        """
        refused, chunks = list[Send](), list[PrefillChunk]()
        budget, layers = ChunkBudget(self.chunk_tokens), range(self.plan.geometry.layers)
        queue: list[Prompt | PendingRequest] = [*self._prompts, *self._waiting]
        for entry in self._scheduler.in_order(queue):
            if budget.tokens <= 0:
                break
            if entry.layerwise is not None and chunks:
                continue  # all chunks of a step have the same layers
            prompt = self._start(entry, refused) if isinstance(entry, PendingRequest) else entry
            if prompt is None:
                continue
            if prompt.layerwise is not None:
                part = self._next_layers(prompt, prompt.layerwise, refused)
                if part is not None:
                    return refused, [part]
            elif (chunk := budget.take(prompt, layers)) is not None:
                chunks.append(chunk)
        return refused, chunks

    def _next_layers(
        self, prompt: Prompt, layerwise: LayerwisePrefill, refused: list[Send]
    ) -> PrefillChunk | None:
        """The next layers of a prompt; None if it waits for its compressor, or is refused."""
        if prompt.waits_for_compressor:
            return None
        every = self.plan.geometry.layers
        layers = range(
            layerwise.next_layer, min(layerwise.next_layer + layerwise.layers_per_part, every)
        )
        try:
            self._allocate(prompt, layers)
        except TriptychError as error:
            refused.append(refuse(prompt.request.id, error))
            self._prompts.remove(prompt)
            return None
        return PrefillChunk(
            prompt, 0, prompt.tokens_left, layers, has_last_layer=layers.stop == every
        )

    def _finish(self, done: list[Prompt], logits: Tensor) -> list[Send]:
        """Sample first tokens, and hand over the pages of unfinished requests."""
        if not done:
            return []
        sends, going_on = list[Send](), list[Started]()
        rows, started = list[int](), list[Started]()
        for row, prompt in enumerate(done):
            for request in prompt.requests:
                answer = self._start_answer(request, sends)
                if answer is not None:
                    rows.append(row)
                    started.append(Started(prompt, request, answer))
        if rows != list(range(len(done))):
            logits = logits[self.device.put(np.array(rows, np.int64))]
        drawn = self.draw(logits, [one.answer.sampler_row for one in started]) if started else []
        for one, draw in zip(started, drawn, strict=True):
            prompt, request, answer = one.prompt, one.request, one.answer
            answer.cached_tokens = min(prompt.cached, len(request.prompt))
            if prompt.scores is not None:
                answer.prompt_logprobs = prompt.scores.packed()
            try:
                sends.append(answer.push(draw))
            except TriptychError as error:
                sends.append(refuse(request.id, error))
                continue
            if answer.finish is None:
                going_on.append(one)
            else:
                sends.append(_prefilled(prompt, request, answer, None))
        return [*sends, *self._hand_over(done, going_on)]

    def _start_answer(self, request: Request, sends: list[Send]) -> OutputProcessor | None:
        """The answer to a prompt; None if it cannot begin, which fails this request alone."""
        try:
            return self.answers.start(request)
        except Exception as error:  # noqa: BLE001  # others of the step go on
            sends.append(_refusal(request, error))
            return None

    def _store_significance(self, prompt: Prompt) -> None:
        """Store the attention that each token received, or the score that a method makes of the
        queries, in the score segments of its pages."""
        kv_heads, per_page = self.plan.geometry.kv_heads, self.plan.raw.tokens
        if prompt.bounded is not None:
            return  # its tokens were chosen already
        if prompt.statistics is not None:
            sums = prompt.statistics.scores(partial(self._stored, prompt))
        elif prompt.attention is not None:
            rule = prompt.plan.policy.observing_rule
            if rule is not None and rule.heads:
                heads = rule.heads[prompt.layers.start : prompt.layers.stop]
                sums = sums_of_heads(prompt.attention, heads, kv_heads)
            elif rule is None or rule.while_generating:
                sums = largest_sums(prompt.attention, kv_heads)
            else:
                sums = mean_sums(prompt.attention, kv_heads)
            sums = F.pad(sums, (prompt.rounded.stop, 0), value=ALWAYS_HIGH)
        else:
            return
        padded = F.pad(sums, (0, -prompt.request.known_tokens % per_page))
        ids = self.device.put(prompt.pages).long().flatten()
        segments(self._memory.near, self.plan.raw).scores[ids] = padded.reshape(-1, per_page)

    def _stored(self, prompt: Prompt, layer: int) -> tuple[Tensor, Tensor]:
        """Keys and values of a prompt in one of the layers of its pages, [KH, N, d] float32."""
        pages = self.device.put(np.ascontiguousarray(prompt.pages[layer]))
        counts = np.full(len(pages), prompt.request.known_tokens, np.int32)
        keys, values, _ = load_tokens(
            self._memory.near, self.plan.raw, pages, self.device.put(counts)
        )
        return keys, values

    def _hand_over(self, done: list[Prompt], going_on: list[Started]) -> list[Send]:
        """Hand the pages of finished prompts to those of their requests that go on."""
        for prompt in done:
            self._store_significance(prompt)
        ready, copies, sends = list[Started](), list[Ids](), list[Send]()
        pages, unused = list[Ids](), {prompt: prompt.pages for prompt in done}
        try:
            for one in going_on:
                if one.prompt in unused:
                    pages.append(unused.pop(one.prompt))
                elif (copy := self._copy(one, sends)) is not None:
                    pages.append(copy)
                    copies.append(copy)
                else:
                    continue
                ready.append(one)
            counts = [one.prompt.row_tokens for one in ready]
            handles = self._hand_off([one.request for one in ready], pages, counts)
        except Exception:
            self._free(copies)
            raise
        for prompt in done:
            self._prompts.remove(prompt)
        self._free(list(unused.values()))
        return sends + [
            _prefilled(one.prompt, one.request, one.answer, handle)
            for one, handle in zip(ready, handles, strict=True)
        ]

    def _copy(self, one: Started, refused: list[Send]) -> Ids | None:
        """A copy of the raw pages of a prompt; None if its request is refused for want of pages."""
        pages = one.prompt.pages
        try:
            ids = self.pool.allocate(pages.size, one.prompt.arena)
        except TriptychError as error:
            refused.append(refuse(one.request.id, error))
            return None
        copy_pages(self._memory, pages.ravel(), ids)
        return ids.reshape(pages.shape)

    def _free(self, pages: list[Ids]) -> None:
        if pages and not self.pool.is_lost:
            self.pool.free(np.concatenate([ids.ravel() for ids in pages]))

    def _hand_over_layers(self, chunk: PrefillChunk) -> Send:
        """Hand finished layers to the prompt's compressor."""
        prompt, layerwise = chunk.prompt, chunk.prompt.layerwise
        assert layerwise is not None
        self._store_significance(prompt)
        (handle,) = self._hand_off([prompt.request], [prompt.pages], [prompt.row_tokens])
        prompt.pages, first = NO_PAGES, chunk.layers.start
        layerwise.unencoded.add(first)
        layers = Layers(
            request=prompt.request.id,
            first=first,
            handle=handle,
            reader=layerwise.reader,
            floor=prompt.request.floor,
            method=prompt.request.method,
            segments=prompt.request.segments,
        )
        return Send(layerwise.encoder, layers)

    def _on_layers_encoded(self, message: LayersEncoded) -> None:
        for prompt in self._prompts:
            if prompt.request.id == message.request and prompt.layerwise is not None:
                prompt.layerwise.unencoded.discard(message.first)

    def _hand_off(
        self, requests: list[Request], pages: list[Ids], counts: list[Ids]
    ) -> list[KVHandle]:
        """Put raw pages under a lease of each request, for its compressor.

        ``counts``: tokens of each head row.
        """
        self.device.wait()
        for ids in pages:
            self._memory.touch(ids.ravel())
        raw, handles = self.plan.raw, list[KVHandle]()
        lease_refs = self.pool.handoff(
            [(one.id, ids.ravel()) for one, ids in zip(requests, pages, strict=True)],
            about=[
                About(one.tenant, ((raw.format.name, ids.size),))
                for one, ids in zip(requests, pages, strict=True)
            ],
        )
        for request, ids, tokens, ref in zip(requests, pages, counts, lease_refs, strict=True):
            handles.append(make_handle(ref, [(raw, tokens, ids.ravel())], request.known_tokens))
        return handles


def _prefilled(
    prompt: Prompt, request: Request, answer: OutputProcessor, handle: KVHandle | None
) -> Send:
    message = Prefilled(
        request=request.id,
        first_token=answer.tokens[-1],
        handle=handle,
        token_s=prompt.token_s,
        cached_tokens=prompt.cached,
    )
    return Send(ROUTER, message)


def _refusal(request: Request, error: Exception) -> Send:
    """Fail a request that cannot begin; what is no error of ours is logged and not told."""
    if isinstance(error, TriptychError):
        return refuse(request.id, error)
    logger.error("%s cannot begin", request.id, exc_info=error)
    return refuse(request.id, TriptychError("internal error"))
