"""Policy and parts of methods that keep a share of a prompt's tokens."""

from dataclasses import replace

from triptych.core.config import CompressorConfig
from triptych.core.methods.composition import Granularity, Need, Part, Trait
from triptych.core.policy import Measured, Policy, Retention, two_classes
from triptych.core.profile import Profile

WINDOW_QUERIES = 64
"""Last queries of a prompt by which SnapKV and its relatives score tokens."""
MOMENT_QUERIES = 32
"""Last queries of a prompt by which CAKE scores tokens."""
RETRIEVAL_QUERIES = 8
"""Last queries of a prompt by which CompressKV scores tokens."""


def kept_share(
    config: CompressorConfig,
    profile: Profile | None,
    *,
    score: str,
    budget: str = "per_head",
    last_queries: int | None = None,
    measured: Measured = "attention",
    compares_layers: bool = False,
    head_shares: tuple[float, ...] = (),
    layer_errors: tuple[float, ...] = (),
    heads: tuple[tuple[int, ...], ...] = (),
    while_generating: bool = False,
    block_tokens: int = 0,
    most_kept: int = 0,
) -> Policy:
    """A policy that keeps ``compressor.keep_share`` of a prompt's tokens, in the high format.

    The low format is for memory that runs short, as with other policies of two classes.
    """
    rule = Retention(
        score=score,
        budget=budget,
        keep_share=config.keep_share,
        last_queries=last_queries,
        measured=measured,
        compares_layers=compares_layers,
        head_shares=head_shares,
        layer_errors=layer_errors,
        heads=heads,
        while_generating=while_generating,
        block_tokens=block_tokens,
        most_kept=most_kept,
    )
    return replace(two_classes(config, profile), high_window_tokens=0, retention=rule)


def scorer(name: str, *needs: Need) -> Part:
    """A scorer of tokens."""
    return Part(role="scorer", name=name, granularity="token", needs=frozenset(needs))


def best(granularity: Granularity, *needs: Need) -> Part:
    """A budget that keeps the best tokens of each such unit, and drops the others."""
    traits: frozenset[Trait] = frozenset({"drops_tokens", "requantizes_tokens"})
    name = f"share_of_a_{granularity}"
    return Part(
        role="budget", name=name, granularity=granularity, needs=frozenset(needs), traits=traits
    )
