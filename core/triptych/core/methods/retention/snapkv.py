"""``snapkv``: the last 64 prompt tokens, and those that they attend to."""

from triptych.core.config import CompressorConfig
from triptych.core.methods.composition import Method
from triptych.core.methods.parts import HADAMARD, ONE_RANGE
from triptych.core.methods.retention.kept_share import WINDOW_QUERIES, best, kept_share, scorer
from triptych.core.policy import Policy
from triptych.core.profile import Profile


def snapkv(config: CompressorConfig, profile: Profile | None = None) -> Policy:
    """Keep the last 64 tokens, and those with the most attention from them after pooling."""
    return kept_share(config, profile, score="window_attention", last_queries=WINDOW_QUERIES)


METHOD = Method(
    name="snapkv",
    idea="the last 64 prompt tokens, and those that they attend to",
    paper="SnapKV",
    policy=snapkv,
    scorer=scorer("window_attention", "queries"),
    budget=best("head"),
    basis=HADAMARD,
    codec=ONE_RANGE,
)
