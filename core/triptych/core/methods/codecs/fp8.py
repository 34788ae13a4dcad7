"""``fp8``: keys and values as 8-bit floating-point numbers."""

from triptych.core.config import CompressorConfig
from triptych.core.methods.composition import Method, Part
from triptych.core.methods.parts import EVERY_TOKEN, HADAMARD
from triptych.core.methods.uniform import one_format
from triptych.core.policy import Policy
from triptych.core.profile import Profile


def fp8(config: CompressorConfig, profile: Profile | None = None) -> Policy:
    """Codes are e4m3 numbers, by a power of two for each token and head."""
    return one_format(config, profile, "fp8")


METHOD = Method(
    name="fp8",
    idea="keys and values as e4m3 numbers, by a power of two for each token and head",
    paper="FP8 formats for deep learning",
    policy=fp8,
    budget=EVERY_TOKEN,
    basis=HADAMARD,
    codec=Part(role="codec", name="float8", granularity="token"),
)
