"""Where plug-ins of the decode step were imported from; goes with the next release."""

import logging

from triptych.workers.decode.plugins import Facts, Pipeline, StepPlugin, Verdict, offers_of

__all__ = ["Facts", "Pipeline", "StepPlugin", "Verdict", "offers_of"]

logging.getLogger(__name__).warning(
    "triptych.workers.steps is now triptych.workers.decode.plugins; "
    "the old name goes with the next release"
)
