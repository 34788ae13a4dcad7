"""``cake``: as snapkv with the variance of attention; layers get shares by how they attend."""

from triptych.core.config import CompressorConfig
from triptych.core.methods.composition import Method
from triptych.core.methods.parts import HADAMARD, ONE_RANGE
from triptych.core.methods.retention.kept_share import MOMENT_QUERIES, best, kept_share, scorer
from triptych.core.policy import Policy
from triptych.core.profile import Profile


def cake(config: CompressorConfig, profile: Profile | None = None) -> Policy:
    """Keep tokens by mean and variance of the attention from the last 32; more of them in layers
    whose attention is dispersed and shifts. A prompt is compressed with all of its layers."""
    return kept_share(
        config,
        profile,
        score="shifting_attention",
        budget="by_preference",
        last_queries=MOMENT_QUERIES,
        measured="attention_moments",
        compares_layers=True,
    )


METHOD = Method(
    name="cake",
    idea="tokens by mean and variance of the attention from the last 32; more in layers whose "
    "attention is dispersed and shifts",
    paper="CAKE",
    policy=cake,
    scorer=scorer("shifting_attention", "attention_moments"),
    budget=best("layer"),
    basis=HADAMARD,
    codec=ONE_RANGE,
)
