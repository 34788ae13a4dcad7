"""One process of a server killed while it answers, and what its clients see of it."""

import os
import signal
from typing import Any

MODEL = "smollm2-135m-instruct"
BACK_WITHIN_S = 120


def ask(server: Any) -> int:
    with server.client(timeout=60) as client:
        answer = client.completions.create(
            model=MODEL, prompt="Hello", max_tokens=3, extra_body={"ignore_eos": True}
        )
    return int(answer.usage.completion_tokens)


def kill_at_work(server: Any, victim: str) -> None:
    """Every stream goes on, and new requests are answered.

    Nobody is refused meanwhile; what was in a dead pool is computed again.
    """
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
