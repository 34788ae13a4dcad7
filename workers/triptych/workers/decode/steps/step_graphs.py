"""Decode steps as captured graphs of a GPU: the host queues one graph, not hundreds of kernels.

A graph replays the same kernels on the same memory. So it takes its inputs from one buffer, into
which each step copies its tokens, and reads page tables and pages where they always are. Kernels
find the length of each row on the device; the only shape that a step has is its batch size. A graph
is captured for a few batch sizes, and other batches are filled up with rows that have no slot:
nothing is stored for them, and their logits are not read. Steps in which tokens of a request are
scored have graphs of their own; which requests those are is an input.

Source: CUDA graphs as in vLLM (one graph for each of some batch sizes)
"""

import logging
import time
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from triptych.workers.decode.decode_attention import (
    Placed,
    PlainAttention,
    TokenScores,
)
from triptych.workers.device import Captured
from triptych.workers.kv.block_table import Sections
from triptych.workers.kv.device_pages import DevicePages
from triptych.workers.kv.new_tokens import NewTokens
from triptych.workers.kv.prefetch import Prefetcher
from triptych.workers.models.runner import Runner

logger = logging.getLogger(__name__)

TOKENS, ROTARY, POSITIONS, SLOTS, PLACES, SCORED, STORES = range(7)
"""Rows of the input buffer of a graph; ``ROTARY``: positions of the rotation; ``SCORED``: slots of
the requests that are scored; from ``STORES`` on: for each table of new tokens, slots of the
requests that store them there."""
NO_SLOT = -1
"""Slot and place of rows that fill up a batch, and in ``SCORED`` of those that are not scored."""
USUAL_REQUESTS = 64
"""Batches up to this size are captured before requests come. Others are captured at their first
use: each graph keeps memory for its logits."""


def batch_sizes(max_requests: int) -> list[int]:
    """Batch sizes of the graphs: 1, 2, 4, 8, then by 8 up to 64 and by 32 above.

    >>> batch_sizes(20)
    [1, 2, 4, 8, 16, 20]
    """
    sizes = [1, 2, 4, *range(8, 64, 8), *range(64, max_requests + 32, 32)]
    return [*(size for size in sizes if size < max_requests), max_requests]


@dataclass(frozen=True, slots=True)
class _StepGraph:
    """The captured step of one batch size, with or without scores."""

    captured: Captured
    """Its output is float32 [batch size, vocab]."""
    inputs: Tensor
    """int32 [rows, batch size]."""


class StepGraphs:
    """The captured decode steps of an engine, at most two for each of ``batch_sizes``."""

    def __init__(
        self,
        memory: DevicePages,
        sections: Sections,
        scores: TokenScores,
        max_requests: int,
        num_stores: int,
    ) -> None:
        """``num_stores``: tables of new tokens, which are the first sections."""
        self._num_rows = STORES + num_stores
        self._memory, self._sections, self._device = memory, sections, memory.device
        self._scores = scores
        self._sizes: Sequence[int] = batch_sizes(max_requests)
        self._every = self._device.put(np.arange(max_requests))
        self._graphs = dict[tuple[int, bool], _StepGraph]()
        self._pool = self._device.graph_pool()
        self._failed = False
        """Whether a capture failed; no other one is tried."""

    @classmethod
    def of(
        cls,
        runner: Runner,
        memory: DevicePages,
        sections: Sections,
        scores: TokenScores,
        prefetcher: Prefetcher | None,
        max_requests: int,
        num_stores: int,
    ) -> "StepGraphs | None":
        """None if steps cannot be captured: on a CPU, with layers of transformers, or if each
        layer requests its pages from a disk.
        """
        if not (memory.device.can_capture and runner.can_capture) or prefetcher is not None:
            return None
        return cls(memory, sections, scores, max_requests, num_stores)

    def capture_usual(self, runner: Runner) -> None:
        """Capture the steps of the usual batch sizes, the largest first: others use its memory.

        Most of the time goes to kernels that are compiled for the first time.
        """
        if not runner.can_capture:
            return
        begun = time.perf_counter()
        for size in reversed([one for one in self._sizes if one <= USUAL_REQUESTS]):
            for is_scored in (True, False) if self._scores.are_kept else (False,):
                self._graph(runner, size, is_scored=is_scored)
        logger.info(
            "captured %d decode steps of up to %d requests as graphs in %.1f s",
            len(self._graphs),
            max((size for size, _ in self._graphs), default=0),
            time.perf_counter() - begun,
        )

    def forward(
        self, runner: Runner, tokens: NDArray[np.int64], rotary: NDArray[np.int32], new: NewTokens
    ) -> Tensor | None:
        """Run a step that was not cut short; None: it must be run without a graph.

        The logits are valid until the next step.

        Shapes:  tokens, rotary (B,) -> (B, vocab) float32
        """
        if not runner.can_capture:
            return None
        size = self._sizes[bisect_left(self._sizes, len(tokens))]
        graph = self._graph(runner, size, is_scored=len(new.scored) > 0)
        if graph is None:
            return None
        self._device.put_into(graph.inputs, filled_up(self._num_rows, size, tokens, rotary, new))
        graph.captured.replay()
        return graph.captured.output[: len(tokens)]

    def _graph(self, runner: Runner, size: int, *, is_scored: bool) -> _StepGraph | None:
        """The graph of a batch size, captured at its first use; None: captures fail."""
        graph = self._graphs.get((size, is_scored))
        if graph is None and not self._failed:
            graph = self._capture(runner, size, is_scored=is_scored)
            if graph is not None:
                self._graphs[size, is_scored] = graph
        return graph

    def _capture(self, runner: Runner, size: int, *, is_scored: bool) -> _StepGraph | None:
        """Capture the step of a batch size; None, with a warning, if that fails."""
        rows = np.full((self._num_rows, size), NO_SLOT, np.int32)
        rows[[TOKENS, ROTARY, POSITIONS]] = 0
        inputs = self._device.put(rows)
        placed = Placed(inputs[SLOTS], inputs[POSITIONS], inputs[PLACES])
        scores = self._scores if is_scored else None
        stores = list(inputs[STORES:])
        attend = PlainAttention(
            self._memory, self._sections, placed, stores, scores, inputs[SCORED]
        )

        def step() -> Tensor:
            every = self._every[:size]
            return runner.forward(inputs[TOKENS], inputs[ROTARY], attend, every)

        step()  # compiles kernels; no row has a slot, so it changes nothing
        try:
            return _StepGraph(self._device.capture(step, self._pool), inputs)
        except RuntimeError as error:
            self._failed = True
            logger.warning(
                "decode steps are launched kernel by kernel, which takes longer: the step of %d "
                "requests cannot be captured as a graph: %s",
                size,
                error,
            )
            return None


def filled_up(
    num_rows: int,
    size: int,
    tokens: NDArray[np.int64],
    rotary: NDArray[np.int32],
    new: NewTokens,
) -> NDArray[np.int32]:
    """The inputs of a graph, int32 [num_rows, size]; columns after the batch have no slot."""
    count = len(tokens)
    rows = np.full((num_rows, size), NO_SLOT, np.int32)
    rows[TOKENS, :count], rows[ROTARY, :count] = tokens, rotary
    rows[POSITIONS, :count] = new.positions
    rows[SLOTS, :count], rows[PLACES, :count] = new.slots, new.places
    rows[[TOKENS, ROTARY, POSITIONS], count:] = 0
    rows[SCORED, new.scored] = new.slots[new.scored]
    for section, requests in new.stores:
        at = np.arange(count) if requests is None else requests
        rows[STORES + section, at] = new.slots[at]
    return rows
