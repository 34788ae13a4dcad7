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
    classes = two_classes(config, profile)
    return replace(classes, mass_high=config.mass_high, mass_low=config.mass_low)


METHOD = Method(
    name="leankv",
    idea="prompt tokens high, low or dropped by shares of all attention",
    paper="LeanKV",
    policy=by_share_of_attention,
    scorer=ATTENTION,
    budget=classes_by_threshold("shares_of_the_whole"),
    basis=HADAMARD,
    codec=ONE_RANGE,
)
