"""The profiler: splits the time of each step into parts that add up to the step.

A part is an op of ``kernels``, or the time between ops: matrix products of the model, sampling,
page tables. Engines have no profiling code: for the duration of a step the profiler wraps their
step, their runner and their sampler.

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
from triptych.kernels import PageLists, observe_ops
from triptych.workers.decode.decode_engine import DecodeEngine
from triptych.workers.decode.page_selection import Selector
from triptych.workers.decode.read_stats import Lists, Reading, reading_of
from triptych.workers.models.attention_interface import Attend, LayerTraits
from triptych.workers.models.early_exit import Exits
from triptych.workers.models.runner import Runner
from triptych.workers.models.vision.feature_rows import FeatureRows
from triptych.workers.prefill.prefill_engine import PrefillEngine
from triptych.workers.sampling.sampler import Draw, Drawn, SamplerRow
from triptych.workers.stage import Engine

NO_LAYER = -1
PAGE_TABLES, PRODUCTS, ATTENTION, HEAD, DRAW, ANSWERS, OWN = (
    "page books",
    "products",
    "attention call",
    "head",
    "draw",
    "answers",
    "profiler",
)
"""Parts that are not ops. ``products``: from the previous layer's attention to this layer's;
``attention call``: time in attention outside of its ops; ``head``: all after the last layer's
attention, including its products."""

Work = Callable[[], Iterable[Send] | None]
Span = tuple[str, int, float, float]
"""Part, layer, begin and end in seconds of ``perf_counter``."""


@dataclass(eq=False)
class Step:
    """One step of an engine."""

    stage: Stage
    begin_s: float
    end_s: float = 0.0
    tokens: int = 0
    """Tokens of the forward pass."""
    cuts: list[Any] = field(default_factory=list[Any])
    """Part, layer and end of each span, flat in one list: recording takes time that belongs to no
    part, and a list is cheapest."""
    reading: Reading | None = None
    """Pages read, for a decode step."""

    @property
    def spans(self) -> list[Span]:
        """Spans of the step, without gaps."""
        parts, layers, ends = self.cuts[::3], self.cuts[1::3], self.cuts[2::3]
        return list(zip(parts, layers, [self.begin_s, *ends], ends, strict=False))

    @property
    def took_s(self) -> float:
        return self.end_s - self.begin_s


class Profiler:
    """Profiles the steps of a ``StageLoop``, which calls ``around``; single-threaded."""

    def __init__(
        self, max_steps: int, *, every: int = 1, clock: Callable[[], float] = time.perf_counter
    ) -> None:
        """Keep ``max_steps`` steps per stage; profile one in ``every`` decode steps at random.

        The others are only timed, which shows the overhead of profiling. Random, since some work
        happens every few steps and would fall into every second step alone.
        """
        self.steps, self.unprofiled = list[Step](), list[Step]()
        self._max_steps, self._every, self._clock = max_steps, every, clock
        self._rng = random.Random(0)
        self._counts = dict[Stage, int]()
        self._between, self._layer = PAGE_TABLES, NO_LAYER
        self._rows = dict[int, Tensor | None]()
        """By layer, the requests of the step that read selected pages."""

    def is_full(self, stage: Stage) -> bool:
        """Whether ``max_steps`` steps of a stage were kept."""
        return self._counts.get(stage, 0) >= self._max_steps

    def around(self, engine: Engine, work: Work) -> Iterable[Send] | None:
        """Run a step, and keep its spans unless the stage is full."""
        if self.is_full(engine.stage):
            return work()
        step = Step(engine.stage, self._clock())
        if engine.stage == "decode" and self._rng.randrange(self._every):
            done = work()
            step.end_s = self._clock()
            self.unprofiled.append(step)
            return done
        self._counts[engine.stage] = self._counts.get(engine.stage, 0) + 1
        self._between, self._layer = PAGE_TABLES, NO_LAYER
        self._rows.clear()
        try:
            with self._instrumented(engine, step):
                self._note(step, OWN)
                return work()
        finally:
            self._note(step, self._between)
            step.end_s = step.cuts[-1]
            self.steps.append(step)

    @contextmanager
    def _instrumented(self, engine: Engine, step: Step) -> Generator[None]:
        cuts = step.cuts

        def on_op(op: str, given: Mapping[str, Any], begin_s: float, end_s: float) -> None:
            layer = self._layer
            cuts.extend((self._between, layer, begin_s, op, layer, end_s))
            if "page_lists" in given:
                lists: PageLists | None = given["page_lists"]
                self._rows[layer] = None if lists is None else lists.rows

        with observe_ops(on_op):
            if not isinstance(engine, PrefillEngine | DecodeEngine):
                yield
                return
            runner, draw = engine.runner, engine.draw
            engine.runner = _ProfiledRunner(runner, self, step, engine)
            engine.draw = self._timed_draw(draw, step)
            try:
                yield
            finally:
                engine.runner, engine.draw = runner, draw

    def _note(self, step: Step, part: str) -> None:
        """Attribute the time since the last note to ``part``."""
        step.cuts.extend((part, self._layer, self._clock()))

    def _timed_draw(self, draw: Draw, step: Step) -> Draw:
        def timed(logits: Tensor, rows: Sequence[SamplerRow]) -> list[Drawn]:
            self._note(step, self._between)
            drawn = draw(logits, rows)
            self._note(step, DRAW)
            self._between = ANSWERS
            return drawn

        return timed

    # ---------------------------------------------------------------- called by the runner

    def begin_forward(self, step: Step, tokens: int) -> None:
        self._note(step, self._between)
        self._between = PRODUCTS
        step.tokens += tokens

    def around_attention(self, step: Step, attend: Attend) -> Attend:
        """``attend`` with the begin and end of each call recorded."""
        cuts, clock = step.cuts, self._clock

        def timed(
            layer: int,
            query: Tensor,
            key: Tensor,
            value: Tensor,
            traits: LayerTraits,
            sinks: Tensor | None = None,
        ) -> Tensor:
            cuts.extend((PRODUCTS, layer, clock()))
            self._layer, self._between = layer, ATTENTION
            mixed = attend(layer, query, key, value, traits, sinks)
            cuts.extend((ATTENTION, layer, clock()))
            self._between = PRODUCTS
            return mixed

        return timed

    def end_layers(self, step: Step) -> None:
        """Some layers are done; others may follow in this step."""
        self._note(step, PRODUCTS)
        self._layer, self._between = NO_LAYER, ANSWERS

    def end_forward(self, step: Step, engine: Engine) -> None:
        """Record the pages read; no request of the step has finished yet."""
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


class _ProfiledRunner:
    """A runner that reports its phases to the profiler."""

    def __init__(self, inner: Runner, profiler: Profiler, step: Step, engine: Engine) -> None:
        self._inner, self._profiler, self._step, self._engine = inner, profiler, step, engine

    @property
    def num_heads(self) -> int:
        return self._inner.num_heads

    @property
    def can_exit(self) -> bool:
        return self._inner.can_exit

    @property
    def step_bytes(self) -> int:
        return self._inner.step_bytes

    @property
    def can_capture(self) -> bool:
        """A step is profiled by its parts, which a graph does not have."""
        return False

    def forward(
        self,
        tokens: Tensor,
        positions: Tensor,
        attend: Attend,
        logits_at: Tensor,
        exits: Exits | None = None,
        given: FeatureRows | None = None,
    ) -> Tensor:
        profiler, step = self._profiler, self._step
        timed = profiler.around_attention(step, attend)
        profiler.begin_forward(step, len(tokens))
        logits = self._inner.forward(tokens, positions, timed, logits_at, exits, given)
        profiler.end_forward(step, self._engine)
        return logits

    def embed(self, tokens: Tensor, given: FeatureRows | None = None) -> Tensor:
        """Counts tokens at the first layer only."""
        self._step.tokens += len(tokens)
        return self._inner.embed(tokens, given)

    def through(self, layers: range, hidden: Tensor, positions: Tensor, attend: Attend) -> Tensor:
        profiler, step = self._profiler, self._step
        timed = profiler.around_attention(step, attend)
        profiler.begin_forward(step, 0)
        passed = self._inner.through(layers, hidden, positions, timed)
        profiler.end_layers(step)
        return passed

    def logits(self, hidden: Tensor) -> Tensor:
        logits = self._inner.logits(hidden)
        self._profiler.end_forward(self._step, self._engine)
        return logits
