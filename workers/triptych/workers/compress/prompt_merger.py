# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false
# pyright: reportUnknownArgumentType=false
# torch leaves Tensor.unflatten and others untyped in part.
"""Merges tokens of prompts by a learned network, from raw pages into pages with biases.

The chunks of all prompts of a step are merged together, in tiles of a fixed number of chunks: so a
product has the same shape whatever the batch is, and a prompt gets the same bytes as alone.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

import torch
from torch import Tensor

from triptych.core.errors import ConfigError
from triptych.core.layout import PageLayout
from triptych.core.methods.learned_files import LearnedFile
from triptych.core.pages import PagePlan
from triptych.kernels import store_tokens
from triptych.workers.compress.job import MergedChunks, MergedSets
from triptych.workers.compress.learned.artefact import load_merger
from triptych.workers.compress.learned.chunk_merger import Chunks
from triptych.workers.compress.learned.merge_requests import TINY, anchors
from triptych.workers.compress.learned.rope_frame import RopeFrame
from triptych.workers.compress.raw_tokens import ModelCoordinates, RawTokens
from triptych.workers.device import Device

M = TypeVar("M", MergedChunks, MergedSets)
TILE_CHUNKS = 64
"""Chunks that the network merges at a time: 8 MiB of keys and values of the default model."""


@dataclass(frozen=True)
class MergedPrompt(Generic[M]):
    """A prompt to merge, and the pages for its merged tokens."""

    raw: RawTokens
    tokens: int
    """Length of the prompt."""
    merged: M
    """Which of its tokens are merged."""
    pages: Tensor
    """int32 [head rows, pages of a row]."""


Chunk = tuple[MergedPrompt[MergedChunks], int]
"""A prompt, and the index of a chunk in it."""
Run = tuple[MergedPrompt[MergedChunks], range]
"""A prompt, and consecutive chunks of it."""


class PromptMerger:
    """A learned merger for the pages of a method."""

    def __init__(self, file: LearnedFile, plan: PagePlan, device: Device) -> None:
        """Raises: ModelError if the file was replaced since the start, or is torn"""
        self._network = load_merger(file).to(device.name)
        if self._network.geometry != plan.geometry:
            raise ConfigError(f"{file.path}: networks of {self._network.geometry}")
        self._layout, self._chunk = plan.high, file.chunk_tokens
        self._frame = RopeFrame(RopeFrame.of_file(file).frequencies.to(device.name))
        self._is_pooled_by_attention = file.kind == "merger"
        self._coordinates = ModelCoordinates.of(plan.policy.kv_rotation, plan.geometry, device.name)

    @property
    def layout(self) -> PageLayout:
        """Layout of the pages of merged tokens."""
        return self._layout

    def merge(self, prompts: Sequence[MergedPrompt[MergedChunks]]) -> None:
        """Write the merged tokens of prompts into their pages.

        Source: FastCache, section 3.2 (batches are compressed without attention scores); keys in
                the frame of their chunk are ours (``rope_frame``)
        """
        todo = [(prompt, index) for prompt in prompts for index in range(len(prompt.merged.starts))]
        for first in range(0, len(todo), TILE_CHUNKS):
            self._merge_tile(todo[first : first + TILE_CHUNKS])

    def _merge_tile(self, tile: list[Chunk]) -> None:
        """Merge up to ``TILE_CHUNKS`` chunks (prompt, index of the chunk in it)."""
        runs = _runs(tile)
        parts = [self._chunks(prompt, indices) for prompt, indices in runs]
        keys, values, logs, middles = (
            _filled_up(torch.cat(part, dim), dim, TILE_CHUNKS)
            for part, dim in zip(zip(*parts, strict=True), (2, 2, 2, 0), strict=True)
        )
        local = self._frame.to_local(keys, middles[:, None])
        merged = self._network(Chunks(keys=local, values=values, log_significance=logs))
        stored = self._coordinates.to_stored(
            self._frame.rotate(merged.keys, middles), merged.values
        )
        keys, values = (part.flatten(0, 1).transpose(0, 1) for part in stored)
        bias, at = merged.bias.flatten(0, 1).T, 0
        for prompt, indices in runs:
            some = slice(at, at := at + len(indices))
            self._store(prompt, indices, keys[some], values[some], bias[some])

    def _chunks(
        self, prompt: MergedPrompt[MergedChunks], indices: range
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Keys and values [L, KH, C, k, d], log significance [L, KH, C, k], middles (C,)."""
        k = self._chunk
        starts = prompt.merged.starts[indices.start : indices.stop]
        positions = (starts[:, None] + torch.arange(k, device=starts.device)).flatten()
        keys, values, sums = prompt.raw.read(positions)
        keys, values = self._coordinates.of_stored(keys, values)
        if self._is_pooled_by_attention:
            logs = (sums / (prompt.tokens - positions) + TINY).log()
        else:
            logs = torch.zeros_like(sums)
        found = (part.unflatten(2, (-1, k)) for part in (keys, values, logs))
        keys, values, logs = found
        return keys, values, logs, anchors(starts, k)

    def _store(
        self,
        prompt: MergedPrompt[MergedChunks],
        indices: range,
        keys: Tensor,
        values: Tensor,
        bias: Tensor,
    ) -> None:
        """Store merged tokens [C, head rows, d] at the positions of their newest members."""
        layout, there, first = self._layout, prompt.raw.pages.device, prompt.merged.first_place
        places = torch.arange(first + indices.start, first + indices.stop, device=there)
        newest = prompt.merged.starts[indices.start : indices.stop] + self._chunk - 1
        pages = prompt.pages[:, places // layout.tokens].T.contiguous()
        store_merged(prompt.raw.arena, layout, keys, values, pages, places, newest, bias)


def store_merged(
    arena: Tensor,
    layout: PageLayout,
    keys: Tensor,
    values: Tensor,
    pages: Tensor,
    places: Tensor,
    positions: Tensor,
    bias: Tensor,
) -> None:
    """Encode merged tokens into pages with biases.

    ``places``: index of each token within its row.

    Shapes:  keys, values [T, rows, d] in stored coordinates; pages, bias [T, rows];
             places, positions [T]
    Dtypes:  keys, values, bias float32; pages int32; places, positions int64
    """
    rows = (places % layout.tokens).int()[:, None].expand_as(pages).contiguous()
    store_tokens(arena, layout, keys, values, pages, rows, positions.int(), bias)


def _runs(tile: Sequence[Chunk]) -> list[Run]:
    """Consecutive chunks of each prompt of a tile."""
    runs = list[Run]()
    for prompt, index in tile:
        if runs and runs[-1][0] is prompt:
            runs[-1] = prompt, range(runs[-1][1].start, index + 1)
        else:
            runs.append((prompt, range(index, index + 1)))
    return runs


def _filled_up(part: Tensor, dim: int, count: int) -> Tensor:
    """``part`` with zeros up to ``count`` chunks in a dimension."""
    missing = count - part.shape[dim]
    if not missing:
        return part
    shape = list(part.shape)
    shape[dim] = missing
    return torch.cat((part, part.new_zeros(shape)), dim)
