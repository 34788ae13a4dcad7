"""``pyramidkv``: as snapkv, with more tokens in early layers and fewer in late ones."""

from triptych.core.config import CompressorConfig
from triptych.core.methods.composition import Method
from triptych.core.methods.parts import HADAMARD, ONE_RANGE
from triptych.core.methods.retention.kept_share import WINDOW_QUERIES, best, kept_share, scorer
from triptych.core.policy import Policy
from triptych.core.profile import Profile


def pyramidkv(config: CompressorConfig, profile: Profile | None = None) -> Policy:
    """Keep tokens as SnapKV, more in early layers and fewer in late ones."""
    return kept_share(
        config, profile, score="window_attention", budget="per_layer", last_queries=WINDOW_QUERIES
    )


METHOD = Method(
    name="pyramidkv",
    idea="as snapkv, with more tokens in early layers and fewer in late ones",
    paper="PyramidKV",
    policy=pyramidkv,
    scorer=scorer("window_attention", "queries"),
    budget=best("layer"),
    basis=HADAMARD,
    codec=ONE_RANGE,
)
