"""The frontier: all methods on one plane of bytes and fidelity, on texts that chose nothing."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal, get_args

from triptych.core.config import AppConfig, DType, require
from triptych.core.errors import ConfigError
from triptych.evals.data.cases import EqualBytes, Method, Outcome
from triptych.evals.data.tasks import TaskBuilder
from triptych.evals.data.texts import Split, documents, text_hash
from triptych.evals.data.vocabulary import Vocabulary
from triptych.evals.frontier.compress_time import compress_times
from triptych.evals.frontier.probes import Probe, ProbeGroup, answer_probes, text_probes
from triptych.evals.frontier.record_file import ProbeRecord, RecordFile
from triptych.evals.methods.full_cache import FullCache
from triptych.evals.methods.method_names import FULL, parse_methods
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
PRUNED = ("streaming_llm", "snapkv", "pyramidkv", "h2o", "knorm", "mean_attention")
FRONTIER = (
    "default",
    "leankv",
    "diffkv+alpha_high=1",
    "uniform:k8v8",
    "uniform:k8v4",
    "uniform:k4v4",
    "uniform:k4v2",
    "simulated:k4v8",
    "simulated:k2v4",
    *(f"{name}+keep={share}" for name in PRUNED for share in (0.5, 0.25)),
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
        """What all records of a file have in common; methods may be added later."""
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

    Raises: ConfigError for a wrong setting, ModelError if there is no such model
    """
    path = resolve(study.model or study.base.model.name)
    facts = describe(path)
    methods = list[Method]()
    for one in parse_methods(study.methods, path, study.base, study.dtype):
        if isinstance(one, EqualBytes):
            raise ConfigError(f"method {one.name!r}: say which share it keeps, as in +keep=0.3")
        methods.append(one)
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
    """Measure what the file does not have yet, and add it line by line.

    Raises: ConfigError if the file is of another study, ModelError if a request fails
    """
    file.open(prepared.conditions)
    done = {(one.method, one.group, one.case) for one in file.probes()}
    for part in prepared.study.parts:
        if part == "times":
            _time(prepared, file, advance)
        for group in prepared.groups_of(part):
            for probes in group.batches(BATCH_PROBES):
                _run_batch(prepared, group, probes, done, file, advance)


def _run_batch(
    prepared: PreparedFrontier,
    group: ProbeGroup,
    probes: Sequence[Probe],
    done: set[tuple[str, str, str]],
    file: RecordFile,
    advance: Advance,
) -> None:
    """Run the methods that lack a result; the full cache runs if there is such a method."""

    def lacks(name: str) -> bool:
        return any((name, group.name, probe.case.name) not in done for probe in probes)

    missing = [method for method in prepared.methods if lacks(method.name)]
    if missing or lacks(FULL):
        full = _outcomes(FullCache(prepared.path), probes)
        if lacks(FULL):
            file.add(_records(FULL, group, probes, full, full))
        for method in missing:
            outcomes = _outcomes(method, probes)
            file.add(_records(method.name, group, probes, full, outcomes))
            for _ in probes:
                advance(group.name)
    for _ in range((1 + len(prepared.methods) - len(missing)) * len(probes)):
        advance(group.name)


def _outcomes(method: Method, probes: Sequence[Probe]) -> list[Outcome]:
    return method.run([probe.case for probe in probes])


def _records(
    name: str,
    group: ProbeGroup,
    probes: Sequence[Probe],
    full: Sequence[Outcome],
    outcomes: Sequence[Outcome],
) -> list[ProbeRecord]:
    return [
        ProbeRecord(
            method=name,
            group=group.name,
            case=probe.case.name,
            steps=_steps(probe, reference, outcome),
            tokens=outcome.tokens,
            footprint=outcome.footprint,
        )
        for probe, reference, outcome in zip(probes, full, outcomes, strict=True)
    ]


def _steps(probe: Probe, full: Outcome, ours: Outcome) -> Steps | None:
    if full.logits is None or ours.logits is None:
        return None
    count = probe.scored_tokens
    return compare(full.logits[:count], ours.logits[:count], probe.case.forced[1 : count + 1])


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
