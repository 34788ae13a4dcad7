"""``streaming_llm``: the first four tokens of a prompt and the newest."""

from triptych.core.config import CompressorConfig
from triptych.core.methods.composition import Method
from triptych.core.methods.parts import HADAMARD, ONE_RANGE
from triptych.core.methods.retention.kept_share import best, kept_share, scorer
from triptych.core.policy import Policy
from triptych.core.profile import Profile


def streaming_llm(config: CompressorConfig, profile: Profile | None = None) -> Policy:
    """Keep the first four tokens and the newest."""
    return kept_share(config, profile, score="recency")


METHOD = Method(
    name="streaming_llm",
    idea="the first four tokens of a prompt and the newest",
    paper="StreamingLLM",
    policy=streaming_llm,
    scorer=scorer("recency"),
    budget=best("head"),
    basis=HADAMARD,
    codec=ONE_RANGE,
)
