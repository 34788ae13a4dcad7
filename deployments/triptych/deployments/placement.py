"""Where actors go: all of one application share the memory of one node."""

import time
from collections.abc import Callable, Mapping, Sequence

from triptych.core.errors import ConfigError

NODE_WAIT_S = 900.0
"""How long a cluster may take to bring up the node: a GPU machine is bought in minutes."""
LOOK_EVERY_S = 2.0
SLIVER = 0.001
"""What an actor takes of the node's resource: it says where, not how many."""

Resources = Mapping[str, float]


def sliver(node_resource: str) -> dict[str, float]:
    """The ``resources`` that make Ray put an actor on the application's node."""
    return {node_resource: SLIVER} if node_resource else {}


def home(node_resource: str, nodes: Sequence[Resources]) -> Resources | None:
    """What the application's node has; None while it is not there.

    Raises: ConfigError if it could be more than one node
    """
    found = [node for node in nodes if not node_resource or node.get(node_resource, 0.0) > 0]
    if len(found) > 1 and not node_resource:
        raise ConfigError(
            f"node_resource='': the cluster has {len(found)} nodes, and the stages share the "
            "memory of one: start one of them with a custom resource (ray start --resources "
            "'{\"triptych\": 1}') and name it in node_resource"
        )
    if len(found) > 1:
        raise ConfigError(
            f"node_resource={node_resource!r}: {len(found)} nodes have this resource, and the "
            "stages share the memory of one: let one node have it, and serve one application "
            "for each further node"
        )
    return found[0] if found else None


def wait_for_home(
    node_resource: str,
    nodes: Callable[[], Sequence[Resources]],
    *,
    wait_s: float = NODE_WAIT_S,
    sleep: Callable[[float], None] = time.sleep,
) -> Resources:
    """What the application's node has, as soon as it has joined the cluster.

    Raises: ConfigError if it does not come, or could be more than one node
    """
    for _ in range(max(1, int(wait_s / LOOK_EVERY_S))):
        node = home(node_resource, nodes())
        if node is not None:
            return node
        sleep(LOOK_EVERY_S)
    raise ConfigError(
        f"node_resource={node_resource!r}: no node of the cluster had this resource within "
        f"{wait_s:.0f} s: start one with ray start --resources '{{\"{node_resource}\": 1}}', or in "
        "Kubernetes look at the worker group whose rayStartParams name it"
    )
