"""A draw of texts on which claims are measured: the model is loaded once, captures once a draw."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path

from torch import Tensor

from triptych.core.config import AppConfig
from triptych.evals.data.texts import Document, Split, documents
from triptych.evals.data.vocabulary import Vocabulary
from triptych.evals.methods.context_methods import Levels
from triptych.evals.studies.learned_study import profile_mean_keys
from triptych.evals.training.captures import Capture, CapturePlan, capture_text
from triptych.workers.models.facts import ModelFacts, describe
from triptych.workers.models.load import LoadedModel, load
from triptych.workers.models.store.model_store import resolve


@dataclass(frozen=True)
class ClaimModel:
    """The model of a report, in float32."""

    path: Path

    @classmethod
    def find(cls, name: str) -> "ClaimModel":
        """Raises: ModelError if there is no such model"""
        return cls(resolve(name))

    @cached_property
    def facts(self) -> ModelFacts:
        return describe(self.path)

    @cached_property
    def vocabulary(self) -> Vocabulary:
        return Vocabulary(self.path)

    @cached_property
    def loaded(self) -> LoadedModel:
        return load(self.path, "float32", quantization="none")

    @cached_property
    def mean_keys(self) -> Tensor:
        """Those of the model's profile: [L, KH, d]."""
        return profile_mean_keys(str(self.path), self.facts)


@dataclass(frozen=True)
class Draw:
    """Texts of one seed, with the attention of the full cache over each."""

    model: ClaimModel
    seed: int
    """Above 0: each has other cuts of the texts."""
    context: int
    documents: int
    steps: int
    split: Split
    base: AppConfig = field(default_factory=AppConfig)
    """Settings of the methods that run in the engines of the server."""
    known_kl: dict[tuple[Levels, int], float] = field(
        default_factory=dict[tuple[Levels, int], float]
    )
    """KL by levels and number of a text."""

    @cached_property
    def texts(self) -> Sequence[Document]:
        """Raises: ConfigError if the split holds too little text"""
        return documents(
            self.model.vocabulary.encode,
            self.split,
            context=self.context,
            continuation=self.steps,
            count=self.documents,
            seed=self.seed,
        )

    @property
    def captures(self) -> Sequence[Capture]:
        """Keys, values, significance and later queries of each text."""
        return [capture for capture, _ in self.readings]

    @cached_property
    def readings(self) -> Sequence[tuple[Capture, Tensor]]:
        """Captures, and the logits after each token behind the context: [steps, vocab].

        Raises: ModelError for a model with sliding windows or softcaps
        """
        plan = CapturePlan(context=self.context, continuation=self.steps)
        return [
            capture_text(self.model.loaded, (*text.context, *text.continuation), plan)
            for text in self.texts
        ]
