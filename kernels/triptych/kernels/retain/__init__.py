"""Retention rules: which tokens of a prompt are kept, by a score and a budget, or merged."""

from triptych.kernels.retain.attention_moments import AttentionMoments, layer_preferences
from triptych.kernels.retain.block_eviction import (
    block_scores,
    kept_of_block,
    layer_budgets,
    lost_attention,
)
from triptych.kernels.retain.episodes import episode_weights
from triptych.kernels.retain.expected_attention import (
    FIRST_TOKENS,
    expected_attention,
    mean_rotation,
)
from triptych.kernels.retain.key_merging import MergedTokens, alike_sets, merge_sets
from triptych.kernels.retain.observed_prompt import KeyScore, ObservedPrompt
from triptych.kernels.retain.retention_budgets import (
    BUDGETS,
    divided,
    error_budgets,
    largest,
    pyramid_budgets,
)
from triptych.kernels.retain.retention_scores import (
    POOL_TOKENS,
    SCORES,
    SINK_TOKENS,
    WINDOW_TOKENS,
    newest,
)
from triptych.kernels.retain.tiers import Tiers, choose_tiers, value_distortions

__all__ = [
    "BUDGETS",
    "FIRST_TOKENS",
    "POOL_TOKENS",
    "SCORES",
    "SINK_TOKENS",
    "WINDOW_TOKENS",
    "AttentionMoments",
    "KeyScore",
    "MergedTokens",
    "ObservedPrompt",
    "Tiers",
    "alike_sets",
    "block_scores",
    "choose_tiers",
    "divided",
    "episode_weights",
    "error_budgets",
    "expected_attention",
    "kept_of_block",
    "largest",
    "layer_budgets",
    "layer_preferences",
    "lost_attention",
    "mean_rotation",
    "merge_sets",
    "newest",
    "pyramid_budgets",
    "value_distortions",
]
