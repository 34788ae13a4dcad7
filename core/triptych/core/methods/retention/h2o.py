"""``h2o`` and ``h2o:generate``: the newest tokens, and those with the most attention from all.

``h2o`` applies the rule once, to the prompt; ``h2o:generate`` drops tokens during decode too.
"""

from dataclasses import replace

from triptych.core.config import CompressorConfig, require
from triptych.core.methods.composition import Method
from triptych.core.methods.parts import HADAMARD, ONE_RANGE
from triptych.core.methods.retention.kept_share import best, kept_share, scorer
from triptych.core.policy import Policy
from triptych.core.profile import Profile


def h2o(config: CompressorConfig, profile: Profile | None = None) -> Policy:
    """Keep half of the budget for the newest tokens, half for those with the most attention."""
    return kept_share(config, profile, score="heavy_hitters", last_queries=0)


def while_generating(config: CompressorConfig, profile: Profile | None = None) -> Policy:
    """Keep the budget of the prompt while the answer grows: the token with the least attention so
    far goes, of prompt and answer alike.

    Attention from output tokens is measured every ``compressor.score_every_tokens`` tokens, and
    tokens are dropped a page at a time.

    Raises: ConfigError if attention from output tokens is not measured
    Source: H2O, section 4 (the eviction policy while generating)
    """
    every = config.score_every_tokens
    require(every > 0, "compressor.score_every_tokens", every, "above 0 with 'h2o:generate'")
    policy = kept_share(
        config, profile, score="heavy_hitters", last_queries=0, while_generating=True
    )
    return replace(policy, score_every=every)


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
WHILE_GENERATING = Method(
    name="h2o:generate",
    idea="as h2o, and of the answer too: a head keeps as many tokens as of the prompt, however "
    "long the answer is",
    paper="H2O",
    policy=while_generating,
    scorer=scorer("heavy_hitters", "attention_sums"),
    budget=best("head"),
    basis=HADAMARD,
    codec=ONE_RANGE,
)
