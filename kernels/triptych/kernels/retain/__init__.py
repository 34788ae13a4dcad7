"""Retention rules: which tokens of a prompt are kept, by a score and a budget, or merged."""

from triptych.kernels.retain.attention_moments import AttentionMoments, layer_preferences
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
    "alike_sets",
    "divided",
    "error_budgets",
    "expected_attention",
    "largest",
    "layer_preferences",
    "mean_rotation",
    "merge_sets",
    "newest",
    "pyramid_budgets",
]
