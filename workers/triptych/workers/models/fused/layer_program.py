"""All layers of a step as one call of compiled code.

The jobs are those of the ops that blocks and ``Coordinates`` call, in their order, so that
the bits are theirs. Without Python between them a step of one request takes three quarters of the
time.
"""

from collections.abc import Sequence
from typing import Protocol

from torch import Tensor

from triptych.kernels.cpu_jobs import (
    Job,
    Program,
    norm_job,
    rotate_back_job,
    rotate_job,
    rotate_kv_job,
)
from triptych.workers.models.attention_interface import LayerTraits
from triptych.workers.models.fused.block import HeadLayout
from triptych.workers.models.fused.block_jobs import (
    ProgramBlock,
    StepMemory,
    head_jobs,
    mix_jobs,
)


class AttentionJobs(Protocol):
    """Attention of a step, which stores new keys and values, as jobs."""

    def __call__(
        self,
        layer: int,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        traits: LayerTraits,
        mixed: Tensor,
    ) -> list[Job]:
        """The jobs of one layer; ``mixed`` gets what ``Attend`` returns."""
        ...


class LayerProgram:
    """All layers, for a number of tokens; the last one is computed for some of them alone."""

    def __init__(
        self,
        blocks: Sequence[ProgramBlock],
        centre: Tensor,
        memory: StepMemory,
        parts: Sequence[tuple[range, AttentionJobs]],
        *,
        ends_with_attention: bool = False,
    ) -> None:
        """``centre``: of ``Coordinates``; ``memory``: that of the tokens.

        ``parts``: tokens that are computed beside each other, each part in one thread, with their
        attention; a single part in all threads. ``ends_with_attention``: what follows the last
        attention is left to ``of_rows``.
        """
        self._memory, self._last = memory, blocks[-1]
        self._ends_with_attention = ends_with_attention
        rows = [
            self._jobs(blocks, centre, memory.of_tokens(tokens), attention)
            for tokens, attention in parts
        ]
        self._program = Program(*rows)

    def _jobs(
        self,
        blocks: Sequence[ProgramBlock],
        centre: Tensor,
        memory: StepMemory,
        attention: AttentionJobs,
    ) -> list[Job]:
        """The jobs of some of the tokens."""
        jobs = list[Job]()
        for layer, block in enumerate(blocks):
            jobs.extend(head_jobs(block, memory, is_first=layer == 0))
            jobs.extend(_coordinate_jobs(block.layout, memory, centre[layer]))
            heads, rotated = block.layout.heads, block.layout.heads + block.layout.kv_heads
            query, key = memory.turned[:, :heads], memory.turned[:, heads:rotated]
            value = memory.turned[:, rotated:]
            jobs.extend(attention(layer, query, key, value, block.traits, memory.mixed))
            jobs.append(rotate_back_job(memory.mixed, memory.back))
            if block is not self._last or not self._ends_with_attention:
                jobs.extend(mix_jobs(block, memory))
        return jobs

    def __call__(self, hidden: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """The residual stream after the layers; it is valid until the next call.

        Shapes:  hidden (T, E) float32; cos, sin (T, d / 2) -> (T, E) float32
        """
        self._run(hidden, cos, sin)
        return self._memory.hidden.add_(self._memory.delta)

    def of_rows(self, rows: Tensor, hidden: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """The residual stream of some tokens after the layers, of a program that ends with
        attention.

        Shapes:  rows (N,); hidden (T, E) float32; cos, sin (T, d / 2) -> (N, E) float32
        """
        self._run(hidden, cos, sin)
        memory, block = self._memory, self._last
        return block.total(*block.mix(memory.hidden[rows], memory.back[rows].flatten(1)))

    def _run(self, hidden: Tensor, cos: Tensor, sin: Tensor) -> None:
        memory = self._memory
        memory.hidden.copy_(hidden)
        memory.cos.copy_(cos)
        memory.sin.copy_(sin)
        self._program.run()


def _coordinate_jobs(layout: HeadLayout, memory: StepMemory, centre: Tensor) -> list[Job]:
    """Queries, keys and values in the coordinates of pages."""
    query_key, value = layout.divide(memory.qkv)
    jobs, query, key = _rotation_jobs(layout, query_key, memory)
    return [*jobs, rotate_kv_job(query, key, value, centre, memory.turned)]


def _rotation_jobs(
    layout: HeadLayout, query_key: Tensor, memory: StepMemory
) -> tuple[list[Job], Tensor, Tensor]:
    """As ``HeadLayout.rotate``."""
    heads, angles = layout.heads, (memory.cos, memory.sin)
    if layout.query_norm is None or layout.key_norm is None:
        rotated = memory.rotated
        return [rotate_job(query_key, *angles, rotated)], rotated[:, :heads], rotated[:, heads:]
    sources = query_key[:, :heads], query_key[:, heads:]
    normed, rotated = (_parts(each, heads) for each in (memory.normed, memory.rotated))
    jobs = list[Job]()
    for at, norm in enumerate((layout.query_norm, layout.key_norm)):
        jobs.append(norm_job(sources[at], norm.weight, norm.epsilon, normed[at]))
        jobs.append(rotate_job(normed[at], *angles, rotated[at]))
    return jobs, *rotated


def _parts(memory: Tensor, heads: int) -> tuple[Tensor, Tensor]:
    """Memory of some heads, and of the others: (T, H + KH, d) as (T, H, d) and (T, KH, d)."""
    tokens, _, dim = memory.shape
    flat, first = memory.flatten(), tokens * heads * dim
    return flat[:first].view(tokens, -1, dim), flat[first:].view(tokens, -1, dim)
