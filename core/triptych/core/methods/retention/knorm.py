"""``knorm``: prompt tokens with the shortest keys."""

from triptych.core.config import CompressorConfig
from triptych.core.methods.composition import Method
from triptych.core.methods.parts import HADAMARD, ONE_RANGE
from triptych.core.methods.retention.kept_share import best, kept_share, scorer
from triptych.core.policy import Policy
from triptych.core.profile import Profile


def knorm(config: CompressorConfig, profile: Profile | None = None) -> Policy:
    """Keep the tokens whose keys have the smallest L2 norms."""
    return kept_share(config, profile, score="key_norm")


METHOD = Method(
    name="knorm",
    idea="prompt tokens with the shortest keys",
    paper="L2-norm compression",
    policy=knorm,
    scorer=scorer("key_norm"),
    budget=best("head"),
    basis=HADAMARD,
    codec=ONE_RANGE,
)
