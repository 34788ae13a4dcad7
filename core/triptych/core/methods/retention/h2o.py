"""``h2o``: the newest prompt tokens, and those with the most attention from all."""

from triptych.core.config import CompressorConfig
from triptych.core.methods.composition import Method
from triptych.core.methods.parts import HADAMARD, ONE_RANGE
from triptych.core.methods.retention.kept_share import best, kept_share, scorer
from triptych.core.policy import Policy
from triptych.core.profile import Profile


def h2o(config: CompressorConfig, profile: Profile | None = None) -> Policy:
    """Keep half of the budget for the newest tokens, half for those with the most attention."""
    return kept_share(config, profile, score="heavy_hitters", last_queries=0)


METHOD = Method(
    name="h2o",
    idea="the newest prompt tokens, and those with the most attention from all",
    paper="H2O",
    policy=h2o,
    scorer=scorer("heavy_hitters", "attention_sums"),
    budget=best("head"),
    basis=HADAMARD,
    codec=ONE_RANGE,
)
