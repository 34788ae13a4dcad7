"""``expected_attention``: the prompt tokens that later queries are expected to attend to."""

from triptych.core.config import CompressorConfig
from triptych.core.methods.composition import Method
from triptych.core.methods.parts import HADAMARD, ONE_RANGE
from triptych.core.methods.retention.kept_share import best, kept_share, scorer
from triptych.core.policy import Policy
from triptych.core.profile import Profile


def expected_attention(config: CompressorConfig, profile: Profile | None = None) -> Policy:
    """Keep the first four tokens, and those with the most expected attention times value norm."""
    return kept_share(
        config, profile, score="expected", last_queries=0, measured="query_statistics"
    )


METHOD = Method(
    name="expected_attention",
    idea="the prompt tokens that later queries are expected to attend to, from the mean and "
    "covariance of its queries",
    paper="Expected Attention",
    policy=expected_attention,
    scorer=scorer("expected_attention", "query_statistics"),
    budget=best("head"),
    basis=HADAMARD,
    codec=ONE_RANGE,
)
