"""Measures what LeanKV and DiffKV claim about attention, tokens, bytes and long answers.

Each part returns named figures for a draw of texts; means and intervals are over draws.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass, field, replace

from triptych.core.config import AppConfig, ModelConfig, require
from triptych.core.errors import ConfigError
from triptych.evals.claims.attention_shape import critical_tokens, ranges
from triptych.evals.claims.claims_results import ClaimsResults
from triptych.evals.claims.draw import ClaimModel, Draw
from triptych.evals.claims.head_sparsity import dynamic_over_static
from triptych.evals.claims.integer_products import integer_products
from triptych.evals.claims.long_answers import drift
from triptych.evals.claims.precision_levels import four_levels
from triptych.evals.claims.scorer_memory import scorer_peaks
from triptych.evals.claims.token_classes import token_classes
from triptych.evals.data.texts import Split, text_hash
from triptych.evals.studies.ablation import T_975, Ablation, Advance, Begin, ablate_one, joined
from triptych.workers.models.compression_profile import find_profile

AXES = ("pruning", "low_format", "levels", "combination", "shares", "answers")
"""Axes of the ablation that belong to the claims."""
ABLATION = "ablation"
"""The part that runs these axes."""


@dataclass(frozen=True, kw_only=True)
class ClaimsStudy:
    """The parts of a report, and the texts on which they are measured."""

    model: str = ModelConfig().name
    base: AppConfig = field(default_factory=AppConfig)
    parts: tuple[str, ...] = ()
    """Names in ``PARTS``, or ``ablation``; empty: all of them."""
    seeds: int = 5
    context: int = 1024
    documents: int = 4
    """Texts of each draw."""
    steps: int = 64
    """Tokens behind each text whose queries are measured."""
    answer_tokens: int = 1024
    """Tokens of the long answers."""
    scorer_tokens: int = 2048
    """Tokens of the prompt whose memory is measured."""
    ablation_documents: int = 1
    """Texts of each draw in the ablation, which runs most methods."""
    split: Split = "evaluation"

    def __post_init__(self) -> None:
        require(2 <= self.seeds <= len(T_975) + 1, "seeds", self.seeds, f"2 to {len(T_975) + 1}")
        require(self.documents >= 1, "documents", self.documents, ">= 1")
        require(self.steps >= 2, "steps", self.steps, ">= 2")
        most = self.ablation_documents
        require(most >= 1, "ablation_documents", most, ">= 1")
        for part in self.parts:
            if part not in (*PARTS, ABLATION):
                expected = sorted((*PARTS, ABLATION))
                raise ConfigError(f"part {part!r}: expected one of {expected}")

    def quick(self) -> "ClaimsStudy":
        """The same parts with fewer and shorter texts: about a quarter of the time."""
        return replace(self, seeds=3, documents=2, steps=32, answer_tokens=256, scorer_tokens=1024)

    @property
    def chosen(self) -> tuple[str, ...]:
        """The parts that run, in the order of the table."""
        every = (*PARTS, ABLATION)
        return tuple(part for part in every if part in (self.parts or every))

    @property
    def conditions(self) -> dict[str, object]:
        """All on which figures depend; the parts that run do not change those of others.

        Raises: ModelError if there is no such model
        """
        facts = ClaimModel.find(self.model).facts
        profile = find_profile(self.base, facts)
        left_out = {"base", "parts"}
        return {
            "text_hash": text_hash(self.split),
            "model_revision": facts.revision,
            "profile": None if profile is None else asdict(profile.settings),
            "default_compressor": asdict(self.base.compressor),
            **{name: value for name, value in vars(self).items() if name not in left_out},
        }

    @property
    def seed_numbers(self) -> range:
        """Seed 0 is left out."""
        return range(1, self.seeds + 1)

    def draws(self) -> Iterator[Draw]:
        """One draw for each seed."""
        model = ClaimModel.find(self.model)
        for seed in self.seed_numbers:
            yield Draw(model, seed, self.context, self.documents, self.steps, self.split, self.base)

    def ablation(self) -> Ablation:
        """The axes of the claims over the same draws."""
        return Ablation(
            model=self.model,
            base=self.base,
            axes=AXES,
            seeds=self.seeds,
            context=self.context,
            documents=self.ablation_documents,
            steps=self.steps,
            tasks=(),
        )


MEMORY_DRAWS = 2
"""Draws in which memory is measured: it hardly depends on the text."""

Measure = Callable[[Draw, ClaimsStudy], Mapping[str, float]]

PARTS: dict[str, Measure] = {
    "ranges": lambda draw, _study: ranges(draw),
    "critical": lambda draw, _study: critical_tokens(draw),
    "sparsity": lambda draw, _study: dynamic_over_static(draw),
    "classes": lambda draw, _study: token_classes(draw),
    "four_levels": lambda draw, _study: four_levels(draw),
    "memory": lambda draw, study: (
        scorer_peaks(draw, study.scorer_tokens) if draw.seed <= MEMORY_DRAWS else {}
    ),
    "drift": lambda draw, study: drift(draw, study.answer_tokens),
    "products": lambda draw, _study: integer_products(draw),
}
"""By part: the figures of a draw; none where it is not measured."""


Keep = Callable[[ClaimsResults], None]
"""Called after each part of a draw, the ablation too, with all that has been measured so far."""


def measure_claims(
    study: ClaimsStudy, found: ClaimsResults, begin: Begin, advance: Advance, keep: Keep
) -> ClaimsResults:
    """Run all parts that ``found`` does not have.

    Raises: ConfigError for a wrong setting or too little text; ModelError for a model with sliding
            windows or softcaps, or if a request fails
    """
    parts = [part for part in study.chosen if part != ABLATION]
    for part in parts:
        known = [found.has_draw(part, seed) for seed in study.seed_numbers]
        if not all(known):
            begin(part, known.count(False))
    for draw in study.draws():
        for part in parts:
            if not found.has_draw(part, draw.seed):
                found = found.with_draw(part, draw.seed, PARTS[part](draw, study))
                keep(found)
                advance(part, 1)
    if ABLATION in study.chosen and found.ablation is None:
        for one in study.ablation().studies:
            if str(one.seed) not in found.ablation_draws:
                found = found.with_ablation_draw(one.seed, ablate_one(one, begin, advance))
                keep(found)
        draws = [found.ablation_draws[str(seed)] for seed in study.seed_numbers]
        found = replace(found, ablation=joined(study.ablation(), draws), ablation_draws={})
        keep(found)
    return found
