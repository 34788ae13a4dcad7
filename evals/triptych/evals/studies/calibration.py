"""Calibration: the compression point of a model with the fewest bytes at a target fidelity.

Nothing is trained. Mean keys are measured once, then every candidate runs through the engines on
the calibration split, which no evaluation uses. The candidate with the fewest bytes that meets the
target becomes the profile. Thresholds of each head or layer are fitted afterwards, and kept if they
take fewer bytes at the target.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import product
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Literal

import numpy as np
import torch

from triptych.core.config import AppConfig, CompressorConfig, PoolConfig, require
from triptych.core.errors import ModelError
from triptych.core.methods.table import offered_methods, policy_of
from triptych.core.profile import Fidelity, Profile, Settings
from triptych.evals.data.texts import Document, documents, text_hash
from triptych.evals.data.vocabulary import Vocabulary
from triptych.evals.methods.full_cache import TransformersRunner
from triptych.evals.methods.mean_keys import mean_keys
from triptych.evals.methods.method_names import SERVED
from triptych.evals.studies.alpha_scales import ScalesPlan, Unit, fit_alpha_scales
from triptych.evals.studies.kv_bases import fit_bases, fit_pair_order
from triptych.evals.studies.report import Row
from triptych.evals.studies.study import Results, Study
from triptych.workers.compress.learned.known_networks import find_networks
from triptych.workers.models.facts import describe
from triptych.workers.models.kv_rotation import pack_bases
from triptych.workers.models.store.model_store import resolve

RunStudy = Callable[[Study], Results]

ALL = "all"
"""Instead of names of methods: all that a server can offer."""


@dataclass(frozen=True, kw_only=True)
class Target:
    """The required fidelity to the full cache."""

    kl: float = 0.01
    """Largest mean KL divergence, in nats."""
    top1_agreement: float = 0.96
    """Smallest share of steps at which both have the same most likely token."""
    perplexity_ratio: float = 1.01
    """Largest ratio of perplexities, method to full cache."""

    def __post_init__(self) -> None:
        require(self.kl > 0, "max_kl", self.kl, "> 0")
        require(0 <= self.top1_agreement <= 1, "min_top1", self.top1_agreement, "0 to 1")
        require(self.perplexity_ratio > 0, "max_perplexity_ratio", self.perplexity_ratio, "> 0")

    def is_met(self, row: Row) -> bool:
        found = row.summary
        return (
            found.kl <= self.kl
            and found.top1_agreement >= self.top1_agreement
            and found.perplexity_ratio <= self.perplexity_ratio
        )


@dataclass(frozen=True, kw_only=True)
class Calibration:
    """Candidates, and the texts that they run on."""

    model: str
    target: Target = Target()
    high_format: str = "k8v4"
    low_formats: tuple[str, ...] = ("k4v2", "k4v4")
    alphas: tuple[float, ...] = (2.0, 3.0, 4.0, 5.0, 6.0, 8.0)
    """Candidates for ``alpha_high``."""
    low_alphas: tuple[float, ...] = (0.0,)
    """Candidates for ``alpha_low``, up to ``alpha_high``; above 0 tokens are dropped."""
    scales: Unit | Literal["none"] = "none"
    """What gets thresholds of its own."""
    windows: tuple[int, ...] = (16, 32)
    contexts: tuple[int, ...] = (1024,)
    documents: int = 6
    steps: int = 128
    other_methods: tuple[str, ...] = (ALL,)
    """Methods of requests to measure with the chosen settings, besides the chosen one."""
    learned: tuple[str, ...] = CompressorConfig().learned
    """Files of learned networks, as in ``compressor.learned``."""
    pool_bytes: int = PoolConfig().kv_cache_memory_bytes

    @property
    def candidates(self) -> dict[str, Settings]:
        """Settings by the method name that a study parses."""
        return {
            f"diffkv+high_format={self.high_format}+low_format={low}+alpha_high={alpha:.9g}"
            f"+alpha_low={dropped:.9g}+recent_window_tokens={window}": Settings(
                policy="diffkv",
                high_format=self.high_format,
                low_format=low,
                alpha_high=alpha,
                alpha_low=dropped,
                recent_window_tokens=window,
            )
            for low, alpha, dropped, window in product(
                self.low_formats, self.alphas, self.low_alphas, self.windows
            )
            if dropped <= alpha
        }


@dataclass(frozen=True, kw_only=True)
class CalibrationResult:
    """The profile, the candidates' rows at each context and over all, and the chosen one."""

    profile: Profile
    rows: list[Row]
    chosen: str
    scaled: Row | None = None
    """The chosen candidate with thresholds of its own for each head or layer, if they were fitted;
    the profile has them if it meets the target with fewer bytes."""


def calibrate(
    plan: Calibration, run: RunStudy, extend: Callable[[Profile], Profile] = lambda made: made
) -> CalibrationResult:
    """Measure mean keys, then the candidates, and choose.

    ``extend``: adds to a profile what candidates need besides mean keys.

    Raises: ModelError if no candidate meets the target; ConfigError for a wrong setting
    """
    uncalibrated = extend(profile_with_mean_keys(plan))
    results = _measured(uncalibrated, tuple(plan.candidates), plan, run)
    overall = [row for row in results.rows if row.context == results.rows[-1].context]
    chosen = choose([row for row in overall if row.method in plan.candidates], plan.target)
    profile = replace(
        uncalibrated,
        settings=plan.candidates[chosen.method],
        measured=tuple(_fidelity(row) for row in results.rows if _is_of(row, chosen.method)),
    )
    scaled = None
    if plan.scales != "none":
        profile, scaled = _with_scales(profile, chosen, plan, run)
    profile = with_other_methods(profile, plan, run)
    return CalibrationResult(
        profile=profile, rows=results.rows, chosen=chosen.method, scaled=scaled
    )


def _with_scales(
    profile: Profile, chosen: Row, plan: Calibration, run: RunStudy
) -> tuple[Profile, Row]:
    """The profile with fitted scales if they take fewer bytes at the target, and their row."""
    assert plan.scales != "none"
    texts = ScalesPlan(
        unit=plan.scales,
        context=max(plan.contexts),
        documents=plan.documents,
        steps=plan.steps,
    )
    scales = fit_alpha_scales(plan.model, profile, texts, lambda: None)
    scaled = profile.with_alpha_scales(scales)
    rows = _measured(scaled, (chosen.method,), plan, run).rows
    row = rows[-1]
    if not plan.target.is_met(row) or row.bytes_all_in_ratio >= chosen.bytes_all_in_ratio:
        return profile, row
    measured = tuple(_fidelity(one) for one in rows if _is_of(one, chosen.method))
    return replace(scaled, measured=measured), row


def with_other_methods(profile: Profile, plan: Calibration, run: RunStudy) -> Profile:
    """The profile with the fidelity of ``other_methods`` too, as a server with it runs them.

    Raises: ConfigError for a method that cannot run
    """
    facts = describe(resolve(plan.model))
    settings = AppConfig(compressor=CompressorConfig(learned=plan.learned))
    files = find_networks(settings, facts)
    names = plan.other_methods
    if names == (ALL,):
        offered = offered_methods(files, profile)
        names = tuple(name for name in offered if name != profile.settings.policy)
    if not names:
        return profile
    networks = dict(profile.measured_networks)
    for name in names:
        networks.pop(name, None)
        policy = policy_of(replace(settings.compressor, policy=name), profile, files)
        file = policy.merger or policy.scorer
        if file is not None:
            networks[name] = file.tensors
    served = {name: f"{SERVED}{name}" for name in names}  # not the baseline of the same name
    rows = _measured(profile, tuple(served.values()), plan, run).rows
    found = {
        name: tuple(_fidelity(row) for row in rows if _is_of(row, study_name))
        for name, study_name in served.items()
    }
    return replace(
        profile,
        measured_methods={**profile.measured_methods, **found},
        measured_networks=networks,
    )


def choose(rows: Sequence[Row], target: Target) -> Row:
    """The row with the fewest bytes among those that meet the target.

    Raises: ModelError naming the candidate with the lowest KL
    """
    good = [row for row in rows if target.is_met(row)]
    if good:
        return min(good, key=lambda row: row.bytes_all_in_ratio)
    nearest = min(rows, key=lambda row: row.summary.kl)
    raise ModelError(
        f"no candidate reaches KL {target.kl:g}, top-1 {target.top1_agreement:g} and perplexity "
        f"ratio {target.perplexity_ratio:g}: {nearest.method} comes nearest with "
        f"{nearest.summary.kl:.4f}, {nearest.summary.top1_agreement:.3f} and "
        f"{nearest.summary.perplexity_ratio:.3f}; allow more, or try smaller alphas"
    )


def with_bases(profile: Profile, plan: Calibration, done: Callable[[], None]) -> Profile:
    """The profile with bases of keys and values, from the calibration split.

    ``done``: called after each layer of the model.

    Raises: ModelError for models with latents, sliding windows or softcaps
    """
    path = resolve(plan.model)
    bases = fit_bases(path, [text.context for text in _texts(path, plan)], done)
    return replace(profile, bases=Profile.pack(pack_bases(bases)))


def with_pair_order(profile: Profile, plan: Calibration, done: Callable[[], None]) -> Profile:
    """The profile with the order of RoPE pairs, from the calibration split.

    ``done``: called after each layer of the model.

    Raises: ModelError as ``with_bases``
    """
    path, shape = resolve(plan.model), profile.geometry
    centre = None
    if profile.key_centre:
        packed = torch.frombuffer(bytearray(profile.centre), dtype=torch.float16)
        centre = packed.float().view(shape.layers, shape.kv_heads, shape.head_dim)
    order = fit_pair_order(path, [text.context for text in _texts(path, plan)], centre, done)
    return replace(profile, pair_order=Profile.pack(order.numpy().tobytes()))


def _texts(path: Path, plan: Calibration) -> list[Document]:
    return documents(
        Vocabulary(path).encode,
        "calibration",
        context=max(plan.contexts),
        continuation=1,
        count=plan.documents,
    )


def profile_with_mean_keys(plan: Calibration) -> Profile:
    """A profile with the model's mean keys, before settings are chosen."""
    path = resolve(plan.model)
    facts = describe(path)
    packed = b""
    if not any(
        layer.softcap for layer in facts.layers
    ):  # with a softcap, subtracting a mean changes attention
        texts = [text.context for text in _texts(path, plan)]
        centre = mean_keys(TransformersRunner(path), texts)
        packed = centre.numpy().astype(np.dtype("<f2")).tobytes()
    return Profile(
        model=plan.model,
        weights=facts.weights,
        config=facts.config,
        geometry=facts.geometry,
        settings=next(iter(plan.candidates.values())),
        key_centre=Profile.pack(packed),
        texts=text_hash("calibration"),
    )


def _measured(
    profile: Profile, methods: tuple[str, ...], plan: Calibration, run: RunStudy
) -> Results:
    """Rows of some methods with a profile, on the calibration split."""
    with TemporaryDirectory(prefix="triptych-") as folder:
        path = Path(folder) / "profile.json"
        profile.write(path)
        study = Study(
            model=plan.model,
            methods=methods,
            base=AppConfig(
                compressor=CompressorConfig(profile=str(path), learned=plan.learned),
                pool=PoolConfig(kv_cache_memory_bytes=plan.pool_bytes),
            ),
            contexts=plan.contexts,
            documents=plan.documents,
            steps=plan.steps,
            split="calibration",
            tasks=(),
            greedy_tokens=0,
        )
        return run(study)


def _is_of(row: Row, method: str) -> bool:
    return row.method == method and row.context != "all"


def _fidelity(row: Row) -> Fidelity:
    return Fidelity(
        context=int(row.context),
        bytes_ratio=round(row.bytes_all_in_ratio, 4),
        kl=round(row.summary.kl, 6),
        top1_agreement=round(row.summary.top1_agreement, 4),
        perplexity_ratio=round(row.summary.perplexity_ratio, 4),
    )
