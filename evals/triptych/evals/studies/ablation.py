"""What each setting is worth: one changed at a time, over several draws of texts and tasks."""

from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from math import sqrt
from statistics import mean, stdev

from triptych.core.config import AppConfig, require
from triptych.core.errors import ConfigError
from triptych.evals.methods.baselines import BASELINES
from triptych.evals.studies.report import Row, TaskRow
from triptych.evals.studies.study import Prepared, Results, Study, measure, prepare, report

BASE = "moments+keep=0.3"
"""What axes of reading change: pages of 16 tokens, two dense layers, 4 first and 64 newest."""
DEFAULT = "default"

AXES: dict[str, dict[str, str]] = {
    "page": {str(n): f"{BASE}+page={n}" if n != 16 else BASE for n in (4, 8, 16, 32, 64)},
    "keep": {f"{k:g}": f"moments+keep={k:g}" for k in (0.1, 0.2, 0.3, 0.5, 0.75, 1.0)},
    "rank": {
        "box": "quest+keep=0.3",
        "moments": BASE,
        "mean": "mean+keep=0.3",
        "oracle": "oracle+keep=0.3",
    },
    "dense": {str(n): f"{BASE}+dense_layers={n}" if n != 2 else BASE for n in (0, 1, 2, 4)},
    "reading": {
        "all": BASE,
        "not by query": "static+keep=0.3",
        "first tokens compete": f"{BASE}+sink_tokens=0",
        "newest tokens compete": f"{BASE}+window_tokens=0",
        "neither is sure": f"{BASE}+sink_tokens=0+window_tokens=0",
    },
    "compressor": {
        "all": DEFAULT,
        "keys as they are": f"{DEFAULT}+basis=plain",
        "first page rounded": f"{DEFAULT}+sink_tokens=0",
        "newest rounded": f"{DEFAULT}+recent_window_tokens=0",
        "one class, low": "uniform:k4v2",
        "one class, high": "uniform:k8v4",
    },
}
"""By name of the axis: label of the setting, and the method that has it."""

DIAGNOSTICS = ("passkey", "repetition", "rare", "aliasing")
DIAGNOSED = (DEFAULT, *BASELINES)
"""Methods that get the generated tasks; baselines at the bytes of the first."""

T_975 = (
    *(12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228),
    *(2.201, 2.179, 2.160, 2.145, 2.131, 2.120, 2.110, 2.101, 2.093),
)
"""Quantile of Student's t at 97.5 %, for 1 to 19 degrees of freedom."""


@dataclass(frozen=True, kw_only=True)
class Ablation:
    """What is asked."""

    model: str = ""
    """Name or path; empty: that of ``base``."""
    base: AppConfig = field(default_factory=AppConfig)
    axes: tuple[str, ...] = tuple(AXES)
    seeds: int = 5
    """Draws of texts and tasks; each has its own."""
    context: int = 1024
    """Tokens that are compressed."""
    documents: int = 2
    """Texts of each draw."""
    steps: int = 64
    """Tokens that are scored after each."""
    tasks: tuple[str, ...] = DIAGNOSTICS
    methods: tuple[str, ...] = DIAGNOSED
    """Which methods get the tasks."""
    task_context: int = 1024
    task_count: int = 2
    """Tasks of each kind and draw."""

    def __post_init__(self) -> None:
        require(2 <= self.seeds <= len(T_975) + 1, "seeds", self.seeds, f"2 to {len(T_975) + 1}")
        for axis in self.axes:
            if axis not in AXES:
                raise ConfigError(f"axis {axis!r}: expected one of {sorted(AXES)}")
        something = bool(self.axes or self.tasks)
        require(something, "axes", self.axes, "one axis or one task at least")

    @property
    def studies(self) -> list[Study]:
        """One for the texts and one for the tasks of each draw; no draw is that of seed 0."""
        return [study for seed in range(1, self.seeds + 1) for study in self._of(seed)]

    def _of(self, seed: int) -> Iterable[Study]:
        draw = Study(model=self.model, base=self.base, greedy_tokens=0, seed=seed)
        if self.axes:
            names = dict.fromkeys(name for axis in self.axes for name in AXES[axis].values())
            yield replace(
                draw,
                methods=tuple(names),
                contexts=(self.context,),
                documents=self.documents,
                steps=self.steps,
                tasks=(),
            )
        if self.tasks:
            yield replace(
                draw,
                methods=self.methods,
                texts=False,
                tasks=self.tasks,
                task_context=self.task_context,
                task_count=self.task_count,
            )


@dataclass(frozen=True, kw_only=True)
class Spread:
    """A figure over the draws."""

    mean: float
    deviation: float
    """Of single draws."""
    ci95: tuple[float, float]
    """Student's interval of the mean."""

    @classmethod
    def of(cls, values: Sequence[float]) -> "Spread":
        middle, deviation = mean(values), stdev(values)
        reach = T_975[len(values) - 2] * deviation / sqrt(len(values))
        return cls(mean=middle, deviation=deviation, ci95=(middle - reach, middle + reach))


@dataclass(frozen=True, kw_only=True)
class Point:
    """One setting of one axis."""

    axis: str
    setting: str
    method: str
    bytes_read_ratio: float
    bytes_held_ratio: float
    attention_hit: Spread | None
    kl: Spread
    top1_agreement: Spread
    perplexity_ratio: Spread


@dataclass(frozen=True, kw_only=True)
class Score:
    """Right answers of one method in one kind of task."""

    method: str
    task: str
    cases: int
    """Of all draws together."""
    score: Spread
    full_score: Spread


@dataclass(frozen=True, kw_only=True)
class Ablated:
    """What came out, and under which conditions."""

    conditions: dict[str, object]
    points: list[Point]
    scores: list[Score]

    def as_json(self) -> dict[str, object]:
        return {
            "conditions": self.conditions,
            "points": [asdict(point) for point in self.points],
            "scores": [asdict(score) for score in self.scores],
        }


Begin = Callable[[str, int], None]
"""Told the name of a study and how many cases it will take, all methods together."""
Advance = Callable[[str, int], None]


def ablate(plan: Ablation, begin: Begin, advance: Advance) -> Ablated:
    """Run all studies.

    Raises: ConfigError for a wrong setting, before anything runs; ModelError if a request fails
    """
    waiting = deque((name_of(study), prepare(study)) for study in plan.studies)
    for name, one in waiting:
        begin(name, cases_of(one))

    def run(name: str, one: Prepared) -> Results:
        records = measure(one, lambda _method, count: advance(name, count), lambda _n, _c: None)
        return report(one, records)

    found = list[Results]()
    while waiting:  # what a study has read is let go of before the next one begins
        found.append(run(*waiting.popleft()))
    told = {key: value for key, value in vars(plan).items() if key not in {"base", "model"}}
    known = ("model", "model_revision", "text_hash", "default_compressor")
    return Ablated(
        conditions={key: found[0].conditions[key] for key in known} | told,
        points=points_of(plan.axes, [one.rows for one in found if one.rows]),
        scores=scores_of([one.tasks for one in found if one.tasks]),
    )


def name_of(study: Study) -> str:
    return f"{'texts' if study.texts else 'tasks'}, draw {study.seed}"


def cases_of(prepared: Prepared) -> int:
    """Of the full cache and all methods."""
    return (1 + len(prepared.methods)) * sum(len(group.cases) for group in prepared.groups)


def points_of(axes: Sequence[str], draws: Sequence[Sequence[Row]]) -> list[Point]:
    """Rows of each draw, put together by method."""
    by_name: Mapping[str, list[Row]] = {
        row.method: [next(r for r in rows if r.method == row.method) for rows in draws]
        for row in (draws[0] if draws else ())
    }
    return [
        _point(axis, label, name, by_name[name])
        for axis in (axes if draws else ())
        for label, name in AXES[axis].items()
    ]


def _point(axis: str, label: str, name: str, rows: Sequence[Row]) -> Point:
    hits = [row.attention_hit for row in rows if row.attention_hit is not None]
    return Point(
        axis=axis,
        setting=label,
        method=name,
        bytes_read_ratio=mean(row.bytes_data_ratio for row in rows),
        bytes_held_ratio=mean(row.bytes_all_in_ratio for row in rows),
        attention_hit=Spread.of(hits) if hits else None,
        kl=Spread.of([row.summary.kl for row in rows]),
        top1_agreement=Spread.of([row.summary.top1_agreement for row in rows]),
        perplexity_ratio=Spread.of([row.summary.perplexity_ratio for row in rows]),
    )


def scores_of(draws: Sequence[Sequence[TaskRow]]) -> list[Score]:
    """Task rows of each draw, which come in the same order, put together."""
    return [
        Score(
            method=rows[0].method,
            task=rows[0].task,
            cases=sum(row.cases for row in rows),
            score=Spread.of([row.score for row in rows]),
            full_score=Spread.of([row.full_score for row in rows]),
        )
        for rows in zip(*draws, strict=True)
    ]
