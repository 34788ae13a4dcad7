"""Retention rules: which tokens of a prompt are kept, by a score of each and a budget."""

from triptych.kernels.retain.attention_moments import AttentionMoments, layer_preferences
from triptych.kernels.retain.expected_attention import (
    FIRST_TOKENS,
    expected_attention,
    mean_rotation,
)
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
    "ObservedPrompt",
    "Tiers",
    "choose_tiers",
    "divided",
    "error_budgets",
    "expected_attention",
    "largest",
    "layer_preferences",
    "mean_rotation",
    "newest",
    "pyramid_budgets",
    "value_distortions",
]
