"""The nodes of the application, which actors are placed on; each of them has a pool."""

import logging
import time
from collections.abc import Callable, Mapping, Sequence

from triptych.core.errors import ConfigError

logger = logging.getLogger(__name__)

NODE_WAIT_S = 900.0
"""How long to wait for nodes: a cluster may take minutes to start a GPU machine."""
POLL_INTERVAL_S = 2.0
AFFINITY_AMOUNT = 0.001
"""Amount of the node resource that an actor takes: small, as it only restricts placement."""

Resources = Mapping[str, float]


def check_ray_auth(*, is_on: bool, chosen: str) -> None:
    """Refuse a Ray cluster without authentication, unless ``RAY_AUTH_MODE`` asks for that.

    Ray's ports listen on all addresses, whatever address the server has, and run code for whoever
    connects. ``chosen``: the value of ``RAY_AUTH_MODE`` on the nodes.

    Raises: ConfigError saying what to set
    """
    if is_on:
        return
    if chosen.lower() != "disabled":
        raise ConfigError(
            "Ray's token authentication is off, and its ports run code for whoever connects: run "
            "'ray get-auth-token --generate', copy ~/.ray/auth_token to all nodes and start them "
            "with RAY_AUTH_MODE=token, or with RAY_AUTH_MODE=disabled on a network of your own"
        )
    logger.warning("RAY_AUTH_MODE is disabled: whoever reaches Ray's ports can run code")


def node_affinity(node_resource: str) -> dict[str, float]:
    """The ``resources`` with which Ray places an actor on one of the application's nodes."""
    return {node_resource: AFFINITY_AMOUNT} if node_resource else {}


def application_nodes(node_resource: str, nodes: Sequence[Resources]) -> list[Resources]:
    """Resources of the application's nodes: those with ``node_resource``, or all if it is empty.

    Each of them gets a pool, since any may get a worker.
    """
    return [node for node in nodes if not node_resource or node.get(node_resource, 0.0) > 0]


def wait_for_nodes(
    node_resource: str,
    nodes: Callable[[], Sequence[Resources]],
    *,
    at_least: int = 1,
    wait_s: float = NODE_WAIT_S,
    sleep: Callable[[float], None] = time.sleep,
) -> list[Resources]:
    """Wait until ``at_least`` of the application's nodes have joined; returns their resources.

    Raises: ConfigError if they do not join within ``wait_s``
    """
    found = list[Resources]()
    for _ in range(max(1, int(wait_s / POLL_INTERVAL_S))):
        found = application_nodes(node_resource, nodes())
        if len(found) >= at_least:
            return found
        sleep(POLL_INTERVAL_S)
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
