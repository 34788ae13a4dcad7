"""All actors of an application find its nodes."""

import pytest

from triptych.core.errors import ConfigError
from triptych.deployments.placement.nodes import (
    POLL_INTERVAL_S,
    application_nodes,
    check_ray_auth,
    node_affinity,
    wait_for_nodes,
)

HEAD = {"memory": 1.0}
WORKER = {"CPU": 8.0, "triptych": 1.0}


@pytest.mark.parametrize("chosen", ["", "token", "what"])
def test_a_cluster_that_authenticates_nobody_is_refused(chosen: str) -> None:
    with pytest.raises(ConfigError, match="RAY_AUTH_MODE=token, or with RAY_AUTH_MODE=disabled"):
        check_ray_auth(is_on=False, chosen=chosen)


def test_authentication_can_be_turned_off_on_purpose(caplog: pytest.LogCaptureFixture) -> None:
    check_ray_auth(is_on=True, chosen="")
    assert not caplog.records
    check_ray_auth(is_on=False, chosen="disabled")
    assert "can run code" in caplog.text


def test_without_a_resource_every_node_is_one_of_the_application() -> None:
    assert application_nodes("", [HEAD]) == [HEAD]
    assert application_nodes("", [HEAD, WORKER]) == [HEAD, WORKER]
    assert node_affinity("") == {}


def test_the_nodes_with_the_resource_are_those_of_the_application() -> None:
    assert application_nodes("triptych", [HEAD, WORKER]) == [WORKER]
    assert application_nodes("triptych", [WORKER, HEAD, WORKER]) == [WORKER, WORKER]
    assert application_nodes("triptych", [HEAD]) == []
    assert 0 < node_affinity("triptych")["triptych"] < 0.01


def test_a_node_that_comes_late_is_waited_for() -> None:
    nodes = [HEAD]
    slept = list[float]()

    def sleep(seconds: float) -> None:
        slept.append(seconds)
        if len(slept) == 3:
            nodes.append(WORKER)

    assert wait_for_nodes("triptych", lambda: nodes, sleep=sleep) == [WORKER]
    assert slept == [POLL_INTERVAL_S] * 3


def test_a_node_that_never_comes_is_named() -> None:
    with pytest.raises(ConfigError, match=r"node_resource='gone'.*--resources '\{\"gone\": 1\}'"):
        wait_for_nodes("gone", lambda: [HEAD, WORKER], wait_s=10, sleep=lambda _: None)


def test_as_many_nodes_as_asked_for_are_waited_for() -> None:
    nodes = [WORKER]

    def sleep(_: float) -> None:
        nodes.append(WORKER)

    found = wait_for_nodes("triptych", lambda: nodes, at_least=3, sleep=sleep)
    assert found == [WORKER] * 3
    with pytest.raises(ConfigError, match=r"min_nodes=5: the application had 3 nodes after 4 s"):
        wait_for_nodes("", lambda: nodes, at_least=5, wait_s=4, sleep=lambda _: None)
