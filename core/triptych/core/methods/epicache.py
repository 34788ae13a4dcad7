"""``epicache``: prompts are read in blocks of bounded memory, for the episode of the question."""

from triptych.core.config import CompressorConfig
from triptych.core.methods.composition import Method
from triptych.core.methods.parts import HADAMARD, ONE_RANGE
from triptych.core.methods.retention.kept_share import WINDOW_QUERIES, best, kept_share, scorer
from triptych.core.policy import Policy
from triptych.core.profile import Profile


def epicache(config: CompressorConfig, profile: Profile | None = None) -> Policy:
    """Drop tokens down to the budget after each block of a prompt, so that its raw pages never hold
    more than the budget and a block.

    Tokens are scored by the attention from the last queries of the block; those of the episode of
    the conversation that is nearest to its last turn count more. Layers in which the first block
    loses more attention get more of the budget.

    Source: EpiCache (block-wise prefill, episodes, budgets by the sensitivity of layers)
    """
    return kept_share(
        config,
        profile,
        score="window_attention",
        budget="by_layer_error",
        last_queries=WINDOW_QUERIES,
        block_tokens=config.block_tokens,
        most_kept=config.keep_tokens,
    )


METHOD = Method(
    name="epicache",
    idea="reads a prompt in blocks and drops tokens after each, by the attention from its last "
    "queries; tokens of the episode of the last turn count more",
    paper="EpiCache",
    policy=epicache,
    scorer=scorer("block_attention", "queries"),
    budget=best("layer"),
    basis=HADAMARD,
    codec=ONE_RANGE,
)
