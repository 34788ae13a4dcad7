"""``leankv``: high, low or dropped by shares of all attention."""

from dataclasses import replace

from triptych.core.config import CompressorConfig
from triptych.core.methods.composition import Method
from triptych.core.methods.parts import ATTENTION, HADAMARD, ONE_RANGE, classes_by_threshold
from triptych.core.policy import Policy, two_classes
from triptych.core.profile import Profile


def by_share_of_attention(config: CompressorConfig, profile: Profile | None = None) -> Policy:
    """High, low or dropped by the share of all attention that the least significant receive.

    Source: LeanKV, section 4.2
    """
    return replace(
        two_classes(config, profile),
        mass_high=config.mass_high,
        mass_low=config.mass_low,
        score_every=config.score_every_tokens if config.mass_high > 0 else 0,
    )


METHOD = Method(
    name="leankv",
    idea="tokens high, low or dropped by shares of all attention",
    paper="LeanKV",
    version=2,
    policy=by_share_of_attention,
    scorer=ATTENTION,
    budget=classes_by_threshold("shares_of_the_whole"),
    basis=HADAMARD,
    codec=ONE_RANGE,
)
