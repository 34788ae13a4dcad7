"""Plug-ins of a decode step: what they see, in which order they run, who has which."""

from triptych.workers.steps.pipeline import Pipeline, Verdict, offers_of
from triptych.workers.steps.plugin import Facts, StepPlugin

__all__ = ["Facts", "Pipeline", "StepPlugin", "Verdict", "offers_of"]
