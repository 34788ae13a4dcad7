"""``keydiff``: the prompt tokens whose keys differ most from the mean direction of all."""

from triptych.core.config import CompressorConfig
from triptych.core.methods.composition import Method
from triptych.core.methods.parts import HADAMARD, ONE_RANGE
from triptych.core.methods.retention.kept_share import best, kept_share, scorer
from triptych.core.policy import Policy
from triptych.core.profile import Profile


def keydiff(config: CompressorConfig, profile: Profile | None = None) -> Policy:
    """Keep the tokens whose keys have the smallest cosine similarity with the mean direction."""
    return kept_share(config, profile, score="key_difference")


METHOD = Method(
    name="keydiff",
    idea="prompt tokens whose keys differ most from the mean direction of all keys",
    paper="KeyDiff",
    policy=keydiff,
    scorer=scorer("key_difference"),
    budget=best("head"),
    basis=HADAMARD,
    codec=ONE_RANGE,
)
