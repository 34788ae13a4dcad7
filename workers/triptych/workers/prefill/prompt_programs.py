"""Prefill steps as programs on a CPU: the layers of a step are one call of compiled code.

As in decode, a program always reads and writes the same memory, and its bits are those of a step
that is run op by op. New keys and values are rounded and stored first; attention reads them, and
those of earlier chunks, in the raw pages.
"""

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import replace
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
from triptych.workers.models.fused.block_jobs import ProgramBlock, StepMemory
from triptych.workers.models.fused.layer_program import LayerProgram
from triptych.workers.models.runner import ModelRunner, Runner
from triptych.workers.models.vision.feature_rows import FeatureRows
from triptych.workers.prefill.prompt_batch import PrefillChunk

MOST_PROGRAMS = 16
"""Programs of all layers that are kept, or as many layers in programs of some of them; one of all
has 0.2 MB, and making it takes some milliseconds."""
MOST_PARTS = 64
"""Prompts, or parts of them, in a step that is a program."""

Key = tuple[range, int, PageLayout]
"""Of a program: layers, tokens, and the layout to whose numbers some of them are rounded."""


class PromptPrograms:
    """The programs of an engine's prefill steps, made at their first use."""

    def __init__(
        self,
        blocks: Sequence[ProgramBlock],
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
        if not isinstance(runner, ModelRunner) or len(tokens) > self._most_tokens:
            return None  # profiled, or a long block of an image
        if not self._fits(chunks):
            return None
        program = self._prepared(chunks)
        return runner.run(partial(program.of_rows, logits_at), tokens, positions, given)

    def through(
        self, runner: Runner, chunk: PrefillChunk, hidden: Tensor, positions: Tensor
    ) -> Tensor | None:
        """The residual stream of a prompt after some of its layers; None: as ``forward``.

        Its tokens are computed as the chunks of a step are, so that they have the same bits. Of the
        last layer only the tokens whose logits are needed are computed and returned.

        Shapes:  hidden (T, E) float32, overwritten; positions (T,) or (3, T)
            -> (T, E), or (N, E) if ``chunk`` has the last layer, float32
        """
        chunks = [
            replace(chunk, start=start, tokens=min(self._most_tokens, chunk.end - start))
            for start in range(chunk.start, chunk.end, self._most_tokens)
        ]
        if not isinstance(runner, ModelRunner) or not all(self._fits([one]) for one in chunks):
            return None
        return runner.apply(partial(self._in_turn, chunks), hidden, positions)

    def _in_turn(
        self, chunks: Sequence[PrefillChunk], hidden: Tensor, cos: Tensor, sin: Tensor
    ) -> Tensor:
        """Compute the chunks of one prompt after each other; as ``through``."""
        lasts, first = list[Tensor](), chunks[0].start
        for chunk in chunks:
            rows = slice(chunk.start - first, chunk.end - first)
            given, program = (hidden[rows], cos[rows], sin[rows]), self._prepared([chunk])
            if chunk.has_last_layer:
                lasts.append(
                    program.of_rows(torch.tensor(chunk.logits_at, dtype=torch.int64), *given)
                )
            else:
                hidden[rows] = program(*given)
        return torch.cat(lasts) if lasts else hidden

    def _fits(self, chunks: Sequence[PrefillChunk]) -> bool:
        """Whether a program computes these chunks.

        Not if some are measured in other ways, read both directions, are rounded differently, or
        are of prompts that store different tokens in each layer.
        """
        if any(chunk.prompt.bounded is not None for chunk in chunks):
            return False
        parts = [part for chunk in chunks for part in chunk.sequences()]
        if any(part.statistics is not None or part.is_two_way for part in parts):
            return False
        return len(_layouts(chunks)) <= 1 and self._parts.holds(len(parts))

    def _prepared(self, chunks: Sequence[PrefillChunk]) -> LayerProgram:
        """The program of a step, with these chunks as the parts that it reads."""
        self._parts.write(_parts(chunks))
        tokens = sum(chunk.tokens for chunk in chunks)
        return self._program((chunks[0].layers, tokens, next(iter(_layouts(chunks)), self._raw)))

    def _program(self, key: Key) -> LayerProgram:
        """The program of a step; of more than ``MOST_PROGRAMS`` the one used longest ago goes."""
        program = self._programs.pop(key, None)
        if program is None:
            layers, tokens, rounding = key
            program = LayerProgram(
                self._blocks[layers.start : layers.stop],
                self._centre[layers.start : layers.stop],
                self._memory.of_tokens(range(tokens)),
                [(range(tokens), partial(self._attention, rounding))],
                ends_with_attention=layers.stop == len(self._blocks),
            )
        self._programs[key] = program
        most = MOST_PROGRAMS * len(self._blocks)
        while sum(len(layers) for layers, *_ in self._programs) > most:
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


def _parts(chunks: Sequence[PrefillChunk]) -> list[PromptPart]:
    """The parts of a step."""
    parts, start = list[PromptPart](), 0
    for part in (part for chunk in chunks for part in chunk.sequences()):
        prompt = part.prompt
        sums = prompt.attention if part.is_observed else None
        parts.append(PromptPart(start, part.tokens, part.start, prompt.pages, prompt.rounded, sums))
        start += part.tokens
    return parts


def _layouts(chunks: Sequence[PrefillChunk]) -> set[PageLayout]:
    """The layouts to whose numbers tokens of a step are rounded."""
    return {chunk.prompt.plan.rounding for chunk in chunks if len(chunk.prompt.rounded)}
