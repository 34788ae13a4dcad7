# Ray's node table and Serve's autoscaling lack types.
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false
# pyright: reportUnknownArgumentType=false
"""One replica of a deployment on every node of the application, also on nodes that join later.

Serve has no such setting. This autoscaling policy returns the number of nodes; with at most one
replica per node, each node gets one.
"""

import time
from typing import cast

import ray
from ray.serve.config import AutoscalingConfig, AutoscalingContext, AutoscalingPolicy

from triptych.deployments.placement.nodes import POLL_INTERVAL_S, Resources, application_nodes

MAX_NODES = 10_000
DEAD_NODE_S = 60.0
"""Delay before scaling down after a node died. Serve must first notice that the node's replica is
dead; before that it would stop a healthy one."""


def alive_nodes() -> list[Resources]:
    """The resources of each live node of the cluster."""
    nodes = cast("list[dict[str, object]]", ray.nodes())
    return [cast("Resources", node["Resources"]) for node in nodes if node["Alive"]]


class NodeCount:
    """Autoscaling policy that returns the number of the application's nodes."""

    def __init__(self, node_resource: str) -> None:
        self._node_resource = node_resource
        self._count, self._polled = 0, 0.0

    def __call__(self, context: AutoscalingContext) -> tuple[int, dict[str, object]]:
        now = time.monotonic()
        if not self._count or now - self._polled >= POLL_INTERVAL_S:
            self._count = len(application_nodes(self._node_resource, alive_nodes()))
            self._polled = now
        return self._count or context.target_num_replicas, {}


def on_every_node(node_resource: str, present: int) -> AutoscalingConfig:
    """Autoscaling configuration for one replica per node; ``present``: the number of nodes now."""
    return AutoscalingConfig(
        min_replicas=1,
        initial_replicas=present,
        max_replicas=MAX_NODES,
        upscale_delay_s=0.0,
        downscale_delay_s=DEAD_NODE_S,
        policy=AutoscalingPolicy(
            policy_function=NodeCount, policy_kwargs={"node_resource": node_resource}
        ),
    )
