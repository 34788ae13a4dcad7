"""Where the time of each step goes: every moment of it belongs to one part, so the sum is the step.

A part is an op of ``kernels``, or what lies between: the matrix products of the model, drawing
tokens, the pages' books. Nothing in the engines knows of it: the profiler stands around their
work, their runner and their draw for as long as a step takes.

Source: TinyServe (layer-wise profiler with hooks of microseconds)
"""

import random
import time
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from torch import Tensor

from triptych.core.messages import Send, Stage
from triptych.kernels import PageLists, hearing
from triptych.workers.decode.decode_engine import DecodeEngine
from triptych.workers.decode.page_selection import Selector
from triptych.workers.decode.read_stats import Lists, Reading, reading_of
from triptych.workers.models.attention_interface import Attend
from triptych.workers.models.early_exit import Exits
from triptych.workers.models.runner import Runner
from triptych.workers.prefill.prefill_engine import PrefillEngine
from triptych.workers.sampling.sampler import Draw, Drawn, SamplerRow
from triptych.workers.stage import Engine

NO_LAYER = -1
BOOKS, PRODUCTS, ATTENTION, HEAD, DRAW, ANSWERS, OWN = (
    "page books",
    "products",
    "attention call",
    "head",
    "draw",
    "answers",
    "profiler",
)
"""Parts that are no ops. ``products``: what lies between the attention of the layer before and that
of this one; ``attention call``: what surrounds the ops there; ``head``: what comes after the last
layer's attention, with its products."""

Work = Callable[[], Iterable[Send] | None]
Span = tuple[str, int, float, float]
"""Part, layer, begin and end in seconds of ``perf_counter``."""


@dataclass(eq=False)
class Step:
    """One piece of work of an engine."""

    stage: Stage
    begin_s: float
    end_s: float = 0.0
    tokens: int = 0
    """That the model was run for."""
    cuts: list[Any] = field(default_factory=list[Any])
    """Part, layer and end of each span, one after the other: what is written down costs time that
    belongs to no part, and nothing costs less than one list."""
    reading: Reading | None = None
    """Of a decode step."""

    @property
    def spans(self) -> list[Span]:
        """What the step was made of, without gaps."""
        parts, layers, ends = self.cuts[::3], self.cuts[1::3], self.cuts[2::3]
        return list(zip(parts, layers, [self.begin_s, *ends], ends, strict=False))

    @property
    def took_s(self) -> float:
        return self.end_s - self.begin_s


class Profiler:
    """Looks on while engines work; ``around`` goes into a ``StageLoop``. For one thread."""

    def __init__(
        self, most: int, *, every: int = 1, clock: Callable[[], float] = time.perf_counter
    ) -> None:
        """Keep ``most`` steps of each stage; one in ``every`` decode steps is looked at, by chance.

        The others are timed as a whole, which shows what looking costs. By chance, since scores are
        added every few steps: of every second step one half would have them all.
        """
        self.steps, self.unwatched = list[Step](), list[Step]()
        self._most, self._every, self._clock = most, every, clock
        self._luck = random.Random(0)
        self._counts = dict[Stage, int]()
        self._between, self._layer = BOOKS, NO_LAYER
        self._rows = dict[int, Tensor | None]()
        """By layer which requests of the step read lists of pages."""

    def is_full(self, stage: Stage) -> bool:
        """Whether there are as many steps of a stage as are kept."""
        return self._counts.get(stage, 0) >= self._most

    def around(self, engine: Engine, work: Work) -> Iterable[Send] | None:
        """Do a piece of work, and keep what became of the time if there is room."""
        if self.is_full(engine.stage):
            return work()
        step = Step(engine.stage, self._clock())
        if engine.stage == "decode" and self._luck.randrange(self._every):
            done = work()
            step.end_s = self._clock()
            self.unwatched.append(step)
            return done
        self._counts[engine.stage] = self._counts.get(engine.stage, 0) + 1
        self._between, self._layer = BOOKS, NO_LAYER
        self._rows.clear()
        try:
            with self._looking_on(engine, step):
                self._note(step, OWN)
                return work()
        finally:
            self._note(step, self._between)
            step.end_s = step.cuts[-1]
            self.steps.append(step)

    @contextmanager
    def _looking_on(self, engine: Engine, step: Step) -> Generator[None]:
        cuts = step.cuts

        def hear(op: str, given: Mapping[str, Any], begin_s: float, end_s: float) -> None:
            layer = self._layer
            cuts.extend((self._between, layer, begin_s, op, layer, end_s))
            if "lists" in given:
                lists: PageLists | None = given["lists"]
                self._rows[layer] = None if lists is None else lists.rows

        with hearing(hear):
            if not isinstance(engine, PrefillEngine | DecodeEngine):
                yield
                return
            runner, draw = engine.runner, engine.draw
            engine.runner = _WatchedRunner(runner, self, step, engine)
            engine.draw = self._watched_draw(draw, step)
            try:
                yield
            finally:
                engine.runner, engine.draw = runner, draw

    def _note(self, step: Step, part: str) -> None:
        """The time since the last note belongs to ``part``."""
        step.cuts.extend((part, self._layer, self._clock()))

    def _watched_draw(self, draw: Draw, step: Step) -> Draw:
        def watched(logits: Tensor, rows: Sequence[SamplerRow]) -> list[Drawn]:
            self._note(step, self._between)
            drawn = draw(logits, rows)
            self._note(step, DRAW)
            self._between = ANSWERS
            return drawn

        return watched

    # ---------------------------------------------------------------- what the runner tells

    def begin_forward(self, step: Step, tokens: int) -> None:
        self._note(step, self._between)
        self._between = PRODUCTS
        step.tokens += tokens

    def around_attention(self, step: Step, attend: Attend) -> Attend:
        """``attend``, with notes of when a layer begins and ends it."""
        cuts, clock = step.cuts, self._clock

        def watched(
            layer: int,
            query: Tensor,
            key: Tensor,
            value: Tensor,
            *,
            scale: float,
            window: int,
            softcap: float,
        ) -> Tensor:
            cuts.extend((PRODUCTS, layer, clock()))
            self._layer, self._between = layer, ATTENTION
            mixed = attend(layer, query, key, value, scale=scale, window=window, softcap=softcap)
            cuts.extend((ATTENTION, layer, clock()))
            self._between = PRODUCTS
            return mixed

        return watched

    def end_layers(self, step: Step) -> None:
        """Some layers are done; whether others come in this step is open."""
        self._note(step, PRODUCTS)
        self._layer, self._between = NO_LAYER, ANSWERS

    def end_forward(self, step: Step, engine: Engine) -> None:
        """The step's requests are all there still: none has ended at its new token."""
        self._layer = NO_LAYER
        self._note(step, HEAD)
        if isinstance(engine, DecodeEngine):
            step.reading = self._reading(engine)
            self._note(step, OWN)
        self._between = ANSWERS

    def _reading(self, engine: DecodeEngine) -> Reading:
        names, slots = engine.slots()
        lists = None
        if engine.selector is not None and any(row is not None for row in self._rows.values()):
            lists = self._lists(engine.selector, slots)
        return reading_of(engine.tables, names, slots, lists)

    def _lists(self, selector: Selector, slots: np.ndarray) -> Lists:
        layers = selector.ordinals.shape[0]
        is_read = np.zeros((layers, len(slots)), np.bool_)
        for layer, rows in self._rows.items():
            if rows is not None:
                is_read[layer] = rows.cpu().numpy() >= 0
        counts = selector.counts.cpu().numpy()[:, slots]
        most = int(counts.max(initial=0))
        return Lists(selector.ordinals.cpu().numpy()[:, slots, :, :most], counts, is_read)


class _WatchedRunner:
    """A runner that tells when it begins, and when attention does."""

    def __init__(self, inner: Runner, profiler: Profiler, step: Step, engine: Engine) -> None:
        self._inner, self._profiler, self._step, self._engine = inner, profiler, step, engine

    @property
    def num_heads(self) -> int:
        return self._inner.num_heads

    @property
    def can_exit(self) -> bool:
        return self._inner.can_exit

    def forward(
        self,
        tokens: Tensor,
        positions: Tensor,
        attend: Attend,
        logits_at: Tensor,
        exits: Exits | None = None,
    ) -> Tensor:
        profiler, step = self._profiler, self._step
        watched = profiler.around_attention(step, attend)
        profiler.begin_forward(step, len(tokens))
        logits = self._inner.forward(tokens, positions, watched, logits_at, exits)
        profiler.end_forward(step, self._engine)
        return logits

    def embed(self, tokens: Tensor) -> Tensor:
        """Tokens count where they begin: what follows are layers of the same ones."""
        self._step.tokens += len(tokens)
        return self._inner.embed(tokens)

    def through(self, layers: range, hidden: Tensor, positions: Tensor, attend: Attend) -> Tensor:
        profiler, step = self._profiler, self._step
        watched = profiler.around_attention(step, attend)
        profiler.begin_forward(step, 0)
        passed = self._inner.through(layers, hidden, positions, watched)
        profiler.end_layers(step)
        return passed

    def logits(self, hidden: Tensor) -> Tensor:
        logits = self._inner.logits(hidden)
        self._profiler.end_forward(self._step, self._engine)
        return logits
