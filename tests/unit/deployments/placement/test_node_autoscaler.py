"""A node that joins the cluster gets a replica of its own."""

from types import SimpleNamespace
from typing import Any, cast

import pytest
import ray
from ray import serve

from triptych.deployments.placement import node_autoscaler
from triptych.deployments.placement.node_autoscaler import NodeCount, on_every_node
from triptych.deployments.placement.nodes import POLL_INTERVAL_S
from triptych.deployments.replicas.pool import PoolReplica

CONTEXT = cast("Any", SimpleNamespace(target_num_replicas=4))


@pytest.fixture
def nodes(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, object]]:
    """What Ray says of the cluster."""
    found: list[dict[str, object]] = []
    monkeypatch.setattr(ray, "nodes", lambda: found)
    return found


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    now = SimpleNamespace(s=100.0)
    monkeypatch.setattr(node_autoscaler, "time", SimpleNamespace(monotonic=lambda: now.s))
    return now


def node(*, alive: bool = True, **resources: float) -> dict[str, object]:
    return {"Alive": alive, "Resources": resources}


def test_the_nodes_of_the_application_are_counted_now_and_then(
    nodes: list[dict[str, object]], clock: SimpleNamespace
) -> None:
    count = NodeCount(node_resource="triptych")
    nodes += [node(CPU=1), node(triptych=1), node(triptych=1, alive=False)]
    assert count(CONTEXT) == (1, {})
    nodes.append(node(triptych=1))
    assert count(CONTEXT) == (1, {})
    clock.s += POLL_INTERVAL_S
    assert count(CONTEXT) == (2, {})


@pytest.mark.usefixtures("nodes", "clock")
def test_without_any_node_nothing_is_stopped() -> None:
    assert NodeCount(node_resource="triptych")(CONTEXT) == (4, {})


def test_serve_takes_the_policy_for_a_deployment_of_one_replica_a_node() -> None:
    made = serve.deployment(PoolReplica, name="Pool", max_replicas_per_node=1).options(
        autoscaling_config=on_every_node("triptych", 3)
    )
    config = cast("Any", made)._deployment_config.autoscaling_config
    assert (config.initial_replicas, config.upscale_delay_s) == (3, 0.0)
    policy = config.policy
    assert policy.get_policy()(**policy.policy_kwargs)._node_resource == "triptych"
