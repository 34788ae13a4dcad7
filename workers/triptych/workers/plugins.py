"""The table of plug-ins of the decode step."""

from typing import TYPE_CHECKING

from triptych.core.registry import Registry

if TYPE_CHECKING:
    from triptych.workers.decode.plugins.plugin import StepPlugin

STEP_PLUGINS: "Registry[type[StepPlugin]]" = Registry(
    kind="step_plugins",
    builtin={
        "entropy_stop": "triptych.workers.decode.plugins.entropy:EntropyStop",
        "layer_exit": "triptych.workers.decode.plugins.layers:LayerExit",
        "soft_prune": "triptych.workers.decode.plugins.prune:SoftPrune",
    },
)
"""Names to dataclasses whose fields are the options of a plug-in."""
