"""Decode steps as programs on a CPU: all layers are one call of compiled code.

As with the graphs of a GPU, a program always reads and writes the same memory: each step copies its
slots, positions and places there, and page tables and pages stay where they are. The bits are those
of a step that is run op by op.
"""

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from triptych.kernels import multiplies_tiles
from triptych.kernels.cpu_jobs import (
    Job,
    LogitTransform,
    append_job,
    attention_job,
    record_job,
    score_job,
)
from triptych.workers.decode.decode_attention import TokenScores
from triptych.workers.decode.steps.step_graphs import NO_SLOT
from triptych.workers.kv.block_table import Sections
from triptych.workers.kv.device_pages import DevicePages
from triptych.workers.kv.new_tokens import NewTokens
from triptych.workers.models.attention_interface import LayerTraits
from triptych.workers.models.fused.block_jobs import ProgramBlock, StepMemory
from triptych.workers.models.fused.layer_program import LayerProgram
from triptych.workers.models.runner import ModelRunner, Runner

MOST_PARTS = 128
"""Parts of the programs that are kept, of 0.2 MB each; making one takes some milliseconds."""

FEWEST_REQUESTS = 2
"""Requests of a part of a step."""

MOST_BYTES = 128 << 20
"""Weights of a step in parts. Each thread reads all of them, larger ones from memory."""

SLOTS, POSITIONS, PLACES, SCORED = range(4)
"""Rows of the numbers that a step copies; ``SCORED``: slots of the requests that are scored."""


@dataclass(frozen=True, slots=True)
class _Kind:
    """Key of a program: steps with equal ones run the same jobs on the same memory."""

    requests: int
    section: int
    """The section that gets the new tokens."""
    is_scored: bool
    parts: int
    """Parts of the requests, which threads compute beside each other."""

    def ranges(self) -> list[range]:
        """The requests of each part."""
        bounds = [self.requests * part // self.parts for part in range(self.parts + 1)]
        return [range(*pair) for pair in pairwise(bounds)]


class StepPrograms:
    """The programs of an engine's decode steps, made at their first use."""

    def __init__(
        self,
        blocks: Sequence[ProgramBlock],
        centre: Tensor,
        memory: DevicePages,
        sections: Sections,
        scores: TokenScores,
        max_requests: int,
        weight_bytes: int,
    ) -> None:
        """``centre``: of ``Coordinates``; ``weight_bytes``: what a step reads."""
        # A tile has 16 rows: with fewer a part takes as long as all.
        self._has_parts = weight_bytes <= MOST_BYTES and not multiplies_tiles()
        self._blocks, self._centre = blocks, centre
        self._pages, self._sections, self._scores = memory, sections, scores
        self._memory = StepMemory.of(self._blocks[0], max_requests)
        layout = self._blocks[0].layout
        self._lse = torch.empty(max_requests * layout.heads)
        self._numbers = torch.empty(4 * max_requests, dtype=torch.int32)
        self._programs = OrderedDict[_Kind, LayerProgram]()

    @classmethod
    def of(
        cls,
        runner: Runner,
        memory: DevicePages,
        sections: Sections,
        scores: TokenScores,
        max_requests: int,
    ) -> "StepPrograms | None":
        """None if steps cannot be programs: on a GPU, and with other weights or coordinates."""
        if not memory.device.is_host or not isinstance(runner, ModelRunner):
            return None
        parts = runner.centred_blocks
        if parts is None:
            return None
        return cls(*parts, memory, sections, scores, max_requests, runner.step_bytes)

    def divides(self, requests: int) -> bool:
        """Whether each thread computes some of so many requests, if there are several threads."""
        return self._has_parts and requests >= 2 * FEWEST_REQUESTS

    def forward(
        self, runner: Runner, tokens: NDArray[np.int64], rotary: NDArray[np.int32], new: NewTokens
    ) -> Tensor | None:
        """Run a step that was not cut short; None: it must be run op by op.

        Shapes:  tokens, rotary (B,) -> (B, vocab) float32
        """
        if not isinstance(runner, ModelRunner) or len(new.stores) != 1:
            return None  # profiled, or of several methods
        section = new.stores[0][0]
        kind = _Kind(len(tokens), section, len(new.scored) > 0, self._parts(len(tokens)))
        numbers = self._numbers_of(kind)
        numbers[[SLOTS, POSITIONS, PLACES]] = np.stack((new.slots, new.positions, new.places))
        numbers[SCORED] = NO_SLOT
        numbers[SCORED, new.scored] = new.slots[new.scored]
        program, device = self._program(kind), self._pages.device
        return runner.run(program, device.put(tokens), device.put(rotary))

    def _parts(self, requests: int) -> int:
        if not self.divides(requests):
            return 1
        return min(torch.get_num_threads(), requests // FEWEST_REQUESTS)

    def _numbers_of(self, kind: _Kind) -> NDArray[np.int32]:
        """The memory of the numbers of a step, [4, requests]."""
        return self._numbers[: 4 * kind.requests].view(4, -1).numpy()

    def _program(self, kind: _Kind) -> LayerProgram:
        """The program of a kind; of more than ``MOST_PARTS`` those used longest ago go."""
        program = self._programs.pop(kind, None)
        if program is None:
            memory = self._memory.of_tokens(range(kind.requests))
            parts = [(part, self._attention(kind, part)) for part in kind.ranges()]
            program = LayerProgram(self._blocks, self._centre, memory, parts)
        self._programs[kind] = program
        while len(self._programs) > 1 and sum(one.parts for one in self._programs) > MOST_PARTS:
            self._programs.popitem(last=False)
        return program

    def _attention(self, kind: _Kind, requests: range) -> "_Attention":
        rows = slice(requests.start, requests.stop)
        numbers = self._numbers[: 4 * kind.requests].view(4, -1)[:, rows]
        lse = self._lse.view(len(self._memory.hidden), -1)[rows]
        return _Attention(self._pages, self._sections, self._scores, kind, numbers, lse)


class _Attention:
    """The jobs of ``PageAttention`` without a choice of pages; see ``AttentionJobs``."""

    def __init__(
        self,
        pages: DevicePages,
        sections: Sections,
        scores: TokenScores,
        kind: _Kind,
        numbers: Tensor,
        lse: Tensor,
    ) -> None:
        """``numbers`` and ``lse``: of the requests of a part."""
        self._pages, self._sections, self._scores, self._kind = pages, sections, scores, kind
        self._numbers, self._lse = numbers, lse

    def __call__(
        self,
        layer: int,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        traits: LayerTraits,
        mixed: Tensor,
    ) -> list[Job]:
        arena, sections = self._pages.near, self._sections.of_layer[layer]
        slots, positions, places, _ = self._numbers
        lse = self._lse
        transform = LogitTransform(traits.scale, traits.window, traits.softcap)
        store = append_job(
            arena, sections[self._kind.section], key, value, slots, places, positions
        )
        attend = attention_job(
            query,
            arena,
            sections,
            slots,
            transform,
            positions,
            mixed,
            lse if self._kind.is_scored else None,
        )
        if not self._kind.is_scored:
            return [store, attend]
        return [store, attend, *self._score(layer, query, lse, transform)]

    def _score(
        self, layer: int, query: Tensor, lse: Tensor, transform: LogitTransform
    ) -> list[Job]:
        """As ``TokenScores.add``."""
        scores, (_, positions, _, scored) = self._scores, self._numbers
        sections, progress = scores.of_layer[layer], scores.progress
        add = score_job(
            query, self._pages.near, sections, scored, transform, positions, lse, scores.weight
        )
        record = record_job(progress, scored, positions, layer, len(scores.of_layer))
        return [record] if add is None else [add, record]
