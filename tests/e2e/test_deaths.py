"""The pool and the router killed at work, and what a server leaves behind when it ends."""

import os
import signal
from collections.abc import Callable
from typing import Any

import psutil
import pytest

pytestmark = pytest.mark.e2e

MODEL = "smollm2-135m-instruct"
BACK_WITHIN_S = 120


@pytest.fixture(scope="module")
def server(start: Callable[..., Any]) -> Any:
    return start(topology="colocated")


def ask(server: Any) -> int:
    with server.client(timeout=60) as client:
        answer = client.completions.create(
            model=MODEL, prompt="Hello", max_tokens=3, extra_body={"ignore_eos": True}
        )
    return int(answer.usage.completion_tokens)


@pytest.mark.parametrize("victim", ["Pool", pytest.param("Router", marks=pytest.mark.cluster)])
def test_every_stream_goes_on_and_new_requests_are_answered(server: Any, victim: str) -> None:
    """Nobody is refused meanwhile; what was in the dead pool is computed again."""
    arena = server.shared_memory()[0]
    crowd = server.crowd([f"{i}: " + "word " * 40 * i for i in range(8)], max_tokens=64)
    crowd.wait_for_chunks(2)
    (process,) = server.replicas(victim)
    os.kill(process.pid, signal.SIGKILL)
    assert ask(server) == 3
    assert crowd.join() == {"length": 8}
    assert min(crowd.chunks) > 32
    server.wait_until(server.is_healthy, timeout_s=BACK_WITHIN_S)
    server.wait_until(lambda: server.pages_held() == 0, timeout_s=10)
    assert arena.exists() == (victim != "Pool")
    assert server.shared_memory()[0].exists()


@pytest.mark.cluster
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
