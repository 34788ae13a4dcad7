# Ray's node table and Serve's autoscaling lack types.
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false
# pyright: reportUnknownArgumentType=false
"""One replica on every node of an application, whenever that joins the cluster.

Serve has no such thing. It lets a policy say how many replicas there are to be, though, and asks it
all the time: this one counts nodes. With one replica a node at most, each gets its own.
"""

import time
from typing import cast

import ray
from ray.serve.config import AutoscalingConfig, AutoscalingContext, AutoscalingPolicy

from triptych.deployments.placement.nodes import LOOK_EVERY_S, Resources, homes

MAX_NODES = 10_000
DEAD_NODE_S = 60.0
"""After the death of a node Serve must have noticed that of the replica there: before that it would
stop a healthy one instead."""


def alive_nodes() -> list[Resources]:
    """What each node of the cluster has."""
    nodes = cast("list[dict[str, object]]", ray.nodes())
    return [cast("Resources", node["Resources"]) for node in nodes if node["Alive"]]


class NodeCount:
    """Asks for as many replicas as the application has nodes; Serve's controller calls it."""

    def __init__(self, node_resource: str) -> None:
        self._node_resource = node_resource
        self._count, self._looked = 0, 0.0

    def __call__(self, context: AutoscalingContext) -> tuple[int, dict[str, object]]:
        now = time.monotonic()
        if not self._count or now - self._looked >= LOOK_EVERY_S:
            self._count, self._looked = len(homes(self._node_resource, alive_nodes())), now
        return self._count or context.target_num_replicas, {}


def on_every_node(node_resource: str, present: int) -> AutoscalingConfig:
    """What makes Serve keep a replica on each node; ``present``: how many there are now."""
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
