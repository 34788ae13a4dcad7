"""Figures of the claims: by part and draw as they come, and means once all draws are there."""

from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field, replace
from typing import Self

from triptych.core.schema import build
from triptych.evals.studies.ablation import AblationResults, SeedStats
from triptych.evals.studies.study import Results


@dataclass(frozen=True, kw_only=True)
class ClaimFigure:
    """One figure of a part over all draws."""

    part: str
    name: str
    stats: SeedStats


@dataclass(frozen=True, kw_only=True)
class ClaimsResults:
    """Figures of the draws that are measured, by part, and the settings of the run."""

    conditions: dict[str, object]
    draws: dict[str, dict[str, dict[str, float]]] = field(
        default_factory=dict[str, dict[str, dict[str, float]]]
    )
    """By part and seed: the figures of a draw; none where the part is not measured in it."""
    ablation_draws: dict[str, Results] = field(default_factory=dict[str, Results])
    """By seed, until all draws of the ablation are measured."""
    ablation: AblationResults | None = None

    @classmethod
    def from_json(cls, data: Mapping[str, object]) -> Self:
        """Raises: SchemaError if a value is missing or of another kind"""
        names = ("conditions", "draws", "ablation_draws", "ablation")
        return build(cls, {name: data[name] for name in names if name in data})

    def has_draw(self, part: str, seed: int) -> bool:
        return str(seed) in self.draws.get(part, {})

    def with_draw(self, part: str, seed: int, figures: Mapping[str, float]) -> Self:
        by_seed = {**self.draws.get(part, {}), str(seed): dict(figures)}
        return replace(self, draws={**self.draws, part: by_seed})

    def with_ablation_draw(self, seed: int, results: Results) -> Self:
        return replace(self, ablation_draws={**self.ablation_draws, str(seed): results})

    @property
    def figures(self) -> list[ClaimFigure]:
        """Figures of the parts that were measured in all draws."""
        return [
            figure
            for part, by_seed in self.draws.items()
            if len(by_seed) == self.conditions["seeds"]
            for figure in _figures(part, [draw for draw in by_seed.values() if draw])
        ]

    def as_json(self) -> dict[str, object]:
        axes = {} if self.ablation is None else {"ablation": self.ablation.as_json()}
        if self.ablation_draws:
            axes = {"ablation_draws": {s: asdict(one) for s, one in self.ablation_draws.items()}}
        figures = [asdict(figure) for figure in self.figures]
        return {"conditions": self.conditions, "figures": figures, "draws": self.draws, **axes}


def _figures(part: str, draws: list[dict[str, float]]) -> Iterator[ClaimFigure]:
    """Figures that all draws have: a draw of few texts may lack a kind of text."""
    for name in draws[0] if draws else ():
        found = [draw[name] for draw in draws if name in draw]
        if len(found) == len(draws):
            yield ClaimFigure(part=part, name=name, stats=SeedStats.of(found))
