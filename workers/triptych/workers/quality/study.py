"""A study: which methods, on which texts, how long; and what came out, with its conditions."""

from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path

from triptych.core.config import AppConfig, DType, require
from triptych.workers.models import describe, resolve
from triptych.workers.quality.methods import BASELINES, FULL, parse_methods
from triptych.workers.quality.plain import FullCache
from triptych.workers.quality.report import Row, text_rows
from triptych.workers.quality.runner import Advance, Group, check, evaluate, text_group
from triptych.workers.quality.texts import Split, documents, text_hash
from triptych.workers.quality.vocabulary import Vocabulary


@dataclass(frozen=True, kw_only=True)
class Study:
    """What is asked."""

    model: str = ""
    """Name or path; empty: that of ``base``."""
    methods: tuple[str, ...] = BASELINES
    """Names as in ``methods.parse_method``."""
    base: AppConfig = field(default_factory=AppConfig)
    """Settings that methods start from; ``default`` is exactly these."""
    dtype: DType = "float32"
    """In which the engines compute: float32 shows the cache alone, as the full cache is float32."""
    contexts: tuple[int, ...] = (1024, 2048, 4096)
    """Tokens that are compressed."""
    documents: int = 6
    """Documents per context length."""
    steps: int = 128
    """Tokens that are forced and scored after each context."""
    split: Split = "evaluation"
    """Which texts: what a setting was tuned on must not be what it is judged on."""

    def __post_init__(self) -> None:
        require(bool(self.contexts), "contexts", self.contexts, "one context length or more")
        require(min(self.contexts, default=1) >= 2, "contexts", self.contexts, ">= 2 tokens each")
        require(self.documents >= 1, "documents", self.documents, ">= 1")
        require(self.steps >= 1, "steps", self.steps, ">= 1")

    @property
    def model_name(self) -> str:
        return self.model or self.base.model.name


@dataclass(frozen=True, kw_only=True)
class Results:
    """What came out, and under which conditions; the machine is the caller's to add."""

    conditions: dict[str, object]
    rows: list[Row]

    def as_json(self) -> dict[str, object]:
        return {"conditions": self.conditions, "rows": [row.as_json() for row in self.rows]}


def run(study: Study, advance: Advance, announce: Callable[[str, int], None]) -> Results:
    """Run a study; ``announce`` is told each method and how many cases it will take.

    Raises: ConfigError for a wrong setting, ModelError if a model or a request fails
    """
    path = resolve(study.model_name)
    facts = describe(path)
    methods = parse_methods(study.methods, path, study.base, study.dtype)
    groups = _groups(study, path)
    check(groups, facts.context_tokens)
    cases = sum(len(group.cases) for group in groups)
    for name in (FULL, *(method.name for method in methods)):
        announce(name, cases)
    records = evaluate(FullCache(path), methods, groups, advance)
    return Results(conditions=_conditions(study, facts.revision), rows=text_rows(records, groups))


def _groups(study: Study, path: Path) -> list[Group]:
    encode = Vocabulary(path).encode
    return [
        text_group(
            documents(
                encode,
                study.split,
                context=context,
                continuation=study.steps + 1,
                count=study.documents,
            )
        )
        for context in study.contexts
    ]


def _conditions(study: Study, revision: str) -> dict[str, object]:
    told = ("methods", "dtype", "contexts", "documents", "steps", "split")
    return {
        "model": study.model_name,
        "model_revision": revision,
        "text_hash": text_hash(study.split),
        "compressor_default": asdict(study.base.compressor),
        **{name: getattr(study, name) for name in told},
    }
