"""The pool and the router killed at work, and what a server leaves behind when it ends."""

import os
import signal
import time
from collections.abc import Callable
from typing import Any

import openai
import psutil
import pytest

pytestmark = pytest.mark.e2e

MODEL = "smollm2-135m-instruct"
BACK_WITHIN_S = 120


@pytest.fixture(scope="module")
def server(start: Callable[..., Any]) -> Any:
    return start()


def ask(server: Any) -> int:
    with server.client(timeout=60) as client:
        answer = client.completions.create(
            model=MODEL, prompt="Hello", max_tokens=3, extra_body={"ignore_eos": True}
        )
    return int(answer.usage.completion_tokens)


def wait_for_an_answer(server: Any) -> None:
    """Ask until a request succeeds; those before it must be refused properly, and at once."""
    deadline = time.monotonic() + BACK_WITHIN_S
    while True:
        refusal = None
        try:
            assert ask(server) == 3
        except openai.APIStatusError as error:
            refusal = error
        if refusal is None:
            return
        assert refusal.status_code == 503
        assert refusal.body.keys() >= {"message", "type", "param", "code"}
        assert time.monotonic() < deadline
        time.sleep(0.5)


@pytest.mark.parametrize("victim", ["ServeReplica:triptych:Router", "PoolShell"])
def test_its_requests_end_with_an_error_and_the_service_comes_back(
    server: Any, victim: str
) -> None:
    arena = server.arena()
    crowd = server.crowd([f"{i}: " + "word " * 40 * i for i in range(8)], max_tokens=2000)
    crowd.wait_for_chunks(2)
    (process,) = server.processes(victim)
    os.kill(process.pid, signal.SIGKILL)
    endings = crowd.join()
    assert endings.total() == 8
    assert set(endings) <= {"worker_lost", "overloaded"}
    wait_for_an_answer(server)
    server.wait_until(server.is_healthy, timeout_s=BACK_WITHIN_S)
    server.wait_until(lambda: server.pages_held() == 0, timeout_s=10)
    assert arena.exists() == (victim != "PoolShell")
    assert server.arena().exists()


def test_a_server_leaves_nothing_when_it_is_stopped_and_sweeps_up_after_one_that_was_killed(
    serving: Callable[..., Any],
) -> None:
    small = {"topology": "colocated", "pool": {"capacity_bytes": 128 << 20}}
    with serving(**small) as killed:
        left = [killed.arena(), killed.run_dir()]
        kill_all(killed)
        assert all(path.exists() for path in left)
    with serving(**small) as stopped:
        assert ask(stopped) == 3
        assert not any(path.exists() for path in left)
        left = [stopped.arena(), stopped.run_dir()]
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
