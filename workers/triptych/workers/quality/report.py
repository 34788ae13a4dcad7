"""From records to rows: one per method and context length, and one over all lengths."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Literal

from triptych.workers.quality.metrics import (
    Interval,
    Steps,
    Summary,
    bootstrap,
    kl_means,
    summarize,
)
from triptych.workers.quality.runner import Group, Record, Records

Context = int | Literal["all"]


@dataclass(frozen=True, kw_only=True)
class Row:
    """A method at one context length, or over all of them."""

    method: str
    context: Context
    bytes_data_ratio: float
    bytes_all_in_ratio: float
    summary: Summary
    kl_over_first_ci95: Interval | None
    """Paired 95 % interval of this method's KL less that of the first method that is not full."""

    def as_json(self) -> dict[str, object]:
        """Flat: ``summary`` comes with the other fields."""
        flat = {name: value for name, value in asdict(self).items() if name != "summary"}
        return flat | asdict(self.summary)


def text_rows(records: Mapping[str, Records], groups: Sequence[Group]) -> list[Row]:
    """Rows of every method over the scored groups, method by method."""
    scored = [group for group in groups if any(case.scored for case in group.cases)]
    parts: list[tuple[Context, list[Group]]] = [(g.context_tokens, [g]) for g in scored]
    if len(scored) > 1:
        parts.append(("all", scored))
    names = list(records)
    first = names[1] if len(names) > 1 else names[0]
    return [
        _row(name, context, _pick(records[name], part), _pick(records[first], part))
        for name in names
        for context, part in parts
    ]


def _pick(records: Records, groups: Iterable[Group]) -> list[list[Record]]:
    """Records of the groups by document: the first of each group belongs to the first document."""
    return [list(one) for one in zip(*(records[group.name] for group in groups), strict=True)]


def _row(name: str, context: Context, ours: list[list[Record]], first: list[list[Record]]) -> Row:
    steps = [_steps(one) for one in ours]
    pairs = zip(kl_means(steps), kl_means([_steps(one) for one in first]), strict=True)
    prints = [record.footprint for one in ours for record in one]
    full = sum(one.full_bytes for one in prints)
    return Row(
        method=name,
        context=context,
        bytes_data_ratio=sum(one.data_bytes for one in prints) / full,
        bytes_all_in_ratio=sum(one.all_in_bytes for one in prints) / full,
        summary=summarize(steps),
        kl_over_first_ci95=bootstrap([a - b for a, b in pairs]),
    )


def _steps(records: Iterable[Record]) -> list[Steps]:
    return [record.steps for record in records if record.steps is not None]
