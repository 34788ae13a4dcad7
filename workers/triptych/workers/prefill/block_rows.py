# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false
# Some methods of tensors and numpy's comparisons lack types.
"""Raw pages of a prompt that is read in blocks: a token's slot in a row is not its position.

A prompt has all its raw pages when it starts, as many as the budget and a block take. After each
block the tokens that stay move to the front of the rows of their layer, and pages that are emptied
are there for the next block, in whichever layer. All head rows of a layer store as many tokens, in
the order of positions, but not the same ones; pages know the positions.
"""

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from triptych.core.errors import ConfigError
from triptych.core.layout import PageLayout
from triptych.core.pages import PagePlan
from triptych.kernels import mean_sums
from triptych.kernels.pages import Segments, segments
from triptych.kernels.retain import (
    block_scores,
    episode_weights,
    kept_of_block,
    layer_budgets,
    lost_attention,
)
from triptych.kernels.retain.episodes import turn_embeddings, turns_of
from triptych.kernels.retain.retention_budgets import MOST_TIMES
from triptych.workers.device import Device

Ids = NDArray[np.int32]


@dataclass(eq=False)
class BlockRows:
    """Which tokens of a prompt are in its raw pages, and where."""

    plan: PagePlan
    tokens: int
    """Tokens of the whole prompt."""
    owned: Ids
    """All its pages; see ``PagePlan.raw_row_pages``."""
    weights: Tensor
    """Weight of the score of each token of the prompt, float32 [tokens]."""
    table: Ids = field(init=False)
    """Raw pages, [layers, kv_heads, most pages of a row]."""
    counts: Ids = field(init=False)
    """Tokens that each row of a layer had after the last eviction, [layers]."""
    first: int = 0
    """Position of the first token behind that eviction."""
    budgets: Sequence[int] = ()
    """Tokens that each layer keeps; empty before the first eviction."""

    def __post_init__(self) -> None:
        geometry = self.plan.geometry
        width = self.layout.pages(self.most_slots)
        self.table = np.zeros((geometry.layers, geometry.kv_heads, width), np.int32)
        self.counts = np.zeros(geometry.layers, np.int32)
        self._used = np.zeros(geometry.layers, np.int32)
        self._spare = self.owned

    @property
    def layout(self) -> PageLayout:
        return self.plan.raw

    @property
    def kept(self) -> int:
        """Tokens of a row that are kept, the mean over layers."""
        return self.plan.kept_tokens(self.tokens)

    @property
    def block_tokens(self) -> int:
        rule = self.plan.policy.retention
        assert rule is not None
        return rule.block_tokens

    @property
    def most_slots(self) -> int:
        """The most tokens that a row of any layer can have."""
        return min(self.tokens, MOST_TIMES * self.kept + self.block_tokens)

    def block_end(self, read: int) -> int:
        """The end of the block that the token at ``read`` is in; the first block is the short one,
        so that the last has as many queries as others."""
        left = max(0, self.tokens - read - 1)
        return self.tokens - left // self.block_tokens * self.block_tokens

    def slots(self, positions: NDArray[np.int64]) -> NDArray[np.int64]:
        """Slots of tokens that are behind the last eviction, [layers, T]."""
        return self.counts[:, None] + (positions - self.first)

    def stored(self, position: int) -> Ids:
        """Tokens of each layer's rows before ``position``, [layers]."""
        return self.counts + np.int32(position - self.first)

    @property
    def row_tokens(self) -> Ids:
        """Tokens that each head row had after the last eviction, [head rows]."""
        return np.repeat(self.counts, self.plan.geometry.kv_heads).astype(np.int32)

    def reserve(self, end: int) -> None:
        """Have pages for the tokens before position ``end``."""
        wanted = -(-self.stored(end) // np.int32(self.layout.tokens))
        for layer in np.flatnonzero(wanted > self._used).tolist():
            rows = self.table[layer]
            count = len(rows) * int(wanted[layer] - self._used[layer])
            taken, self._spare = self._spare[:count], self._spare[count:]
            rows[:, self._used[layer] : wanted[layer]] = taken.reshape(len(rows), -1)
            self._used[layer] = wanted[layer]

    def end_block(self, arena: Tensor, device: Device, attention: Tensor, end: int) -> None:
        """Drop tokens down to the budget, if rows have more, and set the attention to 0.

        ``end``: of the block, which is in the pages.

        Shapes:  attention [layers, H, slots] float32, from the last queries of the block
        """
        before = self.stored(end)
        if int(before.mean()) > self.kept:
            self._evict(arena, device, attention, before)
            self.first = end
        elif end == self.tokens:
            self.counts, self.first = before, end
        attention.zero_()

    def final_pages(self) -> Ids:
        """The pages that have tokens, in the order of head rows; the others are ``spare``."""
        parts = [rows[:, :used].ravel() for rows, used in zip(self.table, self._used, strict=True)]
        return np.concatenate(parts)

    @property
    def spare(self) -> Ids:
        """Pages without tokens."""
        return self._spare

    def _evict(self, arena: Tensor, device: Device, attention: Tensor, before: Ids) -> None:
        sink = self.plan.sink_tokens
        newest = self.plan.full_recent_tokens - sink
        parts = segments(arena, self.layout)
        slots = [self._places(layer, int(before[layer]), device) for layer in range(len(before))]
        scores = [
            block_scores(
                sums[:, :count],
                self.plan.geometry.kv_heads,
                self.weights[parts.positions[page, row].long()],
                sink,
                newest,
            )
            for sums, count, (page, row) in zip(attention, before.tolist(), slots, strict=True)
        ]
        if not self.budgets:
            errors = [lost_attention(of_layer, self.kept) for of_layer in scores]
            least, most = self.plan.full_recent_tokens, int(before.min())
            self.budgets = layer_budgets(errors, self.kept, least, most)
        for layer, (page, row) in enumerate(slots):
            kept = kept_of_block(scores[layer], self.budgets[layer])
            sums = mean_sums(attention[layer, :, : before[layer]], len(page))
            _compact(parts, page, row, kept, sums)
            self.counts[layer] = kept.shape[1]
            self._release(layer)

    def _places(self, layer: int, count: int, device: Device) -> tuple[Tensor, Tensor]:
        """Page and row within it of the first tokens of each row of a layer, int64 [KH, count]."""
        at = torch.arange(count, device=device.name)
        pages = device.put(np.ascontiguousarray(self.table[layer])).long()
        per_page = self.layout.tokens
        return pages[:, at // per_page], (at % per_page).expand(len(pages), -1)

    def _release(self, layer: int) -> None:
        """Keep emptied pages of a layer for the next block."""
        used = self.layout.pages(int(self.counts[layer]))
        emptied = self.table[layer, :, used : self._used[layer]].ravel()
        self._spare = np.concatenate([self._spare, emptied])
        self._used[layer] = used


def question_weights(tokens: Sequence[int], ends: Collection[int], device: Device) -> Tensor:
    """Weights of the tokens of a prompt by the episode of its last turn, float32 [tokens].

    ``ends``: tokens that end a turn.
    """
    turns = turns_of(tokens, ends)
    return episode_weights(turn_embeddings(tokens, turns), turns).to(device.name)


def check_blocks(plan: PagePlan, *, two_way: bool) -> None:
    """Raise ConfigError for models whose prompts cannot be read in blocks.

    ``two_way``: whether the tokens of an image read each other, so that no block may divide it.
    """
    in_blocks = [name for name, one in plan.by_method.items() if one.reads_in_blocks]
    if in_blocks and two_way:
        raise ConfigError(
            f"compressor: {in_blocks[0]!r} cannot read prompts of this model in blocks: the tokens "
            "of an image attend to each other in both directions, which no block may divide; "
            "choose another method, such as 'snapkv'"
        )


def _compact(parts: Segments, page: Tensor, row: Tensor, kept: Tensor, sums: Tensor) -> None:
    """Move the tokens that stay to the first slots, with their positions, and ``sums`` as scores.

    Shapes:  page, row int64 [KH, n]; kept int64 [KH, m], ascending; sums [KH, n]
    """
    source = page.gather(1, kept), row.gather(1, kept)
    target = page[:, : kept.shape[1]], row[:, : kept.shape[1]]
    for part in (parts.keys, parts.values, parts.positions):
        part[target] = part[source].clone()
    parts.scores[target] = sums.gather(1, kept)
