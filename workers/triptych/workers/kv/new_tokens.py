"""The new tokens of a decode step: where each is stored, and whose tokens are scored."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from triptych.kernels import block_table_ops
from triptych.workers.kv.block_table import SectionTable
from triptych.workers.kv.method_tables import MethodTables

Ids = NDArray[np.int32]
Ids64 = NDArray[np.int64]


@dataclass(frozen=True, eq=False)
class NewTokens:
    """Places of the new tokens of a step, and the requests whose tokens are scored in it.

    Every ``score_every`` tokens of a request its tokens are scored, if its method scores tokens.
    Those steps depend on the position alone, so an output does not depend on the rest of the batch.
    """

    slots: Ids
    positions: Ids
    places: Ids
    """Indices of the tokens in their rows of the table of new tokens."""
    scored: Ids64
    """Indices of the requests whose tokens are scored."""
    begun: Ids64 | None
    """Layers of this step whose scores are added; None: 0, as the step was not cut short."""
    stores: tuple[tuple[int, Ids64 | None], ...] = ((0, None),)
    """Sections that get new tokens, and the indices of their requests; None: all of the batch."""

    @classmethod
    def count(
        cls,
        tables: Sequence[MethodTables],
        slots: Ids,
        positions: Ids,
        progress: NDArray[np.int64],
    ) -> "NewTokens":
        """Choose the place of each new token in its table, and count it as stored.

        ``tables``: of each request's method. ``progress``: for each slot the layers whose scores
        are added, over all positions. A step that is repeated after a worker death skips those
        layers.
        """
        groups = _alike(tables)
        if len(groups) == 1:
            (kind,) = groups
            places, scored, begun = _count(kind, slots, positions, progress)
            return cls(slots, positions, places, scored, begun, ((kind.section, None),))
        places, begun = np.zeros_like(slots), np.zeros(len(slots), np.int64)
        all_scored, is_begun = list[Ids64](), False
        for kind, at in groups.items():
            places[at], scored, some = _count(kind, slots[at], positions[at], progress)
            all_scored.append(at[scored])
            if some is not None:
                begun[at], is_begun = some, True
        scored = np.sort(np.concatenate(all_scored))
        stores = _stores(groups)
        return cls(slots, positions, places, scored, begun if is_begun else None, stores)


class _Kind(NamedTuple):
    """Table, section and scoring interval; requests with equal ones are counted together."""

    table: SectionTable
    section: int
    score_every: int


def _alike(tables: Sequence[MethodTables]) -> dict[_Kind, Ids64]:
    """Indices of the requests of a batch by the table of their tokens and their scored steps."""
    kinds = {
        each: _Kind(each.tables[0], each.places[0], each.plan.policy.score_every)
        for each in dict.fromkeys(tables)
    }
    groups = dict[_Kind, list[int]]()
    if len(set(kinds.values())) == 1:
        return {kinds[tables[0]]: np.arange(len(tables))}
    for index, each in enumerate(tables):
        groups.setdefault(kinds[each], []).append(index)
    return {kind: np.array(at, np.int64) for kind, at in groups.items()}


def _count(
    kind: _Kind, slots: Ids, positions: Ids, progress: NDArray[np.int64]
) -> tuple[Ids, Ids64, Ids64 | None]:
    """Places, scored requests and ``begun`` of requests that are alike; counts their tokens."""
    places, scored, before, is_begun = block_table_ops.count_new_tokens(
        kind.table.tokens, slots, kind.table.room, positions, progress, kind.score_every
    )
    return places, scored, progress[slots] - before if is_begun else None


def _stores(groups: Mapping[_Kind, Ids64]) -> tuple[tuple[int, Ids64 | None], ...]:
    by_section = dict[int, list[Ids64]]()
    for kind, at in groups.items():
        by_section.setdefault(kind.section, []).append(at)
    if len(by_section) == 1:
        return ((next(iter(by_section)), None),)
    return tuple((section, np.sort(np.concatenate(at))) for section, at in by_section.items())
