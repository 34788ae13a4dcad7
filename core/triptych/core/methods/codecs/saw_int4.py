"""``saw_int4``: rotated keys and values of 4 bits, with a range for each token."""

from triptych.core.config import CompressorConfig
from triptych.core.methods.codecs.rotation import check_rotated
from triptych.core.methods.composition import Method
from triptych.core.methods.parts import EVERY_TOKEN, HADAMARD, ONE_RANGE
from triptych.core.methods.uniform import one_format
from triptych.core.policy import Policy
from triptych.core.profile import Profile


def saw_int4(config: CompressorConfig, profile: Profile | None = None) -> Policy:
    """K4V4 in rotated coordinates.

    A block of the rotation is the largest power of two that divides the head size. Values are
    rotated too, which the paper leaves open, and keys are centred if there is a profile.

    Raises: ConfigError if the rotation is turned off
    """
    check_rotated(config, rotated=True)
    return one_format(config, profile, "k4v4")


METHOD = Method(
    name="saw_int4",
    idea="rotated keys and values of 4 bits",
    paper="SAW-INT4",
    policy=saw_int4,
    budget=EVERY_TOKEN,
    basis=HADAMARD,
    codec=ONE_RANGE,
)
