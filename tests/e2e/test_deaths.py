"""The pool and the router killed at work, and what a server leaves behind when it ends."""

from collections.abc import Callable
from typing import Any

import psutil
import pytest

from tests.e2e.killed import ask, kill_at_work

pytestmark = [pytest.mark.e2e, pytest.mark.cluster]


@pytest.fixture(scope="module")
def server(start: Callable[..., Any]) -> Any:
    return start(topology="colocated")


@pytest.mark.parametrize("victim", ["Pool", "Router"])
def test_every_stream_goes_on_and_new_requests_are_answered(server: Any, victim: str) -> None:
    kill_at_work(server, victim)


def test_a_server_leaves_nothing_when_it_is_stopped_and_sweeps_up_after_one_that_was_killed(
    server: Any, serving: Callable[..., Any]
) -> None:
    left = [*server.shared_memory(), server.run_dir()]
    kill_all(server)
    assert left[0].exists()
    small = {"topology": "colocated", "pool": {"kv_cache_memory_bytes": 128 << 20}}
    with serving(**small) as stopped:
        assert ask(stopped) == 3
        assert not any(path.exists() for path in left)
        left = [*stopped.shared_memory(), stopped.run_dir()]
        assert all(path.exists() for path in left)
    assert not any(path.exists() for path in left)


def kill_all(server: Any) -> None:
    """Kill every process of a server at once, as a machine that runs out of memory would."""
    tree = [server.process, *server.process.children(recursive=True)]
    for process in tree:
        process.suspend()
    for process in tree:
        process.kill()
    psutil.wait_procs(tree, timeout=10)
