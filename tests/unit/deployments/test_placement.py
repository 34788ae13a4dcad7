"""All actors of an application find the one node whose memory they share."""

import pytest

from triptych.core.errors import ConfigError
from triptych.deployments.placement import LOOK_EVERY_S, home, sliver, wait_for_home

HEAD = {"memory": 1.0}
WORKER = {"CPU": 8.0, "triptych": 1.0}


def test_the_only_node_needs_no_resource() -> None:
    assert home("", [HEAD]) is HEAD
    assert sliver("") == {}


def test_the_node_with_the_resource_is_home() -> None:
    assert home("triptych", [HEAD, WORKER]) is WORKER
    assert home("triptych", [HEAD]) is None
    assert 0 < sliver("triptych")["triptych"] < 0.01


@pytest.mark.parametrize(("name", "nodes"), [("", [HEAD, WORKER]), ("triptych", [WORKER, WORKER])])
def test_two_homes_are_refused_with_what_to_do(name: str, nodes: list[dict[str, float]]) -> None:
    with pytest.raises(ConfigError, match=f"node_resource='{name}'.*memory of one: "):
        home(name, nodes)


def test_a_node_that_comes_late_is_waited_for() -> None:
    nodes = [HEAD]
    slept = list[float]()

    def sleep(seconds: float) -> None:
        slept.append(seconds)
        if len(slept) == 3:
            nodes.append(WORKER)

    assert wait_for_home("triptych", lambda: nodes, sleep=sleep) is WORKER
    assert slept == [LOOK_EVERY_S] * 3


def test_a_node_that_never_comes_is_named() -> None:
    with pytest.raises(ConfigError, match=r"node_resource='gone'.*--resources '\{\"gone\": 1\}'"):
        wait_for_home("gone", lambda: [HEAD, WORKER], wait_s=10, sleep=lambda _: None)
