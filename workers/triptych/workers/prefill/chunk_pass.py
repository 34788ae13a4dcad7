# pyright: reportUnknownMemberType=false
# Some methods of tensors have no types.
"""The pass of a prefill step through the model, or through some of its layers."""

from functools import cached_property
from typing import TYPE_CHECKING, cast

import numpy as np
import torch
from torch import Tensor

from triptych.core.pages import PagePlan
from triptych.kvpool import Arena
from triptych.workers.device import Device
from triptych.workers.kv.device_pages import DevicePages
from triptych.workers.models.runner import Runner
from triptych.workers.models.vision.feature_rows import FeatureRows
from triptych.workers.prefill.image_features import rows_of
from triptych.workers.prefill.prefill_attention import ChunkAttention
from triptych.workers.prefill.prompt_batch import LayerwisePrefill, PrefillChunk, rotary_of

if TYPE_CHECKING:
    from triptych.workers.prefill.prompt_programs import PromptPrograms


class ChunkPass:
    """Runs the chunks of a step: as a program where that is possible, else op by op."""

    def __init__(
        self,
        runner: Runner,
        arena: Arena,
        memory: DevicePages,
        plan: PagePlan,
        device: Device,
        attention_dtype: torch.dtype,
        most_tokens: int,
    ) -> None:
        """``attention_dtype``: of the products of attention; ``most_tokens``: of a step."""
        self._runner, self._arena, self._memory, self._plan = runner, arena, memory, plan
        self._device, self._dtype, self._most_tokens = device, attention_dtype, most_tokens

    def __call__(self, runner: Runner, chunks: list[PrefillChunk]) -> Tensor:
        """Add prompt logprobs, and return the logits of the tokens after finished prompts.

        ``runner``: that of the engine, or one that measures it.

        Shapes:  -> (finished prompts, vocab)
        """
        put = self._device.put
        known = [chunk.prompt.request.known[chunk.start : chunk.end] for chunk in chunks]
        tokens = put(np.concatenate([np.array(part, np.int64) for part in known]))
        starts = np.cumsum([0, *(chunk.tokens for chunk in chunks)])
        wanted = [
            int(start) + at
            for chunk, start in zip(chunks, starts[:-1], strict=True)
            for at in chunk.logits_at
        ]
        logits_at, rotary = put(np.array(wanted, np.int64)), put(rotary_of(chunks))
        given, layerwise = rows_of(chunks, self._device), chunks[0].prompt.layerwise
        if layerwise is not None:
            logits = self._some_layers(runner, chunks, layerwise, tokens, rotary, logits_at, given)
        else:
            logits = self._program(runner, chunks, tokens, rotary, logits_at, given)
            if logits is None:
                attend = self._attention(chunks)
                logits = runner.forward(tokens, rotary, attend, logits_at, given=given)
        self._device.wait()  # before the time is taken and pages are freed
        return _add_prompt_logprobs(chunks, logits)

    def _some_layers(
        self,
        runner: Runner,
        chunks: list[PrefillChunk],
        layerwise: LayerwisePrefill,
        tokens: Tensor,
        rotary: Tensor,
        logits_at: Tensor,
        given: FeatureRows | None,
    ) -> Tensor:
        """Logits of the prompt if these are its last layers, else none."""
        hidden, chunk = layerwise.hidden, chunks[0]
        if hidden is None:
            hidden = runner.embed(tokens, given)
        after = None
        if self._programs is not None:
            after = self._programs.through(runner, chunk, hidden, rotary)
        if after is None:
            after = runner.through(chunk.layers, hidden, rotary, self._attention(chunks))
            after = after[logits_at] if chunk.has_last_layer else after
        layerwise.next_layer = chunk.layers.stop
        if chunk.has_last_layer:
            layerwise.hidden = None
            return runner.logits(after)
        layerwise.hidden = after
        return after[:0]

    def _attention(self, chunks: list[PrefillChunk]) -> ChunkAttention:
        positions = np.concatenate([chunk.positions for chunk in chunks])
        return ChunkAttention(
            self._arena, self._memory, self._plan, chunks, positions, dtype=self._dtype
        )

    def _program(
        self,
        runner: Runner,
        chunks: list[PrefillChunk],
        tokens: Tensor,
        rotary: Tensor,
        logits_at: Tensor,
        given: FeatureRows | None,
    ) -> Tensor | None:
        """Logits of a step that is a program; None: it is not."""
        if self._programs is None:
            return None
        if any(chunk.prompt.bounded is not None for chunk in chunks):
            return None
        for chunk in chunks:
            used = self._plan.raw.pages(chunk.start)
            self._arena.will_need(chunk.prompt.pages[:, :, :used])
        return self._programs.forward(runner, chunks, tokens, rotary, logits_at, given)

    @cached_property
    def _programs(self) -> "PromptPrograms | None":
        """None on a GPU, and where attention is not in bfloat16.

        Made by the first step: on a new machine kernels are compiled, and a worker that is
        registered lets requests wait for that.
        """
        if not self._device.is_host or self._dtype != torch.bfloat16:
            return None
        from triptych.workers.prefill.prompt_programs import (  # noqa: PLC0415 - compiles for a CPU
            PromptPrograms,
        )

        return PromptPrograms.of(self._runner, self._memory, self._plan, self._most_tokens)


def _add_prompt_logprobs(chunks: list[PrefillChunk], logits: Tensor) -> Tensor:
    """Add prompt logprobs, and return the logits of the tokens after prompts.

    Shapes:  logits (all chunks' ``logits_at``, vocab) -> (finished prompts, vocab)
    """
    counts = [len(chunk.logits_at) for chunk in chunks]
    rows = cast("tuple[Tensor, ...]", logits.split(counts))  # torch leaves it untyped
    for chunk, part in zip(chunks, rows, strict=True):
        if chunk.prompt.scores is not None:
            chunk.prompt.scores.add(chunk.start, part[: chunk.tokens - chunk.ends_prompt])
    if all(chunk.prompt.scores is None for chunk in chunks):
        return logits
    ends = [part[-1:] for chunk, part in zip(chunks, rows, strict=True) if chunk.ends_prompt]
    return torch.cat([logits[:0], *ends])
