"""``adakv``: as snapkv, the best tokens of all heads of a layer together."""

from triptych.core.config import CompressorConfig
from triptych.core.methods.composition import Method
from triptych.core.methods.parts import HADAMARD, ONE_RANGE
from triptych.core.methods.retention.kept_share import WINDOW_QUERIES, best, kept_share, scorer
from triptych.core.policy import Policy
from triptych.core.profile import Profile


def adakv(config: CompressorConfig, profile: Profile | None = None) -> Policy:
    """Keep tokens as SnapKV, the best of all heads of a layer together."""
    return kept_share(
        config,
        profile,
        score="window_attention",
        budget="across_heads",
        last_queries=WINDOW_QUERIES,
    )


METHOD = Method(
    name="adakv",
    idea="as snapkv, the best tokens of all heads of a layer together",
    paper="Ada-KV",
    policy=adakv,
    scorer=scorer("window_attention", "queries"),
    budget=best("token"),
    basis=HADAMARD,
    codec=ONE_RANGE,
)
