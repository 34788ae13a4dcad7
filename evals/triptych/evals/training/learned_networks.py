"""Trains a network from captures to artefact: scorers and mergers of one model."""

from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Literal

from triptych.core.config import ModelConfig, require
from triptych.core.images import IMAGE, TEXT, Modality
from triptych.core.methods.learned_files import NetworkKind
from triptych.evals.training.captures import CapturePlan, Captures, capture_samples
from triptych.evals.training.distillation import DistillationObjective
from triptych.evals.training.fit import Advance, FitPlan, FitState, Objective, fit
from triptych.evals.training.merger_training import (
    MaskedAutoencoder,
    MatchingObjective,
    MergerReport,
    ReconstructionObjective,
    TrainedMerger,
    report_merger,
    standardize_merger,
)
from triptych.evals.training.samples import Samples, chat_samples, text_samples
from triptych.evals.training.scorer_training import (
    Loss,
    ScorerObjective,
    ScorerReport,
    Target,
    report_scorer,
    standardize_scorer,
)
from triptych.workers.compress.learned.artefact import (
    ArtefactRecord,
    read_merger,
    read_scorer,
    write_artefact,
)
from triptych.workers.compress.learned.chunk_merger import GatedMerger, PaperMerger
from triptych.workers.compress.learned.rope_frame import RopeFrame
from triptych.workers.compress.learned.token_scorer import TokenScorer
from triptych.workers.models.facts import ModelFacts, describe
from triptych.workers.models.hf_model import HFModel
from triptych.workers.models.store.model_store import resolve

Variant = Literal["gated", "paper"]
Begin = Callable[[str, int], Callable[[int, float | None], None]]
"""Called with the name and the number of steps of a part; returns the callback of its steps."""


@dataclass(frozen=True, kw_only=True)
class ScorerPlan:
    """Training of a scorer."""

    model: str = ModelConfig().name
    captures: CapturePlan = field(
        default_factory=lambda: CapturePlan(context=2048, continuation=0, documents=32)
    )
    fit: FitPlan = field(default_factory=lambda: FitPlan(steps=600, evaluate_every=50))
    target: Target = "later"
    """Attention that is predicted: from tokens behind a prompt, or from the prompt's own."""
    error: Loss = "logarithm"
    hidden: int = 64
    """Units of each network's hidden layer."""
    seed: int = 0

    def __post_init__(self) -> None:
        require(self.hidden >= 1, "hidden", self.hidden, ">= 1")


@dataclass(frozen=True, kw_only=True)
class MergerPlan:
    """Training of a merger: pre-training, attention outputs, polish; parts of 0 steps are off."""

    model: str = ModelConfig().name
    variant: Variant = "gated"
    """``gated``: pooling gated by significance. ``paper``: FastCache's plain networks."""
    chunk_tokens: int = 5
    captures: CapturePlan = field(default_factory=CapturePlan)
    fit: FitPlan = field(default_factory=FitPlan)
    reconstruction_steps: int = 0
    """Steps of masked reconstruction before."""
    polish_steps: int = 0
    """Steps of distillation through the model afterwards."""
    hidden: int = 64
    """Units of each network's hidden layer; ``gated`` only."""
    seed: int = 0
    batch: int = 1
    """Samples of a step of matching attention."""
    chats: Path | None = None
    """File of chats with images, whose image tokens are merged; None: texts are merged."""

    def __post_init__(self) -> None:
        require(self.batch >= 1, "batch", self.batch, ">= 1")
        require(self.chunk_tokens >= 2, "chunk_tokens", self.chunk_tokens, ">= 2")
        require(self.captures.continuation >= 1, "continuation", self.captures.continuation, ">= 1")


@dataclass(frozen=True, kw_only=True)
class Trained:
    """A network that was written, and how it does on held-out documents."""

    record: ArtefactRecord
    report: ScorerReport | MergerReport
    """Of the file, read back."""
    states: dict[str, FitState]
    """By part of the training."""

    def as_json(self) -> dict[str, object]:
        return {
            "record": asdict(self.record),
            "held_out": asdict(self.report),
            "parts": {
                name: {
                    "steps": state.step,
                    "best_step": state.best_step,
                    "held_out_losses": state.losses,
                }
                for name, state in self.states.items()
            },
        }


def train_scorer(plan: ScorerPlan, output: Path, work: Path, begin: Begin) -> Trained:
    """Capture, train, write; files in ``work`` let a later call go on where this one ended.

    Raises: ConfigError for too little text; ModelError for a model without plain layers
    """
    path = resolve(plan.model)
    facts = describe(path)
    scorer = TokenScorer(facts.geometry, RopeFrame.of(facts), plan.hidden, plan.seed)
    samples = _texts(path, plan.captures)
    captures = _capture(path, facts, plan.captures, samples, work, begin)
    standardize_scorer(scorer, captures.files, plan.target, plan.error)
    objective = ScorerObjective(scorer, captures, plan.target, plan.error, plan.seed)
    state = _fit("scorer", objective, plan.fit, work, _bound(facts, plan, captures), begin)
    record = _record("scorer", plan.model, facts, captures, state, hidden=plan.hidden)
    write_artefact(output, record, scorer)
    written, record = read_scorer(output, facts)
    report = report_scorer(written, captures.held_out)
    return Trained(record=record, report=report, states={"scorer": state})


def train_merger(plan: MergerPlan, output: Path, work: Path, begin: Begin) -> Trained:
    """As ``train_scorer``, for a merger."""
    path = resolve(plan.model)
    facts = describe(path)
    frame = RopeFrame.of(facts)
    merger = _new_merger(plan, facts)
    samples = _samples(path, plan)
    captures = _capture(path, facts, plan.captures, samples, work, begin)
    standardize_merger(merger, frame, captures.files)
    bound = _bound(facts, plan, captures)
    states: dict[str, FitState] = {}
    if plan.reconstruction_steps:
        steps = FitPlan(steps=plan.reconstruction_steps, evaluate_every=plan.fit.evaluate_every)
        masked = ReconstructionObjective(MaskedAutoencoder(merger), frame, captures, plan.seed)
        states["reconstruction"] = _fit("reconstruction", masked, steps, work, bound, begin)
    matching = MatchingObjective(merger, frame, captures, plan.seed, plan.batch)
    states["matching"] = _fit("matching", matching, plan.fit, work, bound, begin)
    if plan.polish_steps:
        steps = FitPlan(
            steps=plan.polish_steps, learning_rate=plan.fit.learning_rate / 10, evaluate_every=10
        )
        model = HFModel.read(path, facts, "float32", "cpu")
        model.model.requires_grad_(False)
        polish = DistillationObjective(merger, frame, captures, model, plan.seed)
        states["polish"] = _fit("polish", polish, steps, work, bound, begin)
    kind: NetworkKind = "merger" if plan.variant == "gated" else "paper_merger"
    record = _record(
        kind,
        plan.model,
        facts,
        captures,
        states["matching"],
        hidden=plan.hidden if plan.variant == "gated" else 0,
        chunk_tokens=plan.chunk_tokens,
        modality=TEXT if plan.chats is None else IMAGE,
    )
    write_artefact(output, record, merger)
    written, record = read_merger(output, facts)
    report = report_merger(written, frame, captures.held_out)
    return Trained(record=record, report=report, states=states)


def _new_merger(plan: MergerPlan, facts: ModelFacts) -> TrainedMerger:
    if plan.variant == "gated":
        return GatedMerger(facts.geometry, plan.chunk_tokens, plan.hidden, plan.seed)
    return PaperMerger(facts.geometry, plan.chunk_tokens, plan.seed)


def _texts(path: Path, plan: CapturePlan) -> Samples:
    count = plan.documents + plan.held_out
    return text_samples(path, context=plan.context, continuation=plan.continuation, count=count)


def _samples(path: Path, plan: MergerPlan) -> Samples:
    if plan.chats is None:
        return _texts(path, plan.captures)
    return chat_samples(path, plan.chats, plan.captures.documents + plan.captures.held_out)


def _capture(
    path: Path, facts: ModelFacts, plan: CapturePlan, samples: Samples, work: Path, begin: Begin
) -> Captures:
    advance, count = begin("captures", plan.documents + plan.held_out), 0

    def done() -> None:
        nonlocal count
        count += 1
        advance(count, None)

    return capture_samples(path, facts, plan, samples, work / "captures", done)


def _fit(
    name: str, objective: Objective, plan: FitPlan, work: Path, bound: str, begin: Begin
) -> FitState:
    advance: Advance = begin(name, plan.steps)
    return fit(objective, plan, work / f"{name}.safetensors", f"{name} {bound}", advance)


def _bound(facts: ModelFacts, plan: ScorerPlan | MergerPlan, captures: Captures) -> str:
    return repr((facts.revision, plan, captures.source))


def _record(
    kind: NetworkKind,
    model: str,
    facts: ModelFacts,
    captures: Captures,
    state: FitState,
    *,
    hidden: int,
    chunk_tokens: int = 0,
    modality: Modality = TEXT,
) -> ArtefactRecord:
    return ArtefactRecord(
        kind=kind,
        model=model,
        weights=facts.weights,
        config=facts.config,
        geometry=facts.geometry,
        hidden=hidden,
        chunk_tokens=chunk_tokens,
        modality=modality,
        texts=captures.source,
        held_out_loss=state.best_loss,
    )
