"""What Serve's controller runs for each stage that may grow: it hears from the router's numbers.

The controller gets this module by value, so it imports nothing of ours.
"""

from typing import Any

from ray.serve.config import AutoscalingContext

WANTED = "wanted_replicas"


def policy(context: AutoscalingContext) -> tuple[float, dict[str, Any]]:
    """As many replicas as the router wants (``router.scaling``), by what any of them was told.

    Serve applies bounds and delays. Nobody was told anything: all stays as it is.
    """
    told: dict[str, dict[Any, float]] = context.aggregated_metrics or {}
    wanted = told.get(WANTED) or {}
    return max(wanted.values(), default=float(context.target_num_replicas)), {}
