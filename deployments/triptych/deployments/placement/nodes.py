"""Where actors go: to the nodes of the application, each of which has a pool of its own."""

import time
from collections.abc import Callable, Mapping, Sequence

from triptych.core.errors import ConfigError

NODE_WAIT_S = 900.0
"""How long a cluster may take to bring up a node: a GPU machine is bought in minutes."""
LOOK_EVERY_S = 2.0
SLIVER = 0.001
"""What an actor takes of the nodes' resource: it says where, not how many."""

Resources = Mapping[str, float]


def sliver(node_resource: str) -> dict[str, float]:
    """The ``resources`` that make Ray put an actor on one of the application's nodes."""
    return {node_resource: SLIVER} if node_resource else {}


def homes(node_resource: str, nodes: Sequence[Resources]) -> list[Resources]:
    """What each of the application's nodes has: of those with the resource, or of all.

    Each of them gets a pool, since any may get a worker.
    """
    return [node for node in nodes if not node_resource or node.get(node_resource, 0.0) > 0]


def wait_for_homes(
    node_resource: str,
    nodes: Callable[[], Sequence[Resources]],
    *,
    at_least: int = 1,
    wait_s: float = NODE_WAIT_S,
    sleep: Callable[[float], None] = time.sleep,
) -> list[Resources]:
    """What the application's nodes have, as soon as enough of them have joined the cluster.

    Raises: ConfigError if they do not come
    """
    found = list[Resources]()
    for _ in range(max(1, int(wait_s / LOOK_EVERY_S))):
        found = homes(node_resource, nodes())
        if len(found) >= at_least:
            return found
        sleep(LOOK_EVERY_S)
    if found or not node_resource:
        raise ConfigError(
            f"min_nodes={at_least}: the application had {len(found)} nodes after {wait_s:.0f} s: "
            "start more, or lower it"
        )
    raise ConfigError(
        f"node_resource={node_resource!r}: no node of the cluster had this resource within "
        f"{wait_s:.0f} s: start one with ray start --resources '{{\"{node_resource}\": 1}}', or in "
        "Kubernetes look at the worker group whose rayStartParams name it"
    )
