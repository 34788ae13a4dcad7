"""Step plug-ins of decode: their interface, their order and their use by requests."""

from triptych.workers.decode.plugins.pipeline import Pipeline, Verdict, offers_of
from triptych.workers.decode.plugins.plugin import Facts, StepPlugin

__all__ = ["Facts", "Pipeline", "StepPlugin", "Verdict", "offers_of"]
