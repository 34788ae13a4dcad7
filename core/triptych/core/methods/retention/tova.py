"""``tova``: the prompt tokens that the last one attends to."""

from triptych.core.config import CompressorConfig
from triptych.core.methods.composition import Method
from triptych.core.methods.parts import HADAMARD, ONE_RANGE
from triptych.core.methods.retention.kept_share import best, kept_share, scorer
from triptych.core.policy import Policy
from triptych.core.profile import Profile


def tova(config: CompressorConfig, profile: Profile | None = None) -> Policy:
    """Keep the tokens with the most attention from the last one."""
    return kept_share(config, profile, score="last_attention", last_queries=1)


METHOD = Method(
    name="tova",
    idea="the prompt tokens that the last one attends to",
    paper="TOVA",
    policy=tova,
    scorer=scorer("last_attention", "queries"),
    budget=best("head"),
    basis=HADAMARD,
    codec=ONE_RANGE,
)
