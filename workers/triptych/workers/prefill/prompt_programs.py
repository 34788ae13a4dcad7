"""Prefill steps as programs on a CPU: all layers are one call of compiled code.

As in decode, a program always reads and writes the same memory, and its bits are those of a step
that is run op by op. New keys and values are rounded and stored first; attention reads them, and
those of earlier chunks, in the raw pages.
"""

from collections import OrderedDict
from collections.abc import Sequence
from functools import partial

import torch
from torch import Tensor

from triptych.core.layout import PageLayout
from triptych.core.pages import PagePlan
from triptych.kernels.cpu_jobs import (
    Job,
    PartTable,
    PromptPart,
    attend_parts_job,
    store_prompts_job,
)
from triptych.workers.kv.device_pages import DevicePages
from triptych.workers.models.attention_interface import LayerTraits
from triptych.workers.models.fused.int4_block import Int4Block
from triptych.workers.models.fused.layer_program import LayerProgram, StepMemory
from triptych.workers.models.runner import ModelRunner, Runner
from triptych.workers.models.vision.feature_rows import FeatureRows
from triptych.workers.prefill.prompt_batch import PrefillChunk

MOST_PROGRAMS = 16
"""Programs that are kept, of 0.2 MB each; making one takes some milliseconds."""
MOST_PARTS = 64
"""Prompts, or parts of them, in a step that is a program."""

Key = tuple[int, PageLayout]
"""Of a program: tokens of a step, and the layout to whose numbers some of them are rounded."""


class PromptPrograms:
    """The programs of an engine's prefill steps, made at their first use."""

    def __init__(
        self,
        blocks: Sequence[Int4Block],
        centre: Tensor,
        memory: DevicePages,
        raw: PageLayout,
        most_tokens: int,
    ) -> None:
        """``centre``: of ``Coordinates``; ``most_tokens``: of a step."""
        self._blocks, self._centre, self._pages, self._raw = blocks, centre, memory, raw
        self._most_tokens, self._parts = most_tokens, PartTable(MOST_PARTS)
        self._memory = StepMemory.of(blocks[0], most_tokens, torch.bfloat16)
        self._programs = OrderedDict[Key, LayerProgram]()

    @classmethod
    def of(
        cls, runner: Runner, memory: DevicePages, plan: PagePlan, most_tokens: int
    ) -> "PromptPrograms | None":
        """None if steps cannot be programs: with other weights, coordinates or attention."""
        if not isinstance(runner, ModelRunner):
            return None
        parts = runner.centred_blocks
        if parts is None or any(block.traits.softcap for block in parts[0]):
            return None
        return cls(*parts, memory, plan.raw, most_tokens)

    def forward(
        self,
        runner: Runner,
        chunks: Sequence[PrefillChunk],
        tokens: Tensor,
        positions: Tensor,
        logits_at: Tensor,
        given: FeatureRows | None,
    ) -> Tensor | None:
        """As ``Runner.forward``; None: the step must be run op by op."""
        layouts = {chunk.prompt.plan.rounding for chunk in chunks if len(chunk.prompt.rounded)}
        if not isinstance(runner, ModelRunner) or len(tokens) > self._most_tokens:
            return None  # profiled, or a long block of an image
        parts = _parts(chunks)
        if parts is None or len(layouts) > 1 or not self._parts.fits(parts):
            return None
        self._parts.write(parts)
        program = self._program(len(tokens), layouts.pop() if layouts else self._raw)
        return runner.run(partial(program.of_rows, logits_at), tokens, positions, given)

    def _program(self, tokens: int, rounding: PageLayout) -> LayerProgram:
        """The program of a step; of more than ``MOST_PROGRAMS`` the one used longest ago goes."""
        key = tokens, rounding
        program = self._programs.pop(key, None)
        if program is None:
            program = LayerProgram(
                self._blocks,
                self._centre,
                self._memory.sliced(tokens),
                partial(self._attention, rounding),
                ends_with_attention=True,
            )
        self._programs[key] = program
        if len(self._programs) > MOST_PROGRAMS:
            self._programs.popitem(last=False)
        return program

    def _attention(
        self,
        rounding: PageLayout,
        layer: int,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        traits: LayerTraits,
        mixed: Tensor,
    ) -> list[Job]:
        """The jobs of ``ChunkAttention``; see ``AttentionJobs``."""
        arena, heads = self._pages.near, key.shape[1]
        return [
            store_prompts_job(arena, self._raw, rounding, layer, key, value, self._parts),
            attend_parts_job(
                query, heads, arena, self._raw, layer, traits.scale, traits.window, mixed,
                self._parts,
            ),
        ]  # fmt: skip


def _parts(chunks: Sequence[PrefillChunk]) -> list[PromptPart] | None:
    """The parts of a step; None if some are measured in other ways, or read both directions."""
    parts, start = list[PromptPart](), 0
    for part in (part for chunk in chunks for part in chunk.sequences()):
        prompt = part.prompt
        if part.statistics is not None or part.is_two_way or prompt.layerwise is not None:
            return None
        sums = prompt.attention if part.is_observed else None
        parts.append(PromptPart(start, part.tokens, part.start, prompt.pages, prompt.rounded, sums))
        start += part.tokens
    return parts
