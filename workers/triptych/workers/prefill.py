# pyright: reportUnknownMemberType=false
# Some methods of tensors have no types.
"""The prefill stage: reads prompts in ragged chunks, writes raw pages, draws the first token."""

import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import cast

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor

from triptych.core.errors import TriptychError
from triptych.core.handles import KVHandle
from triptych.core.messages import ROUTER, Message, Prefill, Prefilled, Request, Send, Stage
from triptych.core.pages import PagePlan
from triptych.kernels import Past, largest_sums, prefill_attention, store_tokens
from triptych.kernels.pages import segments
from triptych.kvpool import About, Arena, WorkerPool
from triptych.router.chunks import Chunks
from triptych.workers.answer import Answer, AnswerFactory
from triptych.workers.awaited import Awaited
from triptych.workers.device import CPU, Device
from triptych.workers.handles import make_handle
from triptych.workers.memory import PageMemory
from triptych.workers.models import Runner
from triptych.workers.prefixes import PrefixStore, asks_for_prompt
from triptych.workers.promptscores import SCORED_TOKENS, PromptScores
from triptych.workers.sampling import Draw, sample
from triptych.workers.stage import refuse

Ids = NDArray[np.int32]


@dataclass(eq=False)
class Prompt:
    """A prompt that is being read."""

    request: Request
    due: float
    """When it is to be read to its end, on the clock of the engine's chunks."""
    pages: NDArray[np.int32]
    """Raw pages, [layers, kv_heads, pages of a head row]."""
    read: int = 0
    """Tokens whose keys and values are written."""
    attention: Tensor | None = None
    """Attention that each token received so far, [layers, heads, tokens]; None: nobody asks."""
    cached: int = 0
    """Tokens that a prefix of another request saved."""
    scores: PromptScores | None = None
    """How likely its tokens were; None: nobody asks."""
    seconds: float = 0.0
    """Its share of the steps so far, by tokens."""

    @property
    def left(self) -> int:
        return self.request.known_tokens - self.read

    @property
    def token_s(self) -> float:
        """Seconds per token that was computed here."""
        return self.seconds / max(1, self.read - self.cached)


@dataclass(frozen=True)
class Newcomer:
    """A request whose prompt has no pages yet."""

    request: Request
    due: float


@dataclass(frozen=True)
class Piece:
    """The part of a prompt that one step reads."""

    prompt: Prompt
    start: int
    tokens: int

    @property
    def is_last(self) -> bool:
        return self.start + self.tokens == self.prompt.request.known_tokens

    @property
    def logits_at(self) -> range:
        """Which of its tokens' logits are needed: of all, or of the prompt's last one."""
        first = 0 if self.prompt.scores is not None else self.tokens - self.is_last
        return range(first, self.tokens)

    @property
    def positions(self) -> NDArray[np.int64]:
        return np.arange(self.start, self.start + self.tokens)


@dataclass
class PrefillEngine:
    """Reads up to ``chunk_tokens`` prompt tokens a step, from one prompt or from several.

    Between two steps a shorter prompt may overtake a longer one that is being read.
    """

    runner: Runner
    pool: WorkerPool
    plan: PagePlan
    answers: AnswerFactory
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
    _chunks: Chunks = field(default_factory=Chunks)
    _waiting: list[Newcomer] = field(default_factory=list[Newcomer])
    _prompts: list[Prompt] = field(default_factory=list[Prompt])

    def __post_init__(self) -> None:
        self._memory = PageMemory.in_place(self.pool.arena, self.device)
        self._awaited = Awaited(self.prefixes) if self.prefixes is not None else None

    # ---------------------------------------------------------------- the Engine protocol

    def accept(self, message: Message) -> Iterable[Send] | None:
        if not isinstance(message, Prefill):
            return None
        for request in message.requests:
            due = self._chunks.due(request.known_tokens, request.slo.ttft_s)
            self._waiting.append(Newcomer(request, due))
        if self._awaited is not None:
            for request in message.requests:
                self._awaited.begin(request)
        return ()

    def has_work(self) -> bool:
        if self._prompts or self._awaited is None:
            return bool(self._prompts or self._waiting)
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
        self._chunks.note(tokens, took_s)
        token_s = took_s / tokens
        for piece in pieces:
            piece.prompt.read += piece.tokens
            piece.prompt.seconds += piece.tokens * token_s
        done = [piece.prompt for piece in pieces if piece.is_last]
        return [*refused, *self._finish(done, logits)]

    # ---------------------------------------------------------------- taking prompts in

    def _start(self, one: Newcomer, refused: list[Send]) -> Prompt | None:
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

    def _prompt(self, one: Newcomer) -> Prompt:
        request = one.request
        tokens = request.known_tokens
        prompt = Prompt(request, one.due, self._take_pages(tokens))
        if self.plan.policy.needs_significance:
            shape = (self.plan.geometry.layers, self.runner.num_heads, tokens)
            prompt.attention = torch.zeros(shape, device=self.device.name)
        if asks_for_prompt(request):
            prompt.scores = PromptScores(request.prompt, request.sampling.prompt_logprobs)
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
                self.pool.give(prompt.pages.ravel())
            raise

    def _take_pages(self, tokens: int) -> NDArray[np.int32]:
        geometry = self.plan.geometry
        per_row = self.plan.raw.pages(tokens)
        ids = self.pool.take(geometry.head_rows * per_row)
        return ids.reshape(geometry.layers, geometry.kv_heads, per_row)

    def _drop(self, prompt: Prompt) -> None:
        self._prompts.remove(prompt)
        self.pool.give(prompt.pages.ravel())

    # ---------------------------------------------------------------- one step

    def _choose_pieces(self) -> tuple[list[Send], list[Piece]]:
        """Who is due first, until the chunk is full; and what could not be begun.

        Of prompts whose every token is scored, less is read at once: their logits take memory.
        """
        refused, pieces = list[Send](), list[Piece]()
        left, scorable = self.chunk_tokens, SCORED_TOKENS
        queue: list[Prompt | Newcomer] = [*self._prompts, *self._waiting]
        for one in self._chunks.in_order(queue):
            if not left:
                break
            prompt = self._start(one, refused) if isinstance(one, Newcomer) else one
            if prompt is None:
                continue
            count = min(left, prompt.left)
            if prompt.scores is not None:
                count = min(count, scorable)
                scorable -= count
            if count:
                pieces.append(Piece(prompt, prompt.read, count))
                left -= count
        return refused, pieces

    def _read(self, pieces: list[Piece]) -> Tensor:
        """Run the model over the pieces; logits [prompts that end here, vocab]."""
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
        logits = self.runner.forward(put(read), put(positions), attend, put(logits_at))
        self.device.wait()  # for the clock, and before anybody gives pages back
        return _score(pieces, logits)

    def _finish(self, done: list[Prompt], logits: Tensor) -> list[Send]:
        """Draw first tokens, and hand over the pages of every answer that goes on."""
        if not done:
            return []
        answers = [self.answers.start(prompt.request) for prompt in done]
        drawn = self.draw(logits, [answer.sampler_row for answer in answers])
        sends, going_on = list[Send](), list[tuple[Prompt, Answer]]()
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
        padded = F.pad(sums, (0, -prompt.read % per_page))
        ids = self.device.put(prompt.pages).long().flatten()
        segments(self._memory.near, self.plan.raw).scores[ids] = padded.reshape(-1, per_page)

    def _hand_over(self, going_on: list[tuple[Prompt, Answer]]) -> list[Send]:
        for prompt, _ in going_on:
            self._leave_significance(prompt)
        self.device.wait()
        raw = self.plan.raw.format.name
        claims = self.pool.handoff(
            [(p.request.id, p.pages.ravel()) for p, _ in going_on],
            about=[About(p.request.tenant, ((raw, p.pages.size),)) for p, _ in going_on],
        )
        sends = list[Send]()
        for (prompt, answer), claim in zip(going_on, claims, strict=True):
            self._prompts.remove(prompt)
            tokens = np.full(self.plan.geometry.head_rows, prompt.read, np.int32)
            runs = [(self.plan.raw.format.name, tokens, prompt.pages.ravel())]
            handle = make_handle(claim, runs, prompt.read)
            sends.append(_prefilled(prompt, answer, handle))
        return sends


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


def _prefilled(prompt: Prompt, answer: Answer, handle: KVHandle | None) -> Send:
    message = Prefilled(
        request=prompt.request.id,
        first_token=answer.tokens[-1],
        handle=handle,
        token_s=prompt.token_s,
        cached_tokens=prompt.cached,
    )
    return Send(ROUTER, message)


class ChunkAttention:
    """Attention of one prefill step: writes new keys and values to raw pages, reads old ones."""

    def __init__(
        self,
        arena: Arena,
        memory: PageMemory,
        plan: PagePlan,
        pieces: list[Piece],
        positions: NDArray[np.int64],
        *,
        half: bool = False,
    ) -> None:
        self._arena, self._memory, self._half = arena, memory, half
        self._layout, self._pieces = plan.raw, pieces
        put = memory.device.put
        self._positions = put(positions.astype(np.int32))
        self._offsets = [0, *np.cumsum([piece.tokens for piece in pieces]).tolist()]
        per_page = plan.raw.tokens
        cells = [p.prompt.pages[:, :, p.positions // per_page] for p in pieces]
        self._pages = put(np.ascontiguousarray(np.concatenate(cells, axis=2).transpose(0, 2, 1)))
        rows = (self._positions % per_page)[:, None].expand(-1, plan.geometry.kv_heads)
        self._rows = rows.contiguous()
        self._past = _tables_of_past(plan, pieces)
        self._past_there = None if self._past is None else tuple(map(put, self._past))

    def __call__(
        self,
        layer: int,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        *,
        scale: float,
        window: int,
        softcap: float,
    ) -> Tensor:
        """Shapes: query (T, H, D); key, value (T, KH, D) -> (T, H, D)"""
        memory = self._memory.near
        store_tokens(
            memory, self._layout, key, value, self._pages[layer], self._rows, self._positions
        )
        past = None
        if self._past is not None and self._past_there is not None:
            self._arena.will_need(self._past[0][layer])
            pages, tokens = self._past_there
            past = Past(memory, self._layout, pages[layer], tokens)
        given = (query, key, value)
        if self._half:
            given = (query.half(), key.half(), value.half())
        wanted = self._pieces[0].prompt.attention is not None
        sums = self._empty_sums(query.shape[1]) if wanted else None
        mixed = prefill_attention(
            *given,
            self._offsets,
            scale=scale,
            window=window,
            softcap=softcap,
            past=past,
            significance=sums,
        )
        if sums is not None:
            self._add_to_prompts(layer, sums)
        return mixed.to(query.dtype)

    def _empty_sums(self, heads: int) -> Tensor:
        longest = max(piece.start + piece.tokens for piece in self._pieces)
        return torch.zeros(len(self._pieces), heads, longest, device=self._memory.device.name)

    def _add_to_prompts(self, layer: int, sums: Tensor) -> None:
        for piece, part in zip(self._pieces, sums, strict=True):
            end = piece.start + piece.tokens
            if piece.prompt.attention is not None:
                piece.prompt.attention[layer, :, :end] += part[:, :end]


def _tables_of_past(plan: PagePlan, pieces: list[Piece]) -> tuple[Ids, Ids] | None:
    """Page tables [layers, pieces, kv_heads, pages] and tokens [pieces, kv_heads]."""
    starts = [piece.start for piece in pieces]
    if not any(starts):
        return None
    geometry, width = plan.geometry, plan.raw.pages(max(starts))
    table = np.zeros((geometry.layers, len(pieces), geometry.kv_heads, width), np.int32)
    for i, piece in enumerate(pieces):
        used = plan.raw.pages(piece.start)
        table[:, i, :, :used] = piece.prompt.pages[:, :, :used]
    tokens = np.repeat(np.array(starts, np.int32)[:, None], geometry.kv_heads, axis=1)
    return table, tokens
