"""The methods among which an adaptive server chooses: a frontier of bytes and KL, with times."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory

from triptych.core.config import AppConfig, CompressorConfig, ModelConfig
from triptych.core.errors import ConfigError
from triptych.core.methods.frontier import pareto
from triptych.core.methods.learned_files import LearnedFile
from triptych.core.methods.table import policies_of, policy_of
from triptych.core.profile import Profile
from triptych.evals.data.texts import documents
from triptych.evals.data.vocabulary import Vocabulary
from triptych.evals.frontier.compress_time import compress_times
from triptych.evals.methods.served_engines import EngineMethod
from triptych.evals.studies.calibration import Calibration
from triptych.workers.compress.learned.known_networks import find_networks
from triptych.workers.models.facts import describe
from triptych.workers.models.store.model_store import resolve


def with_pareto(profile: Profile, plan: Calibration) -> Profile:
    """The profile with its frontier, and the time that each of its methods takes to compress.

    Methods that drop or merge tokens are left out: their KL on a text does not show that they
    forget what is asked for later.

    Raises: ConfigError if fewer than two methods are left, since there is nothing to choose
    """
    path = resolve(plan.model)
    learned = find_networks(
        AppConfig(compressor=CompressorConfig(learned=plan.learned)), describe(path)
    )
    measured = {profile.settings.policy: profile.measured, **profile.measured_methods}
    kept = {name: each for name, each in measured.items() if _keeps_all(name, profile, learned)}
    names = _served_together(pareto(kept), profile, learned)
    if len(names) < 2:
        raise ConfigError(
            f"--pareto: of the measured methods {sorted(measured)} fewer than two are on a "
            "frontier, keep all tokens and can be served together: measure others (--methods)"
        )
    return replace(profile, pareto=_times(names, profile, plan, path))


def _keeps_all(name: str, profile: Profile, learned: Sequence[LearnedFile]) -> bool:
    """Whether a method stores every token of a prompt by itself; False if it cannot run."""
    try:
        policy = policy_of(CompressorConfig(policy=name), profile, learned)
    except ConfigError:
        return False
    return not (policy.drops_tokens or policy.merges)


def _served_together(
    names: Sequence[str], profile: Profile, learned: Sequence[LearnedFile]
) -> tuple[str, ...]:
    """Those of the methods that a server can offer beside its default one and those before."""
    kept = tuple[str, ...]()
    for name in names:
        try:
            policies_of(CompressorConfig(methods=(*kept, name)), profile, learned)
        except ConfigError:
            continue
        kept = (*kept, name)
    return kept


def _times(
    names: Sequence[str], profile: Profile, plan: Calibration, path: Path
) -> dict[str, float]:
    """Microseconds that each method takes to compress a token of a prompt."""
    context = min(plan.contexts)
    (text,) = documents(
        Vocabulary(path).encode, "calibration", context=context, continuation=1, count=1
    )
    with TemporaryDirectory(prefix="triptych-") as folder:
        file = Path(folder) / "profile.json"
        profile.write(file)
        found = dict[str, float]()
        for name in names:
            compressor = CompressorConfig(profile=str(file), policy=name, learned=plan.learned)
            config = AppConfig(model=ModelConfig(name=str(path)), compressor=compressor)
            (time,) = compress_times(EngineMethod(name, config, path), text.context, (1,))
            found[name] = round(time.compress_us, 1)
        return found
