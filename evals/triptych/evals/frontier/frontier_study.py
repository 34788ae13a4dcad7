"""The frontier: all methods on one plane of bytes and fidelity, on texts that chose nothing."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal, get_args

from torch import Tensor

from triptych.core.config import AppConfig, DType, require
from triptych.core.errors import ConfigError
from triptych.evals.data.cases import EqualBytes, Method, Outcome
from triptych.evals.data.tasks import TaskBuilder
from triptych.evals.data.texts import Split, documents, text_hash
from triptych.evals.data.vocabulary import Vocabulary
from triptych.evals.frontier.compress_time import compress_times
from triptych.evals.frontier.probes import Probe, ProbeGroup, answer_probes, text_probes
from triptych.evals.frontier.record_file import ProbeRecord, RecordFile
from triptych.evals.frontier.reference_logits import ReferenceLogits
from triptych.evals.methods.full_cache import FullCache
from triptych.evals.methods.method_names import FULL, check_served, parse_methods
from triptych.evals.methods.served_engines import EngineMethod
from triptych.evals.metrics.fidelity import Steps, compare
from triptych.workers.models.facts import ModelFacts, describe
from triptych.workers.models.store.model_store import resolve

Part = Literal["texts", "answers", "times"]
"""``texts``: fidelity and late pass keys; ``answers``: greedy answers; ``times``: to compress."""
PARTS: tuple[Part, ...] = get_args(Part)
BATCHES = (1, 4, 16)
"""Prompts that are compressed together, for its time per token."""
BATCH_PROBES = 4
"""Probes that a method runs at once; a study that is stopped repeats at most these."""
KEPT = (0.5, 0.25)
"""Shares of the tokens that retention rules keep."""
RETENTION = (
    *("snapkv", "h2o", "h2o:generate", "tova", "adakv", "pyramidkv", "streaming_llm", "knorm"),
    *("keydiff", "expected_attention", "cake", "kvcrush", "tangram", "compresskv", "epicache"),
)
"""Served, in K8V4."""
PRUNED = ("snapkv", "h2o", "mean_attention", "pyramidkv", "streaming_llm", "knorm")
"""Baselines, in 16 bits."""
FRONTIER = (
    "default",
    "default+low_format=k4v2",
    "uniform:k8v4",
    "uniform:k4v2",
    "uniform:k4v2c",
    *(f"served:{name}+keep_share={KEPT[0]}" for name in RETENTION),
    "uniform:k4v4",
    "leankv",
    *("saw_int4", "fp8", "kivi", "kivi:2", "kvarn", "oscar", "block_gtq", "spherical"),
    "learned:merge",
    *("uniform:k4v8", "uniform:k8v2"),
    *(f"{name}+keep={share}" for share in KEPT for name in PRUNED),
    "uniform:k8v8",
    "diffkv+alpha_high=1",
    *(f"served:{name}+keep_share={KEPT[1]}" for name in RETENTION),
    *(f"kvmerger+keep_share={share}" for share in KEPT),
    "uniform:k2v2",
    "uniform:k2v4",
    "uniform:k4v1",
)
"""Methods of ``triptych eval frontier`` unless told otherwise."""

Advance = Callable[[str], None]
"""Called with the name of a bar when one of its units is done."""


@dataclass(frozen=True, kw_only=True)
class FrontierStudy:
    """Methods, texts and what is measured."""

    model: str = ""
    """Name or path; empty: that of ``base``."""
    methods: tuple[str, ...] = FRONTIER
    """Names as in ``method_names.parse_method``; baselines with ``+keep=``."""
    base: AppConfig = field(default_factory=AppConfig)
    dtype: DType = "float32"
    """Of the engines, except for times: those are of the data type that is served."""
    parts: tuple[Part, ...] = PARTS
    contexts: tuple[int, ...] = (1024, 4096)
    """Tokens that are compressed; answers and times are of the shortest."""
    documents: int = 8
    steps: int = 64
    """Tokens that are forced and scored after each context."""
    answer_tokens: int = 128
    split: Split = "test"
    seed: int = 0

    def __post_init__(self) -> None:
        require(bool(self.contexts), "contexts", self.contexts, "one context length or more")
        require(min(self.contexts, default=128) >= 128, "contexts", self.contexts, ">= 128")
        require(self.documents >= 1, "documents", self.documents, ">= 1")
        require(self.steps >= 1, "steps", self.steps, ">= 1")
        require(self.answer_tokens >= 2, "answer_tokens", self.answer_tokens, ">= 2")
        known = bool(self.parts) and set(self.parts) <= set(PARTS)
        require(known, "parts", self.parts, f"some of {', '.join(PARTS)}")
        require(self.split != "calibration", "split", self.split, "evaluation or test")


@dataclass(frozen=True, kw_only=True)
class PreparedFrontier:
    """A study with its model resolved and its probes made."""

    study: FrontierStudy
    path: Path
    facts: ModelFacts
    methods: list[Method]
    groups: list[ProbeGroup]
    """Of all parts, whether they run or not."""

    @property
    def conditions(self) -> dict[str, object]:
        """Model, texts and sizes: equal for all records of a file."""
        study = self.study
        kept = ("dtype", "contexts", "documents", "steps", "answer_tokens", "split", "seed")
        return {
            "model": study.model or study.base.model.name,
            "model_revision": self.facts.revision,
            "text_hash": text_hash(study.split),
            **{name: getattr(study, name) for name in kept},
        }

    def groups_of(self, part: Part) -> list[ProbeGroup]:
        return [group for group in self.groups if group.name.startswith(f"{part}@")]

    @property
    def timed(self) -> list[EngineMethod]:
        """Methods that are served, and so have a compressor to time."""
        return [one for one in self.methods if isinstance(one, EngineMethod)]

    def units(self) -> dict[str, int]:
        """Bars and their lengths: probes and timings, done or not, of all methods together."""
        probes = {
            group.name: (1 + len(self.methods)) * len(group.probes)
            for part in self.study.parts
            for group in self.groups_of(part)
        }
        timed = len(self.timed) * len(BATCHES)
        return probes | ({"times": timed} if "times" in self.study.parts else {})


def prepare_frontier(study: FrontierStudy) -> PreparedFrontier:
    """Resolve the model, parse the methods, make the probes.

    Raises: ConfigError for a wrong setting or a method that cannot be served, ModelError if there
            is no such model
    """
    path = resolve(study.model or study.base.model.name)
    facts = describe(path)
    methods = list[Method]()
    for one in parse_methods(study.methods, path, study.base, study.dtype):
        if isinstance(one, EqualBytes):
            raise ConfigError(f"method {one.name!r}: say which share it keeps, as in +keep=0.3")
        methods.append(one)
    check_served(methods)
    prepared = PreparedFrontier(
        study=study,
        path=path,
        facts=facts,
        methods=methods,
        groups=list(_groups(study, Vocabulary(path))),
    )
    _check_lengths(prepared)
    return prepared


def _groups(study: FrontierStudy, vocabulary: Vocabulary) -> Iterator[ProbeGroup]:
    for context in study.contexts:
        found = documents(
            vocabulary.encode,
            study.split,
            context=context,
            continuation=study.steps + 1,
            count=study.documents,
            seed=study.seed,
        )
        builder = TaskBuilder(vocabulary, (), context)
        probes = text_probes(found, builder, study.seed)
        yield ProbeGroup(name=f"texts@{context}", context=context, probes=probes)
        if context == min(study.contexts):
            probes = answer_probes(found, study.answer_tokens)
            yield ProbeGroup(name=f"answers@{context}", context=context, probes=probes)


def _check_lengths(prepared: PreparedFrontier) -> None:
    most = prepared.facts.context_tokens
    for group in prepared.groups:
        cases = [probe.case for probe in group.probes]
        longest = max(len(case.prompt) + case.answer_tokens for case in cases)
        if longest > most:
            raise ConfigError(
                f"{group.name}: {longest} tokens with what follows the context, the model takes "
                f"{most}; ask for a shorter context"
            )


def run_frontier(prepared: PreparedFrontier, file: RecordFile, advance: Advance) -> None:
    """Measure what the file does not have yet, and add it line by line, method by method.

    Raises: ConfigError if the file is of another study, ModelError if a request fails
    """
    file.open(prepared.conditions)
    done = {(one.method, one.group, one.case) for one in file.probes()}
    for part in prepared.study.parts:
        if part == "times":
            _time(prepared, file, advance)
        for group in prepared.groups_of(part):
            run = _GroupRun(group, ReferenceLogits(file.logits_folder), file, done, advance)
            for method in (FullCache(prepared.path), *prepared.methods):
                run.measure(method)


@dataclass(frozen=True)
class _GroupRun:
    """One group of probes, method by method; the full cache comes first."""

    group: ProbeGroup
    reference: ReferenceLogits
    file: RecordFile
    done: set[tuple[str, str, str]]
    """Method, group and case of the records in the file."""
    advance: Advance

    def measure(self, method: Method) -> None:
        """Run a method on the probes for which it has no record."""
        numbered = list(enumerate(self.group.probes))
        missing = [
            (number, probe)
            for number, probe in numbered
            if (method.name, self.group.name, probe.case.name) not in self.done
        ]
        for _ in range(len(numbered) - len(missing)):
            self.advance(self.group.name)
        for start in range(0, len(missing), BATCH_PROBES):
            batch = missing[start : start + BATCH_PROBES]
            outcomes = method.run([probe.case for _, probe in batch])
            pairs = zip(batch, outcomes, strict=True)
            self.file.add(self._record(method.name, *one, outcome) for one, outcome in pairs)
            for _ in batch:
                self.advance(self.group.name)

    def _record(self, name: str, number: int, probe: Probe, outcome: Outcome) -> ProbeRecord:
        return ProbeRecord(
            method=name,
            group=self.group.name,
            case=probe.case.name,
            steps=self._steps(name, number, probe, outcome.logits),
            tokens=outcome.tokens,
            footprint=outcome.footprint,
        )

    def _steps(self, name: str, number: int, probe: Probe, logits: Tensor | None) -> Steps | None:
        if logits is None:
            return None
        count = probe.scored_tokens
        ours = logits[:count]
        if name == FULL:
            self.reference.write(self.group.name, number, ours)
        full = self.reference.read(self.group.name, number)
        if full is None:
            raise ConfigError(
                f"{str(self.reference.folder)!r} lacks logits of the full cache that the records "
                "name; delete both, and begin again"
            )
        return compare(full, ours, probe.case.forced[1 : count + 1])


def _time(prepared: PreparedFrontier, file: RecordFile, advance: Advance) -> None:
    """Time the methods that have no complete set of times."""
    context = min(prepared.study.contexts)
    done = {(one.method, one.batch) for one in file.times() if one.context == context}
    prompt = prepared.groups_of("texts")[0].probes[0].case.prompt
    for method in prepared.timed:
        if any((method.name, batch) not in done for batch in BATCHES):
            file.add(compress_times(method, prompt, BATCHES))
        for _ in BATCHES:
            advance("times")
