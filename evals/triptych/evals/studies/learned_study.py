# pyright: reportUnknownMemberType=false
# numpy and torch leave some calls untyped.
"""Learned networks beside pruning, quantization and attention sums, at equal bytes.

A context is compressed once, then the text's own tokens follow, and
logits are compared with those of the full cache. Attention outputs are compared for the queries of
the full cache.
"""

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from triptych.core.config import AppConfig, ModelConfig, require
from triptych.core.images import TEXT, Segment
from triptych.core.layout import FORMATS
from triptych.core.methods.table import policy_of
from triptych.evals.data.cases import Footprint
from triptych.evals.data.texts import Document, Split, documents, text_hash
from triptych.evals.data.vocabulary import Vocabulary
from triptych.evals.methods.context_methods import (
    Classes,
    ContextMethod,
    Merging,
    Predicted,
    Pruning,
    Significance,
    arbitrary,
    classes_at,
    measured,
    two_levels,
)
from triptych.evals.methods.replaced_cache import ReplacedAttention, ReplacedCache
from triptych.evals.metrics.fidelity import Steps, Summary, compare, summarize
from triptych.evals.training.captures import Capture, CapturePlan, capture_text
from triptych.evals.training.output_matching import context_of, output_error
from triptych.workers.compress.learned.artefact import ArtefactRecord, read_merger, read_scorer
from triptych.workers.compress.learned.chunk_merger import (
    BestTokenMerger,
    GatedMerger,
    MeanMerger,
)
from triptych.workers.compress.learned.chunk_plan import plan_chunks
from triptych.workers.compress.learned.rope_frame import RopeFrame
from triptych.workers.models.compression_profile import find_profile
from triptych.workers.models.facts import ModelFacts, describe
from triptych.workers.models.load import LoadedModel, load
from triptych.workers.models.store.model_store import resolve

PRUNED_RATIOS = (0.75, 0.5, 0.25)
"""Bytes of pruned contexts at which a scorer is compared with attention sums."""
HIGH_SHARES = (0.05, 0.1, 0.2)
"""Shares of tokens in the high of two formats, likewise."""
LOW, HIGH = FORMATS["k4v2"], FORMATS["k8v4"]

Begin = Callable[[int], None]
Advance = Callable[[], None]


@dataclass(frozen=True, kw_only=True)
class LearnedStudy:
    """The networks and the texts of a study."""

    model: str = ModelConfig().name
    scorer: Path | None = None
    mergers: tuple[Path, ...] = ()
    context: int = 1024
    documents: int = 6
    steps: int = 128
    split: Split = "evaluation"
    """Never the split that networks are trained on."""

    def __post_init__(self) -> None:
        require(self.split != "calibration", "split", self.split, "evaluation or test")
        require(self.documents >= 1, "documents", self.documents, ">= 1")
        require(self.steps >= 1, "steps", self.steps, ">= 1")
        some = self.scorer is not None or bool(self.mergers)
        require(some, "scorer", self.scorer, "a scorer, or compressors")


@dataclass(frozen=True, kw_only=True)
class LearnedRow:
    """One method over all documents."""

    method: str
    bytes_data_ratio: float
    bytes_all_in_ratio: float
    output_error: float
    """Squared error of attention outputs over their square, mean over layers and documents."""
    summary: Summary
    kl_of_documents: list[float]

    def as_json(self) -> dict[str, object]:
        data = asdict(self)
        return {**data, **data.pop("summary")}


@dataclass(frozen=True, kw_only=True)
class LearnedResults:
    """Rows of a study with its conditions."""

    conditions: dict[str, object]
    rows: list[LearnedRow]

    def as_json(self) -> dict[str, object]:
        return {"conditions": self.conditions, "rows": [row.as_json() for row in self.rows]}


@dataclass
class _Record:
    footprint: Footprint
    errors: list[float]
    steps: list[Steps]


def run_learned_study(study: LearnedStudy, begin: Begin, advance: Advance) -> LearnedResults:
    """Run all methods on all documents; ``begin`` gets the number of calls of ``advance``.

    Raises: ConfigError for networks of another model, or too little text; ModelError for torn files
    """
    path = resolve(study.model)
    facts = describe(path)
    methods, records = _methods(study, facts)
    texts = documents(
        Vocabulary(path).encode,
        study.split,
        context=study.context,
        continuation=study.steps + 1,
        count=study.documents,
    )
    loaded = load(path, "float32", quantization="none")
    found: dict[str, _Record] = {}
    begin(len(texts) * len(methods))
    for text in texts:
        capture, full = _read(loaded, text)
        for method in methods:
            _measure(method, loaded, text, capture, full, found)
            advance()
    conditions: dict[str, object] = {
        "model": study.model,
        "model_revision": facts.revision,
        "text_hash": text_hash(study.split),
        "context": study.context,
        "documents": study.documents,
        "steps": study.steps,
        "split": study.split,
        "networks": [asdict(record) for record in records],
    }
    return LearnedResults(
        conditions=conditions, rows=[_row(name, one) for name, one in found.items()]
    )


def _read(loaded: LoadedModel, text: Document) -> tuple[Capture, Tensor]:
    """Everything about a document with the full cache; logits after each token but the last."""
    plan = CapturePlan(context=len(text.context), continuation=len(text.continuation) - 1)
    tokens = (*text.context, *text.continuation[:-1])
    return capture_text(loaded, tokens, plan)


def _measure(
    method: ContextMethod,
    loaded: LoadedModel,
    text: Document,
    capture: Capture,
    full: Tensor,
    found: dict[str, _Record],
) -> None:
    with torch.inference_mode():
        replaced, footprint = method.replace(context_of(capture))
        error, _ = output_error(replaced, capture)
    steps = compare(full, continue_text(loaded, text, replaced), text.continuation[1:])
    record = found.setdefault(method.name, _Record(footprint, [], []))
    record.errors.append(float(error.mean()))
    record.steps.append(steps)


def continue_text(loaded: LoadedModel, text: Document, replaced: ReplacedCache) -> Tensor:
    """Logits after each token of the continuation but the last: [steps, vocab]."""
    tokens = torch.tensor(text.continuation[:-1])
    positions = torch.arange(len(tokens)) + len(text.context)
    with torch.inference_mode():
        every = torch.arange(len(tokens))
        return loaded.network(tokens, positions, ReplacedAttention(replaced), every)


def _row(name: str, record: _Record) -> LearnedRow:
    held = record.footprint
    return LearnedRow(
        method=name,
        bytes_data_ratio=held.data_bytes / held.full_bytes,
        bytes_all_in_ratio=held.all_in_bytes / held.full_bytes,
        output_error=float(np.mean(record.errors)),
        summary=summarize([[steps] for steps in record.steps]),
        kl_of_documents=[float(steps.kl.mean()) for steps in record.steps],
    )


# ------------------------------------------------------------------ the methods of a study


def _methods(
    study: LearnedStudy, facts: ModelFacts
) -> tuple[list[ContextMethod], list[ArtefactRecord]]:
    centre = profile_mean_keys(study.model, facts)
    methods, records = list[ContextMethod](), list[ArtefactRecord]()
    predicted: Predicted | None = None
    if study.scorer is not None:
        scorer, record = read_scorer(study.scorer, facts)
        predicted = Predicted(scorer)
        records.append(record)
        if not study.mergers:
            methods += _scored(predicted, centre)
    frame = RopeFrame.of(facts)
    done = set[int]()
    for path in study.mergers:
        merger, record = read_merger(path, facts)
        k = merger.chunk_tokens
        records.append(record)
        if k not in done:
            done.add(k)
            methods += _unlearned(k, facts, frame, centre, study.context)
        if record.kind == "paper_merger":
            methods.append(Merging(f"merge:paper@{k}", merger, frame, has_bias=False))
            continue
        methods.append(Merging(f"merge:learned@{k}", merger, frame))
        if predicted is not None:
            methods.append(Merging(f"merge:learned+scorer@{k}", merger, frame, predicted))
    return methods, records


def _scored(predicted: Predicted, centre: Tensor) -> list[ContextMethod]:
    """Pruning and classes by attention sums, by the scorer and at random, at equal bytes."""
    kinds: dict[str, Significance] = {
        "attention": measured,
        "scorer": predicted,
        "random": arbitrary,
    }
    pruned = [
        Pruning(f"prune:{name}@{ratio:g}", ratio, kind)
        for ratio in PRUNED_RATIOS
        for name, kind in kinds.items()
    ]
    classes = [
        Classes(f"classes:{name}@{share:g}", two_levels(LOW, HIGH, share), centre, kind)
        for share in HIGH_SHARES
        for name, kind in kinds.items()
    ]
    return [*pruned, *classes]


def _unlearned(
    k: int, facts: ModelFacts, frame: RopeFrame, centre: Tensor, context: int
) -> list[ContextMethod]:
    """Baselines of learned mergers, all at the bytes of a merged cache with bias."""
    plan = plan_chunks([Segment(TEXT, 0, context)], k)
    dim = facts.geometry.head_dim
    ratio = plan.merged_tokens * (4 * dim + 8 + 2) / (context * 4 * dim)
    gated = GatedMerger(facts.geometry, k).requires_grad_(False)
    return [
        Merging(f"merge:mean@{k}", MeanMerger(k), frame),
        Merging(f"merge:mean_no_bias@{k}", MeanMerger(k, has_bias=False), frame, has_bias=False),
        Merging(f"merge:untrained@{k}", gated, frame),
        Merging(f"merge:best_token@{k}", BestTokenMerger(k), frame, has_bias=False),
        Pruning(f"prune:attention@1/{k}", ratio),
        classes_at(f"quantize:attention@1/{k}", ratio, context, centre),
    ]


def profile_mean_keys(model: str, facts: ModelFacts) -> Tensor:
    """Mean keys of the model's profile; zeros without one: [L, KH, d]."""
    config = AppConfig(model=ModelConfig(name=model))
    profile = find_profile(config, facts)
    geometry = facts.geometry
    shape = geometry.layers, geometry.kv_heads, geometry.head_dim
    packed = policy_of(config.compressor, profile).kv_rotation.key_centre
    if not packed:
        return torch.zeros(shape)
    values: Sequence[float] = np.frombuffer(packed, "<f2").astype(np.float32).tolist()
    return torch.tensor(values).view(shape)
