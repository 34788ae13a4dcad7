"""Retention rules: which tokens of a prompt are kept, by a score of each and a budget."""

from triptych.kernels.retain.observed_prompt import ObservedPrompt
from triptych.kernels.retain.retention_budgets import BUDGETS, pyramid_budgets
from triptych.kernels.retain.retention_scores import SCORES

__all__ = ["BUDGETS", "SCORES", "ObservedPrompt", "pyramid_budgets"]
