"""Serve's autoscaling policy of a stage: the number of replicas that the router wants.

Serve's controller gets this module by value, so it imports no module of Triptych.
"""

from typing import Any

from ray.serve.config import AutoscalingContext

WANTED = "wanted_replicas"


def policy(context: AutoscalingContext) -> tuple[float, dict[str, Any]]:
    """The largest number that any replica reported from the router (``router.passes.autoscaling``).

    Serve applies bounds and delays. Without any report the number of replicas does not change.
    """
    metrics: dict[str, dict[Any, float]] = context.aggregated_metrics or {}
    wanted = metrics.get(WANTED) or {}
    return max(wanted.values(), default=float(context.target_num_replicas)), {}
