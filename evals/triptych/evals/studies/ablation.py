"""Ablations: one setting changed at a time, over several seeds of texts and tasks."""

from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from math import log, sqrt
from statistics import mean, stdev

from triptych.core.config import AppConfig, require
from triptych.core.errors import ConfigError
from triptych.evals.methods.baselines import BASELINES
from triptych.evals.studies.report import Row, TaskRow
from triptych.evals.studies.study import Prepared, Results, Study, measure, prepare, report
from triptych.kernels.bench.selection import run_selection

PAGE_AXIS = "page"
KEEP = 0.3
"""Share of the pages that the base reads."""
BASE = f"moments+keep={KEEP}"
"""Base of the page selection axes: pages of 16 tokens, 2 dense layers, 4 sink tokens, window 64."""
DEFAULT = "default"

AXES: dict[str, dict[str, str]] = {
    PAGE_AXIS: {str(n): f"{BASE}+page={n}" if n != 16 else BASE for n in (4, 8, 16, 32, 64)},
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
        "keys as they are": f"{DEFAULT}+kv_rotation=none",
        "first page rounded": f"{DEFAULT}+sink_tokens=0",
        "newest rounded": f"{DEFAULT}+recent_window_tokens=0",
        "one class, low": "uniform:k4v2",
        "one class, high": "uniform:k8v4",
    },
    "pruning": {f"{low:g}": f"{DEFAULT}+alpha_low={low:g}" for low in (0, 0.02, 0.1, 0.5, 1)},
    "low_format": {
        form.upper(): f"{DEFAULT}+low_format={form}"
        for form in ("k4v4", "k4v2c", "k4v2", "k2v4", "k4v1")
    },
    "levels": {
        "K8V4, K4V2C": DEFAULT,
        "FP16, K8V4": f"{DEFAULT}+high_format=fp16+low_format=k8v4",
        "FP16, K4V2C": f"{DEFAULT}+high_format=fp16",
        "K8V8, K4V4": f"{DEFAULT}+high_format=k8v8+low_format=k4v4",
    },
    "combination": {
        "quantized, K8V4": "uniform:k8v4",
        "quantized, K4V4": "uniform:k4v4",
        "quantized, K4V2": "uniform:k4v2",
        "pruned, half": "mean_attention+keep=0.5",
        "pruned, three quarters": "mean_attention+keep=0.25",
        "both": f"{DEFAULT}+alpha_low=0.1",
        "both, more pruned": f"{DEFAULT}+alpha_low=0.5",
    },
    "shares": {
        f"{high:.1%}, {low:.1%}": f"leankv+mass_high={high:g}+mass_low={low:g}"
        for high in (0.005, 0.01, 0.05, 0.1, 0.2)
        for low in (0.0, 0.001, 0.005, 0.01)
        if low <= high
    },
    "answers": {
        "classified": "leankv",
        "all high": "leankv+score_every_tokens=0",
        "diffkv, classified": DEFAULT,
        "diffkv, all high": f"{DEFAULT}+score_every_tokens=0",
    },
}
"""By axis: label of each setting, and the method that has it."""
STANDARD = ("page", "keep", "rank", "dense", "reading", "compressor")
"""Axes unless told otherwise."""

DIAGNOSTICS = ("passkey", "repetition", "rare", "aliasing")
DIAGNOSED = (DEFAULT, *BASELINES)
"""Methods that run the generated tasks; baselines at the bytes of the first."""

T_975 = (
    *(12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228),
    *(2.201, 2.179, 2.160, 2.145, 2.131, 2.120, 2.110, 2.101, 2.093),
)
"""Quantile of Student's t at 97.5 %, for 1 to 19 degrees of freedom."""


@dataclass(frozen=True, kw_only=True)
class Ablation:
    """Axes, texts and tasks of an ablation."""

    model: str = ""
    """Name or path; empty: that of ``base``."""
    base: AppConfig = field(default_factory=AppConfig)
    axes: tuple[str, ...] = STANDARD
    seeds: int = 5
    """Number of seeds; each has its own texts and tasks."""
    context: int = 1024
    """Tokens that are compressed."""
    documents: int = 2
    """Texts of each seed."""
    steps: int = 64
    """Tokens that are scored after each text."""
    tasks: tuple[str, ...] = DIAGNOSTICS
    methods: tuple[str, ...] = DIAGNOSED
    """Methods that run the tasks."""
    task_context: int = 1024
    task_count: int = 2
    """Tasks of each kind and seed."""

    def __post_init__(self) -> None:
        require(2 <= self.seeds <= len(T_975) + 1, "seeds", self.seeds, f"2 to {len(T_975) + 1}")
        for axis in self.axes:
            if axis not in AXES:
                raise ConfigError(f"axis {axis!r}: expected one of {sorted(AXES)}")
        something = bool(self.axes or self.tasks)
        require(something, "axes", self.axes, "one axis or one task at least")

    @property
    def studies(self) -> list[Study]:
        """For each seed one study of texts and one of tasks; seed 0 is left out."""
        return [study for seed in range(1, self.seeds + 1) for study in self._of(seed)]

    def _of(self, seed: int) -> Iterable[Study]:
        seeded = Study(model=self.model, base=self.base, greedy_tokens=0, seed=seed)
        if self.axes:
            names = dict.fromkeys(name for axis in self.axes for name in AXES[axis].values())
            yield replace(
                seeded,
                methods=tuple(names),
                contexts=(self.context,),
                documents=self.documents,
                steps=self.steps,
                tasks=(),
            )
        if self.tasks:
            yield replace(
                seeded,
                methods=self.methods,
                texts=False,
                tasks=self.tasks,
                task_context=self.task_context,
                task_count=self.task_count,
            )


@dataclass(frozen=True, kw_only=True)
class SeedStats:
    """Mean, standard deviation and 95 % interval of a figure over seeds."""

    mean: float
    deviation: float
    """Standard deviation of a single seed."""
    ci95: tuple[float, float]
    """Student's t interval of the mean."""

    @classmethod
    def of(cls, values: Sequence[float]) -> "SeedStats":
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
    attention_hit: SeedStats | None
    kl: SeedStats
    top1_agreement: SeedStats
    perplexity_ratio: SeedStats
    is_neutral: bool
    """LeanKV's rule: the mean log perplexity is within three standard deviations of that of the
    full cache. Draws differ in their texts, so the deviation is that of texts and the rule is
    weak; the interval of KL is the stricter one."""
    kl_by_seed: tuple[float, ...] = ()
    perplexity_by_seed: tuple[float, ...] = ()
    """Perplexity ratios; empty in older files. Settings share the texts of a draw, so that their
    figures can be compared draw by draw."""
    attention_us: float | None = None
    """Microseconds of selection and attention of one layer of one request in such pages, at the
    context of the ablation; None where the axis is not that of the page size."""


@dataclass(frozen=True, kw_only=True)
class Score:
    """Share of correct answers of one method in one kind of task."""

    method: str
    task: str
    cases: int
    """Of all seeds together."""
    score: SeedStats
    full_score: SeedStats


@dataclass(frozen=True, kw_only=True)
class AblationResults:
    """Points and scores, with the conditions of the run."""

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
"""Called with the name of a study and its number of cases, all methods together."""
Advance = Callable[[str, int], None]
"""Called with the name of a study and the number of cases that were finished."""


def ablate(plan: Ablation, begin: Begin, advance: Advance) -> AblationResults:
    """Run all studies.

    Raises: ConfigError for a wrong setting, before anything runs; ModelError if a request fails
    """
    waiting = deque((name_of(study), prepare(study)) for study in plan.studies)
    for name, one in waiting:
        begin(name, cases_of(one))

    found = list[Results]()
    while waiting:  # frees the prompts of a study before the next one begins
        found.append(_run(*waiting.popleft(), advance))
    return joined(plan, found)


def joined(plan: Ablation, found: Sequence[Results]) -> AblationResults:
    """Points and scores of the results of all studies."""
    settings = {key: value for key, value in vars(plan).items() if key not in {"base", "model"}}
    known = ("model", "model_revision", "text_hash", "default_compressor")
    return AblationResults(
        conditions={key: found[0].conditions[key] for key in known} | settings,
        points=with_page_times(
            points_of(plan.axes, [one.rows for one in found if one.rows]), plan.context
        ),
        scores=scores_of([one.tasks for one in found if one.tasks]),
    )


def ablate_one(study: Study, begin: Begin, advance: Advance) -> Results:
    """Run one of the studies of a plan.

    Raises: ConfigError for a wrong setting; ModelError if a request fails
    """
    name, prepared = name_of(study), prepare(study)
    begin(name, cases_of(prepared))
    return _run(name, prepared, advance)


def _run(name: str, prepared: Prepared, advance: Advance) -> Results:
    records = measure(prepared, lambda _m, count: advance(name, count), lambda _n, _c: None)
    return report(prepared, records)


def name_of(study: Study) -> str:
    return f"{'texts' if study.texts else 'tasks'}, draw {study.seed}"


def cases_of(prepared: Prepared) -> int:
    """Cases of the full cache and all methods together."""
    return (1 + len(prepared.methods)) * sum(len(group.cases) for group in prepared.groups)


def points_of(axes: Sequence[str], seeds: Sequence[Sequence[Row]]) -> list[Point]:
    """One point per axis and setting from the rows of each seed."""
    by_name: Mapping[str, list[Row]] = {
        row.method: [next(r for r in rows if r.method == row.method) for rows in seeds]
        for row in (seeds[0] if seeds else ())
    }
    return [
        _point(axis, label, name, by_name[name])
        for axis in (axes if seeds else ())
        for label, name in AXES[axis].items()
    ]


def with_page_times(points: Sequence[Point], context: int) -> list[Point]:
    """Add the time of a call to the points of the axis of page sizes.

    Pages are in K8V4, in the shape of a layer of the default model: the rankings of the ablation
    itself run on unquantized keys without pages, so their own time says nothing.
    """
    sizes = [int(point.setting) for point in points if point.axis == PAGE_AXIS]
    if not sizes:
        return list(points)
    rows = run_selection(
        formats=["k8v4"],
        batches=[1],
        contexts=[context],
        keeps=[KEEP],
        budgets=[],
        page_tokens=sizes,
    )
    times = {str(size): row.selected_ms * 1e3 for size, row in zip(sizes, rows, strict=True)}
    return [
        replace(point, attention_us=times[point.setting]) if point.axis == PAGE_AXIS else point
        for point in points
    ]


def _point(axis: str, label: str, name: str, rows: Sequence[Row]) -> Point:
    hits = [row.attention_hit for row in rows if row.attention_hit is not None]
    return Point(
        axis=axis,
        setting=label,
        method=name,
        bytes_read_ratio=mean(row.bytes_data_ratio for row in rows),
        bytes_held_ratio=mean(row.bytes_all_in_ratio for row in rows),
        attention_hit=SeedStats.of(hits) if hits else None,
        kl=SeedStats.of([row.summary.kl for row in rows]),
        top1_agreement=SeedStats.of([row.summary.top1_agreement for row in rows]),
        perplexity_ratio=SeedStats.of([row.summary.perplexity_ratio for row in rows]),
        is_neutral=is_neutral(rows),
        kl_by_seed=tuple(row.summary.kl for row in rows),
        perplexity_by_seed=tuple(row.summary.perplexity_ratio for row in rows),
    )


def is_neutral(rows: Sequence[Row]) -> bool:
    """Whether a method's mean log perplexity is that of the full cache within three deviations.

    Source: LeanKV, section 7.2 (performance-neutral: three standard deviations of FP16's runs)
    """
    full = [log(row.summary.perplexity_full) for row in rows]
    ours = [log(row.summary.perplexity) for row in rows]
    return abs(mean(ours) - mean(full)) <= 3 * stdev(full)


def scores_of(seeds: Sequence[Sequence[TaskRow]]) -> list[Score]:
    """One score per method and task from the task rows of each seed, which have the same order."""
    return [
        Score(
            method=rows[0].method,
            task=rows[0].task,
            cases=sum(row.cases for row in rows),
            score=SeedStats.of([row.score for row in rows]),
            full_score=SeedStats.of([row.full_score for row in rows]),
        )
        for rows in zip(*seeds, strict=True)
    ]
