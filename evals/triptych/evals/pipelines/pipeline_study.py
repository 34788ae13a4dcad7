"""Compression at work: the time of each method in the compressor, and under load."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal, get_args

from triptych.core.config import AppConfig, require
from triptych.core.errors import ConfigError
from triptych.evals.data.texts import Document, documents, text_hash
from triptych.evals.data.vocabulary import Vocabulary
from triptych.evals.frontier.compress_time import compress_times
from triptych.evals.frontier.record_file import RecordFile, TimeRecord
from triptych.evals.methods.method_names import parse_method
from triptych.evals.methods.served_engines import EngineMethod
from triptych.evals.pipelines.pipeline_load import LoadRecord, Pipeline, run_pipeline
from triptych.workers.models.facts import describe
from triptych.workers.models.store.model_store import resolve

Part = Literal["times", "load", "reclaim"]
"""``times``: of the compressor alone; ``load``: requests at each rate, pipelined and one by one;
``reclaim``: with and without zombie reclaim, at the highest rate."""
PARTS: tuple[Part, ...] = get_args(Part)
BATCHES = (1, 4, 8, 16)
"""Prompts that are compressed together."""
SPLIT = "evaluation"

Advance = Callable[[str], None]
"""Called with the name of a part when one of its measurements is done."""


@dataclass(frozen=True, kw_only=True)
class PipelineStudy:
    """Methods, load, and what is measured."""

    methods: tuple[str, ...]
    """Names as in ``method_names.parse_method``, of methods that are served."""
    base: AppConfig = field(default_factory=AppConfig)
    parts: tuple[Part, ...] = PARTS
    rates_per_s: tuple[float, ...] = (0.5, 1.0, 2.0)
    requests: int = 16
    prompt_tokens: int = 512
    """Of the requests under load, and of the prompts that are timed."""
    output_tokens: int = 32

    def __post_init__(self) -> None:
        known = bool(self.parts) and set(self.parts) <= set(PARTS)
        require(known, "parts", self.parts, f"some of {', '.join(PARTS)}")
        require(bool(self.methods), "methods", self.methods, "one or more")
        require(bool(self.rates_per_s), "rates", self.rates_per_s, "one or more")
        require(min(self.rates_per_s, default=1) > 0, "rates", self.rates_per_s, "> 0")
        require(self.requests >= 2, "requests", self.requests, ">= 2")
        require(self.prompt_tokens >= 16, "prompt_tokens", self.prompt_tokens, ">= 16")
        require(self.output_tokens >= 2, "output_tokens", self.output_tokens, ">= 2")

    @property
    def pipelines(self) -> tuple[Pipeline, ...]:
        """All that each method runs in."""
        found = dict[Pipeline, None]()
        if "load" in self.parts:
            for rate in self.rates_per_s:
                for is_pipelined in (True, False):
                    found[Pipeline(rate_per_s=rate, is_pipelined=is_pipelined)] = None
        if "reclaim" in self.parts:
            for reclaims in (True, False):
                found[Pipeline(rate_per_s=max(self.rates_per_s), reclaims=reclaims)] = None
        return tuple(found)


@dataclass(frozen=True, kw_only=True)
class PreparedPipelines:
    """A study with its model resolved and its texts cut."""

    study: PipelineStudy
    path: Path
    methods: tuple[EngineMethod, ...]
    texts: tuple[Document, ...]
    revision: str

    @property
    def conditions(self) -> dict[str, object]:
        """Model, texts and sizes: equal for all records of a file."""
        study = self.study
        return {
            "model": study.base.model.name,
            "model_revision": self.revision,
            "text_hash": text_hash(SPLIT),
            "dtype": study.base.model.dtype,
            "requests": study.requests,
            "prompt_tokens": study.prompt_tokens,
            "output_tokens": study.output_tokens,
        }

    def units(self) -> dict[str, int]:
        """Names of progress bars and their lengths."""
        timed = {"times": len(self.methods)} if "times" in self.study.parts else {}
        return timed | {"pipelines": len(self.methods) * len(self.study.pipelines)}


def prepare_pipelines(study: PipelineStudy) -> PreparedPipelines:
    """Resolve the model, parse the methods, cut the texts.

    Raises: ConfigError for a wrong setting or a method that is not served, ModelError if there is
            no such model
    """
    path = resolve(study.base.model.name)
    methods = list[EngineMethod]()
    for name in study.methods:
        method = parse_method(name, path, study.base, study.base.model.dtype)
        if not isinstance(method, EngineMethod):
            raise ConfigError(f"method {name!r}: runs in no engine; name one that is served")
        methods.append(method)
    texts = documents(
        Vocabulary(path).encode,
        SPLIT,
        context=study.prompt_tokens,
        continuation=1,
        count=study.requests,
    )
    return PreparedPipelines(
        study=study,
        path=path,
        methods=tuple(methods),
        texts=tuple(texts),
        revision=describe(path).revision,
    )


def run_pipelines(prepared: PreparedPipelines, file: RecordFile, advance: Advance) -> None:
    """Measure what the file does not have yet, and add it as it comes.

    Raises: ConfigError if the file is of another study, ModelError if a request fails
    """
    file.open(prepared.conditions)
    if "times" in prepared.study.parts:
        _time(prepared, file, advance)
    done = {(one.method, one.pipeline) for one in loads_of(file)}
    prompts = [text.context for text in prepared.texts]
    for pipeline in prepared.study.pipelines:
        for method in prepared.methods:
            if (method.name, pipeline) not in done:
                record = run_pipeline(
                    method.name,
                    method.config,
                    method.model_path,
                    prompts,
                    prepared.study.output_tokens,
                    pipeline,
                )
                file.add([record])
            advance("pipelines")


def loads_of(file: RecordFile) -> Iterator[LoadRecord]:
    """The load records of a file."""
    return (LoadRecord.from_json(one) for one in file.of_kind("load"))


def _time(prepared: PreparedPipelines, file: RecordFile, advance: Advance) -> None:
    done = {(one.method, one.batch) for one in file.times()}
    for method in prepared.methods:
        if any((method.name, batch) not in done for batch in BATCHES):
            file.add(compress_times(method, prepared.texts[0].context, BATCHES))
        advance("times")


def times_by_method(records: Sequence[TimeRecord]) -> dict[str, dict[int, TimeRecord]]:
    """Times of each method by batch size."""
    found = dict[str, dict[int, TimeRecord]]()
    for one in records:
        found.setdefault(one.method, {})[one.batch] = one
    return found
