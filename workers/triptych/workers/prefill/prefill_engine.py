# pyright: reportUnknownMemberType=false
# Some methods of tensors have no types.
"""The prefill stage: reads prompts in ragged chunks, writes raw pages, draws the first token."""

import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import repeat
from typing import cast

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor

from triptych.core.errors import TriptychError
from triptych.core.handles import KVHandle
from triptych.core.messages import (
    ROUTER,
    Layers,
    LayersEncoded,
    Message,
    Prefill,
    Prefilled,
    Send,
    Stage,
)
from triptych.core.pages import PagePlan
from triptych.kernels import largest_sums
from triptych.kernels.pages import segments
from triptych.kvpool import About, WorkerPool
from triptych.workers.device import CPU, Device
from triptych.workers.kv.device_pages import DevicePages
from triptych.workers.kv.handle_codec import make_handle
from triptych.workers.kv.prefix_cache import PrefixStore, asks_for_prompt
from triptych.workers.models.runner import Runner
from triptych.workers.prefill.chunk_scheduler import ChunkScheduler
from triptych.workers.prefill.prefill_attention import ChunkAttention
from triptych.workers.prefill.prefix_restore import PrefixRestore
from triptych.workers.prefill.prompt_batch import (
    LayerwisePrefill,
    PendingRequest,
    Piece,
    Prompt,
    Room,
)
from triptych.workers.prefill.prompt_logprobs import PromptLogprobRows
from triptych.workers.sampling.output import OutputFactory, OutputProcessor
from triptych.workers.sampling.sampler import Draw, sample
from triptych.workers.stage import refuse

Ids = NDArray[np.int32]
NO_PAGES: Ids = np.empty((0, 0, 0), np.int32)


@dataclass
class PrefillEngine:
    """Reads up to ``chunk_tokens`` prompt tokens a step, from one prompt or from several.

    Between two steps a shorter prompt may overtake a longer one that is being read.

    A prompt that is longer than a step is read all tokens at once and some layers at a time, if the
    router names a compressor for it: that one encodes the layers that are read while the next ones
    are, so no more than two parts of the prompt are ever in raw pages. What passes from step
    to step is the residual stream.
    """

    runner: Runner
    pool: WorkerPool
    plan: PagePlan
    answers: OutputFactory
    chunk_tokens: int
    prefixes: PrefixStore | None = None
    """None: each prompt is read from its first token on."""
    draw: Draw = sample
    """How tokens are drawn from logits; the quality harness forces them."""
    device: Device = CPU
    half: bool = False
    """Whether attention multiplies numbers of 16 bits: those of keys and values are what raw pages
    hold. Tensor cores are many times as fast with them."""
    stage: Stage = "prefill"
    _chunks: ChunkScheduler = field(default_factory=ChunkScheduler)
    _waiting: list[PendingRequest] = field(default_factory=list[PendingRequest])
    _prompts: list[Prompt] = field(default_factory=list[Prompt])

    def __post_init__(self) -> None:
        self._memory = DevicePages.in_place(self.pool.arena, self.device)
        self._awaited = PrefixRestore(self.prefixes) if self.prefixes is not None else None

    # ---------------------------------------------------------------- the Engine protocol

    def accept(self, message: Message) -> Iterable[Send] | None:
        if isinstance(message, LayersEncoded):
            self._hear_encoded(message)
            return ()
        if not isinstance(message, Prefill):
            return None
        for request, encoder in zip(message.requests, message.encoders or repeat(""), strict=False):
            due = self._chunks.due(request.known_tokens, request.slo.ttft_s)
            at_once = self.plan.layers_of(request.known_tokens)
            ascent = LayerwisePrefill(encoder, message.reader, at_once) if encoder else None
            self._waiting.append(PendingRequest(request, due, ascent))
        if self._awaited is not None:
            for request in message.requests:
                self._awaited.begin(request)
        return ()

    def has_work(self) -> bool:
        if not all(prompt.waits for prompt in self._prompts):
            return True
        if self._awaited is None:
            return bool(self._waiting)
        return any(map(self._awaited.is_ready, (one.request.id for one in self._waiting)))

    def wait_s(self) -> float | None:
        return None if self._awaited is None else self._awaited.wait_s

    def is_late(self) -> bool:
        return False

    def requests(self) -> list[str]:
        return [one.request.id for one in self._waiting] + [p.request.id for p in self._prompts]

    def cancel(self, requests: Sequence[str]) -> None:
        gone = set(requests)
        self._waiting = [one for one in self._waiting if one.request.id not in gone]
        if self._awaited is not None:
            self._awaited.forget(gone)
        for prompt in [p for p in self._prompts if p.request.id in gone]:
            self._drop(prompt)
        self.pool.withdraw(requests)

    def abandon(self) -> None:
        self.cancel(self.requests())
        self.pool.withdraw_all()

    def step(self) -> Iterable[Send]:
        refused, pieces = self._choose_pieces()
        if not pieces:
            return refused
        began_s = time.perf_counter()
        logits = self._read(pieces)
        took_s, tokens = time.perf_counter() - began_s, sum(piece.tokens for piece in pieces)
        share = len(pieces[0].layers) / self.plan.geometry.layers
        self._chunks.note(max(1, round(tokens * share)), took_s)
        for piece in pieces:
            piece.prompt.read += piece.tokens * piece.is_through
            piece.prompt.seconds += piece.tokens * took_s / tokens
        done = [piece.prompt for piece in pieces if piece.is_last]
        parts = [self._hand_part_over(piece) for piece in pieces if not piece.is_through]
        return [*refused, *parts, *self._finish(done, logits)]

    # ---------------------------------------------------------------- taking prompts in

    def _start(self, one: PendingRequest, refused: list[Send]) -> Prompt | None:
        """Give a prompt its pages; None if its beginning is on its way from disk, or it cannot be.

        While it waits for the disk, others are read.
        """
        if self._awaited is not None and not self._awaited.settle(one.request.id):
            return None
        self._waiting.remove(one)
        try:
            prompt = self._prompt(one)
        except TriptychError as error:
            refused.append(refuse(one.request.id, error))
            return None
        self._prompts.append(prompt)
        return prompt

    def _prompt(self, one: PendingRequest) -> Prompt:
        request = one.request
        prompt = Prompt(request, one.due, NO_PAGES, ascent=one.ascent)
        if prompt.ascent is not None:
            return prompt
        self._give_room(prompt, self.plan.geometry.layers)
        if asks_for_prompt(request):
            prompt.scores = PromptLogprobRows(request.prompt, request.sampling.prompt_logprobs)
        if self.prefixes is not None:
            self._begin_with_prefix(prompt, self.prefixes)
        return prompt

    def _begin_with_prefix(self, prompt: Prompt, prefixes: PrefixStore) -> None:
        """Copy what an earlier request left; at least the last token is left to be read."""
        request = prompt.request
        try:
            prompt.read = prompt.cached = prefixes.load(request, prompt.pages, prompt.attention)
        except TriptychError:
            if not self.pool.is_lost:
                self.pool.free(prompt.pages.ravel())
            raise

    def _give_room(self, prompt: Prompt, layers: int) -> None:
        """Raw pages and sums of attention for some layers."""
        tokens, kv_heads = prompt.request.known_tokens, self.plan.geometry.kv_heads
        per_row = self.plan.raw.pages(tokens)
        ids = self.pool.allocate(layers * kv_heads * per_row)
        prompt.pages = ids.reshape(layers, kv_heads, per_row)
        if self.plan.policy.needs_significance:
            shape = (layers, self.runner.num_heads, tokens)
            prompt.attention = torch.zeros(shape, device=self.device.name)

    def _drop(self, prompt: Prompt) -> None:
        self._prompts.remove(prompt)
        self.pool.free(prompt.pages.ravel())

    # ---------------------------------------------------------------- one step

    def _choose_pieces(self) -> tuple[list[Send], list[Piece]]:
        """Who is due first, until the chunk is full; and what could not be begun.

        Of prompts whose every token is scored, less is read at once: their logits take memory.
        """
        refused, pieces = list[Send](), list[Piece]()
        room, layers = Room(self.chunk_tokens), range(self.plan.geometry.layers)
        queue: list[Prompt | PendingRequest] = [*self._prompts, *self._waiting]
        for one in self._chunks.in_order(queue):
            if not room.tokens:
                break
            if one.ascent is not None and pieces:
                continue  # all pieces of a step go through the same layers
            prompt = self._start(one, refused) if isinstance(one, PendingRequest) else one
            if prompt is None:
                continue
            if prompt.ascent is not None:
                part = self._next_part(prompt, prompt.ascent, refused)
                if part is not None:
                    return refused, [part]
            elif (piece := room.fill(prompt, layers)) is not None:
                pieces.append(piece)
        return refused, pieces

    def _next_part(
        self, prompt: Prompt, ascent: LayerwisePrefill, refused: list[Send]
    ) -> Piece | None:
        """The next layers of a prompt; None if it waits for its compressor, or cannot go on."""
        if prompt.waits:
            return None
        every = self.plan.geometry.layers
        layers = range(ascent.layer, min(ascent.layer + ascent.at_once, every))
        try:
            self._give_room(prompt, len(layers))
        except TriptychError as error:
            refused.append(refuse(prompt.request.id, error))
            self._prompts.remove(prompt)
            return None
        return Piece(prompt, 0, prompt.left, layers, is_through=layers.stop == every)

    def _read(self, pieces: list[Piece]) -> Tensor:
        """Run the model, or some layers, over the pieces; logits [prompts that end here, vocab]."""
        tokens = [
            token
            for piece in pieces
            for token in piece.prompt.request.known[piece.start : piece.start + piece.tokens]
        ]
        positions = np.concatenate([piece.positions for piece in pieces])
        starts = np.cumsum([0, *(piece.tokens for piece in pieces)])
        wanted = [
            int(start) + at
            for piece, start in zip(pieces, starts[:-1], strict=True)
            for at in piece.logits_at
        ]
        arena, half = self.pool.arena, self.half
        attend = ChunkAttention(arena, self._memory, self.plan, pieces, positions, half=half)
        put = self.device.put
        read, logits_at = np.array(tokens, np.int64), np.array(wanted, np.int64)
        ascent = pieces[0].prompt.ascent
        if ascent is None:
            logits = self.runner.forward(put(read), put(positions), attend, put(logits_at))
        else:
            hidden = self.runner.embed(put(read)) if ascent.hidden is None else ascent.hidden
            layers = pieces[0].layers
            ascent.hidden = self.runner.through(layers, hidden, put(positions), attend)
            ascent.layer = layers.stop
            last = ascent.hidden[put(logits_at)]
            logits = self.runner.logits(last) if len(last) else last
        self.device.wait()  # for the clock, and before anybody gives pages back
        return _score(pieces, logits)

    def _finish(self, done: list[Prompt], logits: Tensor) -> list[Send]:
        """Draw first tokens, and hand over the pages of every answer that goes on."""
        if not done:
            return []
        answers = [self.answers.start(prompt.request) for prompt in done]
        drawn = self.draw(logits, [answer.sampler_row for answer in answers])
        sends, going_on = list[Send](), list[tuple[Prompt, OutputProcessor]]()
        for prompt, answer, draw in zip(done, answers, drawn, strict=True):
            answer.cached_tokens = min(prompt.cached, len(prompt.request.prompt))
            if prompt.scores is not None:
                answer.prompt_logprobs = prompt.scores.packed()
            try:
                sends.append(answer.push(draw))
            except TriptychError as error:
                sends.append(refuse(prompt.request.id, error))
                self._drop(prompt)
                continue
            if answer.finish is None:
                going_on.append((prompt, answer))
            else:
                self._drop(prompt)
                sends.append(_prefilled(prompt, answer, None))
        return [*sends, *self._hand_over(going_on)]

    def _leave_significance(self, prompt: Prompt) -> None:
        """Write the attention that each token received into the score segments of its pages."""
        if prompt.attention is None:
            return
        geometry, per_page = self.plan.geometry, self.plan.raw.tokens
        sums = largest_sums(prompt.attention, geometry.kv_heads)
        padded = F.pad(sums, (0, -prompt.request.known_tokens % per_page))
        ids = self.device.put(prompt.pages).long().flatten()
        segments(self._memory.near, self.plan.raw).scores[ids] = padded.reshape(-1, per_page)

    def _hand_over(self, going_on: list[tuple[Prompt, OutputProcessor]]) -> list[Send]:
        handles = self._commit([prompt for prompt, _ in going_on])
        for prompt, _ in going_on:
            self._prompts.remove(prompt)
        return [
            _prefilled(prompt, answer, handle)
            for (prompt, answer), handle in zip(going_on, handles, strict=True)
        ]

    def _hand_part_over(self, piece: Piece) -> Send:
        """Give layers that are read to the compressor of their prompt."""
        prompt, ascent = piece.prompt, piece.prompt.ascent
        assert ascent is not None
        (handle,) = self._commit([prompt])
        prompt.pages, first = NO_PAGES, piece.layers.start
        ascent.unencoded.add(first)
        request, reader = prompt.request.id, ascent.reader
        layers = Layers(request=request, first=first, handle=handle, reader=reader)
        return Send(ascent.encoder, layers)

    def _hear_encoded(self, message: LayersEncoded) -> None:
        for prompt in self._prompts:
            if prompt.request.id == message.request and prompt.ascent is not None:
                prompt.ascent.unencoded.discard(message.first)

    def _commit(self, prompts: list[Prompt]) -> list[KVHandle]:
        """Put the pages of prompts under leases of their own, for compressors."""
        for prompt in prompts:
            self._leave_significance(prompt)
        self.device.wait()
        raw = self.plan.raw.format.name
        lease_refs = self.pool.handoff(
            [(p.request.id, p.pages.ravel()) for p in prompts],
            about=[About(p.request.tenant, ((raw, p.pages.size),)) for p in prompts],
        )
        handles = list[KVHandle]()
        for prompt, lease_ref in zip(prompts, lease_refs, strict=True):
            layers, kv_heads, _ = prompt.pages.shape
            count = prompt.request.known_tokens
            tokens = np.full(layers * kv_heads, count, np.int32)
            handles.append(make_handle(lease_ref, [(raw, tokens, prompt.pages.ravel())], count))
        return handles


def _score(pieces: list[Piece], logits: Tensor) -> Tensor:
    """Take in what logits say of prompts' own tokens; those of the tokens after prompts are left.

    Shapes:  logits (all pieces' ``logits_at``, vocab) -> (prompts that end here, vocab)
    """
    counts = [len(piece.logits_at) for piece in pieces]
    rows = cast("tuple[Tensor, ...]", logits.split(counts))  # torch leaves it untyped
    for piece, part in zip(pieces, rows, strict=True):
        if piece.prompt.scores is not None:
            piece.prompt.scores.add(piece.start, part[: piece.tokens - piece.is_last])
    if all(piece.prompt.scores is None for piece in pieces):
        return logits
    ends = [part[-1:] for piece, part in zip(pieces, rows, strict=True) if piece.is_last]
    return torch.cat([logits[:0], *ends])


def _prefilled(prompt: Prompt, answer: OutputProcessor, handle: KVHandle | None) -> Send:
    message = Prefilled(
        request=prompt.request.id,
        first_token=answer.tokens[-1],
        handle=handle,
        token_s=prompt.token_s,
        cached_tokens=prompt.cached,
    )
    return Send(ROUTER, message)
