"""``compresskv``: the tokens that retrieval heads attend to; layers get shares by their errors."""

from triptych.core.config import CompressorConfig
from triptych.core.errors import ConfigError
from triptych.core.methods.composition import Method
from triptych.core.methods.parts import HADAMARD, ONE_RANGE
from triptych.core.methods.retention.kept_share import RETRIEVAL_QUERIES, best, kept_share, scorer
from triptych.core.policy import Policy
from triptych.core.profile import Profile

HEADS = 4
"""Query heads of a layer that choose its tokens."""


def compresskv(config: CompressorConfig, profile: Profile | None = None) -> Policy:
    """Keep the tokens that the retrieval heads of a layer attend to from the last 8 queries, the
    same ones in all heads of the layer; more of them in layers whose error is large.

    Raises: ConfigError if the profile does not name the heads
    Source: CompressKV (semantic retrieval heads, budgets by the error of layers); 8 queries and 4
            heads as in the authors' code
    """
    if profile is None or not profile.retrieval_heads:
        raise ConfigError(
            "method 'compresskv' needs the retrieval heads of the model, which the profile does "
            "not have: run 'triptych retrieval' for this model"
        )
    return kept_share(
        config,
        profile,
        score="retrieval_attention",
        budget="by_layer_error",
        last_queries=RETRIEVAL_QUERIES,
        measured="retrieval_attention",
        layer_errors=profile.layer_errors,
        heads=tuple(heads[:HEADS] for heads in profile.retrieval_heads),
    )


METHOD = Method(
    name="compresskv",
    idea="the tokens that the retrieval heads of a layer attend to; more in layers where dropping "
    "tokens changes most",
    paper="CompressKV",
    policy=compresskv,
    scorer=scorer("retrieval_attention", "queries", "retrieval_heads"),
    budget=best("layer", "calibration"),
    basis=HADAMARD,
    codec=ONE_RANGE,
)
