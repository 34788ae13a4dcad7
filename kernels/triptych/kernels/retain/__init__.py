"""Retention rules: which tokens of a prompt are kept, by a score of each and a budget."""

from triptych.kernels.retain.observed_prompt import KeyScore, ObservedPrompt
from triptych.kernels.retain.retention_budgets import BUDGETS, largest, pyramid_budgets
from triptych.kernels.retain.retention_scores import (
    POOL_TOKENS,
    SCORES,
    SINK_TOKENS,
    WINDOW_TOKENS,
    newest,
)

__all__ = [
    "BUDGETS",
    "POOL_TOKENS",
    "SCORES",
    "SINK_TOKENS",
    "WINDOW_TOKENS",
    "KeyScore",
    "ObservedPrompt",
    "largest",
    "newest",
    "pyramid_budgets",
]
