"""``diffkv``: high, low or dropped by the mean attention that a token receives."""

from dataclasses import replace

from triptych.core.config import CompressorConfig
from triptych.core.methods.composition import Method
from triptych.core.methods.parts import ATTENTION, HADAMARD, ONE_RANGE, classes_by_threshold
from triptych.core.policy import Policy, alpha_scales_of, chosen, settings_of, two_classes
from triptych.core.profile import Profile


def by_mean_attention(config: CompressorConfig, profile: Profile | None = None) -> Policy:
    """High, low or dropped by the mean attention that a token receives from later ones.

    Source: DiffKV, section 4
    """
    known = settings_of(profile)
    alpha_high = chosen(config.alpha_high, known.alpha_high)
    return replace(
        two_classes(config, profile),
        alpha_high=alpha_high,
        alpha_low=chosen(config.alpha_low, known.alpha_low),
        alpha_scales=alpha_scales_of(config, profile),
        score_every=config.score_every_tokens if alpha_high > 0 else 0,
    )


METHOD = Method(
    name="diffkv",
    idea="tokens high, low or dropped by the mean attention that they receive",
    paper="DiffKV",
    policy=by_mean_attention,
    scorer=ATTENTION,
    budget=classes_by_threshold("thresholds_of_the_mean"),
    basis=HADAMARD,
    codec=ONE_RANGE,
)
