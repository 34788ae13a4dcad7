"""Plug-ins of a decode step: what they see, in which order they run, who has which."""

from triptych.workers.decode.plugins.pipeline import Pipeline, Verdict, offers_of
from triptych.workers.decode.plugins.plugin import Facts, StepPlugin

__all__ = ["Facts", "Pipeline", "StepPlugin", "Verdict", "offers_of"]
