"""The table of plug-ins of the decode step."""

from typing import TYPE_CHECKING

from triptych.core.registry import Registry

if TYPE_CHECKING:
    from triptych.workers.steps.plugin import StepPlugin

STEP_PLUGINS: "Registry[type[StepPlugin]]" = Registry(
    kind="step_plugins",
    builtin={
        "entropy_stop": "triptych.workers.steps.entropy:EntropyStop",
        "layer_exit": "triptych.workers.steps.layers:LayerExit",
        "soft_prune": "triptych.workers.steps.prune:SoftPrune",
    },
)
"""Names to dataclasses whose fields are the options of a plug-in."""
