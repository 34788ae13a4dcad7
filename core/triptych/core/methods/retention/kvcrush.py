"""``kvcrush``: as snapkv, with a quarter of the budget for tokens that stand for the others."""

from triptych.core.config import CompressorConfig
from triptych.core.methods.composition import Method
from triptych.core.methods.parts import HADAMARD, ONE_RANGE
from triptych.core.methods.retention.kept_share import WINDOW_QUERIES, best, kept_share, scorer
from triptych.core.policy import Policy
from triptych.core.profile import Profile


def kvcrush(config: CompressorConfig, profile: Profile | None = None) -> Policy:
    """Keep tokens as SnapKV, and representatives of the others by which heads would keep them."""
    return kept_share(
        config,
        profile,
        score="window_attention",
        budget="with_representatives",
        last_queries=WINDOW_QUERIES,
    )


METHOD = Method(
    name="kvcrush",
    idea="as snapkv, with a quarter of the budget for tokens that stand for the others, by which "
    "heads would keep them",
    paper="KVCrush",
    policy=kvcrush,
    scorer=scorer("window_attention", "queries"),
    budget=best("head"),
    basis=HADAMARD,
    codec=ONE_RANGE,
)
